"""Which parameters a 4-bit layer has, and how each is laid out. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from oot_quant.types import ParameterRule, PerMatrix, Runs, ShardRequest

from .formats import NESTED_BLOCKSIZE, FourBit

CODES = Runs(weights=2)
"""Two weights in each byte: a byte can never be shared by two ranks."""
OFFSET_BYTES = 4


def parameter_rules(request: ShardRequest) -> Sequence[ParameterRule]:
    """The parameters of a layer that is stored in 4 bit, in the dtypes that they are stored in."""
    stored = request.format
    assert isinstance(stored, FourBit)
    scales = Runs(weights=stored.blocksize, repeatable=True)
    rules = [
        ParameterRule("weight", "uint8", CODES),
        ParameterRule("weight_quant_map", "float32", PerMatrix(16), poison=nan),
        # Of the JSON, just the nested offset: the bytes of a float32, and no number if unfilled.
        ParameterRule("weight_quant_state", "uint8", PerMatrix(OFFSET_BYTES), poison=255),
    ]
    if not stored.nested:
        rules.append(ParameterRule("weight_absmax", "float32", scales, poison=nan))
    else:
        nested = Runs(weights=stored.blocksize * NESTED_BLOCKSIZE, repeatable=True)
        rules += [
            ParameterRule("weight_absmax", "uint8", scales),
            ParameterRule("weight_nested_absmax", "float32", nested, poison=nan),
            ParameterRule("weight_nested_quant_map", "float32", PerMatrix(256), poison=nan),
        ]
    return rules
