"""Models with routed experts through the real engine, against plain transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from tests.mixtures import packed_mixture, plain_mixture, upcycle
from tests.models import dequantized_weights
from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle, agree, perplexity
from tests.vllm.test_bitsandbytes import (
    NEAR_TIE,
    PLAIN_TEXT,
    PROMPTS,
    TEXT,
    check_against_oracle,
)
from tests.vllm.test_features import write_adapter

pytestmark = pytest.mark.needs_vllm(
    "0.30", "a CPU build that chooses experts for a plugin's method"
)
IN_FLIGHT = {"quantization": "bitsandbytes"}
STORED = [
    ("mixtral", "nf4", False),
    ("qwen2_moe", "fp4", True),
    ("qwen3_moe", "nf4", True),
    ("olmoe", "fp4", False),
    ("mixtral", "int8", False),
]


@pytest.mark.parametrize(("name", "quant_type", "nested"), STORED)
def test_stored_experts_agree_with_transformers(shelf, name, quant_type, nested):
    folder = packed_mixture(shelf, plain_mixture(shelf, name), quant_type, nested)
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_in_flight_agree_with_transformers(shelf, name):
    plain = plain_mixture(shelf, name)
    run = run_engine(plain, prompts=PROMPTS, texts=[TEXT], dtype="float32", **IN_FLIGHT)
    check_against_oracle(run, packed_mixture(shelf, plain), "float32")


@pytest.mark.parametrize("kind", ["nf4", "int8", "in-flight"])
def test_latent_attention_beside_experts_equals_plain_weights(shelf, kind):
    """Against vLLM on the unpacked weights: its DeepSeek-V2 is not transformers', even plain."""
    plain = plain_mixture(shelf, "deepseek_v2")
    packed = packed_mixture(shelf, plain, "int8" if kind == "int8" else "nf4")
    ours, theirs = (
        run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32", **arguments)
        for folder, arguments in (
            (plain, IN_FLIGHT) if kind == "in-flight" else (packed, {}),
            (shelf.unpacked(packed), {}),
        )
    )
    assert ours.code == theirs.code == 0, ours.log[-4000:]
    assert ours.tokens == theirs.tokens
    assert ours.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.001)


def test_linear_attention_beside_experts_is_as_exact_as_plain_weights(shelf):
    """In bfloat16, in which alone vLLM computes linear attention on the CPU.

    vLLM's own error on the unpacked weights, against float32, is the measure. Scales moved by
    one block, in a single matrix, make it 1.8 to 30 times as large.
    """
    plain = plain_mixture(shelf, "qwen3_next")
    packed = packed_mixture(shelf, plain)
    oracle = Oracle.unpacked(packed)
    text = [(7 * i * i + 3 * i) % 500 + 4 for i in range(64)]
    expected = torch.tensor(oracle.logprobs(text))
    errors = []
    # Up to vLLM 0.31 the state is in bfloat16 unless asked for, which its own kernel refuses.
    common = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    for folder, arguments in ((shelf.unpacked(packed), {}), (packed, {}), (plain, IN_FLIGHT)):
        run = run_engine(folder, prompts=PROMPTS, texts=[text], **common, **arguments)
        assert run.code == 0, run.log[-4000:]
        for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
            assert agree(tokens, oracle.continue_greedily(prompt), 2 * NEAR_TIE["bfloat16"])
        errors.append(float((torch.tensor(run.logprobs[0]) - expected).norm()))
    unpacked, stored, in_flight = errors
    assert max(stored, in_flight) < 1.5 * unpacked, errors


@pytest.mark.parametrize(
    ("stored", "expert_parallel"), [(True, False), (False, True)], ids=["stored-tp", "online-ep"]
)
def test_two_ranks_agree_with_transformers(shelf, stored, expert_parallel):
    plain = plain_mixture(shelf, "mixtral")
    packed = packed_mixture(shelf, plain)
    run = run_engine(
        packed if stored else plain, prompts=PROMPTS, texts=[TEXT], dtype="float32",
        tensor_parallel_size=2, enable_expert_parallel=expert_parallel,
        **({} if stored else IN_FLIGHT),
    )  # fmt: skip
    check_against_oracle(run, packed, "float32")


def test_compiled_experts_agree_with_transformers(shelf):
    folder = packed_mixture(shelf, plain_mixture(shelf, "mixtral"))
    run = run_engine(
        folder, prompts=PROMPTS, texts=[TEXT], dtype="float32", enforce_eager=False,
    )  # fmt: skip
    check_against_oracle(run, folder, "float32")


def test_perplexity_of_a_real_mixture(shelf, smol):
    """Every expert computes the real model's MLP: gate, up and down mixed up would show."""
    folder = packed_mixture(shelf, shelf.get("upcycled", lambda target: upcycle(smol, target)))
    ids = AutoTokenizer.from_pretrained(smol)(PLAIN_TEXT)["input_ids"]
    run = run_engine(folder, texts=[ids], dtype="float32")
    assert run.code == 0, run.log[-4000:]
    expected = perplexity(Oracle.unpacked(folder).logprobs(ids))
    assert abs(perplexity(run.logprobs[0]) / expected - 1) < 0.0005


def test_adapters_on_experts_are_refused_and_others_served(shelf, tmp_path):
    """With a zero adapter for attention the output is that of the base."""
    plain = plain_mixture(shelf, "mixtral")
    lora = {**IN_FLIGHT, "enable_lora": True, "max_lora_rank": 8}
    refused = run_engine(plain, dtype="float32", **lora)
    assert refused.code != 0
    assert "LoRA adapters on quantized experts are not supported" in refused.log
    packed = packed_mixture(shelf, plain)
    adapter = write_adapter(tmp_path / "idle", dequantized_weights(packed), 0.0)
    run = run_engine(
        plain, prompts=PROMPTS, texts=[TEXT], dtype="float32", lora=adapter,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **lora,
    )  # fmt: skip
    check_against_oracle(run, packed, "float32")
