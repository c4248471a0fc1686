"""Model classes that do something to weights: packed ones are refused, others stay in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from oot_quant.errors import UnsupportedFormat
from oot_quant.testing.layers import build_linear, config_for, tensor_parallel
from oot_quant.vllm_glue import compat
from oot_quant.vllm_glue.architectures import LIMITS, architectures_of
from tests.backends.bitsandbytes.stored import SECTION, pack, random_matrix, write_checkpoint

ATTENTION = "model.layers.3.self_attn"


def checkpoint(folder: Path, module: str, *, packed: bool, **config: Any) -> Path:
    """One module, its config.json changed."""
    matrix = random_matrix(64, 128)
    tensors = pack(module, matrix)[0] if packed else {f"{module}.weight": matrix}
    write_checkpoint(folder, tensors, SECTION if packed else None)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Llama4ForCausalLM"]},
        {"architectures": ["Other"], "text_config": {"architectures": ["Llama4ForCausalLM"]}},
    ],
    ids=["model", "part"],
)
def test_packed_weights_that_a_class_reorders_are_refused_before_loading(tmp_path, config):
    folder = checkpoint(tmp_path, f"{ATTENTION}.q_proj", packed=True, **config)
    with pytest.raises(UnsupportedFormat) as caught:
        config_for("bitsandbytes", folder)
    text = str(caught.value)
    assert "Llama4ForCausalLM cannot load these weights quantized" in text
    assert f"where: {ATTENTION}.q_proj" in text
    assert "reorders or cuts weights" in text
    assert "16-bit checkpoint" in text


def test_other_packed_weights_of_such_a_class_are_not_refused(tmp_path):
    folder = checkpoint(
        tmp_path, f"{ATTENTION}.o_proj", packed=True, architectures=["Llama4ForCausalLM"]
    )
    assert list(config_for("bitsandbytes", folder).formats) == [f"{ATTENTION}.o_proj"]


@pytest.mark.parametrize(
    ("architecture", "layer", "stays"),
    [
        ("IsaacForConditionalGeneration", "vision_embedding.linear_fc1", True),
        ("IsaacForConditionalGeneration", "model.layers.0.mlp.fc1", False),
        ("Llama4ForCausalLM", f"{ATTENTION}.q_proj", False),
        ("ModernBertModel", f"{ATTENTION}.q_proj", False),
        ("LlamaForCausalLM", "vision_embedding.linear_fc1", False),
    ],
)
def test_in_flight_only_what_a_class_uses_itself_stays_unquantized(
    tmp_path, caplog_vllm, architecture, layer, stays
):
    folder = checkpoint(tmp_path, layer, packed=False, architectures=[architecture])
    with tensor_parallel():
        built = build_linear("column", config_for("bitsandbytes", folder), layer, 128, 64)
    assert isinstance(built.quant_method, UnquantizedLinearMethod) is stays


def test_a_merged_layer_stays_unquantized_with_what_it_merges(tmp_path):
    layer = f"{ATTENTION}.qkv_proj"
    folder = checkpoint(tmp_path, layer, packed=False, architectures=["Step3TextForCausalLM"])
    with tensor_parallel():
        config = config_for("bitsandbytes", folder)
        built = build_linear("qkv", config, layer, 128, (128, 64, 64))
    assert isinstance(built.quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize(("installed", "refused"), [("0.31.0", True), ("0.32.0", False)])
def test_what_only_an_older_vllm_does_is_refused_only_there(
    tmp_path, monkeypatch, installed, refused
):
    module = "gpt_neox.layers.0.attention.query_key_value"
    folder = checkpoint(tmp_path, module, packed=True, architectures=["GPTNeoXForCausalLM"])
    monkeypatch.setattr(compat, "installed_version", lambda: installed)
    if refused:
        with pytest.raises(UnsupportedFormat, match="GPTNeoXForCausalLM cannot load these"):
            config_for("bitsandbytes", folder)
    else:
        assert list(config_for("bitsandbytes", folder).formats) == [module]


def test_an_architecture_of_every_reason_is_listed():
    found = {limit.reason for limits in LIMITS.values() for limit in limits}
    assert len(found) == len(type(next(iter(found))))


def test_architectures_of_parts_are_known_too():
    config = {"architectures": ["A"], "text_config": {"architectures": ["B"]}, "x": {"y": 1}}
    assert architectures_of(config) == ["A", "B"]
    assert architectures_of({"architectures": None}) == []
