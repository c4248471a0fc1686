"""Loading never needs much more memory than the weights that it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.memory import MARK

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LAYER_BYTES = 2 * (1024 * (1024 + 2 * 256 + 1024) + 3 * 1024 * 3072)
"""One layer of the model in 16 bit: 24 MB."""


def measured(model: Path, small: Path, arguments: dict[str, Any]) -> dict[str, int]:
    """What loading a model took, in a process of its own that has loaded a small one before."""
    shared = {
        "enforce_eager": True,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        **arguments,
    }
    request = {
        "warm_up": {"model": str(small), **shared},
        "arguments": {"model": str(model), **shared},
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.memory"],
        input=json.dumps(request),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    pytest.fail((done.stdout + done.stderr)[-4000:])


@pytest.mark.parametrize("kind", ["in-flight", "in-flight-int8", "nf4-double", "int8"])
def test_loading_peaks_at_the_final_weights_and_one_layer(shelf, kind):
    arguments: dict[str, Any] = {}

    def prepared(plain: Path) -> Path:
        if kind.startswith("in-flight"):
            return plain
        return shelf.quantized(plain, kind.removesuffix("-double"), nested="double" in kind)

    if kind.startswith("in-flight"):
        arguments["quantization"] = "bitsandbytes"
    if kind == "in-flight-int8":
        section = {"quantization_config": {"load_in_8bit": True}}
        arguments["hf_overrides"] = section
    found = measured(prepared(shelf.llama(**SIZES)), prepared(shelf.llama()), arguments)
    assert found["weights"] < (0.4 if "int8" not in kind else 0.6) * 8 * LAYER_BYTES
    assert found["looks"] > 5 * SIZES["num_hidden_layers"], "too few looks to see each layer"
    assert found["peak"] <= 1.1 * (found["weights"] + LAYER_BYTES), found
    assert found["peak"] >= found["weights"], "more was loaded than was seen"
