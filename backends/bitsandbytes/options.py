"""What a user, or a checkpoint's config.json, may ask of bitsandbytes. No torch, no vLLM.

The names are those of transformers' ``BitsAndBytesConfig``, plus ``bnb_4bit_blocksize``.
docs/options.md explains each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oot_quant.errors import UnknownOption, UnsupportedFormat

from .formats import BLOCKSIZES, QUANT_TYPES

FLAGS = (
    "load_in_4bit",
    "load_in_8bit",
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
)
NO_EFFECT = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
"""Accepted because every checkpoint has them; activations keep the engine's dtype and packed
weights are held as bytes, whatever these say."""
KNOWN = (
    *FLAGS,
    *NO_EFFECT,
    "bnb_4bit_quant_type",
    "bnb_4bit_blocksize",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "quant_method",
)


@dataclass(frozen=True)
class Options:
    """The options that matter for 4-bit weights; ``given`` are the names that were set."""

    quant_type: str = "nf4"
    blocksize: int = 64
    nested: bool = False
    skip: tuple[str, ...] = ()
    given: frozenset[str] = field(default=frozenset())
    unknown: tuple[str, ...] = ()


def parse(section: Mapping[str, Any]) -> Options:
    """Read a quantization section. Unknown names are kept in ``unknown``, for the caller.

    Raises UnknownOption for a value that an option does not have, UnsupportedFormat for a
    request for 8-bit weights.
    """
    for name in FLAGS:
        if section.get(name) not in (None, True, False):
            raise _wrong_value(name, section[name], "true or false")
    if section.get("load_in_8bit") or section.get("_load_in_8bit"):
        raise UnsupportedFormat(
            "8-bit (LLM.int8) weights are not supported yet",
            where="quantization_config.load_in_8bit",
            found="true",
            needed="load_in_4bit",
            fix='ask for 4 bit, as in --hf-overrides \'{"quantization_config": '
            '{"load_in_4bit": true}}\'',
        )
    quant_type = _choice(section, "bnb_4bit_quant_type", QUANT_TYPES, "nf4")
    blocksize = _choice(section, "bnb_4bit_blocksize", BLOCKSIZES, BLOCKSIZES[0])
    skip = section.get("llm_int8_skip_modules")
    if skip is not None and not (
        isinstance(skip, (list, tuple)) and all(isinstance(name, str) for name in skip)
    ):
        raise _wrong_value("llm_int8_skip_modules", skip, "a list of module names, or null")
    return Options(
        quant_type=quant_type,
        blocksize=blocksize,
        nested=bool(section.get("bnb_4bit_use_double_quant")),
        skip=tuple(skip or ()),
        given=frozenset(name for name, value in section.items() if value is not None),
        unknown=tuple(sorted(set(section) - set(KNOWN))),
    )


def is_skipped(module: str, skip: tuple[str, ...]) -> bool:
    """Whether a skip list names a module, one of its parents, or its last parts.

    A name matches whole components anywhere (``mlp`` matches ``model.layers.0.mlp.up_proj``);
    anything else is tried as a regular expression on the whole name, as transformers does.
    """
    return any(f".{name}." in f".{module}." or _matches(name, module) for name in skip)


def refuse_unknown(options: Options) -> None:
    """Raise UnknownOption, naming the first option that nobody would honour."""
    if options.unknown:
        raise UnknownOption(
            "bitsandbytes has no such option",
            where=f"quantization_config.{options.unknown[0]}",
            needed=f"one of: {', '.join(sorted(KNOWN))}",
            fix="correct the name, or remove it",
        )


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        return False


def _choice(section: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any) -> Any:
    value = section.get(name)
    if value is None:
        return default
    if value not in choices or isinstance(value, bool):
        raise _wrong_value(name, value, f"one of: {', '.join(map(str, sorted(choices)))}")
    return value


def _wrong_value(name: str, value: object, needed: str) -> UnknownOption:
    return UnknownOption(
        "an option of bitsandbytes has a value that it does not know",
        where=f"quantization_config.{name}",
        found=repr(value),
        needed=needed,
        fix="correct the value",
    )
