"""Runs the kernels for routed experts in Triton's interpreter; a script, for ``test_experts``.

As ``interpreted``: cases come as JSON, errors against float64 go out.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from oot_quant_backends.bitsandbytes.triton_4bit import experts as kernels
from oot_quant_backends.bitsandbytes.triton_4bit.units import reorder, value_tables
from tests.backends.bitsandbytes.triton_4bit.routing import silu_gated, sort_pairs, through_experts

MARK = "INTERPRETED "
EXPERTS, HIDDEN, INNER = 3, 70, 64
"""Experts on this rank; hidden rows that fill no group."""
HIDDEN_COLUMNS = 96
kernels.PROCESSORS = 2  # few programs, which the interpreter takes a tenth of a second for
VALUES = torch.tensor([(7 * i % 16 - 5.3) / 9.1 for i in range(16)])


def pack(rows: int, columns: int, blocksize: int) -> tuple[kernels.Experts, torch.Tensor]:
    codes = torch.randint(0, 16, (EXPERTS, rows, columns), dtype=torch.uint8)
    absmax = torch.rand(EXPERTS, rows, columns // blocksize) * 0.2 + 0.1
    plain = VALUES.double()[codes.long()].view(*absmax.shape, -1) * absmax.double()[..., None]
    packed = (codes[..., ::2] << 4) | codes[..., 1::2]
    words, scales = zip(*map(reorder, packed, absmax), strict=True)
    tables = value_tables(VALUES, torch.float32)
    one = kernels.Experts(torch.stack(words), torch.stack(scales), VALUES, tables, rows)
    return one, plain.view(EXPERTS, rows, columns)


def run(case: dict[str, Any]) -> float:
    torch.manual_seed(0)
    kernels.FEW, kernels.MORE = case.get("limits", (kernels.FEW, kernels.MORE))
    blocksize, gated = case.get("blocksize", 32), case.get("gated", True)
    gate_up, plain_gate_up = pack(INNER * (1 + gated), HIDDEN_COLUMNS, blocksize)
    down, plain_down = pack(HIDDEN, INNER, blocksize)
    expert_map, count = None, EXPERTS
    if case.get("map"):
        expert_map = torch.tensor(case["map"], dtype=torch.int32)
        count = len(expert_map)
    ids = torch.tensor(case["ids"], dtype=torch.int32)
    x = torch.randn(len(ids), HIDDEN_COLUMNS + 32)[:, 16:-16]
    shares = torch.rand(ids.shape) if case.get("shares", True) else None
    biases = (None, None)
    if case.get("biases"):
        biases = torch.randn(EXPERTS, gate_up.rows), torch.randn(EXPERTS, HIDDEN)
    routing = kernels.Routing(ids, expert_map, count, partial(sort_pairs, ids, count, expert_map))
    activate = None if gated else lambda out, merged: out.copy_(merged.relu())
    out = torch.full((len(ids), HIDDEN), torch.nan)
    kernels.run(x, (gate_up, down), routing, shares, biases, activate, out)
    weights, activation = (plain_gate_up, plain_down), silu_gated if gated else torch.relu
    reference = through_experts(x, weights, ids, shares, biases, activation, expert_map)
    return float((out - reference).norm() / reference.norm())


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps([run(case) for case in json.load(sys.stdin)]) + "\n")
