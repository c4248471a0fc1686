"""Shard rules become parameters of a vLLM layer, and stored tensors find their place in them.

A packed weight is kept as a matrix with one line of stored items for each row, so vLLM's own
parameter class and its own column, row, merged and QKV slicing apply. The loader of such a
parameter brings a flat stored tensor into that form, whatever its order of arrival, and
checks its size against the layer first.

Two rules of vLLM's weight reloading bind a loader: its first argument is called ``param``,
and it must not hold its layer, or a deleted model would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter

from oot_quant.errors import CheckpointIncomplete, WeightMismatch
from oot_quant.sharding import granule, is_plain_view, items_per_row, stored_items
from oot_quant.types import ParameterRule, PerMatrix, Runs
from oot_quant.vllm_glue.reload import keep_old_weights

ShardId = int | str | tuple[int, ...] | None
MEMBER_OF_SHARD = {"q": 0, "k": 1, "v": 2, "index_q": 3, "index_k": 4}
REPLICATED = {"KimiK3MergedQKVGateLinear": (0, 1), "Qwen4ExpQSAQKVIndexerLinear": (3,)}
"""Members that every rank holds whole, by the class of a layer that does not say so itself."""


@dataclass(frozen=True)
class LayerShape:
    """A layer's unpacked weight.

    ``rows`` is each merged matrix's part on this rank, ``columns`` the input width over all
    ranks, ``rank_columns`` this rank's part of it.
    """

    rows: tuple[int, ...]
    columns: int
    rank_columns: int


@dataclass(frozen=True)
class Site:
    """Where a stored tensor goes: its name for messages, and the whole matrix's shape."""

    where: str
    rows: int
    columns: int


Decoder = Callable[[torch.Tensor, Site], torch.Tensor]
"""Turns a stored tensor into the items that a rule speaks of (a view, a parsed blob)."""


def create_parameters(
    layer: LinearBase,
    rules: Sequence[ParameterRule],
    shape: LayerShape,
    decoders: Mapping[str, Decoder],
) -> None:
    """Register a rule's parameters on a layer, sized for this rank, with their loaders.

    Raises ShardMisaligned, naming the layer, if a rule cannot be split so.
    """
    for rule in rules:
        decode = decoders.get(rule.name, _as_stored)
        dtype = getattr(torch, rule.dtype)
        loader: Callable[..., None]
        if isinstance(rule.layout, PerMatrix):
            data = torch.empty(len(shape.rows), rule.layout.elements, dtype=dtype)
            loader = _per_matrix_loader(layer, rule, shape, decode)
            parameter = BasevLLMParameter(data=data, weight_loader=loader)
        else:
            where = f"{layer.prefix}.{rule.name}"
            size = granule(rule.layout, shape.columns, shape.rank_columns, where=where)
            width = items_per_row(rule.layout, shape.rank_columns, size)
            data = torch.empty(sum(shape.rows), width, dtype=dtype)
            loader = _matrix_loader(layer, rule, shape, size, decode)
            parameter = ModelWeightParameter(
                data=data, input_dim=1, output_dim=0, weight_loader=loader
            )
        if rule.poison is not None:
            parameter.data.fill_(rule.poison)
        layer.register_parameter(rule.name, parameter)


def check_filled(layer: LinearBase, rules: Sequence[ParameterRule]) -> None:
    """Raise CheckpointIncomplete if a line of a poisoned parameter still holds its poison."""
    for rule in rules:
        if rule.poison is None:
            continue
        unfilled = lines_of(rule.poison, getattr(layer, rule.name))
        if bool(unfilled.any()):
            raise not_filled(
                "a quantized layer",
                where=f"{layer.prefix}.{rule.name}",
                found=f"{int(unfilled.sum())} of {len(unfilled)} lines were never loaded",
                needed="a stored tensor for every matrix of the layer",
            )


def lines_of(poison: float, value: torch.Tensor) -> torch.Tensor:
    """Which lines along the last axis hold nothing but poison."""
    is_poison = value.isnan() if isnan(poison) else value == poison
    return is_poison.all(dim=-1)


def not_filled(what: str, *, where: str, found: str, needed: str) -> CheckpointIncomplete:
    return CheckpointIncomplete(
        f"{what} was not filled by the checkpoint",
        where=where,
        found=found,
        needed=needed,
        fix="download or save the checkpoint again",
    )


def wrong_size(*, where: str, found: str, needed: str) -> WeightMismatch:
    return WeightMismatch(
        "a stored tensor does not have the size that its layer needs",
        where=where,
        found=found,
        needed=needed,
        fix="use a checkpoint made for this model and its config.json",
    )


def load_plain_weight(layer: LinearBase) -> Callable[..., None]:
    """A loader for 16-bit weights that are quantized later; refuses packed ones by name."""
    reference = weakref.ref(layer)

    def load_plain(
        param: Any, loaded_weight: torch.Tensor, loaded_shard_id: ShardId = None
    ) -> None:
        layer = _alive(reference)
        if not loaded_weight.is_floating_point():
            keep_old_weights()
            raise WeightMismatch(
                "packed bytes without a quant state cannot be loaded into an in-flight layer",
                where=f"{layer.prefix}.weight",
                found=f"{loaded_weight.dtype} of shape {list(loaded_weight.shape)}",
                needed="the unpacked weight in a floating dtype",
                fix="send the weights unpacked (dequantized) to 16 bit",
            )
        _deliver(layer, param, loaded_weight, loaded_shard_id)

    return load_plain


def to_matrix(items: torch.Tensor, layout: Runs, site: Site, size: int) -> torch.Tensor:
    """Flat stored items as a matrix with ``size`` weights for each item.

    items: any shape, in the order of the file, or such a matrix already. Returns [rows, items
    in a row]; a view where no item has to be repeated.

    Raises WeightMismatch if the count is not that of the whole matrix.
    """
    width = items_per_row(layout, site.columns, size)
    if items.shape == (site.rows, width):
        return items
    expected = stored_items(layout, site.rows, site.columns)
    if items.numel() != expected:
        raise wrong_size(
            where=site.where,
            found=f"{items.numel()} items, shape {list(items.shape)}, {items.dtype}",
            needed=f"{expected} items for a packed {site.rows} x {site.columns} weight",
        )
    flat = items.reshape(-1)
    if not is_plain_view(layout, site.columns, size):
        first = torch.arange(0, site.rows * site.columns, size, device=flat.device)
        flat = flat.view(-1, layout.elements)[first // layout.weights]
    return flat.reshape(site.rows, width)


def stored_rows(layer: LinearBase, shard_id: ShardId) -> int:
    """Rows of the whole matrix that is stored for one shard of a layer, over all ranks."""
    if isinstance(layer, QKVParallelLinear):
        key_value = layer.total_num_kv_heads
        sizes: dict[ShardId, int] = {
            "q": layer.total_num_heads * layer.head_size,
            "k": key_value * layer.head_size,
            "v": key_value * layer.v_head_size,
        }
        if hasattr(layer, "index_head_size"):  # MiniMax-M3: an indexer's matrices as well
            sizes["index_q"] = layer.total_num_index_heads * layer.index_head_size
            sizes["index_k"] = layer.index_head_size
        if shard_id is None:
            return sum(sizes.values())
        if shard_id in sizes:
            return sizes[shard_id]
    # An output head is padded; what is stored is the vocabulary.
    whole = getattr(layer, "org_vocab_size", None) or layer.output_size
    members: list[int] = getattr(layer, "output_sizes", [whole])
    indices = shard_members(shard_id, len(members))
    return sum(members[index] // _copies(layer, index) for index in indices)


def shard_members(shard_id: ShardId, count: int) -> Sequence[int]:
    """Which of a layer's ``count`` merged matrices a shard holds."""
    if shard_id is None:
        return range(count)
    if isinstance(shard_id, tuple):
        return shard_id
    return (MEMBER_OF_SHARD[shard_id] if isinstance(shard_id, str) else shard_id,)


def _copies(layer: Any, member: int) -> int:
    """How many times a layer counts the rows of a matrix that several ranks hold alike."""
    whole = {
        getattr(layer, "replicated_shard_id", None),
        *getattr(layer, "replicated_shard_ids", ()),
        *REPLICATED.get(type(layer).__name__, ()),
    }
    if member in whole:
        return int(layer.tp_size)
    is_key_or_value = type(layer).__name__ == "Qwen4ExpQSAQKVIndexerLinear" and member in {1, 2}
    return int(layer.num_kv_head_replicas) if is_key_or_value else 1


def _matrix_loader(
    layer: LinearBase, rule: ParameterRule, shape: LayerShape, size: int, decode: Decoder
) -> Callable[..., None]:
    reference = weakref.ref(layer)
    layout = rule.layout
    assert isinstance(layout, Runs)

    def load_matrix(
        param: Any, loaded_weight: torch.Tensor, loaded_shard_id: ShardId = None
    ) -> None:
        layer = _alive(reference)
        site = _site(layer, rule, shape, loaded_shard_id)
        stored = _in_file_order(loaded_weight)
        matrix = to_matrix(decode(stored, site), layout, site, size)
        _deliver(layer, param, matrix, loaded_shard_id)

    return load_matrix


def _per_matrix_loader(
    layer: LinearBase, rule: ParameterRule, shape: LayerShape, decode: Decoder
) -> Callable[..., None]:
    reference = weakref.ref(layer)

    def load_rows(param: Any, loaded_weight: torch.Tensor, loaded_shard_id: ShardId = None) -> None:
        layer = _alive(reference)
        site = _site(layer, rule, shape, loaded_shard_id)
        value = decode(loaded_weight, site).reshape(-1)
        if value.numel() != param.shape[1]:
            raise wrong_size(
                where=site.where,
                found=f"{value.numel()} items",
                needed=f"{param.shape[1]} items",
            )
        for index in shard_members(loaded_shard_id, param.shape[0]):
            param.data[index].copy_(value)

    return load_rows


def _deliver(layer: LinearBase, param: Any, matrix: torch.Tensor, shard_id: ShardId) -> None:
    load = getattr(layer, "weight_loader_v2", None) or layer.weight_loader
    if shard_id is None:
        load(param, matrix)
    else:
        load(param, matrix, shard_id)


def _site(layer: LinearBase, rule: ParameterRule, shape: LayerShape, shard_id: ShardId) -> Site:
    part = "" if shard_id is None else f" (part {shard_id})"
    where = f"{layer.prefix}.{rule.name}{part}"
    return Site(where, stored_rows(layer, shard_id), shape.columns)


def _in_file_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it lies in the file, if the model's class has transposed it.

    GPT-2's does so with every weight, since plain ones are stored that way (Conv1D). Packed
    ones are stored as a linear layer has them.
    """
    is_transposed = tensor.ndim == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return tensor.t() if is_transposed else tensor


def _as_stored(tensor: torch.Tensor, site: Site) -> torch.Tensor:
    return tensor


def _alive(reference: weakref.ref[LinearBase]) -> LinearBase:
    layer = reference()
    assert layer is not None, "a loader outlived its layer"
    return layer
