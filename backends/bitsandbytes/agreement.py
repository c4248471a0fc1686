"""The config against the stored tensors, which are what gets served. No torch, no vLLM.

The engine's config raises what is wrong here before a model is built, and the doctor shows
the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oot_quant.errors import ConfigContradiction

from .formats import EightBit, FourBit
from .options import Options, is_skipped

if TYPE_CHECKING:
    from oot_quant.checkpoint import Checkpoint

METHOD = "bitsandbytes"
NAMES_SHOWN = 5


@dataclass(frozen=True)
class SkipListFaults:
    """Modules about which skip list and tensors disagree, sorted by name."""

    packed_though_listed: tuple[str, ...]
    plain_though_not_listed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.packed_though_listed or self.plain_though_not_listed)

    def sentences(self) -> list[str]:
        """One sentence for each kind of fault, naming the first modules."""
        packed, plain = self.packed_though_listed, self.plain_though_not_listed
        lines = [f"Stored quantized though listed: {some(packed)}."] if packed else []
        return lines + ([f"Stored unquantized though not listed: {some(plain)}."] if plain else [])


def check_promise(checkpoint: Checkpoint, formats: Mapping[str, object] | None) -> None:
    """Raise ConfigContradiction if config.json promises packed weights and there are none."""
    section = checkpoint.quantization_config or {}
    if section.get("quant_method") == METHOD and formats is not None and not formats:
        raise ConfigContradiction(
            "config.json says that the weights are stored by bitsandbytes, but none is",
            where=checkpoint.model,
            found=f"{len(checkpoint.tensors)} tensors, no quant state among them",
            needed="packed weights, or a config.json without quantization_config",
            fix="remove quantization_config from config.json; to quantize in flight, serve that "
            'with quantization="bitsandbytes"',
        )


def check_options(options: Options, formats: Mapping[str, object]) -> None:
    """Raise ConfigContradiction if an option that was given is not what the tensors say."""
    stored = {name: form for name, form in formats.items() if isinstance(form, FourBit)}
    _check_bits(options, formats)
    for option, claimed, attribute in (
        ("bnb_4bit_quant_type", options.quant_type, "quant_type"),
        ("bnb_4bit_blocksize", options.blocksize, "blocksize"),
    ):
        values = {name: getattr(form, attribute) for name, form in stored.items()}
        others = {name: value for name, value in values.items() if value != claimed}
        if option in options.given and others:
            module, found = next(iter(others.items()))
            raise ConfigContradiction(
                f"the config's {option} is not what the checkpoint holds",
                where=f"{module}.weight ({len(others)} of {len(stored)} modules)",
                found=f"stored as {found!r}, config says {claimed!r}",
                needed="the same in both; a stored weight cannot be changed while loading",
                fix=f"set quantization_config.{option} to {found!r}, or leave it out",
            )


def _check_bits(options: Options, formats: Mapping[str, object]) -> None:
    bits = {name: 8 if isinstance(form, EightBit) else 4 for name, form in formats.items()}
    asked = {f"load_in_{options.bits}bit", f"_load_in_{options.bits}bit"} & options.given
    if asked and bits and options.bits not in bits.values():
        module, found = next(iter(bits.items()))
        raise ConfigContradiction(
            "the config's number of bits is not what the checkpoint holds",
            where=f"{module}.weight ({len(bits)} modules)",
            found=f"stored in {found} bits, config says {options.bits}",
            needed="the same in both; a stored weight cannot be changed while loading",
            fix=f"set quantization_config.load_in_{found}bit to true and the other to false",
        )


def skip_list_faults(
    skip: tuple[str, ...], formats: Mapping[str, Any], modules: Iterable[str]
) -> SkipListFaults:
    """Compare a skip list with what is packed.

    modules: every module that has a stored weight. A plain module counts as a fault only if
    its namesakes in other layers are packed; what is never packed need not be listed.
    """
    kinds = {_kind(name) for name in formats}
    plain = {name for name in modules if name not in formats and _kind(name) in kinds}
    return SkipListFaults(
        tuple(sorted(name for name in formats if is_skipped(name, skip))),
        tuple(sorted(name for name in plain if not is_skipped(name, skip))),
    )


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = len(listed) - NAMES_SHOWN
    return ", ".join(listed[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _kind(module: str) -> str:
    """A module's name with its layer numbers left open."""
    return re.sub(r"\d+", "*", module)
