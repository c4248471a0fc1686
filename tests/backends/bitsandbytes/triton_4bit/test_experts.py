"""Kernels for routed experts in Triton's interpreter against float64, and how they are cut.

tests/gpu/test_mixtures.py has what only a GPU shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oot_quant_backends.bitsandbytes.triton_4bit.experts import Experts, Routing, choose

ROOT = Path(__file__).parents[4]
MARK = "INTERPRETED "
LIMIT = 1e-6
CASES = {
    "one token, each choice a block": {"ids": [[2, 0]], "biases": True},
    "sorted, an expert without tokens": {"ids": [[2, 0], [0, 2], [2, 0]]},
    "experts of other ranks": {"map": [-1, 1, 0, -1, 2], "ids": [[0, 1], [4, 3], [2, 4]],
                               "biases": True},
    "router weights on the input, no gate": {"ids": [[1], [0]], "gated": False, "shares": False,
                                             "biases": True},
}  # fmt: skip
SLOW = {
    "one token, others' experts": {"map": [-1, 0, 1, 2], "ids": [[0, 3]]},
    "nobody's choices": {"ids": [[1, -1], [-1, 0]]},
    "blocks of 32": {"ids": [[2, 0], [0, 2], [2, 1]], "limits": [0, 9], "biases": True},
    "blocks of 64": {"ids": [[2, 0], [0, 2], [2, 1]], "limits": [0, 0]},
    "all tokens to one": {"ids": [[1, 1]] * 18, "biases": True},
}


def interpret(cases):
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.bitsandbytes.triton_4bit.interpreted_experts"],
        input=json.dumps(list(cases.values())), capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    return dict(zip(cases, json.loads(line.removeprefix(MARK)), strict=True))


def test_layers_of_experts_against_float64():
    errors = interpret(CASES)
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_way_to_cut_them():
    errors = interpret(SLOW)
    assert max(errors.values()) < LIMIT, errors


def weights(experts, rows):
    words = torch.empty(experts, -(-rows // 64), 32, 128, 4, dtype=torch.int32, device="meta")
    return Experts(words, words, words, (), rows)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 8), (256, 8)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 4096])
def test_both_weights_of_a_layer_share_their_blocks(experts, k, tokens):
    """One sorting serves both; blocks are not longer than an expert's tokens ask for."""
    plans = [choose(tokens * k, experts, weights(experts, rows)) for rows in (128, 2048, 8192)]
    assert len({plan.tokens for plan in plans}) == 1
    average = tokens * k / experts
    assert plans[0].tokens == 16 or plans[0].tokens < 4 * average
    for plan in plans:
        assert plan.split in {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "spread"),
    [(1, 2, 8, True), (2, 2, 8, False), (8, 8, 256, True), (9, 8, 256, False)],
)
def test_few_pairs_are_not_sorted(tokens, k, experts, spread):
    ids = torch.empty(tokens, k, device="meta")
    assert Routing(ids, None, experts, None).spread is spread
