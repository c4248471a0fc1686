"""Linear layers in 4 bit: from packed tensors, or from 16-bit ones quantized while loading.

Both end in the same form, ``weight``, ``weight_absmax`` and ``weight_quant_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import torch
from vllm.model_executor.layers.linear import LinearBase

from oot_quant.errors import WeightMismatch
from oot_quant.sharding import granule
from oot_quant.types import Runs
from oot_quant.vllm_glue.linear import (
    OnlineLinearMethod,
    QuantizedLinearMethod,
    SavedLinearMethod,
    StoredLinearMethod,
)
from oot_quant.vllm_glue.params import Decoder, Site, to_matrix

from .agreement import METHOD
from .formats import BLOCKSIZES, FourBit, label, parse_state
from .kernels_4bit import Kernel, Packed, choose, is_prepared, recognize
from .options import Options
from .weights import code_table, decode_absmax, quantize

FINAL = ("weight", "weight_absmax", "weight_quant_map")
SCRATCH = "weight_scratch"


class FourBitLinearMethod(QuantizedLinearMethod):
    """The final form, ``kernels_4bit.Packed`` as parameters of the layer, and computing with it."""

    kernel: Kernel

    def final(self, layer: LinearBase, packed: Packed) -> Mapping[str, torch.Tensor]:
        """Choose the kernel, and give it the parameters in the form that it wants."""
        self.kernel = choose(packed, self.dtype)
        return dict(zip(FINAL, self.kernel.prepare(packed), strict=True))

    def adopt(self, layer: LinearBase, final: Mapping[str, torch.Tensor]) -> None:
        rows = sum(self.shape.rows)
        self.kernel = recognize(Packed(*(final[name] for name in FINAL)), self.dtype, rows)

    def scratch(self, layer: LinearBase) -> Mapping[str, torch.Tensor]:
        value = self.kernel.scratch(packed_of(layer))
        return {} if value is None else {SCRATCH: value}

    def apply(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.kernel(x, packed_of(layer), bias, getattr(layer, SCRATCH, None))

    def dequantize(self, layer: LinearBase) -> torch.Tensor:
        return self.kernel.dequantize(packed_of(layer)).to(self.dtype)


def packed_of(layer: LinearBase) -> Packed:
    """A finished layer's weight."""
    return Packed(layer.weight, layer.weight_absmax, layer.weight_quant_map)


class Stored4bitLinearMethod(StoredLinearMethod, FourBitLinearMethod):
    """A layer whose matrices are stored packed."""

    def __init__(self, format: FourBit) -> None:
        super().__init__(METHOD, format)
        self.stored = format

    def decoders(self) -> Mapping[str, Decoder]:
        return {"weight": _octets, "weight_quant_state": self._nested_offset}

    def decode(self, layer: LinearBase) -> Mapping[str, torch.Tensor]:
        absmax = self._decode_absmax(layer) if self.stored.nested else layer.weight_absmax.data
        packed = Packed(layer.weight.data, absmax, self._quant_map(layer))
        return self.final(layer, packed)

    def _decode_absmax(self, layer: LinearBase) -> torch.Tensor:
        """Scales of all merged matrices, each decoded with its own statistics."""
        offsets = layer.weight_quant_state.data.view(torch.float32)
        parts = zip(
            layer.weight_absmax.data.split(self.shape.rows),
            layer.weight_nested_quant_map.data,
            layer.weight_nested_absmax.data.split(self.shape.rows),
            torch.zeros_like(offsets) if self.is_dummy else offsets,
            strict=True,
        )
        return torch.cat([decode_absmax(*part) for part in parts])

    def _quant_map(self, layer: LinearBase) -> torch.Tensor:
        """The 16 values, which merged matrices have to share."""
        maps = layer.weight_quant_map.data
        if self.is_dummy:
            return code_table(self.stored.quant_type, maps.device)
        if not bool((maps == maps[0]).all()):
            raise WeightMismatch(
                "the matrices of one fused layer have different code tables",
                where=f"{layer.prefix}.weight_quant_map",
                found=f"{len(maps.unique(dim=0))} different tables",
                needed="the same 16 values for all of them",
                fix="use a checkpoint that quantizes them alike",
            )
        shared: torch.Tensor = maps[0]
        return shared.clone()

    def _nested_offset(self, blob: torch.Tensor, site: Site) -> torch.Tensor:
        """The one number of the JSON that loading needs; the rest must agree with the layer."""
        state = parse_state(bytes(blob.flatten().to(torch.uint8).tolist()), site.where)
        found = (state["quant_type"], state["shape"])
        needed = (self.stored.quant_type, (site.rows, site.columns))
        # Where a matrix has just one block, its scale is the same for every block size.
        one_block = site.rows * site.columns <= min(state["blocksize"], self.stored.blocksize)
        if found != needed or not (state["blocksize"] == self.stored.blocksize or one_block):
            raise WeightMismatch(
                "a quant state does not describe the weight of its layer",
                where=site.where,
                found=f"{state['quant_type']}, blocks of {state['blocksize']}, "
                f"shape {list(state['shape'])}",
                needed=f"{label(self.stored)}, shape {[site.rows, site.columns]}",
                fix="use a checkpoint made for this model and its config.json",
            )
        return torch.tensor([state["nested_offset"]], dtype=torch.float32).view(torch.uint8)


class Saved4bitLinearMethod(SavedLinearMethod, FourBitLinearMethod):
    """A layer of a sharded state."""

    def finish(self, layer: LinearBase) -> Mapping[str, torch.Tensor]:
        """As saved; or for the best kernel here, if it was saved for none of its own."""
        packed = packed_of(layer)
        return super().finish(layer) if is_prepared(packed) else self.final(layer, packed)


class Online4bitLinearMethod(OnlineLinearMethod, FourBitLinearMethod):
    """A layer whose 16-bit matrices are quantized on arrival, each as bitsandbytes would."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def quantize(
        self, layer: LinearBase, matrices: Sequence[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        blocksize, columns = self._blocksize(), self.shape.rank_columns
        blocks = Runs(weights=blocksize, repeatable=True)
        size = granule(blocks, columns, columns)
        codes, scales = [], []
        for matrix in matrices:
            octets, absmax, quant_map = quantize(
                matrix, self.options.quant_type, blocksize, self.options.nested
            )
            codes.append(octets.view(matrix.shape[0], -1))
            scales.append(to_matrix(absmax, blocks, Site(layer.prefix, *matrix.shape), size))
        packed = Packed(torch.cat(codes), torch.cat(scales), quant_map)
        return self.final(layer, packed)

    def _blocksize(self) -> int:
        """The block size asked for; a smaller one if it would reach across two ranks."""
        if self.shape.columns == self.shape.rank_columns:
            return self.options.blocksize
        common = gcd(self.options.blocksize, self.shape.rank_columns)
        return common if common in BLOCKSIZES else self.options.blocksize


def _octets(weight: torch.Tensor, site: Site) -> torch.Tensor:
    """Packed bytes, whatever dtype they were stored as (FSDP stores them as floats)."""
    return weight.contiguous().view(torch.uint8) if weight.dtype != torch.uint8 else weight
