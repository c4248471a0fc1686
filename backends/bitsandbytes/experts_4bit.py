"""Routed experts in 4 bit on Hopper: which layers the Triton kernels serve, and how it is called.

A layer's experts are kept in the order that ``triton_4bit`` reads, like the linear layers that
they are made of. Importing this imports no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from oot_quant.vllm_glue.grouped import Step, step_of

from .kernels_4bit import TritonGemm
from .product_4bit import TOLERANCE, tables_of
from .triton_4bit.units import restore
from .weights import unpack

if TYPE_CHECKING:
    from oot_quant.vllm_glue.linear import QuantizedLinearMethod

    from .triton_4bit.experts import Experts

logger = init_logger("vllm.oot_quant")

GROUPS = ("w13", "w2")
LARGEST_AVERAGE = 256
"""Above so many pairs for each expert, on the average, unpacking all of them costs less
(``benchmarks.experts``)."""
TRIED_AVERAGES = (1, 16, 32)
"""Pairs for each expert, one number for every way to cut a product; and one token is tried."""
_troubles: dict[object, str | None] = {}


@dataclass(frozen=True)
class TritonExperts4bit:
    """The kernels for a layer: ``rows`` of its two weights, computing in ``dtype``."""

    quant_type: str
    rows: Mapping[str, int]
    dtype: torch.dtype

    def takes(self, pairs: int, experts: int) -> bool:
        return pairs <= LARGEST_AVERAGE * experts

    def multiply(self, layer: Any, step: Step, out: torch.Tensor) -> None:
        from .triton_4bit.experts import Routing, run

        ids = step.ids.contiguous()
        routing = Routing(ids, step.expert_map, step.experts, step.align)
        shares = None if step.shares is None else step.shares.contiguous()
        gate_up, down = (self.experts(layer, group) for group in GROUPS)
        run(step.x, (gate_up, down), routing, shares, step.biases, step.activate, out)

    def unpack(self, layer: Any, group: str) -> torch.Tensor:
        from .triton_4bit.experts import unpack as unpack_experts

        return unpack_experts(self.experts(layer, group), self.dtype)

    def experts(self, layer: Any, group: str) -> Experts:
        """One group's weights, from the parameters of a finished layer."""
        from .triton_4bit.experts import Experts

        return Experts(
            getattr(layer, f"{group}_weight").data,
            getattr(layer, f"{group}_weight_absmax").data,
            getattr(layer, f"{group}_weight_quant_map").data[0],
            tables_of(self.quant_type, self.dtype),
            self.rows[group],
        )


def choose(methods: Mapping[str, QuantizedLinearMethod], layer: Any) -> TritonExperts4bit | None:
    """The kernels for a finished layer, whose two weights have these methods; None for none.

    Says why where they should serve and do not.
    """
    kernels = {group: getattr(methods[group], "kernel", None) for group in GROUPS}
    found = {group: k for group, k in kernels.items() if isinstance(k, TritonGemm)}
    quant_types = {kernel.quant_type for kernel in found.values()}
    if len(found) < len(kernels) or len(quant_types) > 1:
        return None
    rows = {group: kernel.rows for group, kernel in found.items()}
    kernel = TritonExperts4bit(quant_types.pop(), rows, methods[GROUPS[0]].dtype)
    reason = trouble(kernel, layer)
    if reason:
        logger.warning_once(
            "bitsandbytes: the Triton kernels for 4-bit experts are not used, all experts are "
            "unpacked in every step instead: %s",
            reason,
        )
    return None if reason else kernel


def trouble(kernel: TritonExperts4bit, layer: Any) -> str | None:
    """Why the kernels must not serve a layer; None if they may.

    Compiles all that the layer needs and tries them on its weights, once for layers that are
    alike, before graphs are recorded: as ``product_4bit.trouble``.
    """
    shapes = [value.shape for value in kernel.experts(layer, "w13")[:2]]
    shapes += [value.shape for value in kernel.experts(layer, "w2")[:2]]
    key = (kernel.quant_type, *kernel.rows.values(), *shapes, kernel.dtype)
    if key not in _troubles:
        try:
            _troubles[key] = _try(kernel, layer)
        except Exception as raised:  # noqa: BLE001 - whatever it is, another path takes over
            lines = str(raised).strip().splitlines()
            _troubles[key] = f"{type(raised).__name__}: {lines[0] if lines else ''}"
    return _troubles[key]


def _try(kernel: TritonExperts4bit, layer: Any) -> str | None:
    gate_up = kernel.experts(layer, GROUPS[0])
    count, hidden, device = len(gate_up.words), gate_up.columns, gate_up.words.device
    random = torch.Generator(device).manual_seed(0)
    for tokens in (1, *(average * count for average in TRIED_AVERAGES)):
        x = torch.randn(tokens, hidden, dtype=kernel.dtype, device=device, generator=random)
        ids = torch.randint(0, count, (tokens, 1), device=device, generator=random).int()
        out = torch.full_like(x, torch.nan)
        kernel.multiply(layer, step_of(x, ids, count, activate=_relu), out)
        error = _error(kernel, layer, x, ids.view(-1), out)
        if not error <= TOLERANCE:
            return f"{tokens} tokens: the error is {error:.3g}, {TOLERANCE} is allowed"
    return None


def _relu(out: torch.Tensor, merged: torch.Tensor) -> None:
    """Stands for any activation: gate and up are multiplied alike in all."""
    out.copy_(merged[:, : out.shape[1]].relu())


def _error(
    kernel: TritonExperts4bit,
    layer: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
) -> float:
    """Of ``out``, and of the unpacked weights, relative to each expert in plain torch, float32."""
    pair = [kernel.experts(layer, group) for group in GROUPS]
    expected = torch.empty_like(x, dtype=torch.float32)
    worst = 0.0
    packed = [kernel.unpack(layer, group) for group in GROUPS]
    for expert in set(ids.tolist()):
        plain = [
            unpack(*restore(one.words[expert], one.scales[expert], one.rows), one.values)
            for one in pair
        ]
        mine = ids == expert
        merged = x[mine].float() @ plain[0].t()
        inner = merged[:, : pair[1].columns].relu().to(x.dtype).float()
        expected[mine] = inner @ plain[1].t()
        for fast, exact in zip(packed, plain, strict=True):
            worst = max(worst, float((fast[expert].float() - exact).norm() / exact.norm()))
    return max(worst, float((out.float() - expected).norm() / expected.norm()))
