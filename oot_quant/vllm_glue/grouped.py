"""Experts on a GPU, as vLLM's modular kernel: the part between dispatch and combination.

vLLM prepares the tokens (also those of other ranks), records graphs and sums over ranks. What is
here multiplies: with a backend's kernel that reads packed weights while an expert has few tokens,
with vLLM's own for 16 bit after unpacking everything when it has many, or with vLLM's own for
int8 rows. Nothing may depend on which experts were chosen, since a graph is recorded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import (
    biased_moe_quant_config,
    int8_w8a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

from oot_quant.errors import UnsupportedFormat
from oot_quant.vllm_glue.expert_params import DOWN, GATE_UP

if TYPE_CHECKING:
    from oot_quant.vllm_glue.experts import ExpertsMethod

    Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One forward pass of a layer.

    ``x`` [tokens, hidden]; ``ids`` [tokens, k], of ``experts`` over all ranks. ``align`` sorts the
    pairs of token and expert by expert, in blocks of a size. ``expert_map`` gives a rank's own
    number of an expert, or -1; None if it has all. ``shares`` [tokens, k], the router's, None if
    they count before the experts. ``biases`` of the two weights, [experts, rows].
    ``activate(out, merged)`` computes what stands between them; None is silu(gate) * up.
    """

    x: torch.Tensor
    ids: torch.Tensor
    experts: int
    align: Callable[[int], Sorted]
    expert_map: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    activate: Callable[[torch.Tensor, torch.Tensor], None] | None = None


class PackedKernel(Protocol):
    """A backend's kernel for the experts of a layer, which it keeps packed."""

    def takes(self, pairs: int, experts: int) -> bool:
        """Whether it is the fastest for so many pairs among the experts of all ranks."""
        ...

    def multiply(self, layer: Any, step: Step, out: torch.Tensor) -> None:
        """Fill ``out`` [tokens, hidden] with what this rank's experts make of the tokens."""
        ...

    def unpack(self, layer: Any, group: str) -> torch.Tensor:
        """All local experts' weights of one group, [experts, rows, columns] in 16 bit."""
        ...


@dataclass(frozen=True)
class Int8Rows:
    """Experts whose ``weight`` is plain rows of int8, with the parameter ``scale`` for each row.

    A weight is the number times its row's scale, by ``steps``.
    """

    scale: str
    steps: int


class UnpackedExperts(TritonExperts):  # type: ignore[misc]
    """Unpacks all experts in every step, for vLLM's own product."""

    def __init__(self, method: ExpertsMethod, layer: Any) -> None:
        biases = [method.bias(layer, group) for group in (GATE_UP, DOWN)]
        super().__init__(method.moe, biased_moe_quant_config(*biases))
        self.reference, self.rows = weakref.ref(layer), method.parts[GATE_UP].rows
        self.dequantize_all = method.dequantize_all

    def unpack(self, group: str) -> torch.Tensor:
        return self.dequantize_all(self.reference(), group)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of gate and up, columns, choices; packed weights tell no rows."""
        return w1.shape[0], a1.shape[0], self.rows, a1.shape[1], topk_ids.shape[1]

    def apply(self, *, w1: torch.Tensor, w2: torch.Tensor, **arguments: Any) -> None:
        super().apply(w1=self.unpack(GATE_UP), w2=self.unpack(DOWN), **arguments)


class PackedExperts(UnpackedExperts):
    """Multiplies with packed weights as long as the backend's kernel says that it pays."""

    def __init__(self, method: ExpertsMethod, layer: Any, kernel: PackedKernel) -> None:
        super().__init__(method, layer)
        self.kernel = kernel

    def unpack(self, group: str) -> torch.Tensor:
        return self.kernel.unpack(self.reference(), group)

    def apply(self, **given: Any) -> None:
        """See ``FusedMoEExpertsModular.apply``, which names what is given."""
        ids, experts = given["topk_ids"], given["global_num_experts"]
        if not self.kernel.takes(ids.numel(), experts):
            super().apply(**given)
            return
        config, activation = self.activation_config, given["activation"]
        plain = activation == MoEActivation.SILU and config.clamp_limit is None
        step = step_of(
            given["hidden_states"],
            ids,
            experts,
            shares=None if given["apply_router_weight_on_input"] else given["topk_weights"],
            expert_map=given["expert_map"],
            biases=(self.w1_bias, self.w2_bias),
            activate=None if plain else partial(self.activation, activation),
        )
        self.kernel.multiply(self.reference(), step, given["output"])


class Int8Experts(TritonExperts):  # type: ignore[misc]
    """vLLM's own product with int8 rows, which it scales in float32."""

    def __init__(self, method: ExpertsMethod, layer: Any, rows: Int8Rows) -> None:
        w1_bias, w2_bias = (method.bias(layer, group) for group in (GATE_UP, DOWN))
        scales = [getattr(layer, f"{group}_{rows.scale}") for group in (GATE_UP, DOWN)]
        config = int8_w8a16_moe_quant_config(*scales, w1_bias=w1_bias, w2_bias=w2_bias)
        super().__init__(method.moe, config)
        self.steps = rows.steps

    @property
    def w1_scale(self) -> torch.Tensor:
        return self._per_step(self.quant_config.w1_scale)

    @property
    def w2_scale(self) -> torch.Tensor:
        return self._per_step(self.quant_config.w2_scale)

    def _per_step(self, scale: torch.Tensor) -> torch.Tensor:
        """Anew each time: the parameter is what a reload or a load balancer changes."""
        return scale.view(len(scale), -1) / self.steps


def make_kernel(
    method: ExpertsMethod, layer: Any, chosen: PackedKernel | Int8Rows | None
) -> FusedMoEKernel:
    """vLLM's kernel for a finished layer. None unpacks all experts.

    Raises UnsupportedFormat if ranks exchange tokens in a form that no kernel here takes.
    """
    if isinstance(chosen, Int8Rows):
        experts = Int8Experts(method, layer, chosen)
    elif chosen is None:
        experts = UnpackedExperts(method, layer)
    else:
        experts = PackedExperts(method, layer, chosen)
    prepare = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=experts.quant_config,
        routing_tables=layer._expert_routing_tables(),  # noqa: SLF001 - as vLLM's own methods do
        allow_new_interface=True,
    )
    if prepare.activation_format != experts.activation_format():
        backend = method.moe.moe_parallel_config.all2all_backend
        raise UnsupportedFormat(
            "quantized experts cannot take tokens in batches for each expert",
            where=method.where,
            found=f"all2all backend {backend}",
            needed="one that sends plain rows of tokens",
            fix="--all2all-backend allgather_reducescatter",
        )
    return FusedMoEKernel(prepare, experts)


def step_of(
    x: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    **others: Any,
) -> Step:
    """A ``Step`` whose pairs vLLM sorts; those of other ranks are left out."""

    def align(block: int) -> Sorted:
        pairs: Sorted = moe_align_block_size(
            ids, block, experts, expert_map, ignore_invalid_experts=True
        )
        return pairs

    return Step(x, ids, experts, align, expert_map, **others)
