"""bitsandbytes through the real engine on the CPU, against transformers on unpacked weights.

Starting engines is what these tests cost, so each start serves several assertions.
"""

from __future__ import annotations

import re
import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.models import changed
from tests.vllm.engine import Run, run_engine
from tests.vllm.oracle import Oracle, agree, perplexity

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [[1, 5, 9, 33], [7, 8, 200, 4, 4, 100, 31], [511]]
TEXT = [3, 77, 451, 12, 300, 8, 8, 190, 42, 256, 17, 500, 23, 4, 99, 401]
PLAIN_TEXT = (Path(__file__).parent / "plain.txt").read_text(encoding="utf-8").strip()
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.05}


unpacked = lru_cache(maxsize=1)(Oracle.unpacked)
dequantized = lru_cache(maxsize=1)(Oracle.dequantized)


def check_against_oracle(run: Run, folder: Path, dtype: str) -> None:
    oracle = unpacked(folder)
    assert run.code == 0, run.log[-4000:]
    for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
        expected = oracle.continue_greedily(prompt)
        assert agree(tokens, expected, NEAR_TIE[dtype]), (tokens, expected)
    difference = torch.tensor(run.logprobs[0]) - torch.tensor(oracle.logprobs(TEXT))
    assert difference.abs().max() < NEAR_TIE[dtype]


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_stored_checkpoint_needs_no_flags_and_agrees_with_transformers(shelf, quant_type, nested):
    folder = shelf.quantized(shelf.llama(), quant_type, nested=nested)
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


def test_a_stored_8_bit_checkpoint_needs_no_flags(shelf):
    folder = shelf.quantized(shelf.llama(), "int8")
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


def test_weights_that_are_fused_on_disk_agree_with_transformers(shelf):
    folder = shelf.quantized(shelf.family("phi3"), nested=True)
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


def test_a_quantized_output_head_is_used(shelf):
    folder = shelf.quantized(shelf.llama(), nested=True, llm_int8_skip_modules=["nothing"])
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


@pytest.mark.parametrize(
    ("load_format", "name"), [("auto", "pytorch_model.bin"), ("pt", "model.pt")]
)
def test_pytorch_files_are_read_like_safetensors(shelf, tmp_path, load_format, name):
    folder = shelf.quantized(shelf.llama(), "fp4", nested=True)
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / name)
    (pickled / "model.safetensors").unlink()
    run = run_engine(
        pickled, prompts=PROMPTS, texts=[TEXT], dtype="float32", load_format=load_format
    )
    check_against_oracle(run, folder, "float32")


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_in_flight_equals_the_stored_checkpoint(shelf, kind):
    """Same weights, so same log probabilities, also where options choose another format."""
    section = {
        "fp4": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        "int8": {"load_in_8bit": True},
    }[kind]
    run = run_engine(
        shelf.llama(), prompts=PROMPTS, texts=[TEXT], dtype="float32",
        quantization="bitsandbytes", hf_overrides={"quantization_config": section},
    )  # fmt: skip
    folder = shelf.quantized(shelf.llama(), kind, nested=kind == "fp4")
    check_against_oracle(run, folder, "float32")


def test_8_bit_is_compiled_like_everything_else(shelf):
    folder = shelf.quantized(shelf.llama(), "int8")
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], enforce_eager=False, dtype="float32")
    check_against_oracle(run, folder, "float32")


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in-flight"])
def test_compiled_equals_eager(shelf, stored):
    folder = shelf.quantized(shelf.llama()) if stored else shelf.llama()
    arguments = {} if stored else {"quantization": "bitsandbytes"}
    run = run_engine(
        folder, prompts=PROMPTS, texts=[TEXT], enforce_eager=False, dtype="bfloat16", **arguments
    )
    assert "torch.compile" in run.log or "compilation" in run.log.lower()
    check_against_oracle(run, shelf.quantized(shelf.llama()), "bfloat16")


@pytest.mark.parametrize("kind", ["nf4-double", "int8", "in-flight"])
def test_two_ranks_give_the_tokens_of_one(shelf, kind):
    """Down-projection rows of 352 for each rank: five and a half blocks of 64."""
    plain = shelf.llama(intermediate_size=704)
    folder = {
        "nf4-double": lambda: shelf.quantized(plain, nested=True),
        "int8": lambda: shelf.quantized(plain, "int8"),
        "in-flight": shelf.llama,
    }[kind]()
    arguments = {"quantization": "bitsandbytes"} if kind == "in-flight" else {}
    one, two = (
        run_engine(folder, prompts=PROMPTS, dtype="float32", tensor_parallel_size=size, **arguments)
        for size in (1, 2)
    )
    assert one.code == two.code == 0, two.log[-4000:]
    assert one.tokens == two.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp4", "int8"])
def test_perplexity_of_a_real_model(shelf, smol, tmp_path, kind, dtype):
    """In float32 against exact weights, in bfloat16 against transformers' own rounded ones.

    bfloat16 arithmetic alone moves fp4's value by half a percent: plain vLLM on the unpacked
    weights does the same, and that is what fp4 is compared with.
    """
    folder = shelf.quantized(smol, kind.partition("-")[0], nested=kind.endswith("double"))
    ids = AutoTokenizer.from_pretrained(folder)(PLAIN_TEXT).input_ids
    run = run_engine(folder, texts=[ids], dtype=dtype)
    assert run.code == 0, run.log[-4000:]
    found = perplexity(run.logprobs[0])
    if dtype == "float32":
        assert found == pytest.approx(perplexity(unpacked(folder).logprobs(ids)), rel=0.0005)
    elif kind == "fp4":
        unpacked(folder).model.save_pretrained(tmp_path / "plain")
        plain = run_engine(tmp_path / "plain", texts=[ids], dtype=dtype)
        assert found == pytest.approx(perplexity(plain.logprobs[0]), rel=0.005)
    else:
        assert found == pytest.approx(perplexity(dequantized(folder).logprobs(ids)), rel=0.005)


def test_a_real_model_in_flight(smol, shelf):
    """Text, perplexity and the size of the weights, with tied embeddings left alone."""
    tokenizer = AutoTokenizer.from_pretrained(smol)
    ids = tokenizer(PLAIN_TEXT).input_ids
    prompt = tokenizer("The capital of France is").input_ids
    run = run_engine(smol, prompts=[prompt], texts=[ids], quantization="bitsandbytes")
    assert run.code == 0, run.log[-4000:]
    assert tokenizer.decode(run.tokens[0]).startswith(" Paris")
    expected = perplexity(dequantized(shelf.quantized(smol)).logprobs(ids))
    assert perplexity(run.logprobs[0]) == pytest.approx(expected, rel=0.005)


def test_a_bad_tensor_stops_the_engine_with_its_name(shelf, tmp_path):
    """Caught while loading: the headers are those of a sound checkpoint."""

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        key = "model.layers.1.mlp.down_proj.weight"
        other = "model.layers.1.mlp.up_proj.weight"
        for name in [name for name in tensors if name.startswith(f"{key}.")]:
            tensors[name] = tensors[name.replace(key, other)].clone()

    folder = changed(shelf.quantized(shelf.llama()), tmp_path / "swapped", swap)
    run = run_engine(folder, prompts=PROMPTS)
    assert run.code != 0
    text = re.sub(r"\s+", " ", run.log)
    assert "weight-mismatch: a quant state does not describe the weight of its layer" in text
    assert "model.layers.1.mlp.down_proj.weight_quant_state" in text
