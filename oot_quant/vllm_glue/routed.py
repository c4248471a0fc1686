"""Experts on the CPU: each token goes through the few that its router chose.

Only those are multiplied, one after the other, each by its linear methods. ``grouped`` has the
GPU, where nothing may depend on which they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from vllm.forward_context import get_forward_context

from oot_quant.errors import UnsupportedFormat

if TYPE_CHECKING:
    from oot_quant.vllm_glue.experts import ExpertsMethod

Activation = Callable[[torch.Tensor], torch.Tensor]
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


def activation_of(layer: Any) -> Activation:
    """What a layer does between an expert's two products, by vLLM's name of it.

    Raises UnsupportedFormat for one that is not known here. Those without a gate vLLM itself has
    on GPUs alone.
    """
    name = str(getattr(layer.activation, "value", layer.activation))
    limit = getattr(layer, "swiglu_limit", None)
    if name == "swigluoai":
        return _interleaved
    if name == "swigluoai_uninterleave":
        alpha, beta = (getattr(layer, f"swiglu_{of}", None) for of in ("alpha", "beta"))
        alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        return partial(_gated, lambda x: x * torch.sigmoid(alpha * x), limit, beta)
    function = ACTIVATIONS.get(name)
    if function is None:
        raise UnsupportedFormat(
            "this activation of routed experts is not supported on the CPU",
            where=layer.layer_name,
            found=name,
            needed=f"one of {', '.join(ACTIVATIONS)}",
            fix="serve the model on a GPU, or unquantized",
        )
    return partial(_gated, function, limit, 0.0)


def _gated(
    function: Activation, limit: float | None, beta: float, merged: torch.Tensor
) -> torch.Tensor:
    """The first half through ``function``, times the second; both clamped before, if at all."""
    gate, up = merged.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return function(gate) * (up + beta)


def _interleaved(merged: torch.Tensor) -> torch.Tensor:
    """Gate and up take turns in the rows. Source: vLLM's SwigluOAIAndMul."""
    gate, up = merged[..., ::2], merged[..., 1::2]
    gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * OAI_ALPHA)


ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
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
