"""Which stored elements belong to a rank. Integer arithmetic only: no tensors, no vLLM.

A packed weight is stored flat, one item for each run of consecutive weights of the matrix
read row by row (``oot_quant.types.Runs``). Seen as a matrix with one line of items for each
row, it can be sliced like any weight, provided that no item belongs to two rows or to two
ranks. Where a run does, a repeatable item is stored once for each part of its run: the
*granule* is the longest part that stays within a run, a row and a rank.
"""

from __future__ import annotations

from math import gcd

from oot_quant.errors import ShardMisaligned
from oot_quant.types import Runs


def granule(layout: Runs, columns: int, rank_columns: int, *, where: str = "") -> int:
    """Weights for each item once the matrix can be sliced; divides all three of the widths.

    columns: width of the unpacked weight over all ranks, in weights; rank_columns: width of
    one rank's part. Every rank has the same width.

    Raises ShardMisaligned if an item that cannot be repeated would be cut.
    """
    exact = gcd(layout.weights, columns, rank_columns)
    if exact == layout.weights or layout.repeatable:
        return exact
    ranks = columns // rank_columns if rank_columns else 0
    reason = (
        f"{columns} columns over {ranks} ranks give {rank_columns} each"
        if ranks > 1
        else f"a row has {columns} columns"
    )
    raise ShardMisaligned(
        f"cannot split a weight whose items pack {layout.weights} columns each",
        where=where,
        found=f"{reason}, which is not a multiple of {layout.weights}",
        needed=f"whole items for each rank: {_sizes_that_work(layout, columns)}",
        fix=_fix(layout, columns),
    )


def items_per_row(layout: Runs, columns: int, size: int) -> int:
    """Stored elements in a row of ``columns`` weights, with ``size`` weights for each item."""
    return columns // size * layout.elements


def stored_items(layout: Runs, rows: int, columns: int) -> int:
    """Stored elements of a whole matrix as it comes from a file; the last run may be short."""
    return -(-rows * columns // layout.weights) * layout.elements


def source_item(layout: Runs, row: int, column: int, columns: int) -> int:
    """Index of the stored item that holds the weight at (row, column) of the whole matrix."""
    return (row * columns + column) // layout.weights


def is_plain_view(layout: Runs, columns: int, size: int) -> bool:
    """Whether the file's flat items are already the matrix's, in order, none repeated."""
    return size == layout.weights and columns % layout.weights == 0


def tensor_parallel_sizes(layout: Runs, columns: int, limit: int = 64) -> list[int]:
    """Tensor-parallel sizes, up to ``limit``, at which a row can be split without cutting."""
    return [
        size
        for size in range(1, limit + 1)
        if columns % size == 0 and (layout.repeatable or columns // size % layout.weights == 0)
    ]


def _sizes_that_work(layout: Runs, columns: int) -> str:
    sizes = tensor_parallel_sizes(layout, columns)
    return f"{columns} columns split over {', '.join(map(str, sizes))} ranks" if sizes else "none"


def _fix(layout: Runs, columns: int) -> str:
    if tensor_parallel_sizes(layout, columns):
        return "use one of those tensor-parallel sizes"
    return "this weight cannot be packed row by row; use a checkpoint that keeps it in 16 bit"
