"""What a user, or a checkpoint's config.json, may ask of bitsandbytes. No torch, no vLLM.

The names are those of transformers' ``BitsAndBytesConfig``, plus ``bnb_4bit_blocksize`` and
``quantize_lm_head`` and ``quantize_experts``.
docs/options.md explains each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oot_quant.errors import UnknownOption

from .formats import BLOCKSIZES, QUANT_TYPES

FLAGS = (
    "load_in_4bit",
    "load_in_8bit",
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_use_double_quant",
    "quantize_lm_head",
    "quantize_experts",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
)
NO_EFFECT = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "llm_int8_threshold",
    "llm_int8_has_fp16_weight",
    "llm_int8_enable_fp32_cpu_offload",
)
"""Accepted because every checkpoint has them. Activations keep the engine's dtype and are never
quantized, so they have no outliers to set apart; packed weights are held as bytes."""
FOUR_BIT_ONLY = ("bnb_4bit_quant_type", "bnb_4bit_blocksize", "bnb_4bit_use_double_quant")
KNOWN = (
    *FLAGS,
    *NO_EFFECT,
    "bnb_4bit_quant_type",
    "bnb_4bit_blocksize",
    "llm_int8_skip_modules",
    "quant_method",
)


@dataclass(frozen=True)
class Options:
    """The options that matter; ``given`` are the names that were set.

    ``bits`` is 4 or 8; the next three are for 4 bits only.
    """

    bits: int = 4
    quant_type: str = "nf4"
    blocksize: int = 64
    nested: bool = False
    head: bool = False
    experts: bool = False
    skip: tuple[str, ...] = ()
    given: frozenset[str] = field(default=frozenset())
    unknown: tuple[str, ...] = ()


def parse(section: Mapping[str, Any]) -> Options:
    """Read a quantization section. Unknown names are kept in ``unknown``, for the caller.

    Raises UnknownOption for a value that an option does not have, and for two at odds.
    """
    for name in FLAGS:
        if section.get(name) not in (None, True, False):
            raise _wrong_value(name, section[name], "true or false")
    four, eight = (
        bool(section.get(f"load_in_{bits}bit") or section.get(f"_load_in_{bits}bit"))
        for bits in (4, 8)
    )
    if four and eight:
        raise UnknownOption(
            "weights cannot be held in 4 and in 8 bits at once",
            where="quantization_config",
            found="load_in_4bit and load_in_8bit are both true",
            needed="one of them",
            fix="remove the other",
        )
    quant_type = _choice(section, "bnb_4bit_quant_type", QUANT_TYPES, "nf4")
    blocksize = _choice(section, "bnb_4bit_blocksize", BLOCKSIZES, BLOCKSIZES[0])
    skip = section.get("llm_int8_skip_modules")
    if skip is not None and not (
        isinstance(skip, (list, tuple)) and all(isinstance(name, str) for name in skip)
    ):
        raise _wrong_value("llm_int8_skip_modules", skip, "a list of module names, or null")
    return Options(
        bits=8 if eight else 4,
        quant_type=quant_type,
        blocksize=blocksize,
        nested=bool(section.get("bnb_4bit_use_double_quant")),
        head=bool(section.get("quantize_lm_head")),
        experts=bool(section.get("quantize_experts")),
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
            needed=f"one of: {', '.join(sorted(set(KNOWN)))}",
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
