"""Routed experts: the two linear methods that they are made of, and their kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oot_quant.vllm_glue.experts import ExpertsMethod, experts_method

from .config import BitsAndBytesConfig
from .kernels_8bit import STEPS
from .linear import in_flight, linear_method
from .linear_8bit import EightBitLinearMethod

if TYPE_CHECKING:
    from oot_quant.types import LinearRequest, MoeRequest
    from oot_quant.vllm_glue.grouped import Int8Rows, PackedKernel
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod


def moe_method(request: MoeRequest) -> ExpertsMethod | None:
    """The method for a layer of experts; None leaves them in 16 bit.

    transformers 5 leaves them so, even in a checkpoint that it calls 4-bit.
    """
    return experts_method(request, _linear_method, _kernel)


def _linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    config = request.config
    assert isinstance(config, BitsAndBytesConfig)
    method = linear_method(request)
    if method is None and config.formats and config.wanted.experts:
        method = in_flight(config.wanted)
    if isinstance(method, EightBitLinearMethod):
        method.keeps_rows = True
    return method


def _kernel(
    methods: Mapping[str, QuantizedLinearMethod], layer: Any
) -> PackedKernel | Int8Rows | None:
    """What a finished layer is multiplied with on a GPU; None unpacks all its experts."""
    from oot_quant.vllm_glue.grouped import Int8Rows

    from .experts_4bit import choose

    if all(isinstance(method, EightBitLinearMethod) for method in methods.values()):
        return Int8Rows("weight_scb", STEPS)
    return choose(methods, layer)
