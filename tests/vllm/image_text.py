"""vLLM's image-text models in an engine's process, also where torchvision is not installed.

Builds of torchvision for the CPU's torch are not on every package index. vLLM's modules import
it by way of transformers' processors, which have variants that use PIL and numpy instead and
are what prepares the images then. A stand-in lets the imports pass; nothing may use it.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = {
    "Gemma3ForConditionalGeneration": "gemma3_mm",
    "PaliGemmaForConditionalGeneration": "paligemma",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
}
"""Architectures that cannot be served without importing torchvision, and their modules in vLLM."""
PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Names there of processors that will not load without one for videos."""
STAND_IN = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def prepare(model: Path) -> None:
    """Make the class that serves a model known to vLLM, if that takes torchvision."""
    (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
    if architecture in MODULES and not _has_torchvision():
        _register(architecture)


@lru_cache  # once for a process
def _register(architecture: str) -> None:
    from vllm.model_executor.models import ModelRegistry

    _stand_in()
    module = importlib.import_module(f"vllm.model_executor.models.{MODULES[architecture]}")
    for name in PROCESSORS:
        if hasattr(module, name):
            setattr(module, name, _images_only(getattr(module, name)))
    # The class itself: vLLM looks into one that it knows by name in another process.
    ModelRegistry.register_model(architecture, getattr(module, architecture))


def _has_torchvision() -> bool:
    return STAND_IN[0] not in sys.modules and find_spec(STAND_IN[0]) is not None


def _stand_in() -> None:
    """Modules of torchvision's names, as empty as transformers' imports allow."""
    from transformers.utils import is_torchvision_available, is_torchvision_v2_available

    # Both remember their answer, and so take no notice of what follows.
    assert not is_torchvision_available()
    assert not is_torchvision_v2_available()
    for name in (*STAND_IN, f"{STAND_IN[-1]}.functional"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules.setdefault(name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def _images_only(processor_class: Any) -> Any:
    """A processor that is made without one for videos, whose options vLLM still asks for."""
    from transformers.processing_utils import VideosKwargs

    class ImagesOnly(processor_class):  # type: ignore[misc]
        video_processor = SimpleNamespace(valid_kwargs=VideosKwargs)

        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
        ) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template)

    return ImagesOnly
