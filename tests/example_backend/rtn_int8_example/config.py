"""The method ``rtn_int8`` as vLLM sees it. It has no options, so any option is refused."""

from __future__ import annotations

from typing import ClassVar

from oot_quant.checkpoint import Checkpoint
from oot_quant.errors import UnknownOption
from oot_quant.vllm_glue.config import PluginConfig


class RtnInt8Config(PluginConfig):
    method: ClassVar[str] = "rtn_int8"

    def check(self, checkpoint: Checkpoint | None) -> None:
        for option in sorted(set(self.options) - {"quant_method"}):
            raise UnknownOption(
                "rtn_int8 has no options",
                where=f"quantization_config.{option}",
                fix="remove it",
            )
