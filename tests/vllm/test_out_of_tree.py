"""A model class from outside vLLM, without ``packed_modules_mapping``."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.vllm.engine import run_engine
from tests.vllm.test_bitsandbytes import PROMPTS, TEXT, check_against_oracle


@pytest.fixture
def toy(tmp_path):
    """A copy of a Llama that asks for the toy class."""

    def make(folder):
        copy = shutil.copytree(folder, tmp_path / "toy")
        config = json.loads((copy / "config.json").read_text())
        config["architectures"] = ["ToyForCausalLM"]
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    return make


def test_stored_weights_are_refused_before_they_are_read(shelf, toy):
    """Else a merged layer would be taken for an unquantized one."""
    run = run_engine(toy(shelf.quantized(shelf.llama())), prompts=PROMPTS)
    assert run.code != 0
    text = re.sub(r"\s+", " ", run.log)
    assert "does not say which stored matrices one of its layers merges" in text
    assert "where: model.layers.0.self_attn.qkv_proj" in text
    assert "ToyForCausalLM.packed_modules_mapping has no entry for 'qkv_proj'" in text
    assert "Loading safetensors checkpoint shards" not in text


def test_in_flight_needs_no_mapping(shelf, toy):
    run = run_engine(
        toy(shelf.llama()), prompts=PROMPTS, texts=[TEXT], dtype="float32",
        quantization="bitsandbytes",
    )  # fmt: skip
    check_against_oracle(run, shelf.quantized(shelf.llama()), "float32")
