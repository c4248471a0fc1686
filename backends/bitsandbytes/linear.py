"""Which method a linear layer gets: as stored, quantized in flight, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oot_quant.errors import UnsupportedFormat
from oot_quant.vllm_glue.config import logger

from .config import BitsAndBytesConfig
from .formats import EightBit, FourBit, label
from .library import try_library
from .linear_4bit import (
    Online4bitLinearMethod,
    Saved4bitLinearMethod,
    Stored4bitLinearMethod,
)
from .linear_8bit import (
    Online8bitLinearMethod,
    Saved8bitLinearMethod,
    Stored8bitLinearMethod,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oot_quant.checkpoint import StoredTensor
    from oot_quant.types import LinearRequest
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod

    from .options import Options


LONGEST = 500
"""Characters of a list of matrices in a message; a layer of experts has hundreds."""


def linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    """The method for a layer; None leaves it unquantized.

    Raises UnsupportedFormat if only some of the matrices that it merges are quantized, or
    not all in one format.
    """
    config = request.config
    assert isinstance(config, BitsAndBytesConfig)
    try_library()  # in the worker too, where the device that it has to work on is in use
    if request.saved is not None:
        return _saved(request.saved)
    if not config.formats:
        return None if _is_skipped(config, request) else _by_options(config)
    stored = {name: config.formats.get(name) for name in request.members}
    formats = [form for form in stored.values() if isinstance(form, (FourBit, EightBit))]
    if not formats:
        return None
    if len(formats) < len(stored) or len({form.layout for form in formats}) > 1:
        raise UnsupportedFormat(
            "the matrices of one fused layer are stored in different formats",
            where=request.prefix,
            found="; ".join(f"{name}: {label(form)}" for name, form in stored.items())[:LONGEST],
            needed="all of them in the same format",
            fix="use a checkpoint that treats them alike, or a 16-bit one",
        )
    return _stored(formats[0])


def _by_options(config: BitsAndBytesConfig) -> QuantizedLinearMethod:
    """In flight; or as the config says, where headers cannot be read (PyTorch files, dummy)."""
    wanted = config.wanted
    if not config.prequantized:
        return in_flight(wanted)
    if wanted.bits == 8:
        return _stored(EightBit())
    return _stored(FourBit(wanted.quant_type, wanted.blocksize, wanted.nested))


def in_flight(wanted: Options) -> QuantizedLinearMethod:
    return Online8bitLinearMethod() if wanted.bits == 8 else Online4bitLinearMethod(wanted)


def _stored(format: FourBit | EightBit) -> QuantizedLinearMethod:
    if isinstance(format, EightBit):
        return Stored8bitLinearMethod(format)
    return Stored4bitLinearMethod(format)


def _saved(tensors: Mapping[str, StoredTensor]) -> QuantizedLinearMethod | None:
    """The method for a layer of a sharded state, told by the parameters that it has there."""
    if "weight_absmax" in tensors:
        return Saved4bitLinearMethod(tensors)
    return Saved8bitLinearMethod(tensors) if "weight_scb" in tensors else None


def _is_skipped(config: BitsAndBytesConfig, request: LinearRequest) -> bool:
    """Whether the skip list names a layer or a part of it; a part keeps all of it out."""
    if config.is_skipped(request.prefix):
        return True
    skipped = [name for name in request.members if config.is_skipped(name)]
    if skipped and len(skipped) < len(request.members):
        logger.warning(
            "bitsandbytes: %s stays unquantized as a whole, since llm_int8_skip_modules names "
            "%s, which is merged into it.",
            request.prefix,
            ", ".join(skipped),
        )
    return bool(skipped)
