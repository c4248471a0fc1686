"""Runs the kernels in Triton's interpreter, which has to be asked for before they are imported.

A script, for ``test_gemm``: reads cases as JSON from standard input, prints for each its error
against float64, whether a second run gave the same, and whether the counters were left at zero.
float32 throughout, since the interpreter multiplies 16-bit numbers wrongly.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from oot_quant_backends.bitsandbytes.triton_4bit import gemm
from oot_quant_backends.bitsandbytes.triton_4bit.units import (
    Units,
    new_counters,
    reorder,
    value_tables,
)

MARK = "INTERPRETED "


def run(case: dict[str, Any]) -> dict[str, Any]:
    rows, columns, blocksize, tokens = (case[n] for n in ("rows", "columns", "blocksize", "tokens"))
    torch.manual_seed(rows + columns + tokens)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    absmax = torch.rand(rows, columns // blocksize) + 0.1
    values = torch.tensor([(7 * i % 16 - 5.3) / 9.1 for i in range(16)])
    scaled = values.double()[codes.long()].view(*absmax.shape, -1) * absmax.double()[..., None]
    words, scales = reorder((codes[:, ::2] << 4) | codes[:, 1::2], absmax)
    tables = value_tables(values, torch.float32)
    units = Units(words, scales, values, tables, new_counters(words), rows)
    x = torch.randn(tokens, columns + 32)[:, 16:-16]
    bias = torch.randn(rows) if case["bias"] else None
    expected = x.double() @ scaled.view(rows, columns).t() + (0 if bias is None else bias.double())
    first, second = (gemm.run(x, units, bias, gemm.Plan(**case["plan"])) for _ in range(2))
    return {
        "error": float((first - expected).norm() / expected.norm()),
        "repeated": torch.equal(first, second),
        "counted": bool(units.counters.any()),
    }


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps([run(case) for case in json.load(sys.stdin)]) + "\n")
