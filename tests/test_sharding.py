"""Shard arithmetic: slicing packed items gives exactly the slice of the unpacked weight."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oot_quant.errors import ShardMisaligned
from oot_quant.sharding import (
    granule,
    is_plain_view,
    items_per_row,
    source_item,
    stored_items,
    tensor_parallel_sizes,
)
from oot_quant.types import Runs

RANKS = st.integers(1, 8)
WIDTHS = st.integers(1, 96)
RUNS = st.sampled_from([2, 3, 16, 32, 64, 128, 96 * 8])


def rank_cells(layout: Runs, rows: int, columns: int, ranks: int, rank: int) -> list[list[int]]:
    """For each row of a rank's part, the source item of every weight, through the matrix form."""
    part = columns // ranks
    size = granule(layout, columns, part)
    width = items_per_row(layout, part, size) // layout.elements
    matrix = [
        [source_item(layout, row, cell * size, columns) for cell in range(columns // size)]
        for row in range(rows)
    ]
    taken = [line[rank * width : (rank + 1) * width] for line in matrix]
    return [[line[column // size] for column in range(part)] for line in taken]


@settings(deadline=None)
@given(rows=st.integers(1, 7), part=WIDTHS, ranks=RANKS, run=RUNS)
def test_every_weight_finds_its_own_scale_on_exactly_one_rank(rows, part, ranks, run):
    layout = Runs(weights=run, repeatable=True)
    columns = part * ranks
    seen = []
    for rank in range(ranks):
        for row, line in enumerate(rank_cells(layout, rows, columns, ranks, rank)):
            seen += [(row, rank * part + column, item) for column, item in enumerate(line)]
    expected = [
        (row, column, (row * columns + column) // run)
        for row in range(rows)
        for column in range(columns)
    ]
    assert sorted(seen) == expected


@settings(deadline=None)
@given(rows=st.integers(1, 7), halves=WIDTHS, ranks=RANKS)
def test_packed_bytes_are_covered_exactly_once(rows, halves, ranks):
    layout = Runs(weights=2)
    columns = 2 * halves * ranks
    items = [
        item
        for rank in range(ranks)
        for line in rank_cells(layout, rows, columns, ranks, rank)
        for item in line[::2]
    ]
    assert sorted(items) == list(range(stored_items(layout, rows, columns)))


@given(part=WIDTHS, ranks=RANKS, run=RUNS)
def test_a_granule_stays_within_run_row_and_rank_and_is_the_longest(part, ranks, run):
    size = granule(Runs(weights=run, repeatable=True), part * ranks, part)
    assert run % size == 0
    assert part % size == 0
    assert size == gcd(run, part)


@given(part=WIDTHS, ranks=RANKS, run=RUNS)
def test_items_that_pack_several_weights_are_split_whole_or_refused(part, ranks, run):
    layout = Runs(weights=run)
    if part % run == 0:
        assert granule(layout, part * ranks, part) == run
        return
    with pytest.raises(ShardMisaligned):
        granule(layout, part * ranks, part)


def test_a_refusal_says_what_was_found_and_which_sizes_work():
    with pytest.raises(ShardMisaligned) as caught:
        granule(Runs(weights=32), 4096, 4096 // 3 + 1, where="model.layers.0.mlp.down_proj.weight")
    text = str(caught.value)
    assert text.startswith("shard-misaligned: cannot split a weight whose items pack 32 columns")
    assert "where: model.layers.0.mlp.down_proj.weight" in text
    assert "1, 2, 4, 8, 16, 32, 64 ranks" in text


def test_an_odd_row_is_refused_with_words_about_the_row():
    with pytest.raises(ShardMisaligned, match="a row has 577 columns"):
        granule(Runs(weights=2), 577, 577)


@pytest.mark.parametrize(
    ("layout", "columns", "sizes"),
    [
        (Runs(weights=2), 12, [1, 2, 3, 6]),
        (Runs(weights=64, repeatable=True), 12, [1, 2, 3, 4, 6, 12]),
        (Runs(weights=32), 96, [1, 3]),
    ],
)
def test_tensor_parallel_sizes_that_work(layout, columns, sizes):
    assert tensor_parallel_sizes(layout, columns) == sizes


def test_a_short_last_run_counts_as_an_item():
    assert stored_items(Runs(weights=64, repeatable=True), rows=3, columns=50) == 3
    assert stored_items(Runs(weights=32, elements=18), rows=2, columns=64) == 72


def test_a_view_is_plain_only_when_nothing_has_to_be_repeated():
    blocks = Runs(weights=64, repeatable=True)
    assert is_plain_view(blocks, columns=512, size=64)
    assert not is_plain_view(blocks, columns=512, size=32)
    assert not is_plain_view(blocks, columns=96, size=32)
