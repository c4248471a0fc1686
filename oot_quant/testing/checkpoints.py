"""Tiny checkpoints: a random two-layer Llama in folders that vLLM can serve.

Written without transformers. The sizes are the smallest that two tensor-parallel ranks can
share and that every usual block size fits: hidden 256, MLP 512, 4 heads and 2 key heads of
64, vocabulary 512.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, KEY_HEADS, HEAD_SIZE, VOCABULARY, LAYERS = 256, 512, 4, 2, 64, 512, 2
SPREAD = 0.1
"""Standard deviation of the weights: large enough that logits are not flat."""
LINEAR_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.k_proj": (KEY_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.v_proj": (KEY_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
"""The linear modules of one layer: [rows, columns] of their weights."""
LINEAR_MODULES = tuple(
    f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEAR_SHAPES
)


@dataclass(frozen=True)
class Stored:
    """A quantized matrix: its tensors by full name, and the float32 matrix they stand for."""

    tensors: Mapping[str, torch.Tensor]
    weight: torch.Tensor


Store = Callable[[str, torch.Tensor], Stored]
"""Quantizes a module's float32 matrix [rows, columns] the way that checkpoints hold it."""


def llama_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """All weights of the model in float32, by name; the same for the same seed."""
    return {name: weight.clone() for name, weight in _llama_weights(seed).items()}


@cache
def _llama_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        # Rounded to bfloat16, so that a checkpoint holds the same in either dtype.
        return (SPREAD * torch.randn(shape, generator=generator)).bfloat16().float()

    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in LINEAR_SHAPES.items():
            weights[f"{prefix}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = random(VOCABULARY, HIDDEN)
    return weights


def write_plain(folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """The unquantized model."""
    weights = {name: weight.to(dtype) for name, weight in llama_weights(seed).items()}
    return write_checkpoint(folder, weights, dtype)


def write_quantized(
    folder: Path,
    store: Store,
    section: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """The model with all linear layers quantized. section: quantization_config of config.json."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in llama_weights(seed).items():
        module = name.removesuffix(".weight")
        quantized = module in LINEAR_MODULES
        tensors |= store(module, weight).tensors if quantized else {name: weight.to(dtype)}
    return write_checkpoint(folder, tensors, dtype, section)


def write_dequantized(
    folder: Path, store: Store, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """The unquantized model that computes what ``write_quantized`` stands for."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in llama_weights(seed).items():
        module = name.removesuffix(".weight")
        dense = store(module, weight).weight if module in LINEAR_MODULES else weight
        tensors[name] = dense.to(dtype)
    return write_checkpoint(folder, tensors, dtype)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    section: Mapping[str, Any] | None = None,
) -> Path:
    """Write tensors beside this Llama's config.json; returns the folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if section is not None:
        config["quantization_config"] = dict(section)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
