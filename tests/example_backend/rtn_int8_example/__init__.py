"""Round-to-nearest int8 weights with one scale for each row. This module only answers hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oot_quant import hookimpl
from oot_quant.types import (
    BackendInfo,
    Check,
    LinearRequest,
    ModuleSummary,
    NameRule,
    ParameterRule,
    ShardRequest,
)

if TYPE_CHECKING:
    from oot_quant.checkpoint import Checkpoint
    from oot_quant.vllm_glue.config import PluginConfig
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod


@hookimpl
def oot_quant_describe() -> BackendInfo:
    return BackendInfo(
        name="rtn_int8",
        summary="int8 weights rounded to nearest, one scale for each row (example)",
        methods=("rtn_int8",),
        formats=("int8",),
        platforms=("cpu", "cuda"),
    )


@hookimpl
def oot_quant_config() -> type[PluginConfig]:
    from .config import RtnInt8Config

    return RtnInt8Config


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
    from .formats import NAME_RULES

    return NAME_RULES


@hookimpl
def oot_quant_shard_rule(request: ShardRequest) -> Sequence[ParameterRule]:
    from .sharding import parameter_rules

    return parameter_rules(request)


@hookimpl
def oot_quant_linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    from .linear import linear_method

    return linear_method(request)


@hookimpl
def oot_quant_checks() -> Sequence[Check]:
    from .checks import CHECKS

    return CHECKS
