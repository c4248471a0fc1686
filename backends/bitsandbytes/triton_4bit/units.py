"""The order in which the Triton kernels read a 4-bit weight, and what has to hold for it.

A *unit* is 64 rows by 64 columns (32 where blocks are that short), stored contiguously so that
each of 128 threads reads its operands of the matrix unit as one vector and decodes them in
registers: nothing passes through shared memory but activations. Plain tensor functions; no
kernels, no Triton.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

ROWS = 64
"""Rows of a unit: four warps with 16 rows each."""
THREADS = 128
LONGEST_UNIT = 64
SHORTEST_UNIT = 32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Units(NamedTuple):
    """A weight as the kernels take it.

    ``words`` [row groups, units, 128, words of a thread] int32 and ``scales`` [row groups,
    blocks, 64] float32 are what ``reorder`` makes; ``values`` [16] float32 what the codes stand
    for and ``tables`` what ``value_tables`` makes of them. ``counters`` int32 counts the finished
    parts of each output tile; every kernel leaves it at zero. ``rows`` leaves out the padding.
    """

    words: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    tables: tuple[tuple[int, ...], ...]
    counters: torch.Tensor
    rows: int

    @property
    def columns(self) -> int:
        """Columns of the unpacked weight."""
        return columns_of(self.words)

    @property
    def blocksize(self) -> int:
        """Weights that share a scale."""
        return self.columns // self.scales.shape[1]


def columns_of(words: torch.Tensor) -> int:
    """Columns of the weight that these are the words of."""
    return words.shape[1] * words.shape[3] * 16


def unit_columns(blocksize: int) -> int:
    """Columns of a unit: the longer of the two that a block is a multiple of."""
    return LONGEST_UNIT if blocksize % LONGEST_UNIT == 0 else SHORTEST_UNIT


def supported(
    rows: int, columns: int, blocksize: int, dtype: torch.dtype, capability: tuple[int, int]
) -> bool:
    """Whether the kernels take a weight of this shape and activations of this type.

    Any number of rows, which are padded to 64; columns in whole blocks, blocks in whole units.
    Hopper only: the layout is that of its matrix unit, and PTX multiplies bfloat16 from there on.
    The interpreter computes in float32 alone.
    """
    types = {torch.bfloat16, torch.float16} | ({torch.float32} if INTERPRETED else set())
    whole = blocksize % unit_columns(blocksize) == 0 and columns % blocksize == 0
    hopper = INTERPRETED or capability[0] == 9
    return rows > 0 and columns > 0 and whole and dtype in types and hopper


def reorder(weight: torch.Tensor, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``Units``' words and scales, from packed codes [rows, columns / 2], absmax [rows, blocks].

    What pads the rows has the scale 0.
    """
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    unit = unit_columns(columns // absmax.shape[1])
    groups, extra = -(-rows // ROWS), -rows % ROWS
    padded = torch.nn.functional.pad(weight, (0, 0, 0, extra)) if extra else weight
    # row = 16 warp + 8 r + g; column = 16 word + 8 h + 2 t + e, with e inside a byte. Here
    # warp, g and t number a thread, and r and h the bytes of its words, as in wgmma's operand.
    cells = padded.reshape(groups, 4, 2, 8, columns // unit, unit // 16, 2, 4)
    words = cells.permute(0, 4, 1, 3, 7, 5, 6, 2).reshape(-1).view(torch.int32)
    scales = torch.nn.functional.pad(absmax, (0, 0, 0, extra)).view(groups, ROWS, -1)
    return words.view(groups, -1, THREADS, unit // 16), scales.transpose(1, 2).contiguous()


def restore(
    words: torch.Tensor, scales: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``reorder`` was given: the packed codes and the scales, bit for bit."""
    groups, count, _, per_thread = words.shape
    cells = words.view(torch.uint8).view(groups, count, 4, 8, 4, per_thread, 2, 2)
    weight = cells.permute(0, 2, 7, 3, 1, 5, 6, 4).reshape(groups * ROWS, -1)
    absmax = scales.transpose(1, 2).reshape(groups * ROWS, -1)
    return weight[:rows].contiguous(), absmax[:rows].contiguous()


def new_counters(words: torch.Tensor) -> torch.Tensor:
    """``Units.counters`` for this weight: one for every tile that a product may be cut into."""
    return torch.zeros(4 * words.shape[0], dtype=torch.int32, device=words.device)


def value_tables(values: torch.Tensor, dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """The 16 values as the kernels want them, rounded to ``dtype``: eight int32 each.

    In order; the upper bytes of all, then the lower ones; the same of what rounding left.
    """
    if dtype == torch.float32:
        return ((0,) * 8,) * 3  # the interpreter looks values up
    exact = values.detach().cpu().float()
    rounded = exact.to(dtype)
    ordered, left = (
        part.view(torch.uint8).view(16, 2)
        for part in (rounded, (exact - rounded.float()).to(dtype))
    )
    planes = [part.t().flip(0) for part in (ordered, left)]
    return tuple(
        tuple(part.contiguous().view(-1).view(torch.int32).tolist()) for part in (ordered, *planes)
    )
