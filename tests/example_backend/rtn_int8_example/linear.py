"""Linear layers in int8: stored so, or quantized in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from oot_quant.errors import UnsupportedFormat
from oot_quant.types import LinearRequest
from oot_quant.vllm_glue.linear import (
    OnlineLinearMethod,
    QuantizedLinearMethod,
    StoredLinearMethod,
)

from .config import RtnInt8Config

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase


def linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    config = request.config
    if not config.prequantized:
        return OnlineInt8LinearMethod()
    names = config.stored_names(request.prefix)
    plain = [name for name in names if name not in config.formats]
    if config.formats and len(plain) == len(names):
        return None
    if config.formats and plain:
        raise UnsupportedFormat(
            "only some matrices of one fused layer are int8",
            where=request.prefix,
            found=f"not int8: {', '.join(plain)}",
            fix="use a checkpoint that treats them alike",
        )
    return StoredInt8LinearMethod(RtnInt8Config.method, config.formats.get(names[0]))


class Int8LinearMethod(QuantizedLinearMethod):
    """Computes with ``weight`` int8 [rows, columns] and ``weight_scale`` float32 [rows, 1]."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.dequantize(layer).to(x.dtype), bias)

    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        return (layer.weight * layer.weight_scale).to(self.dtype)


class StoredInt8LinearMethod(StoredLinearMethod, Int8LinearMethod):
    """What is loaded is what is computed with; nothing to decode."""


class OnlineInt8LinearMethod(OnlineLinearMethod, Int8LinearMethod):
    def quantize(
        self, layer: LinearBase, matrices: Sequence[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        weight = torch.cat(list(matrices)).float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
