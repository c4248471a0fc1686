"""The config of a method whose backend failed: it repeats the reason to whoever asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oot_quant.errors import OotQuantError
from oot_quant.vllm_glue.config import PluginConfig


def stand_in_for(method: str, error: OotQuantError) -> type[PluginConfig]:
    """A config class for ``method`` that raises ``error`` as soon as an engine wants it."""

    class StandInConfig(PluginConfig):
        def __init__(self, options: Mapping[str, Any] | None = None) -> None:
            raise error

    StandInConfig.method = method
    return StandInConfig
