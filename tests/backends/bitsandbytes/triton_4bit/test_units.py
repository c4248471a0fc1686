"""The order that the kernels read: where each code goes, and the way back, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oot_quant_backends.bitsandbytes.triton_4bit.units import (
    Units,
    new_counters,
    reorder,
    restore,
    supported,
    unit_columns,
    value_tables,
)
from oot_quant_backends.bitsandbytes.weights import code_table

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
BLOCKSIZES = (32, 64, 96, 128, 256, 512, 1024, 2048, 4096)


def packed(rows, columns, blocksize):
    generator = torch.Generator().manual_seed(rows * columns + blocksize)
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    return weight, torch.randn(rows, columns // blocksize, generator=generator)


@settings(deadline=None)
@given(st.integers(1, 200), st.sampled_from(BLOCKSIZES), st.integers(1, 3))
def test_the_order_is_undone_exactly(rows, blocksize, blocks):
    weight, absmax = packed(rows, blocks * blocksize, blocksize)
    words, scales = reorder(weight, absmax)
    found = restore(words, scales, rows)
    assert torch.equal(found[0], weight)
    assert torch.equal(found[1], absmax)


@settings(deadline=None)
@given(st.integers(1, 200), st.sampled_from((32, 64, 96, 256)), st.integers(1, 3), st.data())
def test_each_code_is_where_the_matrix_unit_wants_it(rows, blocksize, blocks, data):
    columns = blocks * blocksize
    weight, absmax = packed(rows, columns, blocksize)
    words, scales = reorder(weight, absmax)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    group, warp, r, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    unit, within = divmod(column, unit_columns(blocksize))
    word, h, t, e = within // 16, within // 8 % 2, within // 2 % 4, within % 2
    octets = words.view(torch.uint8).view(*words.shape, 4)
    octet = int(octets[group, unit, 32 * warp + 4 * g + t, word, 2 * h + r])
    assert octet == int(weight[row, column // 2])
    assert (octet >> 4 if e == 0 else octet & 15) == np.stack(
        (weight[row].numpy() >> 4, weight[row].numpy() & 15), -1
    ).flatten()[column]
    assert scales[group, column // blocksize, row % 64] == absmax[row, column // blocksize]


def test_padding_counts_for_nothing():
    words, scales = reorder(*packed(70, 128, 64))
    assert words.shape == (2, 2, 128, 4)
    assert words.dtype == torch.int32
    assert not scales[1, :, 6:].any()
    assert scales[1, :, :6].all()


def test_sizes_are_told_from_the_words():
    words, scales = reorder(*packed(100, 1024, 128))
    units = Units(words, scales, torch.zeros(16), (), new_counters(words), 100)
    assert (units.columns, units.blocksize) == (1024, 128)
    assert not units.counters.any()
    assert words.numel() * 8 == 128 * 1024


def test_tables_hold_every_value_to_sixteen_bits():
    for dtype, limit in ((torch.bfloat16, 2.0**-16), (torch.float16, 2.0**-22)):
        values = code_table("nf4", torch.device("cpu"))
        ordered, planes, rest = (
            torch.tensor(t, dtype=torch.int32) for t in value_tables(values, dtype)
        )

        def in_planes(table, dtype=dtype):
            upper, lower = table.view(torch.uint8).view(2, 16)
            return torch.stack((lower, upper), -1).view(dtype).flatten()

        assert torch.equal(ordered.view(dtype), values.to(dtype))
        assert torch.equal(in_planes(planes), values.to(dtype))
        total = in_planes(planes).float() + in_planes(rest).float()
        assert float((total - values).abs().max()) <= limit


@pytest.mark.parametrize(
    ("rows", "columns", "blocksize", "dtype", "capability", "expected"),
    [
        (100, 4096, 64, torch.bfloat16, HOPPER, True),
        (1, 96, 32, torch.float16, HOPPER, True),
        (64, 4096, 16, torch.bfloat16, HOPPER, False),
        (64, 100, 100, torch.bfloat16, HOPPER, False),
        (64, 4096, 64, torch.float32, HOPPER, False),
        (64, 4096, 64, torch.bfloat16, AMPERE, False),
        (64, 4096, 64, torch.bfloat16, BLACKWELL, False),
    ],
)
def test_what_the_kernels_take(rows, columns, blocksize, dtype, capability, expected):
    assert supported(rows, columns, blocksize, dtype, capability) is expected


@pytest.mark.slow
def test_nothing_needs_triton_until_a_kernel_is_chosen():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import oot_quant_backends.bitsandbytes.linear_4bit\n"
        "from oot_quant_backends.bitsandbytes.product_4bit import trouble\n"
        "import torch\n"
        "print(trouble(64, 64, 64, 'nf4', torch.bfloat16, torch.device('cpu')))\n"
        "from oot_quant_cli.main import cli\n"
        "cli(['list'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("ModuleNotFoundError")
    assert "bitsandbytes" in done.stdout.partition("\n")[2]
