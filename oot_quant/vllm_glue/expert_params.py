"""Parameters of routed experts, with one entry for each expert, and how they are filled.

As ``params`` for linear layers, but vLLM gives a loader the expert's number and w1, w2 or w3. A
loader must not hold its layer, or a deleted model would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from oot_quant.sharding import granule, items_per_row
from oot_quant.types import ParameterRule, PerMatrix
from oot_quant.vllm_glue.linear import (
    QuantizedLinearMethod,
    SavedLinearMethod,
    StoredLinearMethod,
    is_dummy_load,
)
from oot_quant.vllm_glue.params import (
    LayerShape,
    Site,
    lines_of,
    not_filled,
    to_matrix,
    wrong_size,
)
from oot_quant.vllm_glue.reload import keep_old_weights

GATE_UP, DOWN = "w13", "w2"
MEMBER = {"w1": 0, "w3": 1, "w2": 0}
"""Which of the matrices that are merged each of vLLM's shards is."""


@dataclass
class Part:
    """One of the two weights of every expert: its linear method and its shape on this rank.

    ``ranks`` share its rows or, if ``splits_columns``, its columns. ``names`` are the layer's
    parameters that hold it: other ones while it is loaded than afterwards.
    """

    group: str
    method: QuantizedLinearMethod
    shape: LayerShape
    ranks: int
    rank: int
    names: tuple[str, ...] = ()

    @property
    def splits_columns(self) -> bool:
        return self.group == DOWN

    @property
    def rows(self) -> int:
        """Rows of the merged matrices on this rank."""
        return sum(self.shape.rows)

    def find_names(self, layer: Any) -> None:
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        self.names = tuple(name for name in names if name.startswith(f"{self.group}_weight"))

    def stacked(self, layer: Any) -> dict[str, torch.Tensor]:
        """All experts' parameters, under the names that a linear layer gives them."""
        return {
            name.removeprefix(f"{self.group}_"): getattr(layer, name).data for name in self.names
        }

    def expert(self, layer: Any, index: int) -> Any:
        """One expert's parameters, as a linear layer has them."""
        values = {name: value[index] for name, value in self.stacked(layer).items()}
        return SimpleNamespace(prefix=f"{layer.layer_name}.{index}.{self.group}", **values)


def create(layer: Any, part: Part, num_experts: int, attributes: Mapping[str, Any]) -> None:
    """Register the parameters that loading fills; ``attributes`` are vLLM's for its own loader."""
    if isinstance(part.method, SavedLinearMethod):
        for name, data in part.method.empty_parameters():
            register(layer, f"{part.group}_{name}", data)
    elif isinstance(part.method, StoredLinearMethod):
        _create_stored(layer, part, part.method, num_experts)
    else:
        shape = (num_experts, part.rows, part.shape.rank_columns)
        data = torch.empty(shape, dtype=part.method.dtype, device="meta")
        register(layer, f"{part.group}_weight", data, **attributes)
    part.find_names(layer)


def _create_stored(layer: Any, part: Part, method: StoredLinearMethod, num_experts: int) -> None:
    decoders = method.decoders()
    for rule in method.find_rules():
        dtype, members = getattr(torch, rule.dtype), len(part.shape.rows)
        if isinstance(rule.layout, PerMatrix):
            size, shape = 0, (members, rule.layout.elements)
        else:
            where = f"{layer.layer_name}.{part.group}_{rule.name}"
            columns = part.shape.rank_columns
            size = granule(rule.layout, part.shape.columns, columns, where=where)
            shape = (part.rows, items_per_row(rule.layout, columns, size))
        data = torch.empty(num_experts, *shape, dtype=dtype)
        if rule.poison is not None:
            data.fill_(rule.poison)
        decode = decoders.get(rule.name, lambda tensor, site: tensor)
        loader = _expert_loader(layer, part, rule, size, decode)
        register(layer, f"{part.group}_{rule.name}", data, weight_loader=loader)


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


def leave_out(  # noqa: PLR0913, PLR0917 - vLLM's signature
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
        found, needed = str(list(value.shape)), str(list(target.shape))
        raise wrong_size(where=site.where, found=found, needed=needed)
    target.copy_(value)


def check_filled(layer: Any, part: Part, rules: Sequence[ParameterRule]) -> None:
    """Raise CheckpointIncomplete if a line of some expert still holds its poison."""
    for rule in rules:
        if rule.poison is None:
            continue
        value = getattr(layer, f"{part.group}_{rule.name}")
        unfilled = lines_of(rule.poison, value).any(dim=-1).nonzero().flatten().tolist()
        if unfilled:
            raise not_filled(
                "a layer of experts",
                where=f"{layer.layer_name}.{part.group}_{rule.name}",
                found=f"nothing or only a part for {len(unfilled)} of {len(value)} experts here, "
                f"first {unfilled[0]}",
                needed="a stored tensor for every matrix of every expert",
            )


def check_arrived(layer: Any, part: Part) -> None:
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
        raise not_filled(
            "a layer of experts",
            where=f"{layer.layer_name}.{name}",
            found=f"{len(found)} of {needed} matrices",
            needed="a stored tensor for every expert",
        )


def register(layer: Any, name: str, data: torch.Tensor, **attributes: Any) -> None:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
