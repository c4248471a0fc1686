"""Routed experts. Packed experts are refused by name; others stay as they are stored."""

from __future__ import annotations

from oot_quant.errors import UnsupportedFormat
from oot_quant.types import MoeRequest


def refuse_packed_experts(request: MoeRequest) -> None:
    """Let 16-bit experts be.

    Raises UnsupportedFormat if the checkpoint holds packed weights inside this layer.
    """
    inside = f"{request.prefix}."
    packed = [name for name in request.config.formats if name.startswith(inside)]
    if packed:
        raise UnsupportedFormat(
            "4-bit experts are not supported yet",
            where=packed[0],
            found=f"{len(packed)} packed expert weights in {request.prefix}",
            needed="experts in 16 bit",
            fix="use a checkpoint of this model whose experts are not quantized",
        )
