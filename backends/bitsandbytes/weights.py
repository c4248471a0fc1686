"""Names of stored tensors, and what becomes of the tensors themselves: decode, quantize, unpack.

Plain tensor functions; no layers, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oot_quant.types import NameRule

from .formats import QUANT_TYPES, SIDE_TENSORS, STATE

NAME_RULES = tuple(
    [NameRule(".SCB", ".weight_scb")]
    + [NameRule(f".weight.{side}", f".weight_{side}") for side in SIDE_TENSORS]
    + [NameRule(f".weight.{STATE}{kind}", ".weight_quant_state") for kind in QUANT_TYPES]
)


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
        packed, state = bnb.quantize_4bit(
            weight.contiguous(),
            blocksize=blocksize,
            compress_statistics=nested,
            quant_type=quant_type,
        )
        absmax = state.absmax
        if nested:
            absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return packed.reshape(-1), absmax.reshape(-1).float(), state.code.float()


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix as LLM.int8 does: round each row to 127 steps of its largest weight.

    weight: [rows, columns] of any float dtype. Returns [rows, columns] int8 and the largest
    weights, [rows, 1] float32. Computed in float32, where bitsandbytes rounds to float16
    first. Source: https://arxiv.org/abs/2208.07339, vector-wise quantization.
    """
    scb = weight.abs().amax(dim=1, keepdim=True).float()
    steps = torch.where(scb > 0, 127 / scb, 0.0)
    return (weight.float() * steps).round().to(torch.int8), scb


def code_table(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values that bitsandbytes' own kernels decode to, float32."""
    import bitsandbytes.functional as bnb

    with _float32_default():
        table: torch.Tensor = bnb.get_4bit_type(quant_type, device=device)
    return table


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
