"""Layers of towers and hybrids: odd widths, and tensors that fill several slots of one layer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from oot_quant.testing.layers import (
    build_linear,
    config_for,
    load_stored,
    process,
    rank_weight,
    tensor_parallel,
)
from tests.backends.bitsandbytes.layers import error_of, weight_of
from tests.backends.bitsandbytes.stored import pack, pack_8bit, random_matrix, write_checkpoint

PACKERS = {"nf4": pack, "nf4-double": partial(pack, nested=True), "int8": pack_8bit}
SECTION = {"quant_method": "bitsandbytes"}
TOWER = "vision_tower.layers.0"
LAYERS = {
    "qkv": (f"{TOWER}.self_attn.qkv_proj", 144, (288, 288, 288)),
    "column": (f"{TOWER}.mlp.fc1", 144, (4304,)),
    "row": (f"{TOWER}.mlp.fc2", 4304, (72,)),
}
"""Heads of 72 and an inner width of 4304 = 67.25 x 64, as in Gemma-3's and Qwen3-VL's towers."""
HEAD_SIZE = 72
SLOTS = (128, 128, 256, 256)
"""Rows of q, k, v and z in Qwen3.5's linear attention, of which the first three are one tensor."""
QKVZ = "model.layers.0.linear_attn.in_proj_qkvz"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_towers_are_exact_on_every_rank(tmp_path, kind, packer, ranks):
    prefix, columns, rows = LAYERS[kind]
    parts = [f"{TOWER}.self_attn.{part}_proj" for part in "qkv"] if kind == "qkv" else [prefix]
    tensors, whole = {}, []
    for seed, (name, count) in enumerate(zip(parts, rows, strict=True)):
        stored, weight = PACKERS[packer](name, random_matrix(count, columns, seed))
        tensors |= stored
        whole.append(weight)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder)
            layer = build_linear(
                kind, config, prefix, columns, rows, dtype=torch.float32, head_size=HEAD_SIZE
            )
            load_stored(layer, config, tensors.items())
            process(layer)
        expected = rank_weight(kind, whole, rank, ranks, head_size=HEAD_SIZE)
        assert torch.equal(weight_of(layer), expected)
        x = torch.randn(3, expected.shape[1])
        reference = x.double() @ expected.double().t()
        assert error_of(layer.quant_method.apply(layer, x), reference) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("in_flight", [False, True], ids=["stored", "in-flight"])
def test_a_tensor_may_fill_several_slots_of_a_merged_layer(tmp_path, in_flight, ranks):
    """Each rank takes its share of q, of k and of v, not a share of all three at once."""
    names = {QKVZ.replace("qkvz", part): slots for part, slots in (("qkv", (0, 1, 2)), ("z", 3))}
    plain, packed, whole = {}, {}, []
    for seed, name in enumerate(names):
        matrix = random_matrix(512 if name.endswith("qkv") else 256, 256, seed)
        plain[f"{name}.weight"] = matrix
        stored, weight = pack(name, matrix)
        packed |= stored
        whole.append(weight)
    tensors = plain if in_flight else packed
    folder = write_checkpoint(tmp_path, tensors, None if in_flight else SECTION)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder, {} if in_flight else None)
            config.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
            layer = MergedColumnParallelLinear(
                256, list(SLOTS), bias=False, params_dtype=torch.float32,
                quant_config=config, prefix=QKVZ,
            )  # fmt: skip
            for name, tensor in config.name_mapper().apply(tensors.items()):
                module, _, parameter = name.rpartition(".")
                target = getattr(layer, parameter)
                target.weight_loader(target, tensor, names[module])
            process(layer)
        slots = torch.cat(whole).split(SLOTS)
        expected = torch.cat([slot.chunk(ranks)[rank] for slot in slots])
        assert torch.equal(weight_of(layer), expected)
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.numel() == expected.numel() // 2
