"""vLLM's own linear layers without an engine or a second process, on any rank.

Build a layer with ``build_linear`` inside ``tensor_parallel``, fill it with ``load_stored``,
finish it with ``process``; ``rank_weight`` is what it has to hold then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

from oot_quant.checkpoint import read_checkpoint
from oot_quant.manager import backends

if TYPE_CHECKING:
    from pathlib import Path

    from oot_quant.vllm_glue.config import PluginConfig

Kind = Literal["replicated", "column", "row", "merged", "qkv"]
KINDS: tuple[Kind, ...] = ("replicated", "column", "row", "merged", "qkv")
HEAD_SIZE = 64
PACKED_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""How vLLM's Llama merges its matrices; what its model class tells a config."""
SHARDS: Mapping[str, tuple[str | int, ...]] = {"merged": (0, 1), "qkv": ("q", "k", "v")}


@contextmanager
def tensor_parallel(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Let layers that are built inside believe to be one rank of several.

    Nothing may communicate: call ``layer.quant_method.apply``, not the layer.
    """
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(_vllm_config()))
        for module in (linear, parameter):
            for name, value in (("rank", rank), ("world_size", size)):
                target = f"get_tensor_model_parallel_{name}"
                stack.enter_context(mock.patch.object(module, target, lambda value=value: value))
        yield


def config_for(
    method: str, folder: str | Path, options: Mapping[str, Any] | None = None
) -> PluginConfig:
    """A method's config as vLLM makes it for a Llama in ``folder``; see ``PluginConfig``.

    options: stands for the quantization section of config.json, which is read if None.

    Raises OotQuantError, as starting an engine would.
    """
    section = options if options is not None else read_checkpoint(str(folder)).quantization_config
    config_class = backends().call(method, "oot_quant_config", method=method)
    config: PluginConfig = (
        config_class() if section is None else config_class.from_config(dict(section))
    )
    config.packed_modules_mapping = PACKED_MODULES
    config.maybe_update_config(str(folder))
    return config


def build_linear(  # noqa: PLR0913 - what a layer of vLLM takes
    kind: Kind,
    config: PluginConfig | None,
    prefix: str,
    columns: int,
    rows: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = HEAD_SIZE,
) -> linear.LinearBase:
    """A layer of vLLM for this rank, without bias; call inside ``tensor_parallel``.

    columns, rows: sizes over all ranks, one number of rows for each merged matrix (two or
    more for ``merged``, those of q, k and v for ``qkv``). prefix: its name, whose last part
    has to be a key of ``PACKED_MODULES`` for merged kinds.
    """
    parts = [rows] if isinstance(rows, int) else list(rows)
    shared: dict[str, Any] = {
        "bias": False,
        "params_dtype": dtype,
        "quant_config": config,
        "prefix": prefix,
    }
    if kind == "merged":
        return linear.MergedColumnParallelLinear(columns, parts, **shared)
    if kind == "qkv":
        heads, key_heads, _ = (part // head_size for part in parts)
        return linear.QKVParallelLinear(columns, head_size, heads, key_heads, **shared)
    (out,) = parts
    if kind == "row":
        return linear.RowParallelLinear(columns, out, reduce_results=False, **shared)
    plain = linear.ReplicatedLinear if kind == "replicated" else linear.ColumnParallelLinear
    return plain(columns, out, **shared)


def load_stored(
    layer: linear.LinearBase,
    config: PluginConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    prefix: str | None = None,
) -> None:
    """Give a layer its stored tensors, in the order given, as a model of vLLM would.

    tensors: names as in the checkpoint, of the layer itself or of the matrices it merges;
    those of other modules are left out. prefix: the layer's name; output heads that are not
    quantized do not keep theirs up to vLLM 0.30.
    """
    prefix = layer.prefix if prefix is None else prefix
    members = config.members(prefix)
    shards = _shards(layer) if len(members) > 1 else (None,)
    shard_of: dict[str, Any] = {**dict(zip(members, shards, strict=True)), prefix: None}
    for name, tensor in config.name_mapper().apply(tensors):
        module, _, parameter_name = name.rpartition(".")
        if module in shard_of:
            target = getattr(layer, parameter_name)
            shard = shard_of[module]
            target.weight_loader(target, tensor, *([] if shard is None else [shard]))


def process(layer: linear.LinearBase) -> None:
    """What vLLM does with a layer once all weights are loaded; may be called again."""
    layer.quant_method.process_weights_after_loading(layer)


def finish_loading(layer: linear.LinearBase) -> None:
    """What vLLM does at the end of its stream of weights with a layer that waits for more."""
    finalize_layerwise_processing(layer, None)  # only attention asks for the model's config


def rank_weight(
    kind: Kind,
    matrices: Sequence[torch.Tensor],
    rank: int,
    size: int,
    *,
    head_size: int = HEAD_SIZE,
) -> torch.Tensor:
    """One rank's part of a layer's weight, by plain slicing of the whole matrices.

    matrices: [rows, columns] for each matrix that the layer merges, one for a plain layer.
    With fewer key heads than ranks, several ranks hold the same head, as in vLLM.
    """
    if kind == "replicated":
        return torch.cat(list(matrices))
    if kind == "row":
        (matrix,) = matrices
        return matrix.chunk(size, dim=1)[rank]
    parts = []
    for matrix in matrices:
        ranks = min(size, matrix.shape[0] // head_size) if kind == "qkv" else size
        parts.append(matrix.chunk(ranks, dim=0)[rank * ranks // size])
    return torch.cat(parts)


@lru_cache(maxsize=1)
def _vllm_config() -> VllmConfig:
    return VllmConfig()


def _shards(layer: linear.LinearBase) -> tuple[str | int, ...]:
    return SHARDS["qkv" if isinstance(layer, linear.QKVParallelLinear) else "merged"]
