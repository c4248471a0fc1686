"""Linear layers in 8 bit: from LLM.int8 tensors, or from 16-bit ones quantized while loading.

Both end in the same form: ``weight`` as the chosen kernel wants it, and ``weight_scb`` [rows, 1]
float32, the largest weight of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.model_executor.layers.linear import LinearBase

from oot_quant.errors import UnsupportedFormat, WeightMismatch
from oot_quant.vllm_glue.int8 import UNIT
from oot_quant.vllm_glue.linear import (
    OnlineLinearMethod,
    QuantizedLinearMethod,
    SavedLinearMethod,
    StoredLinearMethod,
)
from oot_quant.vllm_glue.params import Decoder, Site

from .agreement import METHOD
from .formats import ROW_LAYOUT, EightBit
from .kernels_8bit import STEPS, Kernel, choose
from .weights import quantize_rows

ROWS_AT_ONCE = 1024


class EightBitLinearMethod(QuantizedLinearMethod):
    """The final form and computing with it.

    ``keeps_rows``: the weight stays plain rows of int8 on a GPU too, as vLLM's kernels for routed
    experts want it.
    """

    kernel: Kernel
    keeps_rows = False

    def final(
        self, layer: LinearBase, weight: torch.Tensor, scb: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """Choose the kernel, and give it the parameters in the form that it wants."""
        rows, columns = weight.shape
        self.kernel = choose(rows, columns, self.dtype, keeps_rows=self.keeps_rows)
        return {**self.kernel.prepare(layer, weight), "weight_scb": scb}

    def adopt(self, layer: LinearBase, final: Mapping[str, torch.Tensor]) -> None:
        scb, columns = final["weight_scb"], self.shape.rank_columns
        self.kernel = choose(len(scb), columns, self.dtype, keeps_rows=self.keeps_rows)
        # A kernel of vLLM finds out what it needs while it prepares a weight; any will do.
        zeros = torch.zeros(len(scb), columns, dtype=torch.int8, device=scb.device)
        example = self.kernel.prepare(layer, zeros)
        needed = {name: (value.shape, value.dtype) for name, value in example.items()}
        found = {name: (final[name].shape, final[name].dtype) for name in needed if name in final}
        if found != needed:
            raise UnsupportedFormat(
                "the weights were prepared for another kind of device",
                where=layer.prefix,
                found=str(found),
                needed=str(needed),
                fix="load the original checkpoint here, and save or cache it anew",
            )

    def apply(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale: torch.Tensor = layer.weight_scb.view(-1) / (STEPS * UNIT)
        out = self.kernel(layer, x) * scale
        return (out if bias is None else out + bias).to(x.dtype)

    def dequantize(self, layer: LinearBase) -> torch.Tensor:
        """Asks the kernel itself, whose layout is its own: the product with unit vectors."""
        columns = self.shape.rank_columns
        parts = []
        every = torch.arange(columns, device=layer.weight.device)
        for start in range(0, columns, ROWS_AT_ONCE):
            # Nothing from the host: a graph may be recorded.
            units = (every[start : start + ROWS_AT_ONCE, None] == every).to(self.dtype)
            parts.append(self.kernel(layer, units).t().float())
        scale: torch.Tensor = layer.weight_scb / (STEPS * UNIT)
        return (torch.cat(parts, dim=1) * scale).to(self.dtype)


class Stored8bitLinearMethod(StoredLinearMethod, EightBitLinearMethod):
    """A layer whose matrices are stored by LLM.int8."""

    def __init__(self, format: EightBit) -> None:
        super().__init__(METHOD, format)

    def decoders(self) -> Mapping[str, Decoder]:
        return {"weight": _signed, "weight_format": _row_layout}

    def decode(self, layer: LinearBase) -> Mapping[str, torch.Tensor]:
        return self.final(layer, layer.weight.data, layer.weight_scb.data)


class Saved8bitLinearMethod(SavedLinearMethod, EightBitLinearMethod):
    """A layer of a sharded state."""


class Online8bitLinearMethod(OnlineLinearMethod, EightBitLinearMethod):
    """A layer whose 16-bit matrices are quantized on arrival, row by row."""

    def quantize(
        self, layer: LinearBase, matrices: Sequence[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return self.final(layer, *quantize_rows(*matrices))


def _signed(weight: torch.Tensor, site: Site) -> torch.Tensor:
    """Refuse 16-bit weights, which would be cut to whole numbers without a word."""
    if weight.dtype != torch.int8:
        raise WeightMismatch(
            "an 8-bit layer was given a weight that is not 8-bit",
            where=site.where,
            found=f"{weight.dtype} of shape {list(weight.shape)}",
            needed="torch.int8",
            fix="use a checkpoint whose 8-bit modules all have an SCB tensor",
        )
    return weight


def _row_layout(code: torch.Tensor, site: Site) -> torch.Tensor:
    """Refuse layouts of old GPUs; only whole rows are understood."""
    if int(code.flatten()[0]) != ROW_LAYOUT:
        raise UnsupportedFormat(
            "an 8-bit weight is stored in a layout of an old GPU",
            where=site.where,
            found=f"weight_format {int(code.flatten()[0])}",
            needed=f"weight_format {ROW_LAYOUT}, plain rows",
            fix="save the checkpoint again with a current bitsandbytes",
        )
    return code
