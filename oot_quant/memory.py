"""Bytes that a model's weights need on each device, from names and shapes alone.

An estimate: matrices are split over the ranks, vectors are not; buffers, activations and the
KV cache come on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from oot_quant.checkpoint import Checkpoint, StoredTensor
from oot_quant.types import ModuleSummary

BITS_PER_WEIGHT = {"nf4": 4.5, "fp4": 4.5}
"""Once loaded, by format: 4 bits and a float32 scale for each 64 weights."""
WEIGHT = re.compile(r"\.weight(\.|$)")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
EMBEDDINGS = frozenset(
    {
        "embed_in",
        "embed_positions",
        "embed_tokens",
        "position_embeddings",
        "shared",
        "tok_embeddings",
        "word_embeddings",
        "wpe",
        "wte",
    }
)
"""Last names of modules whose matrix is a table; it is never quantized."""
HEADS = frozenset({"embed_out", "lm_head"})
"""Last names of output heads. They may be stored quantized, but stay as they are in flight."""
FULL_PRECISION = {"F32": 2, "F64": 4}
"""Times by which vLLM shrinks what is stored wider than the 16 bits that it computes in."""


@dataclass(frozen=True)
class Weights:
    """Bytes of a checkpoint's weights, stored and on each of some devices."""

    quantized_bytes: int
    plain_bytes: int
    device_bytes: int


def module_of(tensor: str) -> str:
    """The module that a stored tensor belongs to, side tensors included."""
    return WEIGHT.split(tensor, maxsplit=1)[0] if WEIGHT.search(tensor) else tensor


def is_part_of(tensor: str, quantized: Mapping[str, ModuleSummary]) -> bool:
    """Whether a stored tensor is the weight of a quantized module or one of its side tensors."""
    module, _, part = tensor.rpartition(".")
    return module_of(tensor) in quantized or (module in quantized and part != "bias")


def is_expert(name: str) -> bool:
    """Whether a module or tensor belongs to routed experts."""
    return EXPERTS.search(name) is not None


def is_linear(tensor: StoredTensor) -> bool:
    """Whether a plain tensor is the matrix of a linear layer, to all that its name tells."""
    if not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
        return False
    name = module_of(tensor.name)
    return name.rpartition(".")[2] not in EMBEDDINGS | HEADS and not is_expert(name)


def weights(
    checkpoint: Checkpoint,
    quantized: Mapping[str, ModuleSummary],
    ranks: int = 1,
    in_flight: str | None = None,
) -> Weights:
    """Bytes that a checkpoint's weights take on disk and on each of ``ranks`` devices.

    quantized: its quantized modules. in_flight: the format that linear layers get while
    loading; None for a checkpoint that is served as it is stored.
    """
    packed = plain = 0
    device = 0.0
    for tensor in checkpoint.tensors.values():
        if is_part_of(tensor.name, quantized):
            packed += tensor.bytes
            continue
        plain += tensor.bytes
        loaded = tensor.bytes / FULL_PRECISION.get(tensor.dtype, 1)
        if in_flight in BITS_PER_WEIGHT and is_linear(tensor):
            loaded = tensor.elements * BITS_PER_WEIGHT[in_flight] / 8
        device += loaded / (ranks if len(tensor.shape) > 1 else 1)
    device += sum(_loaded(summary) for summary in quantized.values()) / ranks
    return Weights(packed, plain, round(device))


def _loaded(summary: ModuleSummary) -> float:
    """Bytes of a quantized module once its statistics are decoded."""
    bits = BITS_PER_WEIGHT.get(summary.format)
    if bits is None or summary.shape is None:
        return summary.bytes
    rows, columns = summary.shape
    return rows * columns * bits / 8
