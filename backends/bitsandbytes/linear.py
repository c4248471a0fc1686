"""Which method a linear layer gets: as stored, quantized in flight, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oot_quant.errors import UnsupportedFormat
from oot_quant.vllm_glue.config import logger

from .config import BitsAndBytesConfig
from .formats import EightBit, FourBit, label
from .library import require_library
from .linear_4bit import Online4bitLinearMethod, Stored4bitLinearMethod
from .linear_8bit import Online8bitLinearMethod, Stored8bitLinearMethod

if TYPE_CHECKING:
    from oot_quant.types import LinearRequest
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod


def linear_method(request: LinearRequest) -> QuantizedLinearMethod | None:
    """The method for a layer; None leaves it unquantized.

    Raises UnsupportedFormat if only some of the matrices that it merges are quantized, or
    not all in one format.
    """
    config = request.config
    assert isinstance(config, BitsAndBytesConfig)
    require_library()  # in the worker too, where the device that it has to work on is in use
    wanted = config.wanted
    if not config.prequantized:
        if _is_skipped(config, request):
            return None
        return Online8bitLinearMethod() if wanted.bits == 8 else Online4bitLinearMethod(wanted)
    if not config.formats:
        # Headers could not be read (PyTorch files, dummy weights): go by the config.
        if _is_skipped(config, request):
            return None
        return _stored(
            EightBit()
            if wanted.bits == 8
            else FourBit(wanted.quant_type, wanted.blocksize, wanted.nested)
        )
    stored = {name: config.formats.get(name) for name in config.stored_names(request.prefix)}
    formats = [form for form in stored.values() if isinstance(form, (FourBit, EightBit))]
    if not formats:
        return None
    if len(formats) < len(stored) or len({form.layout for form in formats}) > 1:
        raise UnsupportedFormat(
            "the matrices of one fused layer are stored in different formats",
            where=request.prefix,
            found="; ".join(f"{name}: {label(form)}" for name, form in stored.items()),
            needed="all of them in the same format",
            fix="use a checkpoint that treats them alike, or a 16-bit one",
        )
    return _stored(formats[0])


def _stored(format: FourBit | EightBit) -> QuantizedLinearMethod:
    if isinstance(format, EightBit):
        return Stored8bitLinearMethod(format)
    return Stored4bitLinearMethod(format)


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
