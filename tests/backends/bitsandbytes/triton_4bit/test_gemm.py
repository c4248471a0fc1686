"""The kernels in Triton's interpreter against float64, and how products are cut.

tests/gpu/test_triton_4bit.py has what only a GPU shows: the PTX, graphs, races.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oot_quant_backends.bitsandbytes.triton_4bit.gemm import PROCESSORS, choose

ROOT = Path(__file__).parents[4]
MARK = "INTERPRETED "
FEW = [
    {"blocksize": 64, "columns": 192, "tokens": 3, "plan": {"tokens": 16, "units": 2}},
    {"blocksize": 32, "columns": 96, "tokens": 17,
     "plan": {"tokens": 16, "units": 1, "split": 3, "ahead": 1}},
    {"blocksize": 128, "columns": 384, "tokens": 5, "bias": True,
     "plan": {"tokens": 16, "groups": 2, "units": 2, "scaled": True, "split": 2}},
]  # fmt: skip
MANY = [
    {"blocksize": blocksize, "columns": 256, "tokens": 13, "bias": True, "plan": plan}
    for blocksize in (32, 256)
    for plan in (
        {"tokens": 16, "units": 4, "split": 4},
        {"tokens": 16, "groups": 2, "units": 2, "split": 5},
        {"tokens": 32, "units": 2, "split": 6},
        {"tokens": 32, "groups": 2, "units": 4, "scaled": True, "split": 2},
        {"tokens": 64, "units": 4, "scaled": True},
    )
]
LIMIT = 1e-6


def interpret(cases):
    cases = [{"rows": 70, "bias": False, **case} for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.bitsandbytes.triton_4bit.interpreted"],
        input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    return list(zip(cases, json.loads(line.removeprefix(MARK)), strict=True))


def check(results):
    for case, found in results:
        assert found["error"] < LIMIT, case
        assert found["repeated"], case
        assert not found["counted"], case


def test_products_against_float64():
    """Rows that fill no group, columns that fill no step, parts that get none, a bias."""
    check(interpret(FEW))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_way_to_cut_a_product():
    check(interpret(MANY))


@pytest.mark.parametrize("rows", [1, 64, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 256])
def test_a_cut_has_place_for_its_tokens_and_counters_for_its_tiles(rows, tokens):
    plan = choose(tokens, rows)
    assert plan.tokens >= min(tokens, 128)
    groups = -(-rows // 64)
    tiles = -(-groups // plan.groups) * -(-tokens // plan.tokens)
    assert plan.split == 1 or tiles <= 4 * groups
    assert plan.split == 1 or tiles * plan.split <= 4 * PROCESSORS * -(-tokens // plan.tokens)
