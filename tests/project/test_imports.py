"""Importing the project must stay cheap: no torch, no vLLM, no quantization library."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "bitsandbytes", "transformers", "huggingface_hub")
LIGHT = (
    "oot_quant",
    "oot_quant.checkpoint",
    "oot_quant.errors",
    "oot_quant.hookspecs",
    "oot_quant.manager",
    "oot_quant.sharding",
    "oot_quant.types",
    "oot_quant.vllm_plugin",
    "oot_quant_backends.bitsandbytes",
    "oot_quant_cli.main",
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_leaves_heavy_libraries_alone(module: str) -> None:
    code = f"import sys, {module}; print(*set(sys.modules).intersection({HEAVY}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_finding_all_backends_leaves_heavy_libraries_alone() -> None:
    code = (
        "import sys; from oot_quant.manager import backends; "
        f"backends(); print(*set(sys.modules).intersection({HEAVY}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
