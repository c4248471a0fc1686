"""One tiny random model for each family of architectures, made by transformers.

Two layers, hidden size 256, heads of 64, a vocabulary of 512. A function takes nothing and
returns the model; its name is the family's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    Mamba2Config,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    StableLmConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {**SIZES, "intermediate_size": 512, "num_key_value_heads": 2}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {}


def family(make: Callable[[], Any]) -> Callable[[], Any]:
    """Enter a function that makes a config into the table of models."""
    FAMILIES[make.__name__] = lambda: AutoModelForCausalLM.from_config(make())
    return make


@family
def mistral() -> MistralConfig:
    return MistralConfig(**GATED, head_dim=64, sliding_window=None)


@family
def qwen2() -> Qwen2Config:
    """Biases on q, k and v."""
    return Qwen2Config(**GATED)


@family
def qwen3() -> Qwen3Config:
    return Qwen3Config(**GATED, head_dim=64)


@family
def gemma2() -> Gemma2Config:
    return Gemma2Config(**GATED, head_dim=64, query_pre_attn_scalar=64)


@family
def gemma3() -> Gemma3TextConfig:
    return Gemma3TextConfig(**GATED, head_dim=64, query_pre_attn_scalar=64)


@family
def phi3() -> Phi3Config:
    """q, k and v, and gate and up, are one tensor each on disk."""
    return Phi3Config(**GATED)


@family
def gpt2() -> GPT2Config:
    """Plain weights are stored transposed (Conv1D); quantized ones are not."""
    return GPT2Config(
        n_embd=256, n_layer=2, n_head=4, vocab_size=512, n_positions=1024,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@family
def opt() -> OPTConfig:
    return OPTConfig(**SIZES, ffn_dim=512, word_embed_proj_dim=256)


@family
def gpt_neox() -> GPTNeoXConfig:
    """vLLM serves it through its transformers backend, with q, k and v interleaved."""
    return GPTNeoXConfig(**SIZES, intermediate_size=512)


@family
def falcon() -> FalconConfig:
    """One key head (multi-query), q, k and v fused on disk, and an odd number of heads."""
    sizes = {**SIZES, "hidden_size": 320, "num_attention_heads": 5}
    return FalconConfig(**sizes, multi_query=True, new_decoder_architecture=False)


@family
def falcon_new() -> FalconConfig:
    """Two key heads, each stored behind its queries."""
    return FalconConfig(**SIZES, num_kv_heads=2, new_decoder_architecture=True)


@family
def falcon_heads() -> FalconConfig:
    """As many key heads as query heads, each stored behind its query."""
    return FalconConfig(**SIZES, multi_query=False, new_decoder_architecture=False, bias=True)


@family
def stablelm() -> StableLmConfig:
    return StableLmConfig(**GATED, use_qkv_bias=True)


@family
def mamba2() -> Mamba2Config:
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return Mamba2Config(
        **sizes, num_heads=8, head_dim=64, state_size=64, n_groups=1, chunk_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip


def qwen3_5() -> Qwen3_5ForCausalLM:
    """A layer of linear attention, whose four projections vLLM merges to two, and a usual one."""
    config = Qwen3_5TextConfig(
        **GATED, head_dim=64, layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=64, linear_value_head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def llama_classifier() -> LlamaForSequenceClassification:
    """Three classes."""
    return LlamaForSequenceClassification(LlamaConfig(**GATED, num_labels=3))


def llama_embedder() -> LlamaModel:
    """A Llama without a head, so its tensors' names do not begin with ``model.``."""
    return LlamaModel(LlamaConfig(**GATED))


def bert() -> BertModel:
    return BertModel(BertConfig(**SIZES, intermediate_size=512))


def bert_reranker() -> BertForSequenceClassification:
    """vLLM builds its pooler's linear layer without quantization."""
    return BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=512, num_labels=1))


def qwen3_reranker() -> Qwen3ForSequenceClassification:
    return Qwen3ForSequenceClassification(Qwen3Config(**GATED, head_dim=64, num_labels=1))


def qwen3_judge() -> Qwen3ForCausalLM:
    """Ranks by the odds of two words, which its output head tells."""
    return Qwen3ForCausalLM(Qwen3Config(**GATED, head_dim=64))


def qwen3_tied_judge() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**GATED, head_dim=64, tie_word_embeddings=True))


POOLING: dict[str, Callable[[], PreTrainedModel]] = {
    make.__name__: make
    for make in (
        llama_classifier,
        llama_embedder,
        bert,
        bert_reranker,
        qwen3_reranker,
        qwen3_judge,
        qwen3_tied_judge,
    )
}
HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {"qwen3_5": qwen3_5}
