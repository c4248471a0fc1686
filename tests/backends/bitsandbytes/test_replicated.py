"""Fused layers that hold some matrices split over ranks and others whole on each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as kimi

from oot_quant.errors import CheckpointIncomplete, WeightMismatch
from oot_quant.testing.layers import HEAD_SIZE, config_for, process, tensor_parallel
from tests.backends.bitsandbytes.layers import weight_of
from tests.backends.bitsandbytes.stored import (
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)

COLUMNS = 256
HEADS, KEY_HEADS = 8, 2
PARENT = "model.layers.3.self_attn"
MINIMAX = ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")
MINIMAX_SHARDS = ("q", "k", "v", "index_q", "index_k")
MINIMAX_HEADS = (HEADS, KEY_HEADS, KEY_HEADS, KEY_HEADS, 1)
PACKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "nf4": (pack, {}),
    "nf4-double": (pack, {"nested": True}),
    "int8": (pack_8bit, {}),
}
Tensors = dict[str, torch.Tensor]


def minimax(config: Any) -> linear.LinearBase:
    """MiniMax-M3's projection: q, k, v, and an indexer's q and k."""
    return linear.MinimaxM3QKVParallelLinearWithIndexer(
        hidden_size=COLUMNS,
        head_size=HEAD_SIZE,
        total_num_heads=HEADS,
        total_num_kv_heads=KEY_HEADS,
        total_num_index_heads=KEY_HEADS,
        index_head_size=HEAD_SIZE,
        quant_config=config,
        prefix=f"{PARENT}.qkv_proj",
    )


def stored(
    folder: Path, names: Sequence[str], rows: Sequence[int], kind: str
) -> tuple[Path, Tensors, list[torch.Tensor]]:
    packer, how = PACKERS[kind]
    tensors, whole = {}, []
    for seed, (name, count) in enumerate(zip(names, rows, strict=True)):
        packed, weight = packer(f"{PARENT}.{name}", random_matrix(count, COLUMNS, seed), **how)
        tensors |= packed
        whole.append(weight)
    section = {"quant_method": "bitsandbytes", f"load_in_{8 if kind == 'int8' else 4}bit": True}
    return write_checkpoint(folder, tensors, section), tensors, whole


def fill(layer: linear.LinearBase, config: Any, tensors: Tensors, shards: dict[str, Any]) -> None:
    """Give a layer its tensors in a random order, as its model would."""
    order = list(tensors.items())
    random.Random(5).shuffle(order)
    for name, tensor in config.get_checkpoint_weight_mapper().apply(order):
        module, _, parameter = name.rpartition(".")
        target = getattr(layer, parameter)
        target.weight_loader(target, tensor, shards[module.rpartition(".")[2]])


def part(matrix: torch.Tensor, rank: int, ranks: int, pieces: int) -> torch.Tensor:
    """A rank's slice of a matrix that can be cut into so many pieces, by plain slicing."""
    count = min(ranks, pieces)
    return matrix.chunk(count)[rank * count // ranks]


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_holds_its_slice_of_five_fused_matrices_bit_for_bit(tmp_path, ranks, kind):
    """On four ranks two share a key head; the indexer's key is whole on each."""
    rows = [count * HEAD_SIZE for count in MINIMAX_HEADS]
    folder, tensors, whole = stored(tmp_path, MINIMAX, rows, kind)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder)
            layer = minimax(config)
            fill(layer, config, tensors, dict(zip(MINIMAX, MINIMAX_SHARDS, strict=True)))
            process(layer)
        expected = torch.cat(
            [part(m, rank, ranks, h) for m, h in zip(whole, MINIMAX_HEADS, strict=True)]
        )
        assert torch.equal(weight_of(layer), expected.to(layer.params_dtype))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_five_fused_matrices_in_flight(tmp_path, ranks):
    """Each rank's quantized slice equals the slice of what would have been stored."""
    rows = [count * HEAD_SIZE for count in MINIMAX_HEADS]
    _, _, whole = stored(tmp_path / "packed", MINIMAX, rows, "nf4")
    plain = {
        f"{PARENT}.{name}.weight": random_matrix(count, COLUMNS, seed)
        for seed, (name, count) in enumerate(zip(MINIMAX, rows, strict=True))
    }
    folder = write_checkpoint(tmp_path / "plain", plain, None)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder)
            layer = minimax(config)
            fill(layer, config, plain, dict(zip(MINIMAX, MINIMAX_SHARDS, strict=True)))
            process(layer)
        expected = torch.cat(
            [part(m, rank, ranks, h) for m, h in zip(whole, MINIMAX_HEADS, strict=True)]
        )
        assert torch.equal(weight_of(layer), expected)


@pytest.mark.parametrize("missing", ["index_q_proj", "index_k_proj"])
def test_a_matrix_of_the_indexer_that_never_arrives_is_named(tmp_path, missing):
    rows = [count * HEAD_SIZE for count in MINIMAX_HEADS]
    folder, tensors, _ = stored(tmp_path, MINIMAX, rows, "nf4")
    given = {name: tensor for name, tensor in tensors.items() if missing not in name}
    with tensor_parallel():
        config = config_for("bitsandbytes", folder)
        layer = minimax(config)
        fill(layer, config, given, dict(zip(MINIMAX, MINIMAX_SHARDS, strict=True)))
        with pytest.raises(CheckpointIncomplete, match="qkv_proj"):
            process(layer)


def test_a_key_of_the_indexer_with_as_many_rows_as_there_are_ranks_is_refused(tmp_path):
    """The layer counts it once for each rank; what is stored is one."""
    rows = [count * HEAD_SIZE for count in (*MINIMAX_HEADS[:-1], 2)]
    folder, tensors, _ = stored(tmp_path, MINIMAX, rows, "nf4")
    with tensor_parallel(0, 2):
        config = config_for("bitsandbytes", folder)
        layer = minimax(config)
        with pytest.raises(WeightMismatch, match="index_k"):
            fill(layer, config, tensors, dict(zip(MINIMAX, MINIMAX_SHARDS, strict=True)))


def gated_latents(config: Any, ranks: int) -> linear.LinearBase:
    return linear.KimiK3MergedQKVGateLinear(
        COLUMNS, 128, 64, 64, HEADS, HEAD_SIZE, quant_config=config, prefix=f"{PARENT}.fused"
    )


def delta_net(config: Any, ranks: int) -> linear.LinearBase:
    return kimi._KimiGDNMergedColumnParallelLinear(
        COLUMNS,
        [512, 512, 128],
        replicated_shard_id=2,
        tp_size=ranks,
        bias=False,
        quant_config=config,
        prefix=f"{PARENT}.fused",
    )


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("build", "rows", "is_split"),
    [
        pytest.param(
            gated_latents,
            (128, 128, 512),
            (False, False, True),
            id="kimi-k3-gate",
            marks=pytest.mark.needs_vllm("0.29", "Kimi-K3's gated latents"),
        ),
        pytest.param(delta_net, (512, 512, 128), (True, True, False), id="kimi-delta-net"),
    ],
)
def test_members_that_every_rank_holds_whole(tmp_path, build, rows, is_split, ranks, kind):
    names = ("a_proj", "b_proj", "c_proj")
    folder, tensors, whole = stored(tmp_path, names, rows, kind)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder)
            config.packed_modules_mapping = {"fused": list(names)}
            layer = build(config, ranks)
            fill(layer, config, tensors, dict(zip(names, range(3), strict=True)))
            process(layer)
        expected = torch.cat(
            [part(m, rank, ranks, ranks if s else 1) for m, s in zip(whole, is_split, strict=True)]
        )
        assert torch.equal(weight_of(layer), expected.to(layer.params_dtype))
