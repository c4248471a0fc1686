"""Computes with quantized experts: each token goes through the few that its router chose.

On the CPU only those are unpacked, one after the other. Elsewhere nothing may depend on which
they are (a CUDA graph is recorded once), so without a kernel of its own a layer is unpacked
whole and multiplied by vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from vllm.forward_context import get_forward_context

if TYPE_CHECKING:
    from oot_quant.vllm_glue.experts import ExpertsMethod

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
"""Of gpt-oss, whose model class leaves them to the kernel."""


def route_and_multiply(
    method: ExpertsMethod,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """What the chosen experts make of each token, weighted and summed.

    x: [tokens, hidden]; topk_weights: [tokens, k] float32; topk_ids: [tokens, k], numbers of
    experts over all ranks. Returns [tokens, hidden]; a part of the sum where ranks share the
    experts, or each expert.
    """
    if x.device.type != "cpu":
        return _unpack_all(method, layer, x, topk_weights, topk_ids)
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.oot_quant.routed_experts(
            x, topk_weights, topk_ids, layer.layer_name
        )
        return out
    return _one_by_one(method, layer, x, topk_weights, topk_ids)


def _one_by_one(
    method: ExpertsMethod,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    on_input = layer.apply_router_weight_on_input
    expert_map = layer.expert_map
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    out = torch.zeros_like(x, dtype=torch.float32)
    activate = activation_of(layer)
    for index in local.unique().tolist():
        if index < 0:
            continue  # another rank's
        tokens, choice = (local == index).nonzero(as_tuple=True)
        weights = topk_weights[tokens, choice].unsqueeze(1)
        rows = x[tokens] * weights.to(x.dtype) if on_input else x[tokens]
        inner = activate(method.multiply(layer, "w13", index, rows))
        part = method.multiply(layer, "w2", index, inner).float()
        out.index_add_(0, tokens, part if on_input else part * weights)
    return out.to(x.dtype)


def _unpack_all(
    method: ExpertsMethod,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    w13, w2 = (method.dequantize_all(layer, group) for group in ("w13", "w2"))
    biases = [method.bias(layer, group) for group in ("w13", "w2")]
    product: torch.Tensor = fused_experts(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        activation=layer.activation,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
        global_num_experts=layer.global_num_experts,
        expert_map=layer.expert_map,
        quant_config=biased_moe_quant_config(*biases) if biases[0] is not None else None,
    )
    return product


def activation_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a layer does between an expert's two products, by vLLM's name of it."""
    name = str(getattr(layer.activation, "value", layer.activation))
    if name == "swigluoai":
        return _swiglu_oai
    function = ACTIVATIONS[name.removesuffix("_no_mul")]
    if name.endswith("_no_mul"):
        return function
    limit = getattr(layer, "swiglu_limit", None)

    def gated(merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return function(gate) * up

    return gated


def _swiglu_oai(merged: torch.Tensor) -> torch.Tensor:
    """Gate and up take turns in the rows. Source: vLLM's SwigluOAIAndMul."""
    gate, up = merged[..., ::2], merged[..., 1::2]
    gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * OAI_ALPHA)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


@torch.library.custom_op("oot_quant::routed_experts", mutates_args=())
def _routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """``route_and_multiply`` in a compiled model, where the layer is known by its name."""
    layer: Any = get_forward_context().no_compile_layers[layer_name].routed_experts
    return _one_by_one(layer.quant_method, layer, x, topk_weights, topk_ids)


@_routed_experts.register_fake
def _(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    return torch.empty_like(x)
