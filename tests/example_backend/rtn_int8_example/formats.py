"""How a quantized module is stored: ``m.weight`` int8 [rows, columns], ``m.weight.scale`` [rows].

Weights are ``weight * scale`` with scales in float32. Neither torch nor vLLM is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oot_quant.errors import CheckpointIncomplete, CheckpointSurplus
from oot_quant.types import ModuleSummary, NameRule

if TYPE_CHECKING:
    from oot_quant.checkpoint import Checkpoint

SCALE = ".weight.scale"
NAME_RULES = (NameRule(SCALE, ".weight_scale"),)
FIX = "download or save the checkpoint again"


@dataclass(frozen=True)
class Int8:
    """One int8 matrix."""

    rows: int
    columns: int


def read_formats(checkpoint: Checkpoint) -> Mapping[str, object] | None:
    """Which modules are int8; None if the headers cannot be read.

    Raises CheckpointIncomplete for a weight without scales of its size, CheckpointSurplus
    for scales without a weight.
    """
    if not checkpoint.readable:
        return None
    tensors = checkpoint.tensors
    for name in tensors:
        if name.endswith(SCALE) and name.removesuffix(".scale") not in tensors:
            raise CheckpointSurplus("scales of a weight that is not there", where=name, fix=FIX)
    formats = {}
    for name, weight in tensors.items():
        if name.endswith(".weight") and weight.dtype == "I8":
            scale = tensors.get(f"{name}.scale")
            if scale is None or scale.shape != weight.shape[:-1]:
                raise CheckpointIncomplete(
                    "an int8 weight lacks its scales",
                    where=name,
                    found=f"shape {list(scale.shape)}" if scale else "none",
                    needed=f"{name}.scale, shape {list(weight.shape[:-1])}",
                    fix=FIX,
                )
            formats[name.removesuffix(".weight")] = Int8(*weight.shape)
    return formats


def summarize(format: object) -> ModuleSummary:
    assert isinstance(format, Int8)
    size = format.rows * format.columns + 4 * format.rows
    return ModuleSummary("int8", size, shape=(format.rows, format.columns))
