"""One tiny model of each family through the real engine, stored and in flight.

vLLM's model classes differ in how they rename, merge, split and reorder the tensors that they
load; this is where a backend has to bear with all of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.falcon import modeling_falcon

from tests.families import FAMILIES
from tests.vllm.engine import run_engine
from tests.vllm.oracle import Continuation, Oracle, agree
from tests.vllm.test_bitsandbytes import NEAR_TIE, PROMPTS, TEXT, check_against_oracle

FUSED_ON_DISK = {"phi3", "gpt2", "gpt_neox", "falcon", "falcon_new", "falcon_heads"}
NESTED = {*list(FAMILIES)[::2], "falcon"}
"""Families that are quantized twice: every other one, and one whose heads share such scales."""


@pytest.fixture(autouse=True)
def _falcon_is_quantized(monkeypatch):
    """transformers 5 overlooks Falcon's own class of linear layers; 4 did not."""
    monkeypatch.setattr(modeling_falcon, "FalconLinear", nn.Linear)


STORED = [name for name in FAMILIES if name != "gpt_neox"]
GPT_NEOX = pytest.param(
    "gpt_neox", marks=pytest.mark.needs_vllm("0.32", "a GPT-NeoX class that takes packed weights")
)


@pytest.mark.parametrize("family", [*STORED, GPT_NEOX])
def test_a_stored_family_agrees_with_transformers(shelf, family):
    folder = shelf.quantized(shelf.family(family), nested=family in NESTED)
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_flight_agrees_with_transformers(shelf, family):
    """The scales of q, k and v have statistics of their own, which a fused tensor has not."""
    nested = family in NESTED - FUSED_ON_DISK
    run = run_engine(
        shelf.family(family), prompts=PROMPTS, texts=[TEXT], dtype="float32",
        quantization="bitsandbytes",
        hf_overrides={"quantization_config": {"bnb_4bit_use_double_quant": nested}},
    )  # fmt: skip
    check_against_oracle(run, shelf.quantized(shelf.family(family), nested=nested), "float32")


def test_a_hybrid_of_linear_and_full_attention(shelf, tmp_path):
    """vLLM computes its linear attention in bfloat16 only, on the CPU, and coarsely.

    So coarsely that plain vLLM itself leaves transformers' text: the oracle is plain vLLM on
    the weights that transformers unpacked.
    """
    plain = shelf.family("qwen3_5")
    folder = shelf.quantized(plain)
    Oracle.unpacked(folder).model.save_pretrained(tmp_path / "unpacked")
    reference, stored, in_flight = (
        run_engine(model, prompts=PROMPTS, texts=[TEXT], leads=True, dtype="bfloat16", **arguments)
        for model, arguments in (
            (tmp_path / "unpacked", {}),
            (folder, {}),
            (plain, {"quantization": "bitsandbytes"}),
        )
    )
    for run in (stored, in_flight):
        assert run.code == reference.code == 0, run.log[-4000:]
        difference = torch.tensor(run.logprobs) - torch.tensor(reference.logprobs)
        assert difference.abs().max() < NEAR_TIE["bfloat16"] / 5
        for tokens, *expected in zip(run.tokens, reference.tokens, reference.leads, strict=True):
            assert agree(tokens, Continuation(*expected), NEAR_TIE["bfloat16"])


def test_gpt2_in_8_bit(shelf):
    """Its class transposes square weights too, of which no shape would tell."""
    folder = shelf.quantized(shelf.family("gpt2"), "int8")
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")
