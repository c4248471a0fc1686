"""A model class that is not vLLM's own and does not say what its layers merge."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper


class ToyForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama by another name. It loads its weights rightly: the model inside it knows how."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    hf_to_vllm_mapper = WeightsMapper()
