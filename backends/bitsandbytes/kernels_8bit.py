"""Multiplies with 8-bit weights, weight-only: a stored weight is ``weight * scb / 127``.

LLM.int8 rounds the activations too, but for their outlier columns, which takes a decision on
the host in every layer. With the activations as they are, results are at least as exact, and
the layer can be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from oot_quant.vllm_glue.int8 import UNIT, WeightOnlyInt8

STEPS = 127
"""The largest weight of a row is stored as this number."""


class Kernel(Protocol):
    """Computes ``x @ (weight * UNIT).T`` with the parameters that it prepared."""

    def prepare(self, layer: torch.nn.Module, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The layer's parameters from [rows, columns] int8; called once after loading."""
        ...

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor: ...


class Plain:
    """Unpack in plain torch, then multiply: any device, dtype and shape.

    Whole numbers up to 127 and their product with a power of two are exact in every dtype.
    """

    def prepare(self, layer: torch.nn.Module, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"weight": weight}

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return torch.nn.functional.linear(x, weight.to(x.dtype) * UNIT)


def choose(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """The kernel for a weight on this rank: vLLM's own where it has one for the device."""
    return WeightOnlyInt8.choose(rows, columns, dtype) or Plain()
