"""vLLM's own kernels for int8 weights and 16-bit activations, for backends that store rows of int8.

vLLM chooses among Machete, Marlin and others by device and shape. They take unsigned bytes
with an offset of 128, four in an int32 along the columns, and one scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

WEIGHT, SCALE, ZERO_POINT = "weight", "weight_unit", "w_zp"
PER_INT32 = 4
UNIT = 2.0**-7
"""The scale that a kernel is given: exact in every dtype, and small enough for float16."""


class WeightOnlyInt8:
    """Computes ``x @ (weight * UNIT).T`` with a kernel of vLLM."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @classmethod
    def choose(cls, rows: int, columns: int, dtype: torch.dtype) -> WeightOnlyInt8 | None:
        """The kernel for a weight on this rank; None if vLLM has none for this device."""
        if not current_platform.is_cuda() or dtype == torch.float32 or columns % PER_INT32:
            return None
        shape = (columns, rows)
        wanted = {
            "full_weight_shape": shape,
            "partition_weight_shape": shape,
            "weight_type": scalar_types.uint8b128,
            "act_type": dtype,
            "group_size": -1,
            "zero_points": False,
        }
        if any(field.name == "has_g_idx" for field in fields(MPLinearLayerConfig)):
            wanted["has_g_idx"] = False  # vLLM 0.28 and 0.29
        config = MPLinearLayerConfig(**wanted)
        try:
            chosen = choose_mp_linear_kernel(config)
        except ValueError:
            return None
        return cls(chosen(config, w_q_param_name=WEIGHT, w_s_param_name=SCALE))

    def prepare(self, layer: torch.nn.Module, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The layer's parameters, in the kernel's layout, from [rows, columns] int8."""
        octets = (weight.to(torch.int16) + 128).to(torch.uint8)
        words = octets.view(torch.int32).t()
        units = torch.full(
            (1, weight.shape[0]), UNIT, dtype=self.kernel.config.act_type, device=weight.device
        )
        holder = torch.nn.Module()
        holder.weight = PackedvLLMParameter(
            data=words,
            input_dim=0,
            output_dim=1,
            packed_dim=0,
            packed_factor=PER_INT32,
            weight_loader=_never,
        )
        setattr(
            holder,
            SCALE,
            GroupQuantScaleParameter(data=units, input_dim=0, output_dim=1, weight_loader=_never),
        )
        self.kernel.process_weights_after_loading(holder)
        # Marlin wants an empty tensor for the zero points that it does not have.
        setattr(layer, ZERO_POINT, getattr(holder, ZERO_POINT, None))
        return {WEIGHT: holder.weight.data, SCALE: getattr(holder, SCALE).data}

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.kernel.apply_weights(layer, x, None)
        return out


def _never(param: Any, loaded_weight: Any) -> None:
    raise AssertionError("a weight in a kernel's layout is never loaded into")
