"""From words in memory to a matrix of values in registers, for every kernel of this format.

Functions of Triton kernels; ``units`` says what a unit is, ``ptx`` what runs.
"""

import triton
import triton.language as tl

from .ptx import (
    FILL_4,
    FILL_8,
    FILL_IN,
    FOUR,
    LOAD_2,
    LOAD_4,
    LOAD_BF16,
    LOAD_FP16,
    LOAD_SCALE,
    LOOK_UP,
    PERMUTE,
    PERMUTE_BF16,
    PERMUTE_FP16,
    PERMUTE_IN,
    PERMUTE_PLAIN,
    PERMUTE_SCALED_IN,
    TABLE,
    TABLE_BF16,
    TABLE_FP16,
    TABLE_IN,
    TABLE_PLAIN,
    TABLE_SCALED_IN,
    UNPACK_BF16,
    UNPACK_FP16,
    UNPACK_IN,
)  # fmt: skip


@triton.jit
def everywhere(condition, like):
    """A scalar condition, zero or not, as a mask for pointers ``like``.

    Triton 3.9's interpreter takes no comparison of scalars for a mask.
    """
    return (tl.zeros(like.shape, tl.int32) + condition) != 0


@triton.jit
def load_words(at, on, WORDS: tl.constexpr, DECODE: tl.constexpr):
    """Words of each thread, at word pointers [.., 128], straight to registers if ``on``.

    Always four; where a thread has two, they come twice.
    """
    if DECODE == LOOK_UP:
        mask = everywhere(on, at)
        a, b = tl.load(at, mask, 0), tl.load(at + 1, mask, 0)
        c, d = a, b
        if WORDS == 4:
            c, d = tl.load(at + 2, mask, 0), tl.load(at + 3, mask, 0)
    elif WORDS == 2:
        a, b = tl.inline_asm_elementwise(
            LOAD_2, "=r,=r,l,r", [at.to(tl.int64), on], (tl.int32, tl.int32), False, 1
        )
        c, d = a, b
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            LOAD_4, "=r,=r,=r,=r,l,r", [at.to(tl.int64), on], FOUR, False, 1
        )
    return a, b, c, d


@triton.jit
def load_scale(at, on, DTYPE: tl.constexpr, TWICE: tl.constexpr, DECODE: tl.constexpr):
    """Scales at float32 pointers; ``TWICE`` as the two halves of an int32, rounded to DTYPE."""
    if DECODE == LOOK_UP:
        scale = tl.load(at, everywhere(on, at), 0.0)
    elif not TWICE:
        scale = tl.inline_asm_elementwise(
            LOAD_SCALE, "=r,l,r", [at.to(tl.int64), on], tl.float32, True, 1
        )
    elif DTYPE == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            LOAD_BF16, "=r,l,r", [at.to(tl.int64), on], tl.int32, False, 1
        )
    else:
        scale = tl.inline_asm_elementwise(
            LOAD_FP16, "=r,l,r", [at.to(tl.int64), on], tl.int32, False, 1
        )
    return scale


@triton.jit
def open_table(values, t, DECODE: tl.constexpr, WARPS: tl.constexpr):
    """What decoding needs of a value table, once for each kernel.

    ``values`` points to the 16 values, for LOOK_UP; ``t`` are the eight integers of
    ``value_tables``, in order for TABLE, in planes for PERMUTE.
    """
    if DECODE == TABLE:
        T: tl.constexpr = FILL_8 if WARPS > 4 else FILL_4
        lane = tl.inline_asm_elementwise(
            T, FILL_IN, [t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]], tl.int32, False, 1
        )
        return (lane,)
    elif DECODE == PERMUTE:
        return t
    else:
        return (values,)


@triton.jit
def _look_up(word, values, BYTE: tl.constexpr):
    byte = (word >> (8 * BYTE)) & 0xFF
    return tl.join(tl.load(values + (byte >> 4)), tl.load(values + (byte & 15)))


@triton.jit
def _halves(pair, DTYPE: tl.constexpr):
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def decode_word(word, opened, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr,
                DECODE: tl.constexpr):  # fmt: skip
    """Values of a word a thread, [.., 128], as [.., 128, e, r, h]; scales for r = 0 and 1."""
    if DECODE == LOOK_UP:
        a, b = _look_up(word, opened[0], 0), _look_up(word, opened[0], 1)
        c, d = _look_up(word, opened[0], 2), _look_up(word, opened[0], 3)
        if SCALED:
            a, c = a * scale[0][:, :, :, None], c * scale[0][:, :, :, None]
            b, d = b * scale[1][:, :, :, None], d * scale[1][:, :, :, None]
    else:
        BF16: tl.constexpr = DTYPE == tl.bfloat16
        if DECODE == TABLE and not SCALED:
            p, q, r, s = tl.inline_asm_elementwise(
                TABLE_PLAIN, TABLE_IN, [word, opened[0]], FOUR, True, 1
            )
        elif DECODE == TABLE:
            p, q, r, s = tl.inline_asm_elementwise(
                TABLE_BF16 if BF16 else TABLE_FP16, TABLE_SCALED_IN,
                [word, opened[0], scale[0], scale[1]], FOUR, True, 1,
            )  # fmt: skip
        elif not SCALED:
            p, q, r, s = tl.inline_asm_elementwise(
                PERMUTE_PLAIN, PERMUTE_IN,
                [word, opened[0], opened[1], opened[2], opened[3], opened[4], opened[5],
                 opened[6], opened[7]], FOUR, True, 1,
            )  # fmt: skip
        else:
            p, q, r, s = tl.inline_asm_elementwise(
                PERMUTE_BF16 if BF16 else PERMUTE_FP16, PERMUTE_SCALED_IN,
                [word, opened[0], opened[1], opened[2], opened[3], opened[4], opened[5],
                 opened[6], opened[7], scale[0], scale[1]], FOUR, True, 1,
            )  # fmt: skip
        a, b, c, d = _halves(p, DTYPE), _halves(q, DTYPE), _halves(r, DTYPE), _halves(s, DTYPE)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def decode_units(words, opened, scale, WORDS: tl.constexpr, DTYPE: tl.constexpr,
                 SCALED: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """The matrix [64 groups, units * 16 WORDS] of words loaded for [units, groups, 128].

    Names each register's place in it and moves nothing: the layout that comes out is that of the
    matrix unit's operand, so the compiler has no exchange to insert.
    """
    a = decode_word(words[0], opened, scale, DTYPE, SCALED, DECODE)
    b = decode_word(words[1], opened, scale, DTYPE, SCALED, DECODE)
    values = tl.join(a, b)
    S: tl.constexpr = values.shape
    if WORDS == 4:
        c = decode_word(words[2], opened, scale, DTYPE, SCALED, DECODE)
        d = decode_word(words[3], opened, scale, DTYPE, SCALED, DECODE)
        values = tl.join(values, tl.join(c, d))
    cells = tl.reshape(values, S[0], S[1], 4, 8, 4, 2, 2, 2, 2, WORDS // 2)
    cells = tl.permute(cells, 1, 2, 6, 3, 0, 9, 8, 7, 4, 5)
    return tl.reshape(cells, S[1] * 64, S[0] * WORDS * 16)


@triton.jit
def load_units(words, scales, group, unit, on, units, WORDS: tl.constexpr,
               PER_SCALE: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
               DECODE: tl.constexpr):  # fmt: skip
    """Words and scales of units [n] in row groups [m]: four words, two scales.

    ``SCALED``: each thread's own two scales, in 16 bits, twice in a register. Otherwise one for
    each row of the result, float32, for the product of units that share it.
    """
    thread = tl.arange(0, 128)
    at = (group[None, :, None] * units + unit[:, None, None]) * 128 + thread[None, None, :]
    blocks = units // PER_SCALE
    if SCALED:
        # Rows g and g + 8 of the thread's sixteen.
        row = 16 * (thread // 32) + (thread // 4) % 8
        block = group[None, :, None] * blocks + (unit // PER_SCALE)[:, None, None]
        at_scale = scales + (block * 64 + row[None, None, :])
        upper = load_scale(at_scale, on, DTYPE, True, DECODE)
        lower = load_scale(at_scale + 8, on, DTYPE, True, DECODE)
    else:
        G: tl.constexpr = group.shape[0]
        rows = tl.broadcast_to(group[:, None] * (blocks * 64), G, 64) + tl.arange(0, 64)[None, :]
        at_scale = scales + tl.reshape(rows, G * 64) + (tl.max(unit, 0) // PER_SCALE) * 64
        upper = load_scale(at_scale, on, DTYPE, False, DECODE)
        lower = upper
    return load_words(words + WORDS * at, on, WORDS, DECODE), (upper, lower)


@triton.jit
def unpack_word(word, upper, lower, t, u, DTYPE: tl.constexpr):
    """Pairs of a word a thread, [128] as [128, h, r], scaled in float32 and rounded once."""
    A: tl.constexpr = UNPACK_BF16 if DTYPE == tl.bfloat16 else UNPACK_FP16
    a, b, c, d = tl.inline_asm_elementwise(
        A, UNPACK_IN,
        [word, upper, lower, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7],
         u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7]],
        FOUR, True, 1,
    )  # fmt: skip
    return tl.join(tl.join(a, b), tl.join(c, d))
