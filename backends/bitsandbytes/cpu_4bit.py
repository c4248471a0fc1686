"""Builds ``cpu_4bit.c`` on the user's machine and offers its product as an operator.

It takes a compiler about half a second, once in each process that needs it. Whoever has none is
served by bitsandbytes' own kernels.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("vllm.oot_quant")
SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
COLUMNS = 2 * LANES
"""Weights of a row that are decoded together; blocks are made of whole ones."""
LARGEST = 64
"""More tokens than this: unpack, and multiply as usual in float32."""
CACHED = 1 << 20
"""Weights that are unpacked at once then: 4 MiB."""
COMPILE = ("-O3", "-mavx512f", "-fPIC", "-fopenmp", "-c")
SECONDS = 60


def available() -> bool:
    """Whether the kernel runs on this machine; the first call builds it."""
    return has_avx512() and _library() is not None


def has_avx512() -> bool:
    """Whether the processor has the instructions that the kernel is made of."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def compiler() -> str | None:
    """The C compiler that ``CC`` names, or the usual one."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


@torch.library.custom_op("oot_quant::cpu_gemm_4bit", mutates_args=())
def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``x @ W.T + bias``, computed in float32 and rounded once.

    x: [..., columns] of any float dtype. weight: [rows, columns / 2] uint8. absmax:
    [rows, blocks] float32, blocks of a multiple of 32 columns. quant_map: [16] float32.
    """
    rows, half = weight.shape
    pairs = x.float().reshape(-1, half // LANES, LANES, 2)
    swapped = pairs.transpose(2, 3).reshape(-1, 2 * half)
    if len(swapped) > LARGEST:
        out = _unpack_and_multiply(swapped, weight, absmax, quant_map)
    else:
        out = torch.empty(len(swapped), rows)
        _call("product", weight, absmax, quant_map, swapped, out, numbers=(len(swapped),))
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], rows)


def _unpack_and_multiply(
    x: torch.Tensor, weight: torch.Tensor, absmax: torch.Tensor, quant_map: torch.Tensor
) -> torch.Tensor:
    """Some rows at a time, which stay in the processor's cache."""
    out = torch.empty(len(x), len(weight))
    count = max(1, CACHED // x.shape[1])
    buffer = torch.empty(count, x.shape[1])
    for start in range(0, len(weight), count):
        stop = min(start + count, len(weight))
        part = buffer[: stop - start]
        _call("unpack", weight[start:stop], absmax[start:stop], quant_map, part)
        torch.mm(x, part.t(), out=out[:, start:stop])
    return out


def _call(
    name: str,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    *operands: torch.Tensor,
    numbers: tuple[int, ...] = (),
) -> None:
    library = _library()
    assert library is not None, "available() was not asked"
    tensors = (weight, absmax, *operands)
    assert all(tensor.is_contiguous() for tensor in tensors)
    rows, half = weight.shape
    sizes = (rows, half, half // absmax.shape[1], *numbers)
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    getattr(library, name)(*addresses, *map(ctypes.c_int64, sizes))


@product.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def _library() -> Any:
    """The compiled functions; None, with the reason logged, if it cannot be had."""
    try:
        return _build(compiler() or "cc")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        logger.warning(
            "bitsandbytes: 4-bit layers on this CPU are several times slower than they could be, "
            "since their kernel was not built (%s). fix: install gcc, or let CC name it.",
            said[-300:] or error,
        )
        return None


def _build(command: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        compiled, library = Path(folder, "cpu_4bit.o"), Path(folder, "cpu_4bit.so")
        _run([command, *COMPILE, str(SOURCE), "-o", str(compiled)])
        # Without -fopenmp, which would name an OpenMP beside the one that PyTorch has loaded.
        _run([command, "-shared", str(compiled), "-o", str(library)])
        return ctypes.CDLL(str(library))


def _run(command: list[str]) -> None:
    subprocess.run(  # noqa: S603 - the user's own compiler
        command, check=True, capture_output=True, text=True, timeout=SECONDS
    )
