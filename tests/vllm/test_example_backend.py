"""A backend from a package of its own through the real engine: the example, and a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oot_quant.testing.checkpoints import write_dequantized, write_plain, write_quantized
from tests.contract.example import install_example, store_int8
from tests.vllm.engine import Run, run_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
]

PROMPTS = [[5, 9, 77, 300], [8, 1, 2]]
BROKEN = "raise RuntimeError('made for another framework')"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and a broken backend, both installed."""
    folder = install_example(tmp_path_factory.mktemp("example"))
    (folder / "broken_example.py").write_text(BROKEN, encoding="utf-8")
    info = folder / "broken_example-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: broken-example\nVersion: 3.0\n", encoding="utf-8")
    points = "[oot_quant.backends]\nbroken = broken_example\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM without any quantization generates from the dequantized weights."""
    folder = tmp_path_factory.mktemp("dequantized")
    plain = run_engine(
        write_dequantized(folder, store_int8, dtype=torch.float32), prompts=PROMPTS, dtype="float32"
    )
    assert plain.code == 0, plain.log[-4000:]
    return plain.tokens


def serve(model: Path, site: Path, **arguments: object) -> Run:
    env = {"PYTHONPATH": str(site)}
    return run_engine(model, prompts=PROMPTS, env=env, dtype="float32", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"enforce_eager": False}, {"tensor_parallel_size": 2}],
    ids=["compiled", "two ranks"],
)
def test_stored_checkpoint_gives_the_tokens_of_its_dequantized_weights(
    site, expected, tmp_path, arguments
):
    section = {"quant_method": "rtn_int8"}
    model = write_quantized(tmp_path, store_int8, section, dtype=torch.float32)
    run = serve(model, site, quantization="rtn_int8", **arguments)
    assert run.code == 0, run.log[-4000:]
    assert run.tokens == expected


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_plain_checkpoint_is_quantized_in_flight_to_the_same_tokens(
    site, expected, tmp_path, eager
):
    model = write_plain(tmp_path, dtype=torch.float32)
    run = serve(model, site, quantization="rtn_int8", enforce_eager=eager)
    assert run.code == 0, run.log[-4000:]
    assert run.tokens == expected


def test_serving_a_broken_backend_repeats_the_reason(site, tmp_path):
    run = serve(write_plain(tmp_path), site, quantization="broken")
    assert run.code != 0
    assert "backend-failed: the backend for the quantization method 'broken'" in run.log
    assert "found: RuntimeError: made for another framework" in run.log
    assert "where: broken-example 3.0 (broken_example)" in run.log


def test_list_shows_the_example_and_the_broken_backend(site):
    done = subprocess.run(
        [Path(sys.executable).with_name("oot-quant"), "list", "--json"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["backends"]}
    assert set(listed) == {"bitsandbytes", "broken", "rtn_int8"}
    example, broken = listed["rtn_int8"], listed["broken"]
    assert (example["status"], example["origin"]) == ("ok", "third-party")
    assert (example["distribution"], example["version"]) == ("rtn-int8-example", "1.0.0")
    assert broken["status"] == "failed"
    assert broken["error"] == "RuntimeError: made for another framework"
