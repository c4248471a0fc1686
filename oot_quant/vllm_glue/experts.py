"""Routed experts: each is two linear layers, gate and up merged in one, and down.

So a backend gives the two linear methods that it would give to such layers, and everything it
knows (shard rules, decoding, kernels) serves experts too. A layer of vLLM keeps them in
parameters with one entry for each expert: ``w13_weight`` and ``w2_weight``, with what belongs
to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)

from oot_quant.errors import CheckpointIncomplete, UnsupportedFormat, WeightMismatch
from oot_quant.sharding import granule, items_per_row
from oot_quant.types import LinearRequest, MoeRequest, ParameterRule, PerMatrix
from oot_quant.vllm_glue.linear import (
    PROCESSED,
    OnlineLinearMethod,
    QuantizedLinearMethod,
    SavedLinearMethod,
    StoredLinearMethod,
    comes_finished,
    is_dummy_load,
)
from oot_quant.vllm_glue.params import LayerShape, Site, to_matrix
from oot_quant.vllm_glue.reload import keep_old_weights
from oot_quant.vllm_glue.routed import route_and_multiply

if TYPE_CHECKING:
    LinearMethodOf = Callable[[LinearRequest], QuantizedLinearMethod | None]

MODULE = ".routed_experts"
"""What vLLM puts between a layer's name and its parameters'."""
GATE_UP, DOWN = "w13", "w2"
MEMBER = {"w1": 0, "w3": 1, "w2": 0}
"""Which of the matrices that are merged each of vLLM's shards is."""
DOWN_NAMES = ("down_proj", "w2", "linear_2")


def experts_method(request: MoeRequest, linear_method: LinearMethodOf) -> ExpertsMethod | None:
    """The method for a layer of experts, from those that linear layers of its kind would get.

    None if both would stay as they are stored.

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
    _refuse_lora(inside)
    return ExpertsMethod(request.layer.moe_config, quantized, inside)


@dataclass(frozen=True)
class Part:
    """One of the two weights of every expert: its linear method and its shape on this rank.

    ``ranks`` share its rows or, if ``splits_columns``, its columns.
    """

    group: str
    method: QuantizedLinearMethod
    shape: LayerShape
    ranks: int
    rank: int

    @property
    def splits_columns(self) -> bool:
        return self.group == DOWN

    def names(self, layer: Any) -> list[str]:
        """The parameters of a layer that hold this weight."""
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        return [name for name in names if name.startswith(f"{self.group}_weight")]

    def expert(self, layer: Any, index: int) -> Any:
        """One expert's parameters, under the names that a linear layer gives them."""
        values = {
            name.removeprefix(f"{self.group}_"): getattr(layer, name).data[index]
            for name in self.names(layer)
        }
        return SimpleNamespace(prefix=f"{layer.layer_name}.{index}.{self.group}", **values)


class ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Quantized experts, stored or in flight; ``pair`` are the two linear methods."""

    supports_pre_processed_weights = True

    def __init__(self, moe: Any, pair: Mapping[str, QuantizedLinearMethod], where: str) -> None:
        super().__init__(moe)
        self.pair, self.where = pair, where
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
            if isinstance(method, SavedLinearMethod):
                _create_saved(layer, part)
            elif isinstance(method, StoredLinearMethod):
                _create_stored(layer, part, num_experts)
            else:
                self._create_plain(layer, part, num_experts, extra_weight_attrs)
        if self.moe.has_bias:
            self._create_biases(layer, num_experts, extra_weight_attrs)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, PROCESSED, False):
            return
        for part in self.parts.values():
            final = self._shared(layer, part) if comes_finished() else {}
            final = final or self._finish(layer, part)
            for name in part.names(layer):
                delattr(layer, name)
            for name, value in final.items():
                _register(layer, f"{part.group}_{name}", value, weight_loader=_leave_out)
        setattr(layer, PROCESSED, True)

    def dequantize_expert(self, layer: Any, group: str, index: int) -> torch.Tensor:
        """One local expert's merged gate and up, or down, on this rank: [rows, columns]."""
        part = self.parts[group]
        return part.method.dequantize(part.expert(layer, index))

    def dequantize_all(self, layer: Any, group: str) -> torch.Tensor:
        """All local experts' weights of one group: [experts, rows, columns]."""
        count = len(getattr(layer, f"{group}_weight"))
        return torch.stack([self.dequantize_expert(layer, group, i) for i in range(count)])

    def _create_plain(
        self, layer: Any, part: Part, num_experts: int, attributes: Mapping[str, Any]
    ) -> None:
        """A 16-bit parameter that vLLM's own loader fills, to be quantized afterwards."""
        shape = (num_experts, sum(part.shape.rows), part.shape.rank_columns)
        data = torch.empty(shape, dtype=part.method.dtype, device="meta")
        _register(layer, f"{part.group}_weight", data, **attributes)

    def _create_biases(self, layer: Any, num_experts: int, attributes: Mapping[str, Any]) -> None:
        device = "meta" if self.uses_meta_device else None
        for group, part in self.parts.items():
            shape = (num_experts, sum(part.shape.rows))
            data = torch.zeros(shape, dtype=part.method.dtype, device=device)
            _register(layer, f"{group}_bias", data, **attributes)

    def _finish(self, layer: Any, part: Part) -> dict[str, torch.Tensor]:
        """The final parameters of all experts, one expert after the other."""
        if isinstance(part.method, StoredLinearMethod) and not part.method.is_dummy:
            _check_filled(layer, part)
        if isinstance(part.method, OnlineLinearMethod):
            self._check_arrived(layer, part)
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
        values = {name: getattr(layer, name).data for name in part.names(layer)}
        final = {
            name.removeprefix(f"{part.group}_"): value
            for name, value in values.items()
            if not value.is_meta
        }
        one = SimpleNamespace(prefix=self.where, **{n: v[0] for n, v in final.items()})
        part.method.adopt(one, {name: value[0] for name, value in final.items()})
        return final

    def _check_arrived(self, layer: Any, part: Part) -> None:
        """Raise CheckpointIncomplete if a matrix was not loaded; dummy weights never are."""
        name = f"{part.group}_weight"
        calls = [
            arguments.arguments
            for parameter, arguments in get_layerwise_info(layer).loaded_weights
            if parameter == name
        ]
        arrived = {(call.get("expert_id"), call.get("shard_id")) for call in calls}
        local = layer.expert_map_manager.map_global_to_local
        found = {(local(expert), shard) for expert, shard in arrived}
        needed = len(getattr(layer, name)) * len(part.shape.rows)
        found = {entry for entry in found if entry[0] >= 0}
        if len(found) < needed and (found or not is_dummy_load()):
            raise CheckpointIncomplete(
                "a layer of experts was not filled by the checkpoint",
                where=f"{self.where}.{name}",
                found=f"{len(found)} of {needed} matrices",
                needed="a stored tensor for every expert",
                fix="download or save the checkpoint again",
            )

    # ------------------------------------------------ computing

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        return None

    def apply(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return route_and_multiply(self, layer, x, topk_weights, topk_ids)

    def multiply(self, layer: Any, group: str, index: int, x: torch.Tensor) -> torch.Tensor:
        """One expert's product, [tokens, rows], with its bias.

        Every rank has the whole bias of ``down`` while its product is a part of the sum, so
        only the first rank adds it.
        """
        part = self.parts[group]
        biases = getattr(layer, f"{group}_bias", None)
        elsewhere = part.splits_columns and part.rank > 0
        bias = None if biases is None or elsewhere else biases[index]
        out: torch.Tensor = part.method.apply(part.expert(layer, index), x, bias)
        return out


def _finished(method: QuantizedLinearMethod, expert: Any) -> Mapping[str, torch.Tensor]:
    if isinstance(method, OnlineLinearMethod):
        return method.quantize(expert, expert.weight.split(method.shape.rows))
    if isinstance(method, StoredLinearMethod):
        return method.decode(expert)
    return method.finish(expert)


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


def _create_saved(layer: Any, part: Part) -> None:
    for name, data in part.method.empty_parameters():
        _register(layer, f"{part.group}_{name}", data)


def _create_stored(layer: Any, part: Part, num_experts: int) -> None:
    method = part.method
    decoders = method.decoders()
    for rule in method.find_rules():
        dtype, members = getattr(torch, rule.dtype), len(part.shape.rows)
        if isinstance(rule.layout, PerMatrix):
            size, shape = 0, (members, rule.layout.elements)
        else:
            where = f"{layer.layer_name}.{part.group}_{rule.name}"
            columns = part.shape.rank_columns
            size = granule(rule.layout, part.shape.columns, columns, where=where)
            shape = (sum(part.shape.rows), items_per_row(rule.layout, columns, size))
        data = torch.empty(num_experts, *shape, dtype=dtype)
        if rule.poison is not None:
            data.fill_(rule.poison)
        decode = decoders.get(rule.name, lambda tensor, site: tensor)
        loader = _expert_loader(layer, part, rule, size, decode)
        _register(layer, f"{part.group}_{rule.name}", data, weight_loader=loader)


def _expert_loader(
    layer: Any, part: Part, rule: ParameterRule, size: int, decode: Any
) -> Callable[..., bool | None]:
    reference = weakref.ref(layer)
    rows = part.shape.rows[0] * (1 if part.splits_columns else part.ranks)

    def load_expert(  # noqa: PLR0913, PLR0917 - vLLM's signature
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        layer = reference()
        assert layer is not None, "a loader outlived its layer"
        local = layer.expert_map_manager.map_global_to_local(expert_id)
        if local < 0:
            return False if return_success else None
        member, whole = MEMBER[shard_id], param.data[local]
        where = f"{layer.layer_name}.{expert_id}.{shard_id}.{rule.name}"
        site = Site(where, rows, part.shape.columns)
        items = decode(loaded_weight, site)
        if isinstance(rule.layout, PerMatrix):
            _copy(whole[member], items.reshape(-1), site)
        else:
            matrix = to_matrix(items, rule.layout, site, size)
            dimension = 1 if part.splits_columns else 0
            share = matrix.chunk(part.ranks, dim=dimension)[part.rank]
            _copy(whole.split(part.shape.rows)[member], share, site)
        return True if return_success else None

    return load_expert


def _leave_out(  # noqa: PLR0913, PLR0917 - vLLM's signature
    param: Any,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load nothing: in flight, other ranks' experts still arrive when a layer is finished."""
    return False if return_success else None


def _copy(target: torch.Tensor, value: torch.Tensor, site: Site) -> None:
    if target.shape != value.shape:
        keep_old_weights()
        raise WeightMismatch(
            "a stored tensor does not have the size that its layer needs",
            where=site.where,
            found=f"{list(value.shape)}",
            needed=f"{list(target.shape)}",
            fix="use a checkpoint made for this model and its config.json",
        )
    target.copy_(value)


def _check_filled(layer: Any, part: Part) -> None:
    """Raise CheckpointIncomplete if a line of some expert still holds its poison."""
    for rule in part.method.find_rules():
        if rule.poison is None:
            continue
        value = getattr(layer, f"{part.group}_{rule.name}")
        is_poison = value.isnan() if isnan(rule.poison) else value == rule.poison
        unfilled = is_poison.all(dim=-1).any(dim=-1).nonzero().flatten().tolist()
        if unfilled:
            raise CheckpointIncomplete(
                "a layer of experts was not filled by the checkpoint",
                where=f"{layer.layer_name}.{part.group}_{rule.name}",
                found=f"nothing or only a part for {len(unfilled)} of {len(value)} experts here, "
                f"first {unfilled[0]}",
                needed="a stored tensor for every matrix of every expert",
                fix="download or save the checkpoint again",
            )


def _register(layer: Any, name: str, data: torch.Tensor, **attributes: Any) -> None:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
