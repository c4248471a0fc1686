"""Reload, weight push, sharded state and dummy weights, stored and in flight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mixtures import packed_mixture, plain_mixture
from tests.vllm.engine import run_engine
from tests.vllm.lifecycle import MARK

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [[1, 5, 9, 33], [7, 8, 200, 4, 4, 100, 31]]
ROOT = Path(__file__).parents[2]
RELOADS = 20
STAGES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""What an engine on the CPU needs for two stages, and to be asked for its parameters."""
GROWTH = 16 * 2**20
"""Bytes by which memory may differ between the fifth and the last reload."""


def live(model: Path, arguments: dict[str, Any], **steps: Any) -> dict[str, Any]:
    """Run an engine through some steps of its life in a process of its own."""
    request = {
        "prompts": PROMPTS,
        "arguments": {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 128,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            **arguments,
        },
        **steps,
    }
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **(STAGES if arguments.get("pipeline_parallel_size") else {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.lifecycle"],
        input=json.dumps(request),
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    pytest.fail((done.stdout + done.stderr)[-4000:])


@pytest.mark.parametrize("kind", ["nf4-double", "int8", "in-flight"])
def test_lost_weights_come_back_and_a_saved_state_serves(shelf, tmp_path, kind):
    plain = shelf.llama()
    model = {
        "nf4-double": lambda: shelf.quantized(plain, nested=True),
        "int8": lambda: shelf.quantized(plain, "int8"),
        "in-flight": lambda: plain,
    }[kind]()
    arguments = {"quantization": "bitsandbytes"} if kind == "in-flight" else {}
    saved = tmp_path / "saved"
    found = live(model, arguments, reloads=RELOADS, save=str(saved))
    assert found["lost"] != found["loaded"]
    assert found["reloaded"] == found["loaded"]
    assert abs(found["memory"][-1] - found["memory"][4]) < GROWTH
    again = run_engine(
        saved,
        prompts=PROMPTS,
        max_tokens=12,
        dtype="float32",
        load_format="sharded_state",
        **arguments,
    )
    assert again.code == 0, again.log[-4000:]
    assert again.tokens == found["loaded"]


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in-flight"])
def test_lost_experts_come_back(shelf, stored):
    """Without a saved state: on the CPU, vLLM 0.32 does not load that of a plain Mixtral either."""
    plain = plain_mixture(shelf, "mixtral")
    model = packed_mixture(shelf, plain, nested=True) if stored else plain
    found = live(model, {} if stored else {"quantization": "bitsandbytes"}, reloads=3)
    assert found["lost"] != found["loaded"]
    assert found["reloaded"] == found["loaded"]


def test_16_bit_weights_pushed_into_an_in_flight_engine_are_served(shelf):
    """What reinforcement learning does; the result equals a fresh load of those weights."""
    other = shelf.llama(seed=1)
    arguments = {"quantization": "bitsandbytes"}
    found = live(shelf.llama(), arguments, push=str(other / "model.safetensors"))
    fresh = live(other, arguments)
    assert found["pushed"] == fresh["loaded"] != found["loaded"]


def test_packed_bytes_without_a_state_are_refused_and_the_old_weights_serve_on(shelf):
    packed = shelf.quantized(shelf.llama()) / "model.safetensors"
    found = live(shelf.llama(), {"quantization": "bitsandbytes"}, push_packed=str(packed))
    assert "packed bytes without a quant state" in found["refused"]
    assert "model.layers.0." in found["refused"]
    assert found["still"] == found["loaded"]


def test_two_pipeline_stages_hold_the_parameters_of_one(shelf):
    """Loading only: vLLM itself does not generate over stages on the CPU."""
    model = shelf.quantized(shelf.llama(), nested=True)
    (whole,) = live(model, {}, digests=True)["digests"]
    first, last = live(model, {"pipeline_parallel_size": 2}, digests=True)["digests"]
    assert not first.keys() & last.keys()
    assert {**first, **last} == whole


@pytest.mark.parametrize("kind", ["stored", "in-flight", "experts", "experts-in-flight"])
def test_dummy_weights_start_an_engine(shelf, kind):
    mixture = plain_mixture(shelf, "mixtral")
    model = {
        "stored": lambda: shelf.quantized(shelf.llama(), nested=True),
        "in-flight": shelf.llama,
        "experts": lambda: packed_mixture(shelf, mixture, nested=True),
        "experts-in-flight": lambda: mixture,
    }[kind]()
    arguments = {"quantization": "bitsandbytes"} if "flight" in kind else {}
    run = run_engine(model, prompts=PROMPTS, load_format="dummy", **arguments)
    assert run.code == 0, run.log[-4000:]
    assert all(0 <= token < 512 for tokens in run.tokens for token in tokens)
