"""Routed experts: the two linear methods that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oot_quant.vllm_glue.experts import ExpertsMethod, experts_method

from .config import BitsAndBytesConfig
from .linear import in_flight, linear_method

if TYPE_CHECKING:
    from oot_quant.types import LinearRequest, MoeRequest
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod


def moe_method(request: MoeRequest) -> ExpertsMethod | None:
    """The method for a layer of experts; None leaves them in 16 bit.

    transformers 5 leaves them so, even in a checkpoint that it calls 4-bit.
    """
    return experts_method(request, _linear_method)


def _linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    config = request.config
    assert isinstance(config, BitsAndBytesConfig)
    method = linear_method(request)
    if method is None and config.formats and config.wanted.experts:
        return in_flight(config.wanted)
    return method
