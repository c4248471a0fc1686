"""Output heads, and what vLLM makes of them for models that score."""

from __future__ import annotations

from vllm.config import get_current_vllm_config_or_none

HEAD = "lm_head"
"""What transformers calls a model's output head."""
SCORE_HEADS = ("score", "classifier")
"""And those of classifiers. In vLLM they are linear layers like any other."""


def is_score_head(prefix: str) -> bool:
    """Whether a layer is the head of a classifier."""
    return prefix.rpartition(".")[2] in SCORE_HEADS


def becomes_scores() -> bool:
    """Whether the model that is being built takes a few words' rows of its head for scores.

    vLLM then drops the head that it built, loads it into a plain one and copies the rows.
    """
    engine = get_current_vllm_config_or_none()
    if engine is None or engine.model_config is None:
        return False
    config = engine.model_config.hf_config
    sections = (config, config.get_text_config())
    return any(getattr(section, "classifier_from_token", None) for section in sections)
