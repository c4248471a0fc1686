"""The PTX inside the Triton kernels: look-ups of codes, and loads that stay where they are put.

Triton can neither keep a table in shared memory nor permute bytes, and decoding by what it has
(loads through the cache, or selects) takes longer than the whole product may. Every block works
on one word of a thread: given several, Triton hands over neighbouring registers of whatever
layout it chose, not neighbouring elements. Text only; ``decode`` calls it.

A pair is two 16-bit values in one register, the first in the lower half, as the matrix unit wants
them. The upper code of a byte is the first.
"""

from __future__ import annotations

from collections.abc import Callable

import triton.language as tl

LOOK_UP: tl.constexpr = tl.constexpr(0)
"""Plain loads from the table of 16 values; slow, for the interpreter."""
PERMUTE: tl.constexpr = tl.constexpr(1)
"""Byte permutes in registers: more arithmetic, no shared memory."""
TABLE: tl.constexpr = tl.constexpr(2)
"""Two codes at a time, from a table of 256 pairs in shared memory: three instructions a byte."""
TABLE_BYTES = 32768
"""256 pairs of 4 bytes, 32 times."""


def _fill_asm(warps: int) -> str:
    """Declare the table, fill it from the halfwords in $1 to $8, wait; give four times the lane.

    Entry ``byte`` is the pair of values of its two codes, stored once for each of the 32 banks:
    codes are random, and lanes that met in a bank would wait for one another. The declaration
    stands before the braces, so that later blocks of the kernel can name the table.

    What is returned is needed by every look-up, and that alone keeps them behind the barrier:
    they are pure to the compiler, which may move them, but not before what they depend on.
    """
    share = 64 // warps  # lower codes for which one thread writes entries
    values = [f"${i}" for i in range(1, 9)]
    lines = [
        f".shared .align 128 .b8 oot_quant_pairs[{TABLE_BYTES}];",
        "{ .reg .b32 tid, n, first, to, a<8>, odd, pair; .reg .pred p<4>;",
        "mov.u32 tid, %tid.x;",
    ]
    # A thread writes entries of one upper code, (tid / 8) % 16, whose value comes first.
    lines += [f"and.b32 n, tid, {8 << bit}; setp.ne.b32 p{bit}, n, 0;" for bit in range(4)]
    level = values
    for bit in (1, 2, 3):
        pairs = zip(level[::2], level[1::2], strict=True)
        names = [f"a{i}" for i in range(len(level) // 2)]
        lines += [
            f"selp.b32 {n}, {odd}, {even}, p{bit};"
            for n, (even, odd) in zip(names, pairs, strict=True)
        ]
        level = names
    lines += [
        "and.b32 odd, a0, 0xffff0000; shl.b32 first, a0, 16; selp.b32 first, odd, first, p0;",
        "mov.u32 to, oot_quant_pairs; and.b32 n, tid, 127; mad.lo.u32 to, n, 16, to;",
    ]
    if share == 8:
        lines.append("setp.ge.u32 p0, tid, 128; selp.b32 n, 16384, 0, p0; add.u32 to, to, n;")
        lines += [f"selp.b32 a{i}, {values[i + 4]}, {values[i]}, p0;" for i in range(4)]
        values = [f"a{i}" for i in range(4)]
    for i in range(share):
        lines += [
            f"prmt.b32 pair, {values[i // 2]}, first, {'0x7632' if i % 2 else '0x7610'};",
            f"st.shared.v4.b32 [to + {2048 * i}], {{pair, pair, pair, pair}};",
        ]
    return "\n".join([*lines, "bar.sync 0;", "mov.u32 n, %laneid; shl.b32 $0, n, 2; }"])


def _table_asm(multiply: str) -> str:
    """Four pairs of word $4 with table offset $5; scales, if any, in $6 and $7.

    A lane's entry of a byte is at 128 byte + 4 lane: a shift brings the byte to bits 7 to 14, and
    one three-way operation masks it and puts the lane below. Bytes take turns with rows g and
    g + 8, hence with two scales.
    """
    lines = ["{ .reg .b32 at, base; mov.u32 base, oot_quant_pairs;"]
    for byte, shift in enumerate(("shl.b32 at, $4, 7;", "shr.b32 at, $4, 1;",
                                  "shr.b32 at, $4, 9;", "shr.b32 at, $4, 17;")):  # fmt: skip
        lines += [
            shift,
            "lop3.b32 at, at, 0x7f80, $5, 0xEA; add.u32 at, at, base;",
            f"ld.shared.b32 ${byte}, [at];",
        ]
        if multiply:
            lines.append(f"{multiply} ${byte}, ${byte}, ${6 + byte % 2};")
    return "\n".join([*lines, "}"])


def _permute_lines(word: str, tables: list[str], names: list[str]) -> list[str]:
    """Four pairs of a word into registers ``names``, by byte planes in eight registers.

    A permute looks up four codes at once, but of 8 bytes only and one byte wide. So the values'
    upper and lower bytes are looked up apart, in planes; each among the first 8 and the last 8,
    by a code's lower three bits; and its top bit, moved to where a selector has the bit for the
    second source, picks one of the two.
    """
    lines = [
        f"and.b32 pick, {word}, 0x77777777; shr.u32 side, {word}, 1;",
        "lop3.b32 side, side, 0x44444444, 0x32103210, 0xEA;",
    ]
    for half in range(2):
        if half:
            lines.append("shr.u32 pick, pick, 16; shr.u32 side, side, 16;")
        for plane, name in ((tables[:4], "high"), (tables[4:], "low")):
            lines += [
                f"prmt.b32 a, {plane[0]}, {plane[1]}, pick;",
                f"prmt.b32 b, {plane[2]}, {plane[3]}, pick;",
                f"prmt.b32 {name}, a, b, side;",
            ]
        # Bytes and codes run the other way round: the upper code is the lower halfword.
        lines += [
            f"prmt.b32 {names[2 * half]}, low, high, 0x4051;",
            f"prmt.b32 {names[2 * half + 1]}, low, high, 0x6273;",
        ]
    return lines


def _permute_asm(multiply: str) -> str:
    """As ``_table_asm``, with a value table in $5 to $12 and scales in $13 and $14."""
    lines = ["{ .reg .b32 pick, side, a, b, high, low;"]
    lines += _permute_lines("$4", [f"${5 + i}" for i in range(8)], [f"${i}" for i in range(4)])
    if multiply:
        lines += [f"{multiply} ${i}, ${i}, ${13 + i % 2};" for i in range(4)]
    return "\n".join([*lines, "}"])


def _unpack_asm(kind: str) -> str:
    """Four pairs of word $4, rounded once: scales $5 and $6, values $7 on, their rest $15 on.

    A 16-bit value would be rounded before its product with the scale is. With the rest that this
    rounding leaves, itself in 16 bits, their sum in float32 is the value to 16 bits or more.
    """
    names, rests = [f"pair{i}" for i in range(4)], [f"rest{i}" for i in range(4)]
    lines = [
        "{ .reg .b32 pick, side, a, b, high, low, pair<4>, rest<4>; .reg .f32 f<4>; .reg .b16 h<4>;"
    ]
    lines += _permute_lines("$4", [f"${7 + i}" for i in range(8)], names)
    lines += _permute_lines("$4", [f"${15 + i}" for i in range(8)], rests)
    for i, (name, rest) in enumerate(zip(names, rests, strict=True)):
        if kind == "bf16":
            lines += [
                f"shl.b32 a, {name}, 16; mov.b32 f0, a; and.b32 a, {name}, 0xffff0000;",
                f"mov.b32 f1, a; shl.b32 a, {rest}, 16; mov.b32 f2, a;",
                f"and.b32 a, {rest}, 0xffff0000; mov.b32 f3, a;",
            ]
        else:
            lines += [
                f"mov.b32 {{h0, h1}}, {name}; mov.b32 {{h2, h3}}, {rest};",
                *[f"cvt.f32.f16 f{j}, h{j};" for j in range(4)],
            ]
        lines += [
            "add.f32 f0, f0, f2; add.f32 f1, f1, f3;",
            f"mul.f32 f0, f0, ${5 + i % 2}; mul.f32 f1, f1, ${5 + i % 2};",
            f"cvt.rn.{kind}x2.f32 ${i}, f1, f0;",
        ]
    return "\n".join([*lines, "}"])


def _both(make: Callable[[str], str]) -> tuple[tl.constexpr, ...]:
    return tuple(tl.constexpr(make(m)) for m in ("", "mul.rn.bf16x2", "mul.rn.f16x2"))


def _constraints(out: str, results: int, inputs: int) -> tl.constexpr:
    return tl.constexpr(",".join([out] * results + ["r"] * inputs))


FOUR: tl.constexpr = tl.constexpr((tl.int32,) * 4)
FILL_4: tl.constexpr = tl.constexpr(_fill_asm(4))
FILL_8: tl.constexpr = tl.constexpr(_fill_asm(8))
FILL_IN = _constraints("=r", 1, 8)
TABLE_PLAIN, TABLE_BF16, TABLE_FP16 = _both(_table_asm)
TABLE_IN = _constraints("=r", 4, 2)
TABLE_SCALED_IN = _constraints("=r", 4, 4)
PERMUTE_PLAIN, PERMUTE_BF16, PERMUTE_FP16 = _both(_permute_asm)
PERMUTE_IN = _constraints("=r", 4, 9)
PERMUTE_SCALED_IN = _constraints("=r", 4, 11)
UNPACK_BF16: tl.constexpr = tl.constexpr(_unpack_asm("bf16"))
UNPACK_FP16: tl.constexpr = tl.constexpr(_unpack_asm("f16"))
UNPACK_IN: tl.constexpr = tl.constexpr("=r,=r,=r,=r,r,f,f," + ",".join(["r"] * 16))


def _load_asm(body: str, results: int, suffix: str = "") -> tl.constexpr:
    """A load at address $n, unless $n+1 is zero, that stays before the next barrier.

    The assembler moves a plain load down to where its result is used, which is a step later, and
    the step would wait for memory; it does not move a relaxed one, which costs no more. Weights
    are read once, so they leave the L1 cache to activations. Without the load the results are
    undefined, and nobody reads them.
    """
    return tl.constexpr(
        f"{{ .reg .pred on; .reg .f32 s; setp.ne.b32 on, ${results + 1}, 0; @on {body} {suffix}}}"
    )


LOAD_4 = _load_asm("ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", 4)
LOAD_2 = _load_asm("ld.relaxed.gpu.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];", 2)
LOAD_SCALE = _load_asm("ld.relaxed.gpu.global.b32 $0, [$1];", 1)
LOAD_BF16 = _load_asm("ld.relaxed.gpu.global.f32 s, [$1];", 1, "cvt.rn.bf16x2.f32 $0, s, s;")
LOAD_FP16 = _load_asm("ld.relaxed.gpu.global.f32 s, [$1];", 1, "cvt.rn.f16x2.f32 $0, s, s;")
