"""What vLLM can do with any model, on quantized ones: LoRA, drafts, fp8 cache, fixed choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tests.models import ModelShelf, dequantized_weights
from tests.vllm.engine import run_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [[1, 5, 9, 33], [7, 8, 200, 4, 4, 100, 31]]
RANK = 8


def write_adapter(folder: Path, weights: dict[str, torch.Tensor], scale: float) -> Path:
    """A LoRA adapter for every attention and MLP matrix; ``scale`` 0 changes nothing."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in weights.items():
        if not name.endswith("proj.weight"):
            continue
        rows, columns = weight.shape
        key = f"base_model.model.{name.removesuffix('.weight')}"
        down = torch.randn(RANK, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, RANK, generator=generator) * scale
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["nf4", "int8", "in-flight"])
def test_lora_on_a_quantized_base(shelf: ModelShelf, tmp_path: Path, kind: str):
    """A zero adapter changes nothing; another gives the model with the product added."""
    plain = shelf.llama()
    quantized = shelf.quantized(plain, kind if kind != "in-flight" else "nf4")
    model = plain if kind == "in-flight" else quantized
    weights = dequantized_weights(quantized)
    arguments = {"enable_lora": True, "max_lora_rank": RANK, "dtype": "float32"}
    arguments |= {"quantization": "bitsandbytes"} if kind == "in-flight" else {}
    base = run_engine(model, prompts=PROMPTS, **arguments)
    assert base.code == 0, base.log[-4000:]
    idle = write_adapter(tmp_path / "idle", weights, 0.0)
    assert run_engine(model, prompts=PROMPTS, lora=idle, **arguments).tokens == base.tokens
    active = write_adapter(tmp_path / "active", weights, 0.05)
    found = run_engine(model, prompts=PROMPTS, lora=active, **arguments)
    merged = shelf.unpacked(quantized, active)
    expected = run_engine(merged, prompts=PROMPTS, dtype="float32")
    assert found.tokens == expected.tokens
    assert found.tokens != base.tokens


@pytest.mark.not_in_vllm("0.30", "draft models on the CPU, of whatever weights")
@pytest.mark.parametrize("quantized", ["target", "draft"])
def test_drafts_do_not_change_what_is_said(shelf: ModelShelf, quantized: str):
    plain, packed = shelf.llama(), shelf.quantized(shelf.llama(), nested=True)
    target, draft = (packed, plain) if quantized == "target" else (plain, packed)
    alone = run_engine(target, prompts=PROMPTS, dtype="float32")
    speculative = {"model": str(draft), "num_speculative_tokens": 2, "method": "draft_model"}
    run = run_engine(target, prompts=PROMPTS, dtype="float32", speculative_config=speculative)
    assert run.code == 0, run.log[-4000:]
    assert run.tokens == alone.tokens


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported(),
    reason="vLLM has an fp8 cache only on processors with AVX-512 or AMX",
)
def test_an_fp8_cache_serves_quantized_weights_like_any(shelf: ModelShelf):
    quantized = shelf.quantized(shelf.llama(), nested=True)
    runs = [
        run_engine(model, prompts=PROMPTS, kv_cache_dtype="fp8")
        for model in (quantized, shelf.unpacked(quantized))
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].log[-4000:]
    assert runs[0].tokens == runs[1].tokens


@pytest.mark.needs_vllm("0.32", "online quantization of weights that are quantized already")
@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_stored_weights_can_be_quantized_anew_to_fp8(shelf: ModelShelf, kind: str):
    """vLLM's online quantization on top of a checkpoint, against plain weights."""
    name, _, nested = kind.partition("-")
    quantized = shelf.quantized(shelf.llama(), name, nested=bool(nested))
    fp8 = {"linear": {"weight": "fp8_per_channel_static"}}
    found = run_engine(quantized, prompts=PROMPTS, quantization_config=fp8)
    assert found.code == 0, found.log[-4000:]
    expected = run_engine(
        shelf.unpacked(quantized), prompts=PROMPTS, quantization="fp8_per_channel"
    )
    assert expected.code == 0, expected.log[-4000:]
    assert found.tokens == expected.tokens


def test_answers_from_a_fixed_choice(shelf: ModelShelf, smol: Path):
    folder = shelf.quantized(smol)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("Is Paris a city or a river? Answer:").input_ids
    run = run_engine(
        folder, prompts=[prompt], choices=[" a city", " a river"], skip_tokenizer_init=False
    )
    assert run.code == 0, run.log[-4000:]
    text = tokenizer.decode(run.tokens[0], skip_special_tokens=True)
    assert text in {" a city", " a river"}
