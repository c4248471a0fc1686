"""Bytes of weights, from headers made here."""

import pytest

from oot_quant.checkpoint import read_checkpoint
from oot_quant.memory import is_expert, is_linear, module_of, weights
from oot_quant.types import ModuleSummary


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("a.b.weight", "a.b"),
        ("a.b.weight.absmax", "a.b"),
        ("a.weights_proj.weight", "a.weights_proj"),
        ("a.b.bias", "a.b.bias"),
        ("a.experts.gate_up_proj", "a.experts.gate_up_proj"),
    ],
)
def test_side_tensors_belong_to_their_module(name, module):
    assert module_of(name) == module


def test_experts_are_told_by_a_whole_part_of_the_name():
    assert is_expert("model.layers.0.mlp.experts.3.w2.weight")
    assert is_expert("model.layers.0.mlp.experts.gate_up_proj")
    assert not is_expert("model.layers.0.mlp.shared_experts.up_proj.weight")


def test_only_matrices_of_linear_layers_are_quantized_in_flight(model):
    tensors = {
        "model.layers.0.mlp.up_proj.weight": ("BF16", (64, 64)),
        "model.layers.0.mlp.up_proj.bias": ("BF16", (64,)),
        "model.layers.0.mlp.experts.0.w2.weight": ("BF16", (64, 64)),
        "model.embed_tokens.weight": ("BF16", (64, 64)),
        "lm_head.weight": ("BF16", (64, 64)),
        "visual.patch_embed.proj.weight": ("BF16", (4, 3, 2, 2)),
    }
    checkpoint = read_checkpoint(model(tensors))
    linear = [name for name, tensor in checkpoint.tensors.items() if is_linear(tensor)]
    assert linear == ["model.layers.0.mlp.up_proj.weight"]


def test_matrices_are_split_over_ranks_and_vectors_are_not(model):
    name = model({"a.weight": ("BF16", (8, 8)), "norm.weight": ("BF16", (8,))})
    assert weights(read_checkpoint(name), {}, ranks=4).device_bytes == 128 / 4 + 16


def test_what_is_stored_in_32_bits_is_held_in_16(model):
    found = weights(read_checkpoint(model({"a.weight": ("F32", (8, 8))})), {})
    assert (found.plain_bytes, found.device_bytes) == (256, 128)


def test_a_packed_module_counts_with_its_decoded_scales(model, nf4):
    checkpoint = read_checkpoint(model(nf4("a", 64, 64)))
    stored = sum(tensor.bytes for tensor in checkpoint.tensors.values())
    known = ModuleSummary("nf4", stored, {}, (64, 64))
    found = weights(checkpoint, {"a": known})
    assert (found.quantized_bytes, found.plain_bytes) == (stored, 0)
    assert found.device_bytes == 64 * 64 * 4.5 / 8
    unknown = ModuleSummary("q4", stored)
    assert weights(checkpoint, {"a": unknown}).device_bytes == stored


def test_in_flight_counts_linear_layers_in_the_new_format(model):
    name = model({"a.weight": ("BF16", (64, 64)), "lm_head.weight": ("BF16", (64, 64))})
    found = weights(read_checkpoint(name), {}, in_flight="nf4")
    assert found.device_bytes == 64 * 64 * 4.5 / 8 + 64 * 64 * 2
