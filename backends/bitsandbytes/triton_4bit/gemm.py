"""A 4-bit weight times activations in Triton: the kernels, how a product is cut, launching.

The weight is the left operand, out^T = W x^T, so that few tokens are the narrow side of the
matrix unit and that the weight, which is most of the bytes, goes from memory to registers and
nowhere else. Activations go through shared memory. Nothing here knows layers or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .decode import (
    decode_units,
    everywhere,
    load_units,
    load_words,
    open_table,
    unpack_word,
)
from .ptx import LOOK_UP, PERMUTE, TABLE, TABLE_BYTES
from .units import INTERPRETED, ROWS, Units

LAUNCH_BYTES = 49152
"""Shared memory that a launch has without being asked for more."""
TABLE_ARGUMENTS = [f"{table}{i}" for table in "tu" for i in range(8)]
"""Never specialized: a weight with other values runs the same kernel."""
FREE_ARGUMENTS = ["M", "N", "row_groups", "steps", "split", "has_bias", *TABLE_ARGUMENTS]
"""Not specialized either, or one token and sixteen would each compile a kernel of their own."""


@triton.jit
def unit_numbers(first, units, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """CHUNK units from ``first`` on. Past the last it is read again: its activations are 0."""
    unit = first + tl.arange(0, CHUNK)
    if not EVEN:
        unit = tl.minimum(unit, units - 1)
    return unit


@triton.jit(do_not_specialize=FREE_ARGUMENTS)
def gemm_kernel(
    x, words, scales, values, t0, t1, t2, t3, t4, t5, t6, t7, bias, out, parts, counters,
    M, N, row_groups, units, steps, split, stride_x, has_bias, one,
    BM: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr,
    PER_SCALE: tl.constexpr, SCALED: tl.constexpr, SHARED: tl.constexpr, AHEAD: tl.constexpr,
    DECODE: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One output tile, [64 GROUPS rows, BM tokens], over ``steps`` steps of UNITS units.

    ``SCALED``: scales are multiplied into the weight; otherwise into each unit's product,
    which is exact. ``SHARED``: a tile has ``split`` blocks, of which the last to finish adds
    the parts of all in order.

    Every product is a fresh one, with ``one`` for a factor that no compiler sees through: a
    product that goes on in the next step is left running while the registers of its operand
    are filled anew, and gave infinities now and then.
    """
    WIDTH: tl.constexpr = 16 * WORDS
    # What is loaded, decoded and multiplied at once.
    CHUNK: tl.constexpr = UNITS if SCALED else 1
    tiles_m = tl.cdiv(M, BM)
    tile, part = tl.program_id(0), tl.program_id(1)
    tokens = (tile % tiles_m) * BM + tl.arange(0, BM)
    rows = tl.arange(0, 64 * GROUPS)
    # Groups past the last are read again instead; what they give is not stored.
    group = tl.minimum(tile // tiles_m * GROUPS + tl.arange(0, GROUPS), row_groups - 1)
    begin, end = part * steps, part * steps + steps
    acc = tl.zeros((64 * GROUPS, BM), tl.float32)
    # Words and scales are loaded one step before they are used, each chunk's as soon as the
    # chunk before it in the same registers is decoded.
    ready = ()
    for i in tl.static_range(UNITS // CHUNK):
        unit = unit_numbers(begin * UNITS + i, units, CHUNK, EVEN)
        ready += (load_units(words, scales, group, unit, 1, units, WORDS, PER_SCALE, SCALED, DTYPE,
                             DECODE),)  # fmt: skip
    opened = open_table(values, (t0, t1, t2, t3, t4, t5, t6, t7), DECODE, 4 * GROUPS)
    for step in tl.range(begin, end, num_stages=STAGES):
        coming = ()
        more = (step + 1 < end).to(tl.int32)
        if AHEAD == 1:
            for i in tl.static_range(UNITS // CHUNK):
                unit = unit_numbers((step + 1) * UNITS + i, units, CHUNK, EVEN)
                coming += (load_units(words, scales, group, unit, more, units, WORDS, PER_SCALE,
                                      SCALED, DTYPE, DECODE),)  # fmt: skip
        for i in tl.static_range(UNITS // CHUNK):
            column = (step * UNITS + i) * WIDTH + tl.arange(0, CHUNK * WIDTH)
            mask = tokens[:, None] < M
            if not EVEN:
                mask = mask & (column[None, :] < units * WIDTH)
            x_tile = tl.load(x + tokens[:, None] * stride_x + column[None, :], mask, 0.0)
            codes, scale = ready[i]
            weight = decode_units(codes, opened, scale, WORDS, DTYPE, SCALED, DECODE)
            if AHEAD == 2:
                unit = unit_numbers((step + 1) * UNITS + i, units, CHUNK, EVEN)
                coming += (load_units(words, scales, group, unit, more, units, WORDS, PER_SCALE,
                                      SCALED, DTYPE, DECODE),)  # fmt: skip
            if SCALED:
                acc += tl.dot(weight, tl.trans(x_tile)) * one
            else:
                acc += tl.dot(weight, tl.trans(x_tile)) * scale[0][:, None]
        ready = coming
    last = True
    if SHARED:
        SIZE: tl.constexpr = 64 * GROUPS * BM
        at_part = parts + tile * split * SIZE + rows[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(at_part + part * SIZE, acc, cache_modifier=".cg")
        # All threads' parts are written before the count goes up.
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if last:
            acc = tl.zeros((64 * GROUPS, BM), tl.float32)
            for other in range(0, split, 4):
                for i in tl.static_range(4):
                    mask = everywhere((other + i < split).to(tl.int32), at_part)
                    acc += tl.load(at_part + (other + i) * SIZE, mask, 0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        row = tile // tiles_m * 64 * GROUPS + rows
        acc += tl.load(bias + row, row < N * has_bias, 0.0).to(tl.float32)[:, None]
        keep = (row[:, None] < N) & (tokens[None, :] < M)
        tl.store(out + tokens[None, :] * N + row[:, None], acc.to(DTYPE), keep)


@triton.jit(do_not_specialize=["N", *TABLE_ARGUMENTS])
def dequantize_kernel(
    words, scales, t0, t1, t2, t3, t4, t5, t6, t7, u0, u1, u2, u3, u4, u5, u6, u7, out, N, units,
    WORDS: tl.constexpr, PER_SCALE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One unit of the unpacked weight, two columns in each int32 of ``out``.

    Values are the sums of tables t and u, so that only the product is rounded.
    """
    unit, group = tl.program_id(0), tl.program_id(1)
    thread = tl.arange(0, 128)
    a, b, c, d = load_words(words + WORDS * ((group * units + unit) * 128 + thread), 1, WORDS,
                            PERMUTE)  # fmt: skip
    at_scale = scales + (group * (units // PER_SCALE) + unit // PER_SCALE) * 64
    at_scale += 16 * (thread // 32) + (thread // 4) % 8
    upper, lower = tl.load(at_scale), tl.load(at_scale + 8)
    t, u = (t0, t1, t2, t3, t4, t5, t6, t7), (u0, u1, u2, u3, u4, u5, u6, u7)
    pairs = tl.join(
        unpack_word(a, upper, lower, t, u, DTYPE), unpack_word(b, upper, lower, t, u, DTYPE)
    )
    if WORDS == 4:
        pairs = tl.join(
            pairs,
            tl.join(
                unpack_word(c, upper, lower, t, u, DTYPE),
                unpack_word(d, upper, lower, t, u, DTYPE),
            ),
        )
    cells = tl.reshape(pairs, 4, 8, 4, 2, 2, 2, WORDS // 2)
    matrix = tl.reshape(tl.permute(cells, 0, 3, 1, 6, 5, 4, 2), 64, 8 * WORDS)
    row = group * 64 + tl.arange(0, 64)
    column = unit * 8 * WORDS + tl.arange(0, 8 * WORDS)
    at_out = out + row[:, None].to(tl.int64) * (units * 8 * WORDS) + column[None, :]
    tl.store(at_out, matrix, row[:, None] < N)


@dataclass(frozen=True)
class Plan:
    """How one product is cut: tiles of ``tokens`` by 64 ``groups`` rows, steps of ``units``.

    ``split`` blocks share a tile. ``scaled``: scales go into the weight, not into products.
    ``ahead`` says when a step loads the words of the next: 1 before it computes, 2 as soon as
    their registers are free. ``stages`` is how many steps' activations are on their way,
    ``registers`` the most a thread may have, so that more blocks are resident.
    """

    tokens: int
    groups: int = 1
    units: int = 2
    split: int = 1
    scaled: bool = False
    ahead: int = 2
    stages: int = 2
    decode: int = TABLE.value
    registers: int | None = None

    def shared_bytes(self, words: int) -> int:
        """Shared memory of a block without the table: activations, later the output tile."""
        staged = self.stages * self.units * 16 * words * self.tokens * 2
        tile = ROWS * self.groups * (self.tokens + 8) * (4 if self.split > 1 else 2)
        return max(staged, tile)

    def decoding(self, words: int) -> int:
        """How codes are decoded: by the table only where the launch admits it.

        Triton asks the driver for more than 48 KB only if it needs them itself, and does not
        count the table, which it knows nothing of.
        """
        if INTERPRETED:
            return int(LOOK_UP.value)
        needed = self.shared_bytes(words)
        if self.decode == TABLE.value and LAUNCH_BYTES - TABLE_BYTES < needed <= LAUNCH_BYTES:
            return int(PERMUTE.value)
        return self.decode


def run(x: torch.Tensor, units: Units, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """``x @ W.T + bias`` by one launch; x [tokens, columns] with adjacent columns."""
    tokens, (groups, count, _, words) = x.shape[0], units.words.shape
    tiles = -(-groups // plan.groups) * -(-tokens // plan.tokens)
    assert plan.split == 1 or tiles <= units.counters.numel()
    steps = -(-count // (plan.units * plan.split))
    out = torch.empty(tokens, units.rows, dtype=x.dtype, device=x.device)
    size = tiles * plan.split * ROWS * plan.groups * plan.tokens if plan.split > 1 else 1
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    grid, decode = (tiles, plan.split), plan.decoding(words)
    gemm_kernel[grid](
        x, units.words, units.scales, units.values,
        *units.tables[1 if decode == PERMUTE.value else 0],
        bias if bias is not None else x, out, parts, units.counters,
        tokens, units.rows, groups, count, steps, plan.split, x.stride(0),
        int(bias is not None), 1.0,
        BM=plan.tokens, GROUPS=plan.groups, UNITS=plan.units, WORDS=words,
        PER_SCALE=count // units.scales.shape[1], SCALED=plan.scaled, SHARED=plan.split > 1,
        AHEAD=plan.ahead, DECODE=decode, EVEN=count % (plan.units * plan.split) == 0,
        DTYPE=_triton_type(x.dtype),
        STAGES=plan.stages, num_warps=4 * plan.groups, num_stages=plan.stages,
        maxnreg=plan.registers,
    )  # fmt: skip
    return out


def dequantize(units: Units, dtype: torch.dtype) -> torch.Tensor:
    """The unpacked weight [rows, columns], rounded once; ``units`` made for ``dtype``."""
    groups, count, _, words = units.words.shape
    out = torch.empty(units.rows, units.columns, dtype=dtype, device=units.words.device)
    dequantize_kernel[count, groups](
        units.words, units.scales, *units.tables[1], *units.tables[2], out.view(torch.int32),
        units.rows, count, WORDS=words, PER_SCALE=count // units.scales.shape[1],
        DTYPE=_triton_type(dtype), num_warps=4,
    )  # fmt: skip
    return out


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


LARGEST_FUSED = 128
"""For more tokens than this a weight is unpacked, once, and multiplied as a 16-bit one: decoding
it for every 128 of them costs more. In weights of over LARGE numbers that pays from 256 on."""
LARGE = 1 << 25
PROCESSORS = 132
"""Of an H100 or H200. Plans only shape the work: other numbers give the same results."""


def choose(tokens: int, rows: int) -> Plan:
    """How to cut a product, from sweeps over the layers of an 8B Llama on an H200.

    Wide layers have a tile for every block that is resident; in others several blocks share
    one. Scales go into the weight only in wide layers, which take longest: that saves a
    twentieth of the time, and rounds them to 16 bits, for an error of 0.003 instead of 0.002.
    """
    tiles = -(-rows // ROWS)
    wide = tiles > 2 * PROCESSORS
    if tokens <= 16:
        if wide:
            return Plan(16, units=4, scaled=True, registers=128)
        return Plan(16, units=4, split=_split(tiles, 4))
    if tokens <= 32:
        return Plan(32, groups=2, ahead=1) if wide else Plan(32, split=_split(tiles, 4))
    if tokens <= 64:
        if wide:
            return Plan(64, groups=2, scaled=True, stages=4)
        return Plan(64, split=_split(tiles, 2), ahead=1, stages=4)
    return Plan(128, groups=2, split=_split(-(-tiles // 2), 1), ahead=1, stages=3)


def _split(tiles: int, resident: int) -> int:
    """Blocks for each tile, as many as are resident at once: 1, 2, 4 or 8."""
    split = 1
    while split < 8 and 2 * split * tiles <= resident * PROCESSORS:
        split *= 2
    return split


def matmul(x: torch.Tensor, units: Units, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ W.T + bias`` for activations [tokens, columns] with adjacent columns."""
    large = units.rows * units.columns > LARGE
    if x.shape[0] > (2 if large else 1) * LARGEST_FUSED:
        return torch.nn.functional.linear(x, dequantize(units, x.dtype), bias)
    return run(x, units, bias, choose(x.shape[0], units.rows))
