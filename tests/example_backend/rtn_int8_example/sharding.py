"""Which parameters an int8 layer has, and how each is laid out. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from oot_quant.types import ParameterRule, Runs, ShardRequest


def parameter_rules(request: ShardRequest) -> Sequence[ParameterRule]:
    # A scale counts for a whole row. Where ranks share a row, each keeps a copy of it.
    scales = Runs(weights=request.columns, repeatable=True)
    return [
        ParameterRule("weight", "int8", Runs(weights=1)),
        ParameterRule("weight_scale", "float32", scales, poison=nan),
    ]
