"""Checkpoints that are quantized in part, or say one thing and hold another."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.models import changed
from tests.vllm.engine import run_engine
from tests.vllm.test_bitsandbytes import PROMPTS, TEXT, check_against_oracle

MULTITHREAD = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3}}
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


@pytest.mark.parametrize(
    "arguments",
    [{}, {"load_format": "safetensors"}, MULTITHREAD, {"load_format": "runai_streamer"}],
    ids=["auto", "safetensors", "multithread", "runai_streamer"],
)
def test_pieces_of_a_weight_in_different_files(shelf, tmp_path, arguments):
    folder = shelf.quantized(shelf.llama(), nested=True)
    served = scatter(folder, tmp_path / "scattered")
    run = run_engine(served, prompts=PROMPTS, texts=[TEXT], dtype="float32", **arguments)
    check_against_oracle(run, folder, "float32")


def test_a_consolidated_copy_is_left_unread(shelf, tmp_path):
    """Some publishers add one, under names of their own; vLLM's default prefers it."""
    folder = shelf.quantized(shelf.llama(), nested=True)
    served = scatter(folder, tmp_path / "scattered")
    stray = {f"other.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(stray, served / "consolidated.safetensors")
    refused = run_engine(served)
    assert refused.code != 0
    assert "checkpoint-surplus: the checkpoint has a second copy of its weights" in refused.log
    assert "fix: --load-format safetensors" in re.sub(r"\s+", " ", refused.log)
    run = run_engine(
        served, prompts=PROMPTS, texts=[TEXT], dtype="float32", load_format="safetensors"
    )
    check_against_oracle(run, folder, "float32")


def scatter(folder: Path, target: Path) -> Path:
    """A checkpoint in two files, each weight's bytes apart from its scales."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    where: dict[str, Any] = {}
    for part, has in enumerate((lambda name: ".weight." in name, lambda name: True)):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        names = [name for name in tensors if name not in where and has(name)]
        save_file({name: tensors[name] for name in names}, target / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target
