"""Checkpoints that are quantized in part, or say one thing and hold another."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.models import changed
from tests.vllm.engine import run_engine
from tests.vllm.test_bitsandbytes import PROMPTS, TEXT, check_against_oracle

DENSE = ["lm_head", "model.layers.0.mlp", "model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "null"])
def test_modules_that_the_author_left_unquantized(shelf, tmp_path, listed):
    """As 'dynamic' checkpoints do. Without a skip list, the tensors alone tell."""
    folder = shelf.quantized(shelf.llama(), llm_int8_skip_modules=DENSE)
    served = folder
    if not listed:
        served = shutil.copytree(folder, tmp_path / "null")
        config = json.loads((served / "config.json").read_text())
        config["quantization_config"]["llm_int8_skip_modules"] = None
        (served / "config.json").write_text(json.dumps(config))
    run = run_engine(served, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


def test_half_of_a_fused_pair_unquantized_is_refused_with_the_pair(shelf):
    skip = ["lm_head", "model.layers.1.mlp.gate_proj"]
    run = run_engine(shelf.quantized(shelf.llama(), llm_int8_skip_modules=skip))
    assert run.code != 0
    text = re.sub(r"\s+", " ", run.log)
    assert "the matrices of one fused layer are stored in different formats" in text
    assert "model.layers.1.mlp.gate_proj: unquantized; model.layers.1.mlp.up_proj: nf4" in text


@pytest.mark.parametrize("with_head", [False, True], ids=["alone", "with-head"])
def test_tied_embeddings_are_the_head(shelf, tmp_path, with_head):
    """Some tools store the head as well, though it is the embedding."""
    folder = shelf.quantized(shelf.llama(tied=True))
    served = folder
    if with_head:
        served = changed(
            folder, tmp_path / "with-head",
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        )  # fmt: skip
    run = run_engine(served, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")
