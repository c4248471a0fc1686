"""The layers of the tiny Llama that the contract goes through, and how each is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oot_quant.testing.checkpoints import Store, Stored, llama_weights, write_checkpoint
from oot_quant.testing.layers import (
    Kind,
    build_linear,
    config_for,
    finish_loading,
    load_stored,
    process,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase

LAYER = "model.layers.0"


@dataclass(frozen=True)
class Case:
    """A layer of the tiny Llama: vLLM's class, its name, and the matrices that it merges."""

    kind: Kind
    name: str
    members: tuple[str, ...]

    @property
    def prefix(self) -> str:
        return f"{LAYER}.{self.name}"

    def matrices(self) -> dict[str, torch.Tensor]:
        weights = llama_weights()
        return {f"{LAYER}.{name}": weights[f"{LAYER}.{name}.weight"] for name in self.members}

    def build(self, config: Any, dtype: torch.dtype = torch.float32) -> LinearBase:
        matrices = self.matrices().values()
        columns = next(iter(matrices)).shape[1]
        rows = [matrix.shape[0] for matrix in matrices]
        return build_linear(self.kind, config, self.prefix, columns, rows, dtype=dtype)


REPLICATED = Case("replicated", "mlp.down_proj", ("mlp.down_proj",))
COLUMN = Case("column", "mlp.up_proj", ("mlp.up_proj",))
ROW = Case("row", "mlp.down_proj", ("mlp.down_proj",))
MERGED = Case("merged", "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
QKV = Case(
    "qkv", "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
)
CASES = (REPLICATED, COLUMN, ROW, MERGED, QKV)


@dataclass(frozen=True)
class Loader:
    """Builds and fills layers with one method, the way an engine would."""

    method: str
    store: Store
    section: Mapping[str, Any]
    folder: Path

    def write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Path:
        """A checkpoint of stored tensors."""
        return write_checkpoint(self.folder / name, tensors, dtype, self.section)

    def loaded(
        self,
        case: Case,
        stored: Iterable[Stored],
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        lost: str = "",
    ) -> LinearBase:
        """A finished layer from stored matrices, whose tensors arrive in a random order.

        lost: name of a tensor that the file has, but that never arrives.
        """
        tensors = {name: t for part in stored for name, t in part.tensors.items()}
        config = config_for(self.method, self.write(case.name, tensors, dtype))
        layer = case.build(config, dtype)
        stream = {name: tensor for name, tensor in tensors.items() if name != lost}
        load_stored(layer, config, shuffled(stream, seed))
        process(layer)
        return layer

    def in_flight(
        self, case: Case, folder: Path, matrices: Mapping[str, torch.Tensor]
    ) -> LinearBase:
        """A finished layer from plain matrices."""
        config = config_for(self.method, folder)
        layer = case.build(config)
        tensors = {f"{name}.weight": matrix for name, matrix in matrices.items()}
        load_stored(layer, config, shuffled(tensors, seed=0))
        finish_loading(layer)
        process(layer)
        return layer


def dequantized(layer: LinearBase) -> torch.Tensor:
    """The weight that a finished layer stands for on its rank."""
    weight: torch.Tensor = layer.quant_method.dequantize_weight(layer)
    return weight


def shuffled(tensors: Mapping[str, torch.Tensor], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Named tensors in a random order, the same for the same seed."""
    items = list(tensors.items())
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[index] for index in order.tolist()]
