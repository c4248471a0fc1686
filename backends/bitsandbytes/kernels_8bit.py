"""Multiplies with 8-bit weights, weight-only: a stored weight is ``weight * scb / 127``.

LLM.int8 rounds the activations too, but for their outlier columns, which takes a decision on
the host in every layer. With the activations as they are, results are at least as exact, and
the layer can be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from vllm.platforms import current_platform

from oot_quant.vllm_glue.int8 import SCALE, UNIT, WeightOnlyInt8

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


class Cpu:
    """PyTorch's own product with int8 rows, which converts them in registers.

    In bfloat16 alone: its other types convert one weight at a time. It reads whole vectors
    along a row and past the end of one that is not made of them.
    """

    VECTOR = 32

    def prepare(self, layer: torch.nn.Module, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        units = torch.full((len(weight),), UNIT, dtype=torch.bfloat16, device=weight.device)
        return {"weight": weight, SCALE: units}

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        units = getattr(layer, SCALE)
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, layer.weight, units)  # noqa: SLF001
        return out.view(*x.shape[:-1], -1)


def choose(rows: int, columns: int, dtype: torch.dtype, *, keeps_rows: bool = False) -> Kernel:
    """The kernel for a weight on this rank: vLLM's or PyTorch's own, where they have one.

    Those of vLLM, which have orders of their own, are not for a weight that ``keeps_rows``.
    """
    if current_platform.is_cpu() and dtype == torch.bfloat16 and columns % Cpu.VECTOR == 0:
        return Cpu()
    return (None if keeps_rows else WeightOnlyInt8.choose(rows, columns, dtype)) or Plain()
