"""Routed experts in Triton: products of many 4-bit weights at once, each with its own tokens.

A *pair* is a token and one of the experts that it was sent to. Pairs are multiplied in blocks
that share an expert; a block is a tile of ``gemm_kernel``, read from the weight of its expert.
Products may come in parts, which whoever reads them next adds up: no block waits for another,
and nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .decode import decode_units, load_units, open_table
from .gemm import PROCESSORS, TABLE_ARGUMENTS, Plan, dequantize
from .ptx import PERMUTE
from .units import ROWS, Units

Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Pairs sorted by expert, each expert's filled up to whole blocks: the pairs' numbers (too large
ones fill up), each block's expert, how many there are with what fills up."""
Activate = Callable[[torch.Tensor, torch.Tensor], None]
FEW, MORE = 10, 24
"""Pairs of an expert, on the average, up to which a block has 16 and 32; above it has 64."""


class Experts(NamedTuple):
    """The weights of all experts of a rank, in the order of ``units.Units``, experts first."""

    words: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    tables: tuple[tuple[int, ...], ...]
    rows: int

    @property
    def columns(self) -> int:
        """Columns of each unpacked weight."""
        return self.words.shape[2] * self.words.shape[4] * 16


class Routing(NamedTuple):
    """Which experts the pairs of a step go to.

    ``ids`` [tokens, k], experts over all ranks; negative ones are nobody's. ``expert_map``
    gives a rank's own number of an expert, or -1. ``experts`` of them there are over all ranks.
    ``align`` sorts pairs into blocks of a size.
    """

    ids: torch.Tensor
    expert_map: torch.Tensor | None
    experts: int
    align: Callable[[int], Sorted]

    @property
    def spread(self) -> bool:
        """Whether pairs hardly ever share an expert, so that each is a block of its own."""
        return len(self.ids) == 1 or 4 * self.ids.numel() <= self.experts


@triton.jit
def local_expert(at, expert_map, MAPPED: tl.constexpr):
    """A rank's own number of the expert at a pointer; -1 if it is another's or nobody's."""
    expert = tl.load(at).to(tl.int32)
    if MAPPED:
        local = tl.load(expert_map + tl.maximum(expert, 0)).to(tl.int32)
        expert = tl.where(expert < 0, -1, local)
    return expert


@triton.jit(do_not_specialize=["pairs", "N", "steps", "share", "blocks", *TABLE_ARGUMENTS])
def experts_kernel(
    x, words, scales, values, t0, t1, t2, t3, t4, t5, t6, t7, out,
    ids, expert_map, sorted_pairs, block_experts, filled,
    pairs, N, row_groups, units, steps, share, blocks, stride_x, one,
    BM: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr,
    PER_SCALE: tl.constexpr, SCALED: tl.constexpr, AHEAD: tl.constexpr, DECODE: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One part of one tile, [64 GROUPS rows, BM pairs], over ``steps`` steps of UNITS units.

    Row ``pair / share`` of x is a pair's. Blocks that share a weight's rows are neighbours, so
    that they find them in the cache. Constants and the product are those of ``gemm_kernel``.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = 16 * WORDS
    CHUNK: tl.constexpr = UNITS if SCALED else 1
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    part = tl.program_id(1)
    if SPREAD:
        expert = local_expert(ids + block, expert_map, MAPPED)
        pair = tl.where(tl.arange(0, BM) == 0, block, pairs)
    else:
        if block * BM >= tl.load(filled):
            return
        expert = tl.load(block_experts + block).to(tl.int32)
        pair = tl.load(sorted_pairs + block * BM + tl.arange(0, BM))
    if expert < 0:
        return
    own = expert.to(tl.int64) * row_groups
    words += own * units * (128 * WORDS)
    scales += own * (units // PER_SCALE) * 64
    at_x = x + (pair // share).to(tl.int64) * stride_x
    # Groups past the last are read again instead; what they give is not stored.
    group = tl.minimum(tile * GROUPS + tl.arange(0, GROUPS), row_groups - 1)
    begin, end = part * steps, part * steps + steps
    acc = tl.zeros((64 * GROUPS, BM), tl.float32)
    ready = ()
    for i in tl.static_range(UNITS // CHUNK):
        unit = begin * UNITS + i + tl.arange(0, CHUNK)
        if not EVEN:
            unit = tl.minimum(unit, units - 1)
        ready += (load_units(words, scales, group, unit, 1, units, WORDS, PER_SCALE, SCALED, DTYPE,
                             DECODE),)  # fmt: skip
    opened = open_table(values, (t0, t1, t2, t3, t4, t5, t6, t7), DECODE, 4 * GROUPS)
    for step in tl.range(begin, end, num_stages=STAGES):
        coming = ()
        more = (step + 1 < end).to(tl.int32)
        if AHEAD == 1:
            for i in tl.static_range(UNITS // CHUNK):
                unit = (step + 1) * UNITS + i + tl.arange(0, CHUNK)
                if not EVEN:
                    unit = tl.minimum(unit, units - 1)
                coming += (load_units(words, scales, group, unit, more, units, WORDS, PER_SCALE,
                                      SCALED, DTYPE, DECODE),)  # fmt: skip
        for i in tl.static_range(UNITS // CHUNK):
            column = (step * UNITS + i) * WIDTH + tl.arange(0, CHUNK * WIDTH)
            mask = pair[:, None] < pairs
            if not EVEN:
                mask = mask & (column[None, :] < units * WIDTH)
            x_tile = tl.load(at_x[:, None] + column[None, :], mask, 0.0)
            codes, scale = ready[i]
            weight = decode_units(codes, opened, scale, WORDS, DTYPE, SCALED, DECODE)
            if AHEAD == 2:
                unit = (step + 1) * UNITS + i + tl.arange(0, CHUNK)
                if not EVEN:
                    unit = tl.minimum(unit, units - 1)
                coming += (load_units(words, scales, group, unit, more, units, WORDS, PER_SCALE,
                                      SCALED, DTYPE, DECODE),)  # fmt: skip
            if SCALED:
                acc += tl.dot(weight, tl.trans(x_tile)) * one
            else:
                acc += tl.dot(weight, tl.trans(x_tile)) * scale[0][:, None]
        ready = coming
    row = tile * 64 * GROUPS + tl.arange(0, 64 * GROUPS)
    at_out = out + (part.to(tl.int64) * pairs + pair[None, :]) * N + row[:, None]
    keep = (row[:, None] < N) & (pair[None, :] < pairs)
    tl.store(at_out, acc.to(out.dtype.element_ty), keep)


@triton.jit
def add_parts(parts, row, rows, N, column, mask, PARTS: tl.constexpr):
    """The sum of a row's parts, in order, in float32."""
    total = tl.load(parts + row * N + column, mask, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * rows + row) * N + column, mask, 0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["pairs"])
def activate_kernel(
    parts, bias, ids, expert_map, out, pairs, N, width,
    PARTS: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A pair's products added up, with its expert's bias; ``GATED``: silu(gate) * up of them."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    expert = tl.zeros((), tl.int64)
    if BIASED:
        expert = tl.maximum(local_expert(ids + pair, expert_map, MAPPED), 0).to(tl.int64)
    value = add_parts(parts, pair, pairs.to(tl.int64), N, column, mask, PARTS)
    if BIASED:
        value += tl.load(bias + expert * N + column, mask, 0.0).to(tl.float32)
    if GATED:
        up = add_parts(parts, pair, pairs.to(tl.int64), N, width + column, mask, PARTS)
        if BIASED:
            up += tl.load(bias + expert * N + width + column, mask, 0.0).to(tl.float32)
        value = value / (1 + tl.exp(-value)) * up
    tl.store(out + pair * width + column, value.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["pairs"])
def combine_kernel(
    parts, bias, shares, ids, expert_map, out, pairs, N,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, SHARED_OUT: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's pairs on this rank, each times the router's share if ``SHARED_OUT``, added up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = local_expert(ids + pair, expert_map, MAPPED)
        # What nobody has multiplied holds anything, NaN too.
        here = column < tl.where(expert >= 0, N, 0)
        value = add_parts(parts, pair, pairs.to(tl.int64), N, column, here, PARTS)
        if BIASED:
            at = bias + tl.maximum(expert, 0).to(tl.int64) * N + column
            value += tl.load(at, here, 0.0).to(tl.float32)
        if SHARED_OUT:
            value *= tl.load(shares + pair).to(tl.float32)
        total += value
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask)


def multiply(
    x: torch.Tensor,
    experts: Experts,
    routing: Routing,
    blocks: Sorted | None,
    share: int,
    plan: Plan,
) -> torch.Tensor:
    """Each pair's product with its expert, [parts, pairs, rows]; pairs of other ranks are left.

    x: [pairs / share, columns] with adjacent columns. blocks: what ``align`` made for the plan;
    None takes each pair for a block. In float32 where there are several parts.
    """
    pairs, rows = routing.ids.numel(), experts.rows
    groups, count, _, words = experts.words.shape[1:]
    sorted_pairs, block_experts, filled = blocks or (routing.ids,) * 3
    count_blocks = min(pairs, len(block_experts)) if blocks else pairs
    dtype = torch.float32 if plan.split > 1 else x.dtype
    out = torch.empty(plan.split, pairs, rows, dtype=dtype, device=x.device)
    decode = plan.decoding(words)
    experts_kernel[count_blocks * -(-groups // plan.groups), plan.split](
        x, experts.words, experts.scales, experts.values,
        *experts.tables[1 if decode == PERMUTE.value else 0], out,
        routing.ids, _or_else(routing.expert_map, routing.ids), sorted_pairs, block_experts, filled,
        pairs, rows, groups, count, -(-count // (plan.units * plan.split)), share, count_blocks,
        x.stride(0), 1.0,
        BM=plan.tokens, GROUPS=plan.groups, UNITS=plan.units, WORDS=words,
        PER_SCALE=count // experts.scales.shape[2], SCALED=plan.scaled, AHEAD=plan.ahead,
        DECODE=decode, EVEN=count % (plan.units * plan.split) == 0, STAGES=plan.stages,
        SPREAD=blocks is None, MAPPED=routing.expert_map is not None,
        num_warps=4 * plan.groups, num_stages=plan.stages, maxnreg=plan.registers,
    )  # fmt: skip
    return out


def add_up(
    parts: torch.Tensor, bias: torch.Tensor | None, routing: Routing, dtype: torch.dtype,
    gated: bool,
) -> torch.Tensor:  # fmt: skip
    """The pairs' products, [pairs, rows], with their biases; silu(gate) * up of them if ``gated``.

    bias: [experts, rows].
    """
    count, pairs, rows = parts.shape
    width = rows // 2 if gated else rows
    out = torch.empty(pairs, width, dtype=dtype, device=parts.device)
    block = _columns_at_once(pairs)
    activate_kernel[pairs, -(-width // block)](
        parts, _or_else(bias, parts), routing.ids, _or_else(routing.expert_map, routing.ids), out,
        pairs, rows, width, PARTS=count, BIASED=bias is not None, GATED=gated,
        MAPPED=routing.expert_map is not None, BLOCK=block,
    )  # fmt: skip
    return out


def combine(
    parts: torch.Tensor, bias: torch.Tensor | None, shares: torch.Tensor | None, routing: Routing,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fill ``out`` [tokens, rows] with the sum of each token's products, times its ``shares``."""
    count, pairs, rows = parts.shape
    tokens, top_k = routing.ids.shape
    block = _columns_at_once(tokens)
    combine_kernel[tokens, -(-rows // block)](
        parts, _or_else(bias, parts), _or_else(shares, parts), routing.ids,
        _or_else(routing.expert_map, routing.ids), out, pairs, rows,
        TOP_K=top_k, PARTS=count, BIASED=bias is not None, SHARED_OUT=shares is not None,
        MAPPED=routing.expert_map is not None, BLOCK=block,
    )  # fmt: skip


def run(
    x: torch.Tensor,
    pair: tuple[Experts, Experts],
    routing: Routing,
    shares: torch.Tensor | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activate: Activate | None,
    out: torch.Tensor,
) -> None:
    """Fill ``out`` [tokens, hidden] with what the experts of this rank make of x, likewise.

    pair: gate and up merged, and down. shares: [tokens, k], what each choice counts; None is 1.
    activate: what stands between the two, into its first argument; None is silu(gate) * up.
    """
    pairs, top_k = routing.ids.numel(), routing.ids.shape[1]
    plans = [choose(pairs, routing.experts, one) for one in pair]
    blocks = None if routing.spread else routing.align(plans[0].tokens)
    parts = multiply(x, pair[0], routing, blocks, top_k, plans[0])
    inner = add_up(parts, biases[0], routing, x.dtype, gated=activate is None)
    if activate is not None:
        merged, inner = inner, x.new_empty(pairs, pair[1].columns)
        activate(inner, merged)
    parts = multiply(inner, pair[1], routing, blocks, 1, plans[1])
    combine(parts, biases[1], shares, routing, out)


def unpack(experts: Experts, dtype: torch.dtype) -> torch.Tensor:
    """The unpacked weights [experts, rows, columns], rounded once, as those of one tall weight."""
    count, groups = experts.words.shape[:2]
    words, scales = experts.words.flatten(0, 1), experts.scales.flatten(0, 1)
    tall = Units(words, scales, experts.values, experts.tables, words, len(words) * ROWS)
    return dequantize(tall, dtype).view(count, groups * ROWS, -1)[:, : experts.rows]


def choose(pairs: int, experts: int, weights: Experts) -> Plan:
    """How to cut a product, from a sweep over 8 and 64 experts on an H200.

    Blocks are as long as an expert's pairs are many on the average, alike for both weights of a
    layer. Where tiles do not fill the GPU, a tile is computed in parts. Scales go into products,
    which is exact; putting them into the weight gained a few percent, for half as much error again.
    """
    average = pairs / experts
    local, groups = weights.words.shape[:2]
    tiles = groups * min(pairs, local)
    if average <= FEW:
        return Plan(16, units=4, split=_split(tiles, 4))
    if average <= MORE:
        if tiles > 4 * PROCESSORS:
            return Plan(32, groups=2, ahead=1)
        return Plan(32, split=_split(tiles, 8))
    return Plan(64, groups=2, ahead=1, stages=4)


def _split(tiles: int, resident: int) -> int:
    """Parts of each tile, so that as many as are resident at once are at work: 1, 2, 4 or 8."""
    split = 1
    while split < 8 and 2 * split * tiles <= resident * PROCESSORS:
        split *= 2
    return split


def _columns_at_once(rows: int) -> int:
    """Few rows need more programs, many have enough."""
    return 256 if rows < 64 else 1024


def _or_else(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """A kernel has to be given some pointer for what it will not read."""
    return unused if tensor is None else tensor
