"""Multiplies with a packed weight: which kernel, and the form of the weight that it wants.

The choice is made once, after loading. One call serves a whole fused layer. All of them take
``weight`` [rows, columns / 2] uint8, ``absmax`` float32 with one scale for each block, the 16
values ``quant_map``, and activations [..., columns] of any float dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .formats import BLOCKSIZES
from .weights import code_table, unpack

PACKED_ROWS = 32
"""bitsandbytes' packed CPU layout interleaves this many rows."""
LONGEST_CPU_BLOCK = 1024
"""Above it, bitsandbytes compiles an unpack function for every shape in the first forward."""


class Kernel(Protocol):
    """A way to compute ``x @ W.T + bias`` from a packed W."""

    def prepare(
        self, weight: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and the scales as this kernel wants them; called once after loading."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def dequantize(
        self, weight: torch.Tensor, absmax: torch.Tensor, quant_map: torch.Tensor
    ) -> torch.Tensor:
        """The unpacked weight, [rows, columns] float32, from what ``prepare`` returned."""
        ...


@dataclass(frozen=True)
class Reference:
    """Unpack in plain torch, then multiply. Any block size, any 16 values, any device."""

    def prepare(
        self, weight: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weight, absmax

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        dense = unpack(weight, absmax, quant_map).to(x.dtype)
        return torch.nn.functional.linear(x, dense, bias)

    def dequantize(
        self, weight: torch.Tensor, absmax: torch.Tensor, quant_map: torch.Tensor
    ) -> torch.Tensor:
        return unpack(weight, absmax, quant_map)


@dataclass(frozen=True)
class Gemm4bit(Reference):
    """bitsandbytes' ``gemm_4bit``: fused for few tokens on CUDA, unpack and multiply otherwise.

    ``blocksize`` divides the columns: where blocks reach across rows, the library's AVX-512
    kernel unpacks wrong values (0.50.2: blocks of 64 in rows of 96). ``repeat`` stores each
    scale that many times, for smaller blocks of the same values.
    """

    quant_type: str
    blocksize: int
    repeat: int = 1

    def prepare(
        self, weight: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weight, absmax.repeat_interleave(self.repeat, dim=1)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        shape = [weight.shape[0], 2 * weight.shape[1]]
        out: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit(
            x, weight.view(-1, 1), shape, absmax.view(-1), self.blocksize, self.quant_type, bias
        )
        return out


@dataclass(frozen=True)
class PackedCpu:
    """bitsandbytes' AVX-512 kernel, which decodes in registers; computes in bfloat16.

    Its layout (``bitsandbytes.functional._convert_weight_packed_for_cpu``) interleaves 32
    rows and keeps the scales as bfloat16, transposed.
    """

    quant_type: str
    blocksize: int

    def prepare(
        self, weight: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import bitsandbytes.functional as bnb

        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        state = bnb.QuantState(
            absmax.reshape(-1),
            shape=shape,
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=torch.bfloat16,
        )
        convert = bnb._convert_weight_packed_for_cpu  # noqa: SLF001 - nothing public packs
        packed, state = convert(weight.reshape(-1), state)
        return packed, state.absmax

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        shape = [weight.shape[0], 2 * weight.shape[1]]
        out: torch.Tensor = torch.ops.bitsandbytes.gemv_4bit(
            x, weight, shape, absmax, quant_map, self.blocksize
        )
        return out if bias is None else out + bias

    def dequantize(
        self, weight: torch.Tensor, absmax: torch.Tensor, quant_map: torch.Tensor
    ) -> torch.Tensor:
        rows, half = weight.shape
        low, high = weight & 0xF, weight >> 4
        # Each 32 bytes hold 64 codes, the first half in the low nibbles.
        codes = torch.cat((low.view(-1, PACKED_ROWS), high.view(-1, PACKED_ROWS)), dim=1)
        codes = codes.view(rows // PACKED_ROWS, half, PACKED_ROWS, 2).transpose(1, 2)
        values = quant_map[codes.reshape(rows, 2 * half).to(torch.int64)]
        scales = absmax.t().float().repeat_interleave(self.blocksize, dim=1)
        return values * scales


def choose(
    quant_type: str,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Kernel:
    """The kernel for a layer. shape: (rows, columns) of the weight on this rank."""
    import bitsandbytes.functional as bnb

    rows, columns = shape
    blocksize = columns // absmax.shape[1]
    usual = code_table(quant_type, quant_map.device)
    if blocksize not in BLOCKSIZES or not torch.allclose(quant_map, usual, atol=1e-6, rtol=0):
        return Reference()
    if absmax.device.type != "cpu":
        return Gemm4bit(quant_type, blocksize)
    if dtype == torch.bfloat16 and rows % PACKED_ROWS == 0 and bnb.has_avx512bf16():
        return PackedCpu(quant_type, blocksize)
    repeat = max(1, blocksize // LONGEST_CPU_BLOCK)
    return Gemm4bit(quant_type, blocksize // repeat, repeat)
