"""Which parameters a 4-bit layer has, and how each is laid out. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from oot_quant.types import ParameterRule, PerMatrix, Runs, ShardRequest

from .formats import NESTED_BLOCKSIZE, FourBit

CODES = Runs(weights=2)
"""Two weights in each byte: a byte can never be shared by two ranks."""


def parameter_rules(request: ShardRequest) -> Sequence[ParameterRule]:
    """The parameters of a layer that is stored in 4 bit.

    Scales arrive as float32 whatever their stored dtype: a code of 0 to 255 is exact there,
    and is decoded in place once all statistics are known.
    """
    stored = request.format
    assert isinstance(stored, FourBit)
    scales = Runs(weights=stored.blocksize, repeatable=True)
    rules = [
        ParameterRule("weight", "uint8", CODES),
        ParameterRule("weight_absmax", "float32", scales, poison=nan),
        ParameterRule("weight_quant_map", "float32", PerMatrix(16), poison=nan),
        # The statistics of the JSON: its nested offset, zero without double quantization.
        ParameterRule("weight_quant_state", "float32", PerMatrix(1), poison=nan),
    ]
    if stored.nested:
        nested = Runs(weights=stored.blocksize * NESTED_BLOCKSIZE, repeatable=True)
        rules += [
            ParameterRule("weight_nested_absmax", "float32", nested, poison=nan),
            ParameterRule("weight_nested_quant_map", "float32", PerMatrix(256), poison=nan),
        ]
    return rules
