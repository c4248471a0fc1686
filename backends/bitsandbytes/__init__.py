"""The bitsandbytes backend: nf4, fp4 and int8 weights, from checkpoints or made in flight.

This module only answers hooks; each answer lives in the file of its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oot_quant import hookimpl
from oot_quant.types import (
    BackendInfo,
    Check,
    Library,
    LinearRequest,
    ModuleSummary,
    MoeRequest,
    NameRule,
    ParameterRule,
    ShardRequest,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearMethodBase

    from oot_quant.checkpoint import Checkpoint
    from oot_quant.vllm_glue.config import PluginConfig

LIBRARY = Library("bitsandbytes", "0.50.0")


@hookimpl
def oot_quant_describe() -> BackendInfo:
    return BackendInfo(
        name="bitsandbytes",
        summary="4-bit (nf4, fp4) and 8-bit weights of bitsandbytes, pre-quantized or in flight",
        methods=("bitsandbytes",),
        formats=("nf4", "fp4", "int8"),
        platforms=("cuda", "cpu", "xpu"),
        library=LIBRARY,
    )


@hookimpl
def oot_quant_checks() -> Sequence[Check]:
    from .checks import CHECKS

    return CHECKS


@hookimpl
def oot_quant_config() -> type[PluginConfig]:
    from .config import BitsAndBytesConfig

    return BitsAndBytesConfig


@hookimpl
def oot_quant_read_formats(checkpoint: Checkpoint) -> Mapping[str, object] | None:
    from .formats import read_formats

    return read_formats(checkpoint)


@hookimpl
def oot_quant_summarize_format(format: object) -> ModuleSummary:
    from .formats import summarize

    return summarize(format)


@hookimpl
def oot_quant_weight_names() -> Sequence[NameRule]:
    from .weights import NAME_RULES

    return NAME_RULES


@hookimpl
def oot_quant_shard_rule(request: ShardRequest) -> Sequence[ParameterRule]:
    from .sharding import parameter_rules

    return parameter_rules(request)


@hookimpl
def oot_quant_linear_method(request: LinearRequest) -> LinearMethodBase | None:
    from .linear import linear_method

    return linear_method(request)


@hookimpl
def oot_quant_moe_method(request: MoeRequest) -> FusedMoEMethodBase | None:
    from .fused_moe import moe_method

    return moe_method(request)
