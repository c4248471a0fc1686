"""Tiny models with routed experts: made by transformers, packed by bitsandbytes itself.

transformers 5 leaves experts in 16 bit, so what older releases wrote is made here: each
matrix of each expert packed, under its own name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.families import GATED
from tests.models import SPREAD, ModelShelf, quantized_name

DENSE = re.compile(r"(^lm_head|embed_tokens|norm|\.gate|shared_expert_gate|router)\.?(weight)?$")
"""Names of tensors that stay in 16 bit: tables, norms, and what chooses the experts."""
MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {}


def mixture(make: Callable[[], Any]) -> Callable[[], Any]:
    """Enter a function that makes a config into the table of models."""
    MIXTURES[make.__name__] = lambda: AutoModelForCausalLM.from_config(make())
    return make


@mixture
def mixtral() -> MixtralConfig:
    return MixtralConfig(**GATED, head_dim=64, num_local_experts=4, num_experts_per_tok=2)


@mixture
def qwen2_moe() -> Qwen2MoeConfig:
    """An expert that every token goes through as well, with a gate of its own."""
    return Qwen2MoeConfig(
        **GATED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=256, decoder_sparse_step=1,
    )  # fmt: skip


@mixture
def qwen3_moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **GATED, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


@mixture
def olmoe() -> OlmoeConfig:
    return OlmoeConfig(**GATED, num_experts=8, num_experts_per_tok=2)


@mixture
def deepseek_v2() -> DeepseekV2Config:
    """Shared experts, latent attention, a dense first layer."""
    sizes = {**GATED, "num_key_value_heads": 4}
    return DeepseekV2Config(
        **sizes, moe_intermediate_size=128, n_routed_experts=4, n_shared_experts=2,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, n_group=1, topk_group=1,
        topk_method="greedy",
    )  # fmt: skip


@mixture
def qwen3_next() -> Qwen3NextConfig:
    """Linear attention, then full attention; a shared expert beside the others in both.

    Every token goes to all experts: in bfloat16 the router's choice is that of the rounding.
    """
    return Qwen3NextConfig(
        **GATED, head_dim=64, layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=64, linear_value_head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=4, num_experts_per_tok=4, moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
    )  # fmt: skip


def plain_mixture(shelf: ModelShelf, name: str) -> Path:
    """A random model in bfloat16, as transformers saves it."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)  # for what transformers draws itself, and is left as it is
        model = MIXTURES[name]()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # norms' weights stay one
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
        model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]

    return shelf.get(name, make)


def packed_mixture(
    shelf: ModelShelf, plain: Path, quant_type: str = "nf4", nested: bool = False
) -> Path:
    """A mixture with every matrix of every expert packed."""
    name = f"{plain.name}-{quantized_name(quant_type, nested)}-experts"
    return shelf.get(name, lambda folder: pack(plain, folder, quant_type, nested))


def upcycle(dense: Path, folder: Path, experts: int = 2) -> None:
    """Make a Mixtral of a Llama: each expert is its MLP, the inner neurons in another order.

    So whatever the router chooses, the model computes what it did, and real text tells.
    """
    generator = torch.Generator().manual_seed(0)
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, is_mlp, part = name.partition(".mlp.")
        if not is_mlp:
            tensors[name] = tensor
            continue
        short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part.partition(".")[0]]
        for expert in range(experts):
            number = torch.Generator().manual_seed(expert)
            order = torch.randperm(config["intermediate_size"], generator=number)
            moved = tensor[:, order] if short == "w2" else tensor[order]
            target = f"{layer}.block_sparse_moe.experts.{expert}.{short}.weight"
            tensors[target] = moved.contiguous()
        gate = torch.randn(experts, config["hidden_size"], generator=generator)
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = (gate * SPREAD).bfloat16()
    config = {name: value for name, value in config.items() if not name.endswith("_bias")} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def pack(plain: Path, folder: Path, quant_type: str = "nf4", nested: bool = False) -> None:
    """Write a plain checkpoint anew with every matrix packed that is not DENSE."""
    folder.mkdir()
    tensors = {}
    for file in sorted(plain.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            is_linear = tensor.ndim == 2 and not DENSE.search(name)
            tensors |= _packed(name, tensor, quant_type, nested) if is_linear else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    eight = quant_type == "int8"
    section = {"load_in_8bit": eight, "load_in_4bit": not eight}
    if not eight:
        section |= {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": nested}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **section}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in plain.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())


def _packed(
    name: str, tensor: torch.Tensor, quant_type: str, nested: bool
) -> dict[str, torch.Tensor]:
    module = name.removesuffix(".weight")
    if quant_type == "int8":
        codes, scb, _ = int8_vectorwise_quant(tensor.half())
        form = torch.tensor(0, dtype=torch.uint8)
        return {name: codes, f"{module}.SCB": scb, f"{module}.weight_format": form}
    packed, state = quantize_4bit(tensor, quant_type=quant_type, compress_statistics=nested)
    sides = state.as_dict(packed=True)
    return {name: packed} | {f"{name}.{side}": value for side, value in sides.items()}
