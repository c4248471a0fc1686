"""The method ``bitsandbytes`` as vLLM sees it: options against what the checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from oot_quant.checkpoint import Checkpoint
from oot_quant.errors import ConfigContradiction
from oot_quant.vllm_glue.config import PluginConfig, WeightsMapper, logger

from .formats import FourBit
from .library import require_library
from .options import NO_EFFECT, Options, is_skipped, parse, refuse_unknown

NAMES_IN_A_WARNING = 5


class BitsAndBytesConfig(PluginConfig):
    """Options of bitsandbytes, and the formats of the checkpoint's modules."""

    method: ClassVar[str] = "bitsandbytes"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.wanted: Options = parse(self.options)
        self.skip = self.wanted.skip

    def check(self, checkpoint: Checkpoint | None) -> None:
        """Refuse what cannot work, and say what the tensors decided against the config."""
        require_library()
        stored = checkpoint.quantization_config if checkpoint else None
        if not self.formats and checkpoint and checkpoint.readable and stored == self.options:
            self._check_not_stale(checkpoint)
        if self.formats:
            self._check_against_tensors()
        if self.formats or stored:
            return
        # Nothing is stored packed, so every option is the user's and has to be honoured.
        self.prequantized = False
        refuse_unknown(self.wanted)
        idle = [name for name in NO_EFFECT if name in self.wanted.given]
        if idle:
            logger.warning(
                "bitsandbytes: %s has no effect in flight: activations keep the engine's dtype "
                "and packed weights are held as bytes.", " and ".join(idle),
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        mapped = hf_to_vllm_mapper.apply_list(list(self.skip))
        self.skip = tuple(dict.fromkeys((*self.skip, *mapped)))

    def is_skipped(self, module: str) -> bool:
        """Whether the options keep a module out of in-flight quantization."""
        return is_skipped(module, self.skip)

    def _check_not_stale(self, checkpoint: Checkpoint) -> None:
        if self.options.get("quant_method") == self.method:
            raise ConfigContradiction(
                "config.json says that the weights are stored by bitsandbytes, but none is",
                where=checkpoint.model,
                found=f"{len(checkpoint.tensors)} tensors, no quant state among them",
                needed="packed weights, or a config.json without quantization_config",
                fix="remove quantization_config from config.json; to quantize in flight, "
                'serve that with quantization="bitsandbytes"',
            )

    def _check_against_tensors(self) -> None:
        """Explicit options must agree with the tensors, which are what gets served."""
        claims = {
            "bnb_4bit_quant_type": (self.wanted.quant_type, lambda f: f.quant_type),
            "bnb_4bit_blocksize": (self.wanted.blocksize, lambda f: f.blocksize),
        }
        four_bit = {name: f for name, f in self.formats.items() if isinstance(f, FourBit)}
        for option, (claimed, actual) in claims.items():
            others = {name: actual(f) for name, f in four_bit.items() if actual(f) != claimed}
            if option in self.wanted.given and others:
                module, found = next(iter(others.items()))
                raise ConfigContradiction(
                    f"the config's {option} is not what the checkpoint holds",
                    where=f"{module}.weight ({len(others)} of {len(four_bit)} modules)",
                    found=f"stored as {found!r}, config says {claimed!r}",
                    needed="the same in both; a stored weight cannot be changed while loading",
                    fix=f"set quantization_config.{option} to {found!r}, or leave it out",
                )
        nested = {f.nested for f in four_bit.values()}
        if "bnb_4bit_use_double_quant" in self.wanted.given and nested != {self.wanted.nested}:
            logger.warning(
                "bitsandbytes: the config says bnb_4bit_use_double_quant=%s, the stored tensors "
                "say otherwise; the tensors are used.", self.wanted.nested,
            )
        if self.wanted.unknown:
            logger.warning(
                "bitsandbytes: options without effect on a stored checkpoint: %s.",
                ", ".join(self.wanted.unknown),
            )
        self._warn_of_skip_list()

    def _warn_of_skip_list(self) -> None:
        """One warning for modules about which skip list and tensors disagree."""
        packed = sorted(name for name in self.formats if self.is_skipped(name))
        kinds = {_kind(name) for name in self.formats}
        dense = sorted(
            name
            for name in self._modules - set(self.formats)
            if _kind(name) in kinds and not self.is_skipped(name)
        )
        parts = [f"stored in 4 bit though listed: {_some(packed)}"] if packed else []
        parts += [f"stored unquantized though not listed: {_some(dense)}"] if dense else []
        if parts:
            logger.warning(
                "bitsandbytes: llm_int8_skip_modules and the stored tensors disagree; the "
                "tensors are used. %s.", "; ".join(parts),
            )


def _kind(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:NAMES_IN_A_WARNING])
    more = len(listed) - NAMES_IN_A_WARNING
    return f"{shown} and {more} more" if more > 0 else shown
