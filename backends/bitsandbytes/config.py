"""The method ``bitsandbytes`` as vLLM sees it: options against what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from oot_quant.vllm_glue.config import PluginConfig, logger

from .agreement import METHOD, check_options, check_promise, skip_list_faults
from .formats import EightBit, FourBit
from .library import require_library
from .options import (
    FOUR_BIT_ONLY,
    NO_EFFECT,
    Options,
    is_skipped,
    parse,
    refuse_unknown,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

    from oot_quant.checkpoint import Checkpoint


class BitsAndBytesConfig(PluginConfig):
    """Options of bitsandbytes, and the formats of the checkpoint's modules."""

    method: ClassVar[str] = METHOD

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.wanted: Options = parse(self.options)
        self.skip = self.wanted.skip

    def check(self, checkpoint: Checkpoint | None) -> None:
        """Refuse what cannot work, and say what the tensors decided against the config."""
        require_library()
        if self.is_saved:
            return
        if self.formats:
            check_options(self.wanted, self.formats)
            self._warn_of_differences()
            return
        stored = checkpoint.quantization_config if checkpoint else None
        if checkpoint is not None and checkpoint.readable and stored == self.options:
            check_promise(checkpoint, self.formats)
        if stored and (checkpoint is None or not checkpoint.readable):
            return
        # Nothing is stored packed, so every option is the user's and has to be honoured.
        self.prequantized = False
        self.quantizes_head = self.wanted.head
        refuse_unknown(self.wanted)
        idle = [*NO_EFFECT, *(FOUR_BIT_ONLY if self.wanted.bits == 8 else ())]
        idle = [name for name in idle if self.options.get(name)]
        if idle:
            logger.warning(
                "bitsandbytes: without effect on weights that are quantized in flight to %s "
                "bits: %s; docs/options.md says why.",
                self.wanted.bits,
                ", ".join(idle),
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        mapped = hf_to_vllm_mapper.apply_list(list(self.skip))
        self.skip = tuple(dict.fromkeys((*self.skip, *mapped)))

    def is_skipped(self, module: str) -> bool:
        """Whether the options keep a module out of in-flight quantization."""
        return is_skipped(module, self.skip)

    def _warn_of_differences(self) -> None:
        """Where the tensors do not contradict a request, but are not what the config says."""
        nested = {form.nested for form in self.formats.values() if isinstance(form, FourBit)}
        claimed = "bnb_4bit_use_double_quant" in self.wanted.given
        if nested and claimed and nested != {self.wanted.nested}:
            logger.warning(
                "bitsandbytes: the config says bnb_4bit_use_double_quant=%s, the stored tensors "
                "say otherwise; the tensors are used.",
                self.wanted.nested,
            )
        if any(isinstance(form, EightBit) for form in self.formats.values()):
            logger.info_once(
                "bitsandbytes: 8-bit weights are computed with activations as they are, so "
                "llm_int8_threshold has no effect."
            )
        if self.wanted.unknown:
            logger.warning(
                "bitsandbytes: options without effect on a stored checkpoint: %s.",
                ", ".join(self.wanted.unknown),
            )
        faults = skip_list_faults(self.skip, self.formats, self.stored_modules)
        if faults:
            logger.warning(
                "bitsandbytes: llm_int8_skip_modules and the stored tensors disagree; the "
                "tensors are used. %s",
                " ".join(faults.sentences()),
            )
