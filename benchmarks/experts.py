"""Routed experts on a GPU: device time of one step, beside what users could take instead.

    python -m benchmarks.experts

A step is the experts of 8 layers in one CUDA graph, each with its own weights and routing, so
that nothing is left in the cache. Times are medians of replays. Before a rival is timed, its
result is checked against float64. ``plugin`` is vllm-bnb-plugin's own operator where it lies in
build/benchmarks/vllm-bnb-plugin (pip install --no-deps --target), else the same two calls.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu

from benchmarks.report import Table, arguments, write

PLUGIN = Path(__file__).parents[1] / "build" / "benchmarks" / "vllm-bnb-plugin"
LAYERS, BLOCKSIZE, REPLAYS = 8, 64, 15
TOKENS = (1, 16, 64, 256, 512, 1024, 2048)
DTYPE = torch.bfloat16
TOLERANCE = 0.01
NOTES = (
    "Device time of one step of routed experts, nf4 but for 16-bit and int8, each layer with its "
    "own weights and routing. ours: multiplied packed at every size; a layer unpacks all instead "
    "above 256 tokens for each expert, on the average."
)
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.56e12, 797e12
"""What an H200 reaches: reading memory, and a product of 8192 x 8192 in bfloat16."""


@dataclass(frozen=True)
class Shape:
    """A layer of experts: how many, how many for each token, and the sizes of one."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of gate and up merged, and of down."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)


SHAPES = {
    "8 experts, top 2, 2048 x 4096": Shape(8, 2, 2048, 4096),
    "64 experts, top 8, 2048 x 1024": Shape(64, 8, 2048, 1024),
}


@dataclass(frozen=True)
class Layer:
    """One layer's quantized weights, by group: nf4 codes and scales, and rows of int8."""

    shape: Shape
    codes: tuple[torch.Tensor, ...]
    absmax: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]
    row_scales: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    """One layer's part of a step."""

    x: torch.Tensor
    shares: torch.Tensor
    ids: torch.Tensor


Product = Callable[[Work], torch.Tensor]


def random_layer(shape: Shape) -> Layer:
    def numbers(high: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, size, dtype=torch.uint8, device="cuda").to(dtype)

    count = shape.experts
    return Layer(
        shape,
        tuple(numbers(256, count, r, c // 2, dtype=torch.uint8) for r, c in shape.sizes),
        tuple(
            torch.rand(count, r, c // BLOCKSIZE, device="cuda") * 0.05 + 0.01
            for r, c in shape.sizes
        ),
        tuple(numbers(255, count, r, c, dtype=torch.int16).sub(127).to(torch.int8)
              for r, c in shape.sizes),
        tuple(torch.rand(count, r, device="cuda") * 4e-4 for r, _ in shape.sizes),
    )  # fmt: skip


def plain_4bit(layer: Layer) -> list[torch.Tensor]:
    """The 4-bit weights unpacked in plain torch, float32."""
    from oot_quant_backends.bitsandbytes.weights import code_table, unpack

    values = code_table("nf4", torch.device("cuda"))
    pairs = zip(layer.codes, layer.absmax, strict=True)
    return [
        torch.stack(
            [unpack(code, scale, values) for code, scale in zip(codes, absmax, strict=True)]
        )
        for codes, absmax in pairs
    ]


def plain_8bit(layer: Layer) -> list[torch.Tensor]:
    pairs = zip(layer.rows, layer.row_scales, strict=True)
    return [rows.float() * scales[..., None] for rows, scales in pairs]


def sixteen_bit(layer: Layer) -> Product:
    from vllm.model_executor.layers.fused_moe import fused_experts

    w13, w2 = (weight.to(DTYPE) for weight in plain_4bit(layer))
    return lambda work: fused_experts(work.x, w13, w2, work.shares, work.ids)


def ours(layer: Layer, *, packed: bool = True) -> Product:
    """The kernels that read packed weights; or all experts unpacked by ours, for vLLM's."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    from oot_quant.vllm_glue.grouped import step_of
    from oot_quant_backends.bitsandbytes.experts_4bit import TritonExperts4bit
    from oot_quant_backends.bitsandbytes.triton_4bit.units import reorder
    from oot_quant_backends.bitsandbytes.weights import code_table

    kept = SimpleNamespace()
    for group, codes, absmax in zip(("w13", "w2"), layer.codes, layer.absmax, strict=True):
        words, scales = zip(*map(reorder, codes, absmax), strict=True)
        setattr(kept, f"{group}_weight", torch.stack(words))
        setattr(kept, f"{group}_weight_absmax", torch.stack(scales))
        setattr(kept, f"{group}_weight_quant_map", code_table("nf4", codes.device).view(1, 16))
    shape = layer.shape
    rows = {"w13": 2 * shape.inner, "w2": shape.hidden}
    kernel = TritonExperts4bit("nf4", rows, DTYPE)

    def multiply(work: Work) -> torch.Tensor:
        out = torch.empty_like(work.x)
        step = step_of(work.x, work.ids, shape.experts, shares=work.shares)
        kernel.multiply(kept, step, out)
        return out

    def unpack(work: Work) -> torch.Tensor:
        w13, w2 = (kernel.unpack(kept, group) for group in rows)
        out: torch.Tensor = fused_experts(work.x, w13, w2, work.shares, work.ids)
        return out

    return multiply if packed else unpack


def int8(layer: Layer) -> Product:
    """vLLM's own kernel, given what ``grouped.Int8Experts`` gives it."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import int8_w8a16_moe_quant_config

    scb = [scale * 127 for scale in layer.row_scales]

    def multiply(work: Work) -> torch.Tensor:
        config = int8_w8a16_moe_quant_config(*(scale / 127 for scale in scb))
        out: torch.Tensor = fused_experts(
            work.x, *layer.rows, work.shares, work.ids, quant_config=config
        )
        return out

    return multiply


def plugin(layer: Layer) -> Product:
    """vllm-bnb-plugin: bitsandbytes unpacks all experts in every step, for vLLM's kernel."""
    from bitsandbytes.functional import QuantState, get_4bit_type

    codes = get_4bit_type("nf4", device="cuda")
    kept: Any = SimpleNamespace(
        activation=_silu(), apply_router_weight_on_input=False, global_num_experts=-1,
        expert_map=None,
    )  # fmt: skip
    shape = layer.shape
    groups = zip(("w13", "w2"), layer.codes, layer.absmax, shape.sizes, strict=True)
    for group, packed, absmax, (rows, columns) in groups:
        weight: Any = packed.view(shape.experts, -1, 1)
        whole = (shape.experts, rows, columns)
        weight.experts_shape = whole
        weight.bnb_quant_state = QuantState(
            absmax.reshape(-1), shape=torch.Size((shape.experts * rows, columns)), code=codes,
            blocksize=BLOCKSIZE, quant_type="nf4", dtype=DTYPE,
        )  # fmt: skip
        setattr(kept, f"{group}_weight", weight)
    apply = _plugin_operator()
    return lambda work: apply(kept, work.x, work.shares, work.ids)


def _silu() -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation.SILU


def _plugin_operator() -> Callable[..., torch.Tensor]:
    if PLUGIN.is_dir() and str(PLUGIN) not in sys.path:
        sys.path.append(str(PLUGIN))
    try:
        module = import_module("vllm_bnb_plugin.quantization.fused_moe")
    except ImportError:
        print("vllm-bnb-plugin is not there: its two calls are made without it", file=sys.stderr)
        return _as_the_plugin_does
    # Made without its constructor, which wants a whole engine's configuration.
    method: Any = object.__new__(module.BitsAndBytesMoEMethod)
    method.quant_config, method.moe_quant_config = SimpleNamespace(load_in_8bit=False), None
    operator: Callable[..., torch.Tensor] = method.apply
    return partial(operator, shared_experts=None, shared_experts_input=None)


def _as_the_plugin_does(
    layer: Any, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit
    from vllm.model_executor.layers.fused_moe import fused_experts

    weights = [
        dequantize_4bit(w.reshape(-1, 1), w.bnb_quant_state).reshape(w.experts_shape)
        for w in (layer.w13_weight, layer.w2_weight)
    ]
    out: torch.Tensor = fused_experts(x, *weights, shares, ids)
    return out


RIVALS: Mapping[str, Callable[[Layer], Product]] = {
    "16-bit": sixteen_bit,
    "plugin": plugin,
    "unpack all": partial(ours, packed=False),
    "ours": ours,
    "int8": int8,
}


def works(shape: Shape, tokens: int) -> list[Work]:
    """Random activations and routing for each layer."""

    def one() -> Work:
        scores = torch.rand(tokens, shape.experts, device="cuda")
        shares, ids = scores.softmax(-1).topk(shape.top_k)
        x = torch.randn(tokens, shape.hidden, device="cuda").to(DTYPE)
        return Work(x, (shares / shares.sum(-1, keepdim=True)).contiguous(), ids.int())

    return [one() for _ in range(LAYERS)]


def error_of(product: Product, weights: list[torch.Tensor], work: Work) -> float:
    """Of a result, relative to the same weights in float64, one expert after the other."""
    expected = torch.zeros_like(work.x, dtype=torch.float64)
    for expert in set(work.ids.flatten().tolist()):
        tokens, choice = (work.ids == expert).nonzero(as_tuple=True)
        gate, up = (work.x[tokens].double() @ weights[0][expert].double().t()).chunk(2, dim=-1)
        value = (silu(gate) * up) @ weights[1][expert].double().t()
        expected.index_add_(0, tokens, value * work.shares[tokens, choice, None].double())
    return float((product(work).double() - expected).norm() / expected.norm())


def graph_ms(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Milliseconds of all calls in one CUDA graph, the median of its replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (_clock() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _clock() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def floor_ms(shape: Shape, step: list[Work]) -> float:
    """Of nf4: the packed weights and scales that the routing needs, read once; or the products."""
    per_expert = sum(r * c // 2 + 4 * r * c // BLOCKSIZE for r, c in shape.sizes)
    used = sum(len(set(work.ids.flatten().tolist())) for work in step)
    pairs = sum(work.ids.numel() for work in step)
    flops = 2 * pairs * sum(r * c for r, c in shape.sizes)
    return 1e3 * max(used * per_expert / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)


def measure(shape: Shape) -> list[tuple[tuple[str, ...], list[float | None]]]:
    """A row for each number of tokens: floor, then each rival's time."""
    layers = [random_layer(shape) for _ in range(LAYERS)]
    steps = {tokens: works(shape, tokens) for tokens in TOKENS}
    columns: dict[int, list[float | None]] = {n: [floor_ms(shape, s)] for n, s in steps.items()}
    references = {"int8": plain_8bit(layers[0])}
    four_bit = plain_4bit(layers[0])
    for name, make in RIVALS.items():
        products = [make(layer) for layer in layers]
        for tokens, step in steps.items():
            error = error_of(products[0], references.get(name, four_bit), step[0])
            if not error <= TOLERANCE:
                raise SystemExit(f"{name}, {tokens} tokens: wrong by {error:.3g}")
            calls = [partial(product, work) for product, work in zip(products, step, strict=True)]
            columns[tokens].append(graph_ms(calls))
            print(f"{name} {tokens}: {columns[tokens][-1]:.3f} ms, error {error:.4f}", flush=True)
        del products
        torch.cuda.empty_cache()
    return [((str(tokens),), columns[tokens]) for tokens in TOKENS]


def main() -> None:
    options = arguments("experts").parse_args()
    torch.manual_seed(0)
    tables = [
        Table(f"Experts of {LAYERS} layers: {title}", "ms", ("tokens",), ("floor", *RIVALS),
              measure(shape))
        for title, shape in SHAPES.items()
    ]  # fmt: skip
    write(options.folder, options.name, tables, NOTES)


if __name__ == "__main__":
    main()
