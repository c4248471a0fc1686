"""Which parameters a stored layer has, and how each is laid out. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from oot_quant.types import ParameterRule, PerMatrix, Runs, ShardRequest

from .formats import NESTED_BLOCKSIZE, EightBit, FourBit

CODES = Runs(weights=2)
"""Two weights in each byte: a byte can never be shared by two ranks."""
OFFSET_BYTES = 4


def parameter_rules(request: ShardRequest) -> Sequence[ParameterRule]:
    """The parameters of a layer, in the dtypes that they are stored in."""
    if isinstance(request.format, EightBit):
        return _eight_bit(request.columns)
    assert isinstance(request.format, FourBit)
    return _four_bit(request.format)


def _eight_bit(columns: int) -> Sequence[ParameterRule]:
    # A row's scale counts for all of it. Where ranks share a row, each keeps a copy.
    scales = Runs(weights=columns, repeatable=True)
    return [
        ParameterRule("weight", "int8", Runs(weights=1)),
        ParameterRule("weight_scb", "float32", scales, poison=nan),
        # Some checkpoints lack it; where it is there, it is checked on arrival.
        ParameterRule("weight_format", "uint8", PerMatrix(1)),
    ]


def _four_bit(stored: FourBit) -> Sequence[ParameterRule]:
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
