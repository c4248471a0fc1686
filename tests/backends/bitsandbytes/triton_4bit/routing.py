"""Routed tokens in plain torch: the sorting that vLLM does on a GPU, and what has to come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

UNREAD = -7
"""Fills what a kernel must not read, as vLLM leaves there whatever the memory held."""


def sort_pairs(
    ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As vLLM's ``moe_align_block_size`` with ``ignore_invalid_experts``."""
    flat, pairs, owners = ids.flatten().tolist(), [], []
    for expert in range(experts):
        local = expert if expert_map is None else int(expert_map[expert])
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        if local >= 0 and mine:
            mine += [len(flat)] * (-len(mine) % block)
            pairs += mine
            owners += [local] * (len(mine) // block)
    filled = len(pairs)
    pairs += [UNREAD] * (2 * block)
    owners += [UNREAD] * 2
    return tuple(torch.tensor(v, dtype=torch.int32) for v in (pairs, owners, [filled]))


def through_experts(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ids: torch.Tensor,
    shares: torch.Tensor | None,
    biases: Sequence[torch.Tensor | None],
    activation: Callable[[torch.Tensor], torch.Tensor],
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token through its experts of this rank, one after the other, in float64.

    weights: of gate and up merged, and of down, [experts, rows, columns].
    """
    out = torch.zeros(len(x), weights[1].shape[1], dtype=torch.float64, device=x.device)
    local = ids.long() if expert_map is None else expert_map.long()[ids.long()]
    for token, choices in enumerate(local.tolist()):
        for choice, expert in enumerate(choices):
            if expert < 0:
                continue
            value = x[token].double()
            for weight, bias, then in zip(weights, biases, (activation, lambda v: v), strict=True):
                value = weight[expert].double() @ value
                value = then(value if bias is None else value + bias[expert].double())
            out[token] += value if shares is None else value * shares[token, choice].double()
    return out


def silu_gated(merged: torch.Tensor) -> torch.Tensor:
    gate, up = merged.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
