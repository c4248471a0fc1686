"""The 4-bit product as an operator of torch: Triton's on a GPU, elsewhere plain torch.

An operator, so that a compiled model takes it as it is: nothing in it depends on a number of
tokens that a graph was not made for. Importing this imports no Triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import linear

from .triton_4bit.units import (
    INTERPRETED,
    Units,
    new_counters,
    reorder,
    restore,
    value_tables,
)
from .weights import code_table, unpack

SAMPLE_ROWS = 1024
"""Rows of the random weight that stands for one of the same shape when kernels are tried."""
BUCKETS = (16, 32, 64, 128)
"""Numbers of tokens, one for each kernel that a layer may need."""
TOLERANCE = 0.01
NAME = "oot_quant::gemm_4bit"
torch.library.define(
    NAME,
    "(Tensor x, Tensor words, Tensor scales, Tensor values, Tensor counters, "
    "Tensor? bias, int rows, str quant_type) -> Tensor",
)
# Without ``counters(a!)``, though they are counted up: each launch leaves them at zero, and a
# mutation would make the compiler order, and copy around, what does not need it.


@lru_cache(maxsize=8)
def tables_of(quant_type: str, dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """``value_tables`` of nf4 or fp4: read on the host once, never while a graph is recorded."""
    return value_tables(code_table(quant_type, torch.device("cpu")), dtype)


def on_gpu(  # noqa: PLR0913, PLR0917 - the operator's arguments
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    quant_type: str,
) -> torch.Tensor:
    """``x @ W.T + bias`` for x [.., columns]; the other arguments as in ``Units``."""
    from .triton_4bit.gemm import matmul

    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    units = Units(words, scales, values, tables_of(quant_type, x.dtype), counters, rows)
    return matmul(flat, units, bias).view(*x.shape[:-1], rows)


def in_plain_torch(  # noqa: PLR0913, PLR0917 - the operator's arguments
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    quant_type: str,
) -> torch.Tensor:
    """As ``on_gpu``."""
    weight, absmax = restore(words, scales, rows)
    return linear(x, unpack(weight, absmax, values).to(x.dtype), bias)


def without_data(  # noqa: PLR0913, PLR0917 - the operator's arguments
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    quant_type: str,
) -> torch.Tensor:
    """The result's shape, for a compiler."""
    return x.new_empty(*x.shape[:-1], rows)


torch.library.impl(NAME, "cuda", on_gpu)
torch.library.impl(NAME, "cpu", on_gpu if INTERPRETED else in_plain_torch)
torch.library.register_fake(NAME, without_data)


@lru_cache(maxsize=256)
def trouble(  # noqa: PLR0913, PLR0917 - what makes a kernel another one
    rows: int,
    columns: int,
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernels must not serve weights of a shape; None if they may.

    Compiles each that the shape needs and tries it on random numbers, once, before graphs are
    recorded: what a compiler makes of them is known only for the versions that they were tried
    with, and the driver may refuse a launch.
    """
    try:
        from .triton_4bit.gemm import choose, dequantize, run

        random = torch.Generator(device).manual_seed(0)
        shape = (min(rows, SAMPLE_ROWS), columns // 2)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=random)
        absmax = torch.rand(
            shape[0], columns // blocksize, dtype=torch.float32, device=device, generator=random
        )
        values = code_table(quant_type, device)
        words, scales = reorder(codes, absmax)
        units = Units(
            words, scales, values, tables_of(quant_type, dtype), new_counters(words), shape[0]
        )
        weight = unpack(codes, absmax, values)
        found = {"unpacking": (dequantize(units, dtype), weight)}
        for tokens in BUCKETS:
            x = torch.randn(tokens, columns, dtype=dtype, device=device, generator=random)
            product = run(x, units, None, choose(tokens, rows))
            found[f"{tokens} tokens"] = (product, x.float() @ weight.t())
        for name, (result, expected) in found.items():
            error = float((result.float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                return f"{name}: the error is {error:.3g}, {TOLERANCE} is allowed"
    except Exception as raised:  # noqa: BLE001 - whatever it is, another kernel takes over
        lines = str(raised).strip().splitlines()
        return f"{type(raised).__name__}: {lines[0] if lines else ''}"
    return None
