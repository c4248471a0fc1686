"""Falcon's q, k and v, one tensor on disk, whose rows vLLM sorts by heads before loading them."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.models.falcon import FalconModel

from oot_quant.testing.layers import build_linear, config_for, process, rank_weight, tensor_parallel
from tests.backends.bitsandbytes.layers import weight_of
from tests.backends.bitsandbytes.stored import pack, pack_8bit, random_matrix, write_checkpoint

PREFIX = "transformer.h.0.self_attention.query_key_value"
SHAPES = {
    # heads, key heads, size of a head
    "one-key-head": (5, 1, 64),  # like 7B's: second-level scales do not divide among the heads
    "grouped": (10, 2, 32),
    "whole-by-chance": (4, 2, 60),  # these do, but not at the heads' borders
    "blocks-across-heads": (4, 2, 22),
}


class Falcon(nn.Module):
    """As much of Falcon as its loader looks at."""

    load_own_weights = FalconModel.load_weights

    def __init__(self, config, heads, key_heads, size):
        super().__init__()
        self.quant_config = config
        self.config = SimpleNamespace(
            num_attention_heads=heads, num_kv_heads=key_heads, new_decoder_architecture=True
        )
        rows = [heads * size, key_heads * size, key_heads * size]
        attention = nn.Module()
        attention.query_key_value = build_linear(
            "qkv", config, PREFIX, heads * size, rows, dtype=torch.float32, head_size=size
        )
        self.self_attention = attention

    def named_parameters(self, *_, **__):
        for name, value in self.self_attention.named_parameters():
            yield f"transformer.h.0.self_attention.{name}", value


class Whole(nn.Module):
    """The model around it, which renames what comes from files."""

    def __init__(self, falcon):
        super().__init__()
        self.quant_config = falcon.quant_config
        self.falcon = falcon

    def load_weights(self, weights):
        self.falcon.load_own_weights(
            self.quant_config.get_checkpoint_weight_mapper().apply(weights)
        )


def by_heads(matrix, heads, key_heads, size):
    """The rows of q, k and v, as Falcon stores them: each key head behind its queries."""
    queries = heads // key_heads
    groups = matrix.view(key_heads, queries + 2, size, -1)
    parts = (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
    return [part.reshape(-1, matrix.shape[1]) for part in parts]


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
@pytest.mark.parametrize(
    ("shape", "ranks"), [(shape, 1) for shape in SHAPES] + [("grouped", 2), ("whole-by-chance", 2)]
)
def test_rows_sorted_by_heads_keep_their_scales(tmp_path, shape, kind, ranks):
    heads, key_heads, size = SHAPES[shape]
    matrix = random_matrix((heads + 2 * key_heads) * size, heads * size)
    if kind == "int8":
        tensors, whole = pack_8bit(PREFIX, matrix)
    else:
        tensors, whole = pack(PREFIX, matrix, nested=kind == "nf4-double")
    folder = write_checkpoint(tmp_path, tensors, {"quant_method": "bitsandbytes"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["FalconForCausalLM"]}
    file.write_text(json.dumps(config))
    order = list(tensors.items())
    random.Random(0).shuffle(order)
    for rank in range(ranks):
        with tensor_parallel(rank, ranks):
            config = config_for("bitsandbytes", folder)
            config.packed_modules_mapping = {"query_key_value": ["query_key_value"]}
            falcon = Falcon(config, heads, key_heads, size)
            Whole(falcon).load_weights(order)
            layer = falcon.self_attention.query_key_value
            process(layer)
        expected = rank_weight(
            "qkv", by_heads(whole, heads, key_heads, size), rank, ranks, head_size=size
        )
        assert torch.allclose(weight_of(layer), expected, rtol=1e-6, atol=0)
