"""Routed experts. Packed experts are refused by name; others stay as they are stored."""

from __future__ import annotations

from oot_quant.errors import UnsupportedFormat
from oot_quant.types import MoeRequest
from oot_quant.vllm_glue.config import logger


def refuse_packed_experts(request: MoeRequest) -> None:
    """Let 16-bit experts be, and say so once if the rest is quantized in flight.

    Raises UnsupportedFormat if the checkpoint holds packed weights inside this layer.
    """
    # vLLM 0.32 puts a module between the layer and its experts' names.
    inside = request.prefix.removesuffix(".routed_experts") + "."
    packed = [name for name in request.config.formats if name.startswith(inside)]
    if packed:
        raise UnsupportedFormat(
            "quantized experts are not supported yet",
            where=packed[0],
            found=f"{len(packed)} quantized expert weights in {inside.removesuffix('.')}",
            needed="experts in 16 bit",
            fix="use a checkpoint of this model whose experts are not quantized",
        )
    if not request.config.prequantized:
        logger.warning_once("bitsandbytes: routed experts stay in 16 bit, the rest is quantized.")
