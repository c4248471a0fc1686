"""Names of stored tensors, and what becomes of the tensors themselves: decode, quantize, unpack.

Plain tensor functions; no layers, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oot_quant.types import NameRule

from .formats import NESTED_BLOCKSIZE, QUANT_TYPES, SIDE_TENSORS, STATE

NAME_RULES = tuple(
    [NameRule(".SCB", ".weight_scb")]
    + [NameRule(f".weight.{side}", f".weight_{side}") for side in SIDE_TENSORS]
    + [NameRule(f".weight.{STATE}{kind}", ".weight_quant_state") for kind in QUANT_TYPES]
)

SLICES = 16
"""Into how many parts a weight is cut to convert one at a time: on the way, each of its numbers
takes a dozen bytes. Small weights are cut into fewer."""
SMALLEST_SLICE = 2**18


def decode_absmax(
    codes: torch.Tensor,
    quant_map: torch.Tensor,
    nested_absmax: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Undo double quantization: scales from their 8-bit codes.

    codes: [rows, n] uint8; quant_map: [256]; nested_absmax: [rows, m] with n a multiple of
    m; offset: [1]. All but the codes in float32, whatever the default dtype of torch is
    meanwhile. Returns [rows, n] float32.

    Source: bitsandbytes.functional.dequantize_4bit.
    """
    index = codes.to(torch.int64)
    repeats = codes.shape[1] // nested_absmax.shape[1]
    scales = nested_absmax.repeat_interleave(repeats, dim=1)
    return quant_map[index] * scales + offset


def unpack(weight: torch.Tensor, absmax: torch.Tensor, quant_map: torch.Tensor) -> torch.Tensor:
    """The weights that packed codes stand for, in float32.

    weight: [rows, columns / 2] uint8, high nibble first; absmax: [rows, n] float32 with
    columns a multiple of n; quant_map: [16] float32. Returns [rows, columns] float32.
    """
    codes = torch.stack((weight >> 4, weight & 0xF), dim=-1).to(torch.int64)
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    values = quant_map[codes].view(rows, absmax.shape[1], columns // absmax.shape[1])
    return (values * absmax.unsqueeze(-1)).view(rows, columns)


def quantize(
    weight: torch.Tensor, quant_type: str, blocksize: int, nested: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a matrix with bitsandbytes, as it would do itself.

    weight: [rows, columns] float16, bfloat16 or float32. Returns the codes, flat uint8; the
    scales, flat float32, with double quantization already undone; the 16 values.
    """
    import bitsandbytes.functional as bnb

    with _float32_default(), _library_stream(weight):
        parts = [
            bnb.quantize_4bit(part, blocksize=blocksize, quant_type=quant_type)
            for part in _slices(weight, blocksize)
        ]
        packed = torch.cat([part.reshape(-1) for part, _ in parts])
        absmax, code = torch.cat([state.absmax for _, state in parts]), parts[0][1].code
        if nested:
            offset = absmax.mean()
            codes, state = bnb.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCKSIZE)
            absmax = bnb.dequantize_blockwise(codes, state) + offset
    return packed, absmax.float(), code.float()


def quantize_rows(*matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize matrices as LLM.int8 does: round each row to 127 steps of its largest weight.

    matrices: [rows, columns] of any float dtype. Returns [all rows, columns] int8 and the
    largest weights, [all rows, 1] float32. Computed in float32, where bitsandbytes rounds to
    float16 first. Source: https://arxiv.org/abs/2208.07339, vector-wise quantization.
    """
    rows = [matrix.shape[0] for matrix in matrices]
    device, columns = matrices[0].device, matrices[0].shape[1]
    octets = torch.empty(sum(rows), columns, dtype=torch.int8, device=device)
    largest = torch.empty(sum(rows), 1, dtype=torch.float32, device=device)
    for places in zip(matrices, torch.split(octets, rows), torch.split(largest, rows), strict=True):
        count = rows_at_once(places[0])
        for part, out, scb in zip(*(torch.split(place, count) for place in places), strict=True):
            scb.copy_(part.abs().amax(dim=1, keepdim=True))
            steps = torch.where(scb > 0, 127 / scb, 0.0)
            out.copy_((part.float() * steps).round_())
    return octets, largest


def code_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values that bitsandbytes' own kernels decode to, float32."""
    import bitsandbytes.functional as bnb

    with _float32_default():
        table: torch.Tensor = bnb.get_4bit_type(quant_type, device=device)
    return table


def rows_at_once(weight: torch.Tensor, multiple: int = 1) -> int:
    """How many rows of a matrix to convert at a time, in multiples of so many."""
    count = _slice_of(weight) // max(1, weight.shape[1])
    return max(multiple, count // multiple * multiple)


def _slices(weight: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, ...]:
    """Whole blocks of a weight, flat, to quantize at a time."""
    count = _slice_of(weight) // blocksize * blocksize
    return torch.split(weight.reshape(-1), max(blocksize, count))


def _slice_of(weight: torch.Tensor) -> int:
    return max(SMALLEST_SLICE, weight.numel() // SLICES)


@contextmanager
def _float32_default() -> Iterator[None]:
    """Let bitsandbytes make its tables in float32.

    It makes them in torch's default dtype, which vLLM sets to the model's while it loads, and
    keeps them: a table rounded to bfloat16 would serve the whole process.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _library_stream(tensor: torch.Tensor) -> Iterator[None]:
    """Order bitsandbytes' quantization after what made the tensor, and what follows after it.

    Its CUDA quantization kernels always start on the default stream while vLLM works on one
    of its own; without this the statistics of a weight that is still being copied are wrong.
    """
    if tensor.device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(tensor.device)
    default = torch.cuda.default_stream(tensor.device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        yield
    current.wait_stream(default)
    tensor.record_stream(default)
