"""Layers that vLLM builds without quantization for modules that are stored quantized."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from oot_quant.errors import CheckpointIncomplete, UnsupportedFormat
from oot_quant.testing.layers import build_linear, config_for, process, tensor_parallel
from tests.backends.bitsandbytes.layers import weight_of
from tests.backends.bitsandbytes.stored import pack, pack_8bit, random_matrix, write_checkpoint

ROWS, COLUMNS = 144, 304
"""No whole number of blocks in a row."""
PACKERS = {
    "nf4": pack,
    "fp4-double": partial(pack, quant_type="fp4", nested=True),
    "int8": pack_8bit,
}
DOWN = "model.layers.0.mlp.down_proj"


class Toy(nn.Module):
    """A text layer that is built with the config, and a tower that is not."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.tower.": "vision.", "old.": None})

    def __init__(self, config):
        super().__init__()
        self.quant_config = config
        self.text = build_linear("row", config, DOWN, COLUMNS, ROWS)
        self.vision = nn.Module()
        self.vision.fc = nn.Linear(COLUMNS, ROWS, bias=True)
        self.vision.qkv_proj = QKVParallelLinear(64, 64, 2, 1, bias=False, prefix="vision.qkv_proj")
        self.vision.out = RowParallelLinear(128, 64, bias=False, prefix="vision.out")

    def load_weights(self, weights):
        renamed = self.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix={DOWN: "text"})
        stacked = WeightsMapper(
            orig_to_new_stacked={f".{part}_proj": (".qkv_proj", part) for part in "qkv"}
        )
        loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=["unused."])
        return loader.load_weights(weights, mapper=renamed | stacked)


SHAPES = {
    DOWN: (ROWS, COLUMNS),
    "model.tower.fc": (ROWS, COLUMNS),
    "model.tower.q_proj": (128, 64),
    "model.tower.k_proj": (64, 64),
    "model.tower.v_proj": (64, 64),
    "model.tower.out": (64, 128),
    "unused.fc": (64, 64),
    "old.fc": (64, 64),
}


def checkpoint(folder, kind):
    """A folder with all modules packed, their tensors, and their weights unpacked."""
    tensors, whole = {}, {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        packed, whole[name] = PACKERS[kind](name, random_matrix(*shape, seed))
        tensors |= packed
    tensors["model.tower.fc.bias"] = torch.randn(ROWS)
    section = {"quant_method": "bitsandbytes"}
    return write_checkpoint(folder, tensors, section), tensors, whole


@pytest.fixture(params=PACKERS)
def kind(request):
    return request.param


def build(folder, rank=0, ranks=1):
    with tensor_parallel(rank, ranks):
        config = config_for("bitsandbytes", folder)
        configure_quant_config(config, Toy)
        return Toy(config)


def shuffled(tensors):
    order = list(tensors.items())
    random.Random(0).shuffle(order)
    return order


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_plain_layers_get_unpacked_weights_and_others_stay_packed(tmp_path, kind, rank, ranks):
    folder, tensors, whole = checkpoint(tmp_path, kind)
    toy = build(folder, rank, ranks)
    with tensor_parallel(rank, ranks):
        toy.load_weights(shuffled(tensors))
        process(toy.text)
    text = whole[DOWN].chunk(ranks, dim=1)[rank]
    assert toy.text.weight.element_size() == 1
    assert torch.equal(weight_of(toy.text), text.to(torch.bfloat16))
    assert torch.equal(toy.vision.fc.weight, whole["model.tower.fc"])
    assert torch.equal(toy.vision.fc.bias, tensors["model.tower.fc.bias"])
    q, k, v = (whole[f"model.tower.{part}_proj"] for part in "qkv")
    rows = torch.cat([q.chunk(ranks)[rank], k, v])
    assert torch.equal(toy.vision.qkv_proj.weight, rows)
    assert torch.equal(toy.vision.out.weight, whole["model.tower.out"].chunk(ranks, dim=1)[rank])


def test_the_notice_names_what_was_unpacked_and_its_bytes(tmp_path, caplog_vllm):
    """Weights that vLLM drops are not unpacked, so not counted."""
    folder, tensors, _ = checkpoint(tmp_path, "nf4")
    toy = build(folder)
    with tensor_parallel():
        toy.load_weights(tensors.items())
    (text,) = re.findall(r"vLLM builds .* layers without.*", caplog_vllm.text)
    tower = [name for name in SHAPES if name.startswith("model.tower.")]
    stored = [t for n, t in tensors.items() if n.startswith("model.tower.") and "bias" not in n]
    extra = sum(4 * rows * columns for rows, columns in map(SHAPES.get, tower))
    extra -= sum(tensor.nbytes for tensor in stored)
    assert f"builds {len(tower)} layers" in text
    assert f"take {extra / 2**20:.1f} MiB more: {', '.join(tower)}." in text


def test_no_notice_where_every_layer_takes_packed_weights(tmp_path, caplog_vllm):
    tensors, _ = pack(DOWN, random_matrix(64, 128))
    folder = write_checkpoint(tmp_path, tensors)
    with tensor_parallel():
        config = config_for("bitsandbytes", folder)
        layer = build_linear("row", config, DOWN, 128, 64)
        found = dict(config.get_checkpoint_weight_mapper().apply(tensors.items()))
    assert found.keys() == {f"{DOWN}.{name}" for name, _ in layer.named_parameters()}
    assert "without quantization" not in caplog_vllm.text


def test_weights_that_arrive_plain_pass(tmp_path):
    """As a trainer pushes them into a running engine."""
    folder, tensors, whole = checkpoint(tmp_path, "nf4")
    toy = build(folder)
    pushed = {name: torch.randn(shape) for name, shape in SHAPES.items() if "tower" in name}
    with tensor_parallel():
        toy.load_weights(tensors.items())
        toy.load_weights([(f"{name}.weight", weight) for name, weight in pushed.items()])
        assert torch.equal(toy.vision.fc.weight, pushed["model.tower.fc"])
        assert torch.equal(toy.vision.out.weight, pushed["model.tower.out"])
        toy.load_weights(tensors.items())
    assert torch.equal(toy.vision.fc.weight, whole["model.tower.fc"])


def test_a_tensor_that_never_comes_is_an_error_that_names_its_module(tmp_path):
    folder, tensors, _ = checkpoint(tmp_path, "nf4")
    toy = build(folder)
    del tensors["model.tower.fc.weight.absmax"]
    with tensor_parallel(), pytest.raises(CheckpointIncomplete) as caught:
        toy.load_weights(tensors.items())
    assert "where: model.tower.fc" in str(caught.value)
    assert ".weight.quant_map" in str(caught.value)


@pytest.mark.parametrize("here", [True, False], ids=["downloaded", "elsewhere"])
def test_shapes_that_the_network_did_not_tell(tmp_path, monkeypatch, here):
    """Read once more when they are needed: by then the files have been downloaded."""
    folder, tensors, whole = checkpoint(tmp_path, "nf4")
    toy = build(folder)
    claims = toy.quant_config._claims
    claims.formats = {n: replace(form, shape=None) for n, form in claims.formats.items()}
    if not here:
        monkeypatch.setattr(toy.quant_config, "_read_formats", lambda: claims.formats)
    with tensor_parallel():
        if here:
            toy.load_weights(tensors.items())
            assert torch.equal(toy.vision.fc.weight, whole["model.tower.fc"])
        else:
            with pytest.raises(UnsupportedFormat, match="shape is not known") as caught:
                toy.load_weights(tensors.items())
            assert "where: model.tower." in str(caught.value)
