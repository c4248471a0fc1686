"""One layer of each kind, loaded as vLLM would, for the tests of linear layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from oot_quant.testing.layers import (
    Kind,
    build_linear,
    config_for,
    load_stored,
    process,
    tensor_parallel,
)

PREFIX = {
    "replicated": "model.layers.0.mlp.router",
    "column": "model.layers.0.mlp.fc1",
    "row": "model.layers.0.mlp.down_proj",
    "merged": "model.layers.0.mlp.gate_up_proj",
    "qkv": "model.layers.0.self_attn.qkv_proj",
}
PARTS = {"merged": ("gate_proj", "up_proj"), "qkv": ("q_proj", "k_proj", "v_proj")}
ROWS = {
    "replicated": (64,),
    "column": (128,),
    "row": (64,),
    "merged": (128, 128),
    "qkv": (256, 128, 128),
}


def names_of(kind: Kind) -> list[str]:
    parent = PREFIX[kind].rpartition(".")[0]
    return [f"{parent}.{part}" for part in PARTS[kind]] if kind in PARTS else [PREFIX[kind]]


def load(
    kind: Kind,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    columns: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
) -> LinearBase:
    """A finished layer, its tensors given in a random order."""
    order = list(tensors.items())
    random.Random(rank).shuffle(order)
    with tensor_parallel(rank, ranks):
        config = config_for("bitsandbytes", folder, options)
        rows: int | Sequence[int] = ROWS[kind]
        layer = build_linear(kind, config, PREFIX[kind], columns, rows, dtype=dtype)
        load_stored(layer, config, order)
        process(layer)
    return layer


def weight_of(layer: LinearBase) -> torch.Tensor:
    return layer.quant_method.dequantize_weight(layer)


def error_of(output: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (output.double() - reference.double()).norm()
    return float(difference / reference.double().norm())
