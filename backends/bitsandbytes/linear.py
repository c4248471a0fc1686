"""Linear layers in 4 bit: from packed tensors, or from 16-bit ones quantized while loading.

Both end in the same form, ``weight``, ``weight_absmax`` and ``weight_quant_map`` as parameters
of the layer, so everything after loading (saving, reloading, computing) knows one form only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from oot_quant.errors import UnsupportedFormat, WeightMismatch
from oot_quant.manager import backends
from oot_quant.sharding import granule
from oot_quant.types import LinearRequest, ParameterRule, Runs, ShardRequest
from oot_quant.vllm_glue.config import logger
from oot_quant.vllm_glue.params import (
    LayerShape,
    Site,
    check_filled,
    create_parameters,
    load_plain_weight,
    to_matrix,
)

from .config import BitsAndBytesConfig
from .formats import BLOCKSIZES, FourBit, parse_state
from .kernels import Kernel, choose
from .options import Options
from .weights import decode_absmax, quantize

FINAL = ("weight", "weight_absmax", "weight_quant_map")
"""Parameters of a layer that is ready to compute."""
PROCESSED = "_already_called_process_weights_after_loading"
"""Set on a processed layer. vLLM's reload deletes the attribute of just this name."""


def linear_method(request: LinearRequest) -> LinearMethodBase | None:
    """The method for a layer: as stored, quantized in flight, or None for unquantized.

    Raises UnsupportedFormat if only some of the matrices that it merges are packed, or not
    all in one format.
    """
    config = request.config
    assert isinstance(config, BitsAndBytesConfig)
    if not config.prequantized:
        return _in_flight(config, request)
    if not config.formats:
        # Headers could not be read (PyTorch files, dummy weights): go by the config.
        if any(config.is_skipped(name) for name in (request.prefix, *request.members)):
            return None
        wanted = config.wanted
        return Stored4bitLinearMethod(FourBit(wanted.quant_type, wanted.blocksize, wanted.nested))
    # A layer that is fused on disk is listed under its own name.
    names = request.members if request.prefix not in config.formats else (request.prefix,)
    stored = {name: config.formats.get(name) for name in names}
    four_bit = [format for format in stored.values() if isinstance(format, FourBit)]
    if not four_bit:
        return None
    if len(four_bit) < len(stored) or len({format.layout for format in four_bit}) > 1:
        raise UnsupportedFormat(
            "the matrices of one fused layer are stored in different formats",
            where=request.prefix,
            found="; ".join(f"{name}: {_label(format)}" for name, format in stored.items()),
            needed="all of them in the same format",
            fix="use a checkpoint that treats them alike, or a 16-bit one",
        )
    return Stored4bitLinearMethod(four_bit[0])


def _in_flight(config: BitsAndBytesConfig, request: LinearRequest) -> LinearMethodBase | None:
    names = (request.prefix, *request.members)
    skipped = [name for name in names if config.is_skipped(name)]
    if skipped:
        if request.prefix not in skipped and len(skipped) < len(request.members):
            logger.warning(
                "bitsandbytes: %s stays unquantized as a whole, since llm_int8_skip_modules "
                "names %s, which is merged into it.", request.prefix, ", ".join(skipped),
            )
        return None
    return Online4bitLinearMethod(config.wanted)


def _label(format: object) -> str:
    if not isinstance(format, FourBit):
        return "unquantized"
    nested = ", double quantization" if format.nested else ""
    return f"{format.quant_type}, blocks of {format.blocksize}{nested}"


class Packed4bitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """What both ways of loading share: the final form, and computing with it."""

    def __init__(self, quant_type: str) -> None:
        self.quant_type = quant_type
        self.kernel: Kernel | None = None

    def install(
        self,
        layer: LinearBase,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        quant_map: torch.Tensor,
    ) -> None:
        """Choose the kernel and leave the layer with nothing but the final parameters.

        weight: [rows, columns / 2] uint8; absmax: [rows, n] float32; quant_map: [16] float32.
        """
        shape = (weight.shape[0], 2 * weight.shape[1])
        self.kernel = choose(self.quant_type, absmax, quant_map, shape, layer.params_dtype)
        weight, absmax = self.kernel.prepare(weight, absmax)
        for name in [name for name in layer._parameters if name.startswith("weight")]:
            delattr(layer, name)
        for name, value in zip(FINAL, (weight, absmax, quant_map), strict=True):
            parameter = torch.nn.Parameter(value.contiguous(), requires_grad=False)
            layer.register_parameter(name, parameter)
        setattr(layer, PROCESSED, True)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.kernel is not None, "weights were not processed"
        return self.kernel(x, layer.weight, layer.weight_absmax, layer.weight_quant_map, bias)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight on this rank, [rows, columns], in the layer's dtype."""
        assert self.kernel is not None, "weights were not processed"
        dense = self.kernel.dequantize(layer.weight, layer.weight_absmax, layer.weight_quant_map)
        return dense.to(layer.params_dtype)


class Stored4bitLinearMethod(Packed4bitLinearMethod):
    """A layer whose matrices are stored packed."""

    def __init__(self, format: FourBit) -> None:
        super().__init__(format.quant_type)
        self.format = format
        self.rules: Sequence[ParameterRule] = ()
        self.rows: list[int] = []

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        assert isinstance(layer, LinearBase)
        request = ShardRequest(BitsAndBytesConfig.method, self.format, input_size)
        self.rules = backends().call(request.method, "oot_quant_shard_rule", request=request)
        self.rows = list(output_partition_sizes)
        shape = LayerShape(tuple(self.rows), input_size, input_size_per_partition)
        decoders = {"weight": _codes, "weight_quant_state": self._nested_offset}
        create_parameters(layer, self.rules, shape, decoders)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, PROCESSED, False):
            return
        assert isinstance(layer, LinearBase)
        check_filled(layer, self.rules)
        absmax = layer.weight_absmax.data
        if self.format.nested:
            absmax = self._decode(layer)
        self.install(layer, layer.weight.data, absmax, self._quant_map(layer))

    def _decode(self, layer: LinearBase) -> torch.Tensor:
        """Scales of all merged matrices, each decoded with its own statistics."""
        parts = zip(
            layer.weight_absmax.data.split(self.rows),
            layer.weight_nested_quant_map.data,
            layer.weight_nested_absmax.data.split(self.rows),
            layer.weight_quant_state.data,
            strict=True,
        )
        return torch.cat([decode_absmax(*part) for part in parts])

    def _quant_map(self, layer: LinearBase) -> torch.Tensor:
        maps = layer.weight_quant_map.data
        if not bool((maps == maps[0]).all()):
            raise WeightMismatch(
                "the matrices of one fused layer have different code tables",
                where=f"{layer.prefix}.weight_quant_map",
                needed="the same 16 values for all of them",
                fix="use a checkpoint that quantizes them alike",
            )
        return maps[0].clone()

    def _nested_offset(self, blob: torch.Tensor, site: Site) -> torch.Tensor:
        """The one statistic of the JSON that loading needs; the rest has to agree with the layer."""
        state = parse_state(bytes(blob.flatten().to(torch.uint8).tolist()), site.where)
        found = (state["quant_type"], state["shape"])
        needed = (self.format.quant_type, (site.rows, site.columns))
        # Where a matrix has just one block, its scale is the same for every block size.
        one_block = site.rows * site.columns <= min(state["blocksize"], self.format.blocksize)
        if found != needed or not (state["blocksize"] == self.format.blocksize or one_block):
            raise WeightMismatch(
                "a quant state does not describe the weight of its layer",
                where=site.where,
                found=f"{state['quant_type']}, blocks of {state['blocksize']}, "
                f"shape {list(state['shape'])}",
                needed=f"{_label(self.format)}, shape {[site.rows, site.columns]}",
                fix="use a checkpoint made for this model and its config.json",
            )
        return torch.tensor([state["nested_offset"]], dtype=torch.float32)


class Online4bitLinearMethod(Packed4bitLinearMethod):
    """A layer whose 16-bit matrices are quantized as soon as all of them have arrived."""

    uses_meta_device = True

    def __init__(self, options: Options) -> None:
        super().__init__(options.quant_type)
        self.options = options

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        assert isinstance(layer, LinearBase)
        self.rows = list(output_partition_sizes)
        self.columns, self.rank_columns = input_size, input_size_per_partition
        data = torch.empty(
            sum(self.rows), input_size_per_partition, dtype=params_dtype, device="meta"
        )
        weight = ModelWeightParameter(
            data=data, input_dim=1, output_dim=0, weight_loader=load_plain_weight(layer)
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, PROCESSED, False):
            return
        assert isinstance(layer, LinearBase)
        blocksize = self._blocksize()
        blocks = Runs(weights=blocksize, repeatable=True)
        size = granule(blocks, self.rank_columns, self.rank_columns)
        codes, scales, quant_map = [], [], None
        for part in layer.weight.data.split(self.rows):
            packed, absmax, quant_map = quantize(
                part, self.quant_type, blocksize, self.options.nested
            )
            codes.append(packed.view(part.shape[0], -1))
            site = Site(layer.prefix, *part.shape)
            scales.append(to_matrix(absmax, blocks, site, size))
        assert quant_map is not None
        self.install(layer, torch.cat(codes), torch.cat(scales), quant_map)

    def _blocksize(self) -> int:
        """The block size asked for; a smaller one if it would reach across two ranks."""
        if self.columns == self.rank_columns:
            return self.options.blocksize
        common = gcd(self.options.blocksize, self.rank_columns)
        return common if common in BLOCKSIZES else self.options.blocksize


def _codes(weight: torch.Tensor, site: Site) -> torch.Tensor:
    """Packed bytes, whatever dtype they were stored as (FSDP stores them as floats)."""
    return weight.contiguous().view(torch.uint8) if weight.dtype != torch.uint8 else weight
