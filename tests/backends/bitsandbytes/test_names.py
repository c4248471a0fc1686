"""Layers find their stored tensors in models whose classes do not help."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.utils import WeightsMapper

from oot_quant.errors import UnsupportedFormat
from oot_quant.testing.layers import build_linear, config_for, process, tensor_parallel
from oot_quant.vllm_glue import names
from tests.backends.bitsandbytes.layers import PREFIX, ROWS, names_of, weight_of
from tests.backends.bitsandbytes.stored import (
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)

COLUMNS = 128


def stored(folder, kind, packer=pack, **how):
    """A checkpoint with the matrices of one layer, its config without any mapping."""
    tensors, whole = {}, []
    for name, rows in zip(names_of(kind), ROWS[kind], strict=True):
        packed, weight = packer(name, random_matrix(rows, COLUMNS), **how)
        tensors |= packed
        whole.append(weight)
    config = config_for("bitsandbytes", write_checkpoint(folder, tensors), {})
    config.packed_modules_mapping = {}
    return config, tensors, torch.cat(whole)


@pytest.mark.parametrize(("packer", "how"), [(pack, {}), (pack, {"nested": True}), (pack_8bit, {})])
def test_a_layer_takes_its_tensors_under_their_stored_names(tmp_path, packer, how):
    """As in Mamba-2, whose class hides its quantization config from vLLM's renaming."""
    config, tensors, whole = stored(tmp_path, "column", packer, **how)
    with tensor_parallel():
        layer = build_linear("column", config, PREFIX["column"], COLUMNS, ROWS["column"][0])
        own = [(name.removeprefix(f"{layer.prefix}."), t) for name, t in tensors.items()]
        loaded = set(layer.load_weights(own))
        process(layer)
    assert loaded >= {"weight", "weight_absmax" if packer is pack else "weight_scb"}
    assert torch.allclose(weight_of(layer), whole.to(torch.bfloat16), rtol=0.01)


class Stacking:
    """A model class of vLLM that says only in its weights mapper what it merges."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        }
    )


@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_members_are_told_by_the_table_of_stacked_weights(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(names, "_model_class", lambda: Stacking)
    config, _, _ = stored(tmp_path, kind)
    assert config.members(PREFIX[kind]) == tuple(names_of(kind))
    assert config.members("model.layers.0.mlp.down_proj") == ("model.layers.0.mlp.down_proj",)


@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_a_merged_layer_whose_members_nobody_names_is_refused(tmp_path, monkeypatch, kind):
    """Never taken for an unquantized one."""
    monkeypatch.setattr(names, "_model_class", lambda: dict)
    config, _, _ = stored(tmp_path, kind)
    rows = ROWS[kind]
    with tensor_parallel(), pytest.raises(UnsupportedFormat) as caught:
        build_linear(kind, config, PREFIX[kind], COLUMNS, rows)
    text = str(caught.value)
    assert f"where: {PREFIX[kind]}" in text
    name = PREFIX[kind].rpartition(".")[2]
    assert f"dict.packed_modules_mapping has no entry for '{name}'" in text
    assert all(name in text for name in names_of(kind))


def test_members_are_found_beside_a_prefix_that_vllm_misspells(tmp_path):
    """Its BERT says ``attention.output`` where it means ``attention.self``."""
    parts = [f"encoder.layer.3.attention.self.{part}" for part in ("query", "key", "value")]
    stored = {*parts, "encoder.layer.3.attention.output.dense", "encoder.layer.4.attention.x.query"}
    mapping = ["query", "key", "value"]
    found = names.stored_group("encoder.layer.3.attention.output", mapping, stored)
    assert found == tuple(parts)
    absent = names.stored_group("encoder.layer.4.attention.output", mapping, stored)
    assert absent == tuple(f"encoder.layer.4.attention.output.{part}" for part in mapping)


def test_two_groups_of_the_same_names_are_no_answer():
    stored = {f"layers.0.{module}.{part}" for module in ("a", "b") for part in ("query", "key")}
    own = ("layers.0.c.query", "layers.0.c.key")
    assert names.stored_group("layers.0.c", ["query", "key"], stored) == own


@pytest.mark.parametrize(
    ("name", "stored", "roots"),
    [
        ("model.layers.0.mlp.fc1", {"layers.0.mlp.fc1", "norm"}, ("", "model.")),
        ("layers.0.mlp.fc1", {"model.layers.0.mlp.fc1"}, ("model.", "")),
        ("model.layers.0.mlp.fc1", {"bert.layers.0.mlp.fc1"}, ("bert.", "model.")),
        ("model.layers.0.mlp.fc1", {"model.norm", "layers.0.mlp.fc1"}, None),
        ("model.layers.0.mlp.fc1", {"a.layers.0.mlp.fc1", "b.layers.0.mlp.fc1"}, None),
        ("model.layers.0.mlp.fc1", {"layers.1.mlp.fc1", "x.fc1"}, None),
        ("model.score", {"score"}, None),
        ("model.layer.0.output.qkv", {"layer.0.output.dense", "layer.0.self.q"}, ("", "model.")),
        ("model.layer.0.output.qkv", {"layer.0.self.q"}, None),
        ("model.layer.0.qkv", {"a.layer.0.dense"}, None),
        ("model.layer.0.x.qkv", {"a.layer.0.x.q", "b.layer.0.x.q"}, None),
    ],
)
def test_names_that_begin_otherwise(name, stored, roots):
    assert names.other_root(name, stored) == roots


@pytest.mark.parametrize("prefix", ["score", "classifier"])
def test_a_score_head_is_quantized_in_flight_only_on_request(tmp_path, prefix):
    folder = write_checkpoint(tmp_path, {f"{prefix}.weight": random_matrix(64, COLUMNS)}, None)
    for asked in (False, True):
        config = config_for("bitsandbytes", folder, {"quantize_lm_head": asked})
        with tensor_parallel():
            layer = build_linear("replicated", config, prefix, COLUMNS, 64)
        assert isinstance(layer.quant_method, UnquantizedLinearMethod) is not asked
