"""Models with routed experts through the real engine, against plain transformers."""

from __future__ import annotations

import pytest

from tests.mixtures import packed_mixture, plain_mixture
from tests.vllm.engine import run_engine
from tests.vllm.test_bitsandbytes import PROMPTS, TEXT, check_against_oracle

IN_FLIGHT = {"quantization": "bitsandbytes"}
STORED = [
    ("mixtral", "nf4", False),
    ("qwen2_moe", "fp4", True),
    ("qwen3_moe", "nf4", True),
    ("olmoe", "fp4", False),
    ("deepseek_v2", "nf4", False),
    ("mixtral", "int8", False),
]


@pytest.mark.parametrize(("name", "quant_type", "nested"), STORED)
def test_stored_experts_agree_with_transformers(shelf, name, quant_type, nested):
    folder = packed_mixture(shelf, plain_mixture(shelf, name), quant_type, nested)
    run = run_engine(folder, prompts=PROMPTS, texts=[TEXT], dtype="float32")
    check_against_oracle(run, folder, "float32")
