"""What vLLM's model classes do to stored weights that packed ones do not survive.

Found by walking vLLM's sources (tests/vllm_glue/test_architectures.py), and true of the newest
tested release; ``FORMER`` is about older ones. Imports nothing of vLLM, so that the doctor can
read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from oot_quant.errors import UnsupportedFormat
from oot_quant.vllm_glue import compat


class Reason(str, Enum):
    """Why a model class cannot take packed weights; the value says it in words."""

    NAMES = "takes tensors by name without vLLM's loader, so their scales find no place"
    REORDERS = "reorders or cuts weights before their layer gets them"
    COPIES = "copies weights into place itself, past their layer's loader"
    READS = "reads weights as plain numbers, past their layer's method"


@dataclass(frozen=True)
class Limit:
    """What one model class does, and to which modules.

    modules: parts of module names, as checkpoints or vLLM call them; empty means all of them.
    """

    reason: Reason
    modules: tuple[str, ...] = ()

    def concerns(self, module: str) -> bool:
        """Whether a module is one of those that the model class does this to."""
        return not self.modules or not set(self.modules).isdisjoint(module.split("."))

    @property
    def is_about_arrival(self) -> bool:
        """Whether unpacked weights do not mind, even if they are to be quantized in flight."""
        return self.reason in {Reason.NAMES, Reason.REORDERS}


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """The architectures that a config.json names, for the model and for its parts."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return [name for part in parts for name in part.get("architectures") or ()]


def limits_of(architectures: Iterable[str]) -> tuple[Limit, ...]:
    """The limits of a model of these architectures."""
    return tuple(limit for name in architectures for limit in _limits_of_one(name))


def refuse_packed(architectures: Iterable[str], modules: Iterable[str]) -> None:
    """Raise UnsupportedFormat if a checkpoint's quantized modules cannot be loaded."""
    stored = list(modules)
    for architecture in architectures:
        for limit in _limits_of_one(architecture):
            concerned = [module for module in stored if limit.concerns(module)]
            if concerned:
                raise UnsupportedFormat(
                    f"vLLM's class for {architecture} cannot load these weights quantized",
                    where=concerned[0],
                    found=f"{len(concerned)} such modules are stored quantized; "
                    f"the class {limit.reason.value}",
                    needed="16-bit weights, at least of these modules",
                    fix="use the model's 16-bit checkpoint; it can be quantized while it loads",
                )


def moved_rows(architectures: Iterable[str]) -> tuple[str, ...]:
    """The last parts of the names of modules whose rows models of these architectures sort."""
    return tuple(name for architecture in architectures for name in MOVED.get(architecture, ()))


def _limits_of_one(architecture: str) -> tuple[Limit, ...]:
    limits = LIMITS.get(architecture, ())
    without, former = FORMER.get(architecture, ("0", ()))
    installed = compat.installed_version()
    if installed and compat.is_before(installed, without):
        return (*limits, *former)
    return limits


def stays_plain(limits: Iterable[Limit], names: Iterable[str]) -> bool:
    """Whether a layer must not be quantized in flight, by its names or those that it merges."""
    past = [limit for limit in limits if not limit.is_about_arrival]
    return any(limit.concerns(name) for limit in past for name in names)


NAMES = Limit(Reason.NAMES)
LATENTS = Limit(Reason.READS, ("routed_expert_up_proj",))
PADDED = Limit(Reason.READS, ("in_proj_qkvgfab",))
GATE = Limit(Reason.READS, ("linear_gate",))
ROUTER = Limit(Reason.READS, ("modality_router",))
IMAGES = Limit(Reason.READS, ("embedding_projection",))
MEGA = (Limit(Reason.READS, ("wo_a",)), Limit(Reason.READS, ("wq_b",)))
ROPE = Limit(Reason.REORDERS, ("q_proj", "k_proj"))
UP_GATE = Limit(Reason.REORDERS, ("up_gate_proj",))
AUDIO = Limit(Reason.NAMES, ("mm_whisper_embeddings", "mm_streams_embeddings", "whisper_encoder"))
TOWERS = Limit(Reason.NAMES, ("vision_model", "sound_encoder", "mlp1"))

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "BailingMoeV25MTPModel": (NAMES,),
    "BailingMoeV3ForCausalLM": (NAMES,),
    "BailingMoeV3MTPModel": (NAMES,),
    "BloomForCausalLM": (Limit(Reason.REORDERS, ("query_key_value",)),),
    "ColBERTModernBertModel": (NAMES,),
    "DFlashLagunaForCausalLM": (Limit(Reason.READS, ("q_proj", "k_proj", "v_proj")),),
    "DSparkDraftModel": (NAMES,),
    "DSparkV41DraftModel": (NAMES, *MEGA),
    "DeepSeekMTPModel": (NAMES,),
    "DeepSeekV4MTPModel": (NAMES,),
    "DeepseekV32MTPModel": (NAMES,),
    "DeepseekV41ForCausalLM": MEGA,
    "DiffusionGemmaForBlockDiffusion": (IMAGES,),
    "Dots3NoteMTPModel": (NAMES,),
    "EmbeddingGemma2Model": (IMAGES,),
    "Gemma3nForCausalLM": (ROUTER,),
    "Gemma3nForConditionalGeneration": (ROUTER,),
    "Gemma4DSparkModel": (NAMES, Limit(Reason.READS, ("k_proj",))),
    "Gemma4ForConditionalGeneration": (IMAGES,),
    "Gemma4UnifiedForConditionalGeneration": (IMAGES,),
    "Glm4MoeLiteMTPModel": (NAMES,),
    "Glm4MoeMTPModel": (NAMES,),
    "Glm5NextMTPModel": (NAMES,),
    "GteModel": (NAMES, UP_GATE),
    "GteNewForSequenceClassification": (UP_GATE,),
    "GteNewModel": (NAMES, UP_GATE),
    "HYV4ForCausalLM": (GATE,),
    "HYV4MTPModel": (NAMES, GATE),
    "HfMoondream": (NAMES,),
    "InklingMTPModel": (NAMES,),
    "IsaacForConditionalGeneration": (Limit(Reason.READS, ("linear_fc1", "vision_embedding")),),
    "JinaEmbeddingsV5Model": (Limit(Reason.REORDERS),),
    "K2HorizonForCausalLM": (ROPE,),
    "KimiK3ForConditionalGeneration": (PADDED, LATENTS),
    "KimiK3MTPModel": (NAMES, PADDED, LATENTS),
    "KimiLinearForCausalLM": (PADDED, LATENTS),
    "Llama4ForCausalLM": (ROPE,),
    "Llama4ForConditionalGeneration": (ROPE, Limit(Reason.REORDERS, ("vision_model",))),
    "LongCatFlashMTPModel": (NAMES,),
    "MedusaModel": (NAMES,),
    "MiMoV2MTPModel": (NAMES,),
    "MiMoV2OmniMTPModel": (NAMES,),
    "MiniMaxM3MTP": (NAMES,),
    "ModernBertForSequenceClassification": (NAMES,),
    "ModernBertModel": (NAMES,),
    "Moondream3ForCausalLM": (NAMES,),
    "NemotronHMTPModel": (NAMES,),
    "NemotronH_Nano_Omni_Reasoning_V3": (TOWERS,),
    "NemotronH_Nano_VL_V2": (TOWERS,),
    "NemotronH_Omni_Reasoning_V3": (TOWERS,),
    "NemotronH_Super_Omni_Reasoning_V3": (TOWERS,),
    "NemotronParseForConditionalGeneration": (NAMES,),
    "NomicBertModel": (NAMES,),
    "OpenPanguMTPModel": (NAMES,),
    "OpenPanguVLForConditionalGeneration": (Limit(Reason.REORDERS, ("visual",)),),
    "PixtralForConditionalGeneration": (
        Limit(
            Reason.NAMES,
            (
                "vision_encoder",
                "vision_tower",
                "vision_language_adapter",
                "multi_modal_projector",
                "patch_merger",
            ),
        ),
    ),
    "Step3TextForCausalLM": (Limit(Reason.COPIES, ("q_proj", "k_proj", "v_proj")),),
    "Step3p5MTP": (NAMES,),
    "TeleChat2ForCausalLM": (Limit(Reason.REORDERS, ("key_value",)),),
    "VoxtralForConditionalGeneration": (AUDIO,),
    "VoxtralRealtimeGeneration": (AUDIO,),
}
"""The limits of each architecture, by the name that config.json gives it."""

FORMER: Mapping[str, tuple[str, tuple[Limit, ...]]] = {
    # From 0.32 on, vLLM serves it through transformers.
    "GPTNeoXForCausalLM": ("0.32", (Limit(Reason.REORDERS, ("query_key_value",)),)),
}
"""Limits of classes in older releases of vLLM, with the first release that is without them."""

MOVED: Mapping[str, tuple[str, ...]] = {"FalconForCausalLM": ("query_key_value",)}
"""Modules whose rows a class sorts in whole rows: packed ones survive it (``rows.py``)."""
