"""Multiplies with a packed weight: which kernel, and the form of the weight that it wants.

The choice is made once, after loading. One call serves a whole fused layer, with activations
[..., columns] of any float dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm.logger import init_logger

from oot_quant.errors import UnsupportedFormat

from . import cpu_4bit
from .formats import BLOCKSIZES, QUANT_TYPES
from .product_4bit import trouble
from .triton_4bit.units import columns_of, new_counters, reorder, restore, supported
from .weights import code_table, rows_at_once, unpack

logger = init_logger("vllm.oot_quant")

PACKED_ROWS = 32
"""bitsandbytes' packed CPU layout interleaves this many rows."""
LONGEST_CPU_BLOCK = 1024
"""Above it, bitsandbytes compiles an unpack function for every shape in the first forward."""


class Packed(NamedTuple):
    """A 4-bit weight: what a layer holds and a kernel multiplies with.

    ``weight`` [rows, columns / 2] uint8; ``absmax`` [rows, n] float32, one scale for each
    block; ``quant_map`` [16] float32. A kernel may want the first two in another form.
    """

    weight: torch.Tensor
    absmax: torch.Tensor
    quant_map: torch.Tensor

    @property
    def shape(self) -> list[int]:
        """Rows and columns of the unpacked weight."""
        return [self.weight.shape[0], 2 * self.weight.shape[1]]


@dataclass(frozen=True)
class Kernel:
    """Unpack in plain torch, then multiply. Any block size, any 16 values, any device.

    The base of the kernels that do better, and what they are tested against.
    """

    def prepare(self, packed: Packed) -> Packed:
        """The weight in the form that this kernel wants; called once after loading."""
        return packed

    def scratch(self, packed: Packed) -> torch.Tensor | None:
        """Memory that a layer's calls need beside what ``prepare`` returned; None for none."""
        return None

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x @ W.T + bias`` with W from what ``prepare`` returned, ``scratch`` likewise."""
        return torch.nn.functional.linear(x, self.dequantize(packed).to(x.dtype), bias)

    def dequantize(self, packed: Packed) -> torch.Tensor:
        """The unpacked weight, [rows, columns] float32, from what ``prepare`` returned."""
        return unpack(*packed)


@dataclass(frozen=True)
class Gemm4bit(Kernel):
    """bitsandbytes' ``gemm_4bit``: fused for few tokens on CUDA, unpack and multiply otherwise.

    ``blocksize`` divides the columns: where blocks reach across rows, the library's AVX-512
    kernel unpacks wrong values (0.50.2: blocks of 64 in rows of 96). ``repeat`` stores each
    scale that many times, for smaller blocks of the same values.
    """

    quant_type: str
    blocksize: int
    repeat: int = 1

    def prepare(self, packed: Packed) -> Packed:
        return packed._replace(absmax=packed.absmax.repeat_interleave(self.repeat, dim=1))

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight, absmax = packed.weight.view(-1, 1), packed.absmax.view(-1)
        out: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit(
            x, weight, packed.shape, absmax, self.blocksize, self.quant_type, bias
        )
        return out


@dataclass(frozen=True)
class PackedCpu(Kernel):
    """bitsandbytes' AVX-512 kernel, which decodes in registers; computes in bfloat16.

    Its layout (``bitsandbytes.functional._convert_weight_packed_for_cpu``) interleaves 32
    rows and keeps the scales as bfloat16, transposed.
    """

    quant_type: str
    blocksize: int

    def prepare(self, packed: Packed) -> Packed:
        count = rows_at_once(packed.weight, PACKED_ROWS)
        slices = (torch.split(tensor, count) for tensor in (packed.weight, packed.absmax))
        weights, scales = zip(
            *(self._interleave(*part) for part in zip(*slices, strict=True)), strict=True
        )
        return Packed(torch.cat(weights), torch.cat(scales, dim=1), packed.quant_map)

    def _interleave(
        self, weight: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import bitsandbytes.functional as bnb

        state = bnb.QuantState(
            absmax.reshape(-1),
            shape=torch.Size((weight.shape[0], 2 * weight.shape[1])),
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=torch.bfloat16,
        )
        convert = bnb._convert_weight_packed_for_cpu  # noqa: SLF001 - nothing public packs
        interleaved, state = convert(weight.reshape(-1), state)
        return interleaved, state.absmax

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight, absmax, quant_map = packed
        out: torch.Tensor = torch.ops.bitsandbytes.gemv_4bit(
            x, weight, packed.shape, absmax, quant_map, self.blocksize
        )
        return out if bias is None else out + bias

    def dequantize(self, packed: Packed) -> torch.Tensor:
        rows, columns = packed.shape
        low, high = packed.weight & 0xF, packed.weight >> 4
        # Each 32 bytes hold 64 codes, the first half in the low nibbles.
        codes = torch.cat((low.view(-1, PACKED_ROWS), high.view(-1, PACKED_ROWS)), dim=1)
        codes = codes.view(rows // PACKED_ROWS, columns // 2, PACKED_ROWS, 2).transpose(1, 2)
        values = packed.quant_map[codes.reshape(rows, columns).to(torch.int64)]
        return values * packed.absmax.t().float().repeat_interleave(self.blocksize, dim=1)


@dataclass(frozen=True)
class TritonGemm(Kernel):
    """The kernels in ``triton_4bit``, for Hopper: decode in registers, up to 256 tokens fused.

    The weight is kept in their order alone. ``rows`` leaves out what pads them to 64.
    """

    quant_type: str
    rows: int

    def prepare(self, packed: Packed) -> Packed:
        return Packed(*reorder(packed.weight, packed.absmax), packed.quant_map)

    def scratch(self, packed: Packed) -> torch.Tensor:
        """Counters of the finished parts of the output, at zero between calls.

        So one layer's calls must follow one another, as on one stream; layers may run at once.
        """
        return new_counters(packed.weight)

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        counters = new_counters(packed.weight) if scratch is None else scratch
        out: torch.Tensor = torch.ops.oot_quant.gemm_4bit(
            x, *packed, counters, bias, self.rows, self.quant_type
        )
        return out

    def dequantize(self, packed: Packed) -> torch.Tensor:
        return unpack(*restore(packed.weight, packed.absmax, self.rows), packed.quant_map)


@dataclass(frozen=True)
class Avx512(Kernel):
    """Our own AVX-512 kernel, which needs nothing newer; computes in float32."""

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out: torch.Tensor = cpu_4bit.product(
            x, packed.weight, packed.absmax, packed.quant_map, bias
        )
        return out


def choose(packed: Packed, dtype: torch.dtype) -> Kernel:
    """The kernel for a layer's part on this rank, computing in ``dtype``."""
    rows, columns = packed.shape
    device, blocksize = packed.weight.device, columns // packed.absmax.shape[1]
    quant_type = _quant_type(packed.quant_map)
    if blocksize in BLOCKSIZES and quant_type is not None:
        if _fits_triton((rows, columns), blocksize, quant_type, dtype, device):
            return TritonGemm(quant_type, rows)
        fits = dtype == torch.bfloat16 and rows % PACKED_ROWS == 0
        if device.type == "cpu" and fits and has_packed_cpu():
            return PackedCpu(quant_type, blocksize)
    return _without_preparing(blocksize, quant_type, device)


def _without_preparing(blocksize: int, quant_type: str | None, device: torch.device) -> Kernel:
    """The kernel for a weight that is kept as it is stored."""
    is_cpu = device.type == "cpu"
    if is_cpu and blocksize % cpu_4bit.COLUMNS == 0 and cpu_4bit.available():
        return Avx512()
    if blocksize not in BLOCKSIZES or quant_type is None:
        return Kernel()
    repeat = max(1, blocksize // LONGEST_CPU_BLOCK) if is_cpu else 1
    return Gemm4bit(quant_type, blocksize // repeat, repeat)


def recognize(packed: Packed, dtype: torch.dtype, rows: int) -> Kernel:
    """The kernel for a weight of so many rows that another engine has prepared.

    Raises UnsupportedFormat if it was prepared for a processor that this one is not.
    """
    quant_type = _quant_type(packed.quant_map)
    if packed.weight.dtype == torch.int32:
        columns = columns_of(packed.weight)
        blocksize, device = columns // packed.absmax.shape[1], packed.weight.device
        if quant_type and _fits_triton((rows, columns), blocksize, quant_type, dtype, device):
            return TritonGemm(quant_type, rows)
        raise _prepared_for("a GPU of the Hopper generation and 16-bit activations")
    if packed.absmax.dtype == torch.bfloat16:
        if not has_packed_cpu() or quant_type is None:
            raise _prepared_for("a processor with AVX-512 BF16")
        return PackedCpu(quant_type, packed.shape[1] // packed.absmax.shape[0])
    blocksize = packed.shape[1] // packed.absmax.shape[1]
    return _without_preparing(blocksize, quant_type, packed.weight.device)


def is_prepared(packed: Packed) -> bool:
    """Whether a weight has a form that only some processors compute with."""
    return packed.weight.dtype == torch.int32 or packed.absmax.dtype == torch.bfloat16


def _prepared_for(what: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"the weights were prepared for {what}",
        needed="such a processor, or weights that were prepared on this one",
        fix="load the original checkpoint here, and save or cache it anew",
    )


def _fits_triton(
    shape: tuple[int, int],
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the Triton kernels serve a weight; says so where they should and do not."""
    if device.type != "cuda" or torch.version.hip:
        return False
    if not supported(*shape, blocksize, dtype, torch.cuda.get_device_capability(device)):
        return False
    reason = trouble(*shape, blocksize, quant_type, dtype, device)
    if reason:
        logger.warning_once(
            "bitsandbytes: the Triton kernels for 4-bit weights are not used, its own slower ones "
            "are. Weights of %s, blocks of %d: %s",
            " x ".join(map(str, shape)),
            blocksize,
            reason,
        )
    return reason is None


def has_packed_cpu() -> bool:
    """Whether bitsandbytes' AVX-512 kernel runs on this processor."""
    import bitsandbytes.functional as bnb

    return bool(bnb.has_avx512bf16())


def _quant_type(quant_map: torch.Tensor) -> str | None:
    """Whose values a table holds; None for values of its own."""
    for quant_type in QUANT_TYPES:
        usual = code_table(quant_type, quant_map.device)
        if torch.allclose(quant_map, usual, atol=1e-6, rtol=0):
            return quant_type
    return None
