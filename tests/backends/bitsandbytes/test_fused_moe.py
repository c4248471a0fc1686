"""Layers of routed experts against each expert packed and unpacked by bitsandbytes itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from oot_quant.errors import CheckpointIncomplete, UnsupportedFormat
from oot_quant.testing.experts import build_experts, load_experts
from oot_quant.testing.layers import config_for
from oot_quant.vllm_glue import experts as experts_room
from tests.backends.bitsandbytes.stored import (
    SECTION,
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)
from tests.backends.bitsandbytes.triton_4bit.routing import through_experts

PREFIX = "model.layers.0.mlp.experts"
SIZES = COUNT, HIDDEN, INNER = 4, 128, 192
"""Inner parts of 48 on four ranks: no whole block of 64."""
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
KINDS: dict[str, Any] = {
    "nf4": pack,
    "nf4-double": partial(pack, nested=True),
    "fp4": partial(pack, quant_type="fp4"),
    "int8": pack_8bit,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
Weights = dict[str, torch.Tensor]


def matrices() -> Weights:
    """Each expert's gate, up and down, by module."""
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    return {
        f"{PREFIX}.{expert}.{name}": random_matrix(*shape, seed=10 * expert + number)
        for expert in range(COUNT)
        for number, (name, shape) in enumerate(shapes.items())
    }


def stored(kind: str) -> tuple[Weights, Weights]:
    """The tensors of a checkpoint, and every matrix unpacked."""
    tensors: Weights = {}
    unpacked: Weights = {}
    for name, matrix in matrices().items():
        parts, unpacked[name] = KINDS[kind](name, matrix)
        tensors |= parts
    return tensors, unpacked


def serve(
    folder: Path, kind: str, tensors: Weights, options: Any = None, **arguments: Any
) -> torch.nn.Module:
    section = EIGHT if kind == "int8" else SECTION
    config = config_for("bitsandbytes", write_checkpoint(folder, tensors, section), options)
    layer = build_experts(config, PREFIX, SIZES, **arguments)
    load_experts(layer, config, reversed(tensors.items()))
    return layer


def in_flight(folder: Path, options: dict[str, Any], **arguments: Any) -> torch.nn.Module:
    tensors = {f"{name}.weight": matrix for name, matrix in matrices().items()}
    folder = write_checkpoint(folder, tensors, None)
    config = config_for("bitsandbytes", folder, options)
    layer = build_experts(config, PREFIX, SIZES, **arguments)
    load_experts(layer, config, tensors.items())
    return layer


def held(layer: torch.nn.Module, expert: int, local: int, weights: Weights) -> None:
    """Check one expert of a rank bit for bit against the slices of the whole matrices."""
    method = layer.quant_method
    rank, ranks = method.moe.tp_rank, method.moe.tp_size
    gate, up, down = (weights[f"{PREFIX}.{expert}.{part}_proj"] for part in ("gate", "up", "down"))
    share = [matrix.chunk(ranks)[rank] for matrix in (gate, up)]
    for group, expected in (("w13", torch.cat(share)), ("w2", down.chunk(ranks, dim=1)[rank])):
        found = method.dequantize_expert(layer, group, local)
        torch.testing.assert_close(found, expected, rtol=1e-6 * (layer.is_int8), atol=0)


@every_kind
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_holds_its_slice_of_every_expert(tmp_path, kind, ranks):
    tensors, unpacked = stored(kind)
    for rank in range(ranks):
        layer = serve(tmp_path, kind, tensors, rank=rank, ranks=ranks)
        layer.is_int8 = kind == "int8"
        for expert in range(COUNT):
            held(layer, expert, expert, unpacked)


@every_kind
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_expert_parallel_each_rank_holds_its_experts_whole(tmp_path, kind, ranks):
    tensors, unpacked = stored(kind)
    for rank in range(ranks):
        layer = serve(tmp_path, kind, tensors, rank=rank, ranks=ranks, expert_parallel=True)
        layer.is_int8 = kind == "int8"
        assert layer.local_num_experts == COUNT // ranks
        for local in range(COUNT // ranks):
            held(layer, rank * COUNT // ranks + local, local, unpacked)


def routing(tokens: int, seed: int = 0, experts: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator).softmax(-1)
    return scores.topk(2).values, scores.topk(2).indices


def reference(x: torch.Tensor, weights: Weights, chosen: Any) -> torch.Tensor:
    """What the experts make of each token, in float64, one token and expert at a time."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (shares, experts) in enumerate(zip(*chosen, strict=True)):
        for share, expert in zip(shares.tolist(), experts.tolist(), strict=True):
            name, row = f"{PREFIX}.{expert}", x[token].double()
            gate, up, down = (
                weights[f"{name}.{part}_proj"].double() for part in ("gate", "up", "down")
            )
            out[token] += share * (down @ (functional.silu(gate @ row) * (up @ row)))
    return out


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@every_kind
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_output_under_random_routing(tmp_path, kind, dtype, limit, tokens):
    """With one token, at most two experts get any."""
    tensors, unpacked = stored(kind)
    layer = serve(tmp_path, kind, tensors, dtype=dtype)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = layer.quant_method.apply(layer, x, *routing(tokens))
    assert found.dtype == dtype
    assert error_of(found, reference(x, unpacked, routing(tokens))) < limit


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_the_ranks_outputs_add_up(tmp_path, expert_parallel):
    tensors, unpacked = stored("nf4")
    x = torch.randn(9, HIDDEN)
    total = torch.zeros_like(x)
    for rank in range(4):
        layer = serve(tmp_path, "nf4", tensors, rank=rank, ranks=4, expert_parallel=expert_parallel)
        total += layer.quant_method.apply(layer, x, *routing(9))
    assert error_of(total, reference(x, unpacked, routing(9))) < 1e-5


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss: https://arxiv.org/abs/2508.10925, with the limit and slope of its weights."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def clamped(limit, alpha, beta):
    def activate(merged):
        gate, up = merged.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return activate


ACTIVATIONS = {
    "silu": ({}, clamped(1e9, 1, 0)),
    "silu-limit": ({"activation": "silu", "swiglu_limit": 0.5}, clamped(0.5, 1, 0)),
    "oai": ({"activation": "swigluoai"}, lambda merged: oai(merged[::2], merged[1::2])),
    "own-limits": (
        {"activation": "swigluoai_uninterleave", "swiglu_limit": 0.7, "swiglu_alpha": 1.3,
         "swiglu_beta": 0.5},
        clamped(0.7, 1.3, 0.5),
    ),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda merged: (
        functional.gelu(merged.chunk(2)[0], approximate="tanh") * merged.chunk(2)[1])),
    "relu2_no_mul": ({"activation": "relu2_no_mul", "ckpt_names": ("gate_proj", "down_proj", None)},
                     lambda merged: merged.relu().square()),
}  # fmt: skip


def activated_layer(folder, name, options, dtype=torch.float32, device="cpu", **arguments):
    """A layer with biases, in flight, and what it holds in float64."""
    arguments = {**ACTIVATIONS[name][0], **arguments}
    gated = "ckpt_names" not in arguments
    values = {n: m for n, m in matrices().items() if gated or not n.endswith("up_proj")}
    tensors = {f"{n}.weight": matrix for n, matrix in values.items()}
    tensors |= {f"{n}.bias": torch.randn(len(matrix)) for n, matrix in values.items()}
    config = config_for("bitsandbytes", write_checkpoint(folder, tensors, None), options)
    with torch.device(device):
        layer = build_experts(config, PREFIX, SIZES, has_bias=True, dtype=dtype, **arguments)
        load_experts(layer, config, [(n, t.to(device, dtype)) for n, t in tensors.items()])
        weights = [layer.quant_method.dequantize_all(layer, g).double() for g in ("w13", "w2")]
    return layer, weights, (layer.w13_bias, layer.w2_bias)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if not name.endswith("no_mul")])
def test_every_activation_with_biases(tmp_path, name):
    layer, weights, biases = activated_layer(tmp_path, name, {})
    x, (shares, chosen) = torch.randn(5, HIDDEN), routing(5)
    found = layer.quant_method.apply(layer, x, shares, chosen)
    wanted = through_experts(x, weights, chosen, shares, biases, ACTIVATIONS[name][1])
    assert error_of(found, wanted) < 1e-5


def test_an_activation_that_is_not_known_is_refused(tmp_path):
    arguments = {"activation": "swiglustep"}
    layer, _, _ = activated_layer(tmp_path, "silu", {}, **arguments)
    with pytest.raises(UnsupportedFormat, match="swiglustep"):
        layer.quant_method.apply(layer, torch.randn(1, HIDDEN), *routing(1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_and_an_activation_of_interleaved_rows(tmp_path, ranks):
    """gpt-oss's experts, in flight: gate and up take turns; down's bias counts once."""
    values = matrices()
    biases = {
        f"{name}.bias": torch.randn(len(matrix), generator=torch.Generator().manual_seed(3))
        for name, matrix in values.items()
    }
    tensors = {f"{name}.weight": matrix for name, matrix in values.items()} | biases
    folder = write_checkpoint(tmp_path, tensors, None)
    config = config_for("bitsandbytes", folder, {})
    x, (shares, chosen) = torch.randn(5, HIDDEN), routing(5)
    total, expected = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float64)
    for rank in range(ranks):
        layer = build_experts(
            config, PREFIX, SIZES, rank=rank, ranks=ranks, has_bias=True, activation="swigluoai"
        )
        load_experts(layer, config, tensors.items())
        total += layer.quant_method.apply(layer, x, shares, chosen)
        for token in range(len(x)):
            for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
                w13, w2 = (
                    layer.quant_method.dequantize_expert(layer, group, expert).double()
                    for group in ("w13", "w2")
                )
                merged = w13 @ x[token].double() + layer.w13_bias[expert].double()
                inner = oai(merged[::2], merged[1::2])
                expected[token] += share * (w2 @ inner + layer.w2_bias[expert] * (rank == 0))
    for expert in range(COUNT):
        assert torch.equal(layer.w2_bias[expert], biases[f"{PREFIX}.{expert}.down_proj.bias"])
    assert error_of(total, expected) < 1e-5


def test_router_weights_may_count_before_the_experts(tmp_path):
    """Llama 4: one expert for each token, its share multiplied into what goes in."""
    tensors, unpacked = stored("nf4")
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    layer = build_experts(config, PREFIX, SIZES, top_k=1, apply_router_weight_on_input=True)
    load_experts(layer, config, tensors.items())
    x, (shares, chosen) = torch.randn(5, HIDDEN), routing(5)
    shares, chosen = shares[:, :1], chosen[:, :1]
    one = reference(x * shares, unpacked, (torch.ones_like(shares), chosen))
    assert error_of(layer.quant_method.apply(layer, x, shares, chosen), one) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_flight_each_expert_is_quantized_as_bitsandbytes_would(tmp_path, ranks):
    """In parts of rows, whose blocks are those of the whole, and of columns, whose are not."""
    for rank in range(ranks):
        layer = in_flight(tmp_path, {"load_in_4bit": True}, rank=rank, ranks=ranks)
        for expert in range(COUNT):
            gate, up, down = share_of(expert, rank, ranks)
            expected = torch.cat([pack("x", matrix)[1] for matrix in (gate, up)])
            assert torch.equal(layer.quant_method.dequantize_expert(layer, "w13", expert), expected)
            _, expected = pack("x", down, blocksize=64 if ranks == 1 else 32)
            assert torch.equal(layer.quant_method.dequantize_expert(layer, "w2", expert), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_flight_in_8_bit_each_row_is_rounded_to_its_own_steps(tmp_path, ranks):
    for rank in range(ranks):
        layer = in_flight(tmp_path, {"load_in_8bit": True}, rank=rank, ranks=ranks)
        for expert in range(COUNT):
            gate, up, down = share_of(expert, rank, ranks)
            for group, exact in (("w13", torch.cat([gate, up])), ("w2", down)):
                found = layer.quant_method.dequantize_expert(layer, group, expert)
                step = exact.abs().amax(dim=1, keepdim=True) / 127
                assert ((found - exact).abs() <= 0.501 * step).all()


def test_in_flight_with_expert_parallel_other_ranks_experts_may_come_last(tmp_path):
    for rank in range(2):
        layer = in_flight(tmp_path, {}, rank=rank, ranks=2, expert_parallel=True)
        gate, up, _ = share_of(2 * rank, 0, 1)
        expected = torch.cat([pack("x", matrix)[1] for matrix in (gate, up)])
        assert torch.equal(layer.quant_method.dequantize_expert(layer, "w13", 0), expected)


def share_of(expert: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """A rank's part of an expert's gate, up and down."""
    values = matrices()
    gate, up, down = (values[f"{PREFIX}.{expert}.{part}_proj"] for part in ("gate", "up", "down"))
    down = down.chunk(ranks, dim=1)[rank].contiguous()
    return gate.chunk(ranks)[rank], up.chunk(ranks)[rank], down


class Mailbox(EplbCommunicator):
    """Carries experts between ranks that are threads of this process."""

    def __init__(self, rank: int, letters: dict[Any, Any], barrier: Barrier) -> None:
        self.rank, self.letters, self.barrier = rank, letters, barrier
        self.wanted: list[Any] = []

    def add_send(self, tensors, dst_rank, expert_id):
        self.letters[self.rank, dst_rank, expert_id] = [tensor.clone() for tensor in tensors]

    def add_recv(self, tensors, src_rank, expert_id):
        self.wanted.append((tensors, (src_rank, self.rank, expert_id)))

    def execute(self):
        self.barrier.wait()
        for tensors, letter in self.wanted:
            for tensor, value in zip(tensors, self.letters[letter], strict=True):
                tensor.copy_(value)
        self.barrier.wait()


@pytest.mark.parametrize("kind", [*KINDS, "in-flight"])
def test_a_load_balancer_moves_experts_between_ranks_exactly(tmp_path, kind):
    """By vLLM's own function: what it is given is all that an expert is made of."""
    tensors, _ = stored("nf4" if kind == "in-flight" else kind)
    split = {"ranks": 2, "expert_parallel": True}
    if kind == "in-flight":
        layers = [in_flight(tmp_path, {}, rank=rank, **split) for rank in range(2)]
    else:
        layers = [serve(tmp_path, kind, tensors, rank=rank, **split) for rank in range(2)]
    before, letters, barrier = held_by(layers), {}, Barrier(2, timeout=30)
    old, new = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 0, 1, 2]])

    def rearrange(rank: int) -> None:
        weights = list(layers[rank].get_expert_weights())
        group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
        mailbox = Mailbox(rank, letters, barrier)
        buffers = [torch.empty_like(weight) for weight in weights]
        rearrange_expert_weights_inplace(old, new, [weights], buffers, group, mailbox)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rearrange, range(2)))
    after = held_by(layers)
    for place, expert in enumerate(new[0].tolist()):
        for group in ("w13", "w2"):
            assert torch.equal(after[place][group], before[expert][group])


def held_by(layers: list[Any]) -> list[Weights]:
    """Both weights of each expert, one rank's after the other's."""
    return [
        {g: layer.quant_method.dequantize_expert(layer, g, local) for g in ("w13", "w2")}
        for layer in layers
        for local in range(COUNT // len(layers))
    ]


def test_every_byte_is_written(tmp_path):
    """Whatever the memory held before: two loads over different bytes end alike."""
    tensors, _ = stored("nf4-double")
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    results = []
    for fill in (0, 255):
        layer = build_experts(config, PREFIX, SIZES, rank=1, ranks=2)
        for parameter in layer.parameters():
            if not parameter.is_floating_point():
                parameter.data.fill_(fill)
        load_experts(layer, config, tensors.items())
        results.append(dict(layer.named_parameters()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("lost", ["gate_proj.weight.absmax", "down_proj.weight.quant_map"])
def test_a_tensor_that_never_arrives_is_refused(tmp_path, lost):
    tensors, _ = stored("nf4")
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    layer = build_experts(config, PREFIX, SIZES)
    rest = {name: t for name, t in tensors.items() if name != f"{PREFIX}.2.{lost}"}
    with pytest.raises(CheckpointIncomplete, match="first 2"):
        load_experts(layer, config, rest.items())


def test_in_flight_a_matrix_that_never_arrives_is_refused(tmp_path):
    tensors = {f"{name}.weight": matrix for name, matrix in matrices().items()}
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors, None), {})
    layer = build_experts(config, PREFIX, SIZES)
    del tensors[f"{PREFIX}.2.up_proj.weight"]
    with pytest.raises(CheckpointIncomplete, match="7 of 8 matrices"):
        load_experts(layer, config, tensors.items())


def test_experts_of_which_some_are_dense_are_refused_by_name(tmp_path):
    tensors, _ = stored("nf4")
    dense = f"{PREFIX}.1.up_proj"
    tensors = {name: t for name, t in tensors.items() if not name.startswith(dense)}
    tensors[f"{dense}.weight"] = matrices()[dense]
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    with pytest.raises(UnsupportedFormat, match=f"{dense}: unquantized"):
        build_experts(config, PREFIX, SIZES)


def test_a_vllm_that_would_stop_at_a_missing_operator_is_refused(tmp_path, monkeypatch):
    tensors, _ = stored("nf4")
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    monkeypatch.setattr(experts_room, "installed_version", lambda: "0.29.1")
    with pytest.raises(UnsupportedFormat, match=r"found: vLLM 0\.29\.1"):
        build_experts(config, PREFIX, SIZES)


def test_experts_in_16_bit_stay_so_in_a_4_bit_checkpoint_unless_asked(tmp_path):
    """transformers 5 stores them as two stacks and never quantizes them."""
    attention, _ = pack("model.layers.0.self_attn.o_proj", random_matrix(128, 128))
    values = matrices()
    gate_up = [
        torch.cat([values[f"{PREFIX}.{e}.{n}_proj"] for n in ("gate", "up")]) for e in range(COUNT)
    ]
    down = [values[f"{PREFIX}.{e}.down_proj"] for e in range(COUNT)]
    tensors = attention | {
        f"{PREFIX}.gate_up_proj": torch.stack(gate_up),
        f"{PREFIX}.down_proj": torch.stack(down),
    }
    layer = serve(tmp_path / "as stored", "nf4", tensors)
    assert isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
    layer = serve(tmp_path / "asked", "nf4", tensors, {**SECTION, "quantize_experts": True})
    expected = torch.cat([pack("x", half)[1] for half in gate_up[2].chunk(2)])
    assert torch.equal(layer.quant_method.dequantize_expert(layer, "w13", 2), expected)
