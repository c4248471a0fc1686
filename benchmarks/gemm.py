"""Linear layers in 4 bits on a GPU, side by side in one run: microseconds of one product.

    python -m benchmarks.gemm

Each time is the median of replays of a CUDA graph that goes through enough copies of the weight
to miss the cache. Each kernel is compared with float64 on new random activations before it is
timed, at every number of tokens. A library that is not installed leaves its column empty.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.report import Table, arguments, write
from oot_quant_backends.bitsandbytes.product_4bit import tables_of, trouble
from oot_quant_backends.bitsandbytes.triton_4bit.units import Units, new_counters, reorder
from oot_quant_backends.bitsandbytes.weights import code_table, unpack

LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
"""Of an 8B Llama: rows and columns."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BLOCKSIZE = 64
DTYPE = torch.bfloat16
CUDA = torch.device("cuda")
CACHE_BYTES = 400 << 20
REPLAYS = 15
LIMIT = 0.01
"""Largest error against float64 of a kernel that is worth timing."""
CHECKED_ROWS = 4096

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """A random nf4 weight, as bitsandbytes packs it."""

    rows: int
    columns: int

    @cached_property
    def codes(self) -> torch.Tensor:
        shape = (self.rows, self.columns // 2)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA)

    @cached_property
    def absmax(self) -> torch.Tensor:
        return torch.rand(self.rows, self.columns // BLOCKSIZE, device=CUDA) * 0.05 + 0.01

    @cached_property
    def unpacked(self) -> torch.Tensor:
        return unpack(self.codes, self.absmax, code_table("nf4", CUDA))

    @property
    def packed_bytes(self) -> int:
        return self.codes.numel() + 4 * self.absmax.numel()

    @property
    def copies(self) -> int:
        return max(3, -(-CACHE_BYTES // self.packed_bytes))


@dataclass(frozen=True)
class Rival:
    """Copies of a layer in one library's form; ``weight`` is what they stand for."""

    products: list[Product]
    weight: torch.Tensor


def ours(layer: Layer) -> Rival:
    """The operator of this project, which a layer calls."""
    reason = trouble(layer.rows, layer.columns, BLOCKSIZE, "nf4", DTYPE, CUDA)
    if reason:
        raise RuntimeError(reason)

    def product(units: Units) -> Product:
        return lambda x: torch.ops.oot_quant.gemm_4bit(
            x, units.words, units.scales, units.values, units.counters, None, units.rows, "nf4"
        )

    return Rival([product(units) for units in _units(layer)], layer.unpacked)


def unpack_first(layer: Layer) -> Rival:
    """Our kernel that unpacks, then the 16-bit product."""
    from oot_quant_backends.bitsandbytes.triton_4bit.gemm import dequantize

    def product(units: Units) -> Product:
        return lambda x: linear(x, dequantize(units, DTYPE))

    return Rival([product(units) for units in _units(layer)], layer.unpacked)


def _units(layer: Layer) -> Iterator[Units]:
    words, scales = reorder(layer.codes, layer.absmax)
    tables = tables_of("nf4", DTYPE)
    for _ in range(layer.copies):
        yield Units(
            words.clone(), scales.clone(), code_table("nf4", CUDA), tables, new_counters(words),
            layer.rows,
        )  # fmt: skip


def in_16_bits(layer: Layer) -> Rival:
    """PyTorch's product with the weight unpacked beforehand."""

    def product(weight: torch.Tensor) -> Product:
        return lambda x: linear(x, weight)

    copies = max(3, layer.copies // 4)
    return Rival([product(layer.unpacked.to(DTYPE)) for _ in range(copies)], layer.unpacked)


def bitsandbytes(layer: Layer) -> Rival:
    """The library's ``gemm_4bit``."""
    import_module("bitsandbytes")  # registers the operator
    shape = [layer.rows, layer.columns]

    def product(codes: torch.Tensor, absmax: torch.Tensor) -> Product:
        gemm = torch.ops.bitsandbytes.gemm_4bit
        return lambda x: gemm(x, codes, shape, absmax, BLOCKSIZE, "nf4", None)

    clones = [
        (layer.codes.clone().view(-1, 1), layer.absmax.clone().view(-1))
        for _ in range(layer.copies)
    ]
    return Rival([product(*clone) for clone in clones], layer.unpacked)


def marlin(layer: Layer) -> Rival:
    """vLLM's Marlin: int4 in groups of 64, as many bytes, another number format."""
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel

    return _int4(layer, MarlinLinearKernel)


def machete(layer: Layer) -> Rival:
    """vLLM's Machete, which it prefers for int4 on Hopper."""
    from vllm.model_executor.kernels.linear.mixed_precision.machete import MacheteLinearKernel

    return _int4(layer, MacheteLinearKernel)


def _int4(layer: Layer, kernel_class: Any) -> Rival:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    from oot_quant.testing.layers import tensor_parallel

    current_platform.import_kernels()
    shape = (layer.columns, layer.rows)
    config = MPLinearLayerConfig(
        full_weight_shape=shape, partition_weight_shape=shape, weight_type=scalar_types.uint4b8,
        act_type=DTYPE, group_size=BLOCKSIZE, zero_points=False,
    )  # fmt: skip
    kernel = kernel_class(config, w_q_param_name="weight", w_s_param_name="scale")
    scales = layer.absmax.to(DTYPE)
    layout = {"input_dim": 0, "output_dim": 1, "weight_loader": lambda *_: None}

    def prepared() -> torch.nn.Module:
        holder = torch.nn.Module()
        # Eight codes in an int32 along the columns, the first in the lowest bits.
        words = layer.codes.view(torch.int32).t()
        holder.weight = PackedvLLMParameter(data=words, packed_dim=0, packed_factor=8, **layout)
        holder.scale = GroupQuantScaleParameter(data=scales.t().contiguous(), **layout)
        kernel.process_weights_after_loading(holder)
        return holder

    def product(holder: torch.nn.Module) -> Product:
        return lambda x: kernel.apply_weights(holder, x, None)

    with tensor_parallel():
        products = [product(prepared()) for _ in range(layer.copies)]
    numbers = torch.stack((layer.codes & 15, layer.codes >> 4), -1).view(*scales.shape, -1).float()
    weight = ((numbers - 8) * scales.float().unsqueeze(-1)).view(layer.rows, layer.columns)
    return Rival(products, weight)


RIVALS: dict[str, Callable[[Layer], Rival]] = {
    "ours": ours,
    "16-bit": in_16_bits,
    "Machete int4": machete,
    "Marlin int4": marlin,
    "bitsandbytes": bitsandbytes,
    "unpack, 16-bit": unpack_first,
}


def main() -> None:
    options = arguments("gemm").parse_args()
    copied, multiplied = ceilings()
    tables, errors = [], []
    for name, shape in LAYERS.items():
        layer = Layer(*shape)
        found = {rival: measure(rival, layer) for rival in RIVALS}
        rows = []
        for tokens in TOKENS:
            moved = layer.packed_bytes + 2 * tokens * sum(shape)
            floor = max(moved / copied, 2 * tokens * shape[0] * shape[1] / multiplied) * 1e6
            cells = [found[rival].get(tokens, (None, None))[0] for rival in RIVALS]
            rows.append(((str(tokens),), [floor, *cells]))
        title = f"{name}, {shape[0]} x {shape[1]}"
        tables.append(Table(title, "us", ("tokens",), ("floor", *RIVALS), rows))
        largest = [max((e for _, e in found[rival].values()), default=None) for rival in RIVALS]
        errors.append(((name,), largest))
    notes = (
        f"The linear layers of an 8B Llama. Weights nf4 in blocks of {BLOCKSIZE}, float32 scales; "
        f"activations bfloat16. The floor is the longer of reading and writing at "
        f"{copied / 1e12:.3g} TB/s, what a copy reaches here, and computing at "
        f"{multiplied / 1e12:.3g} TFLOP/s, what a large product does."
    )
    tables.insert(0, total(tables))
    largest_errors = "Largest error against float64, relative"
    tables.append(Table(largest_errors, "1", ("layer",), tuple(RIVALS), errors))
    write(options.folder, options.name, tables, notes)


def measure(rival: str, layer: Layer) -> dict[int, tuple[float, float]]:
    """Microseconds and error by tokens; nothing where the library is not there."""
    try:
        form = RIVALS[rival](layer)
    except (ImportError, AttributeError) as missing:
        print(f"{rival}: {missing}", file=sys.stderr)
        return {}
    found = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, layer.columns, device=CUDA).to(DTYPE)
        error = error_of(form.products[0](x), x, form.weight)
        if not error <= LIMIT:
            raise SystemExit(f"{rival}, {layer}, {tokens} tokens: the error is {error:.3g}")
        found[tokens] = (graph_time([_bound(product, x) for product in form.products]), error)
    return found


def _bound(product: Product, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: product(x)


def error_of(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Relative to float64, over the first and the last rows of a weight."""
    half = CHECKED_ROWS // 2
    rows = torch.cat((weight[:half], weight[-half:])).double()
    reference = x.double() @ rows.t()
    result = torch.cat((found[:, :half], found[:, -half:]), dim=1).double()
    return float((result - reference).norm() / reference.norm())


def graph_time(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Microseconds of one call, where each replay makes every call once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = [microseconds(graph.replay) / len(calls) for _ in range(REPLAYS)]
    graph.reset()
    return statistics.median(times)


def microseconds(call: Callable[[], Any]) -> float:
    """Device time of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and operations a second of a 16-bit product."""
    size = 4 << 30
    source = torch.zeros(size, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    side = 8192
    factor = torch.randn(side, side, device=CUDA).to(DTYPE)
    copy, multiply = (
        statistics.median(microseconds(call) for _ in range(REPLAYS)) * 1e-6
        for call in (lambda: target.copy_(source), lambda: factor @ factor)
    )
    return 2 * size / copy, 2 * side**3 / multiply


def total(tables: list[Table]) -> Table:
    """The layers' sum by tokens; None where one of them is missing."""
    rows: list[tuple[tuple[str, ...], list[float | None]]] = []
    for lines in zip(*(table.rows for table in tables), strict=True):
        columns = zip(*(cells for _, cells in lines), strict=True)
        rows.append((lines[0][0], [None if None in c else sum(filter(None, c)) for c in columns]))
    title = "All four layers: " + ", ".join(LAYERS)
    return Table(title, "us", ("tokens",), tables[0].columns, rows)


if __name__ == "__main__":
    main()
