"""Which of a model's weights are quantized, how, and how many bytes that is. Headers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from oot_quant.doctor.inventory import Inventory, pattern_of, ranges
from oot_quant.doctor.model import GROUP
from oot_quant.memory import is_expert, is_part_of, module_of, weights
from oot_quant.types import Check, Facts, ModuleSummary, Outcome, Status

STEP = 1024


def stored(_: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    if not inventory.checkpoint.tensors:
        return Outcome(Status.SKIP, "which weights are quantized: the headers cannot be read")
    found = weights(inventory.checkpoint, inventory.summaries)
    plain = _plain_matrices(inventory)
    data = {
        "quantized_bytes": found.quantized_bytes,
        "plain_bytes": found.plain_bytes,
        "quantized": _grouped(inventory.summaries),
        "plain": {pattern: len(names) for pattern, names in plain.items()},
    }
    if not inventory.summaries:
        return Outcome(
            Status.INFO, f"{readable(found.plain_bytes)} of weights, none quantized", "", None, data
        )
    lines = [f"  {pattern}  {how}" for pattern, how in _aligned(_grouped(inventory.summaries))]
    packed = {pattern_of(name) for name in inventory.summaries}
    kept = [
        f"{pattern}{_layers(names) if pattern in packed else ''}"
        for pattern, names in plain.items()
    ]
    if kept:
        lines.append(f"Not quantized: {', '.join(kept)}.")
    summary = f"{readable(found.quantized_bytes)} quantized, {readable(found.plain_bytes)} not"
    return Outcome(Status.INFO, summary, "\n".join(lines), None, data)


def experts(_: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    tensors = inventory.checkpoint.tensors.values()
    plain = [
        tensor
        for tensor in tensors
        if is_expert(tensor.name) and not is_part_of(tensor.name, inventory.summaries)
    ]
    packed = {name: s for name, s in inventory.summaries.items() if is_expert(name)}
    size = sum(tensor.bytes for tensor in plain)
    packed_bytes = sum(summary.bytes for summary in packed.values())
    data = {"plain_bytes": size, "quantized_bytes": packed_bytes, "modules": len(packed)}
    if not plain and not packed:
        return Outcome(Status.OK, "no routed experts", data=data)
    if plain and inventory.is_ours and inventory.formats is not None:
        rest = sum(s.bytes for s in inventory.summaries.values()) - packed_bytes
        others = f", {readable(rest)} of other weights are" if rest else ""
        return Outcome(
            Status.INFO,
            f"routed experts are not quantized: {readable(size)} stay as stored{others}",
            "The method only quantizes linear layers, so memory falls by less than its name says.",
            data=data | {"other_quantized_bytes": rest},
        )
    return Outcome(Status.OK, f"routed experts: {readable(packed_bytes or size)}", data=data)


def readable(size: float) -> str:
    """Bytes as people write them."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < STEP:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= STEP
    return f"{size:.1f} GiB"


def _plain_matrices(inventory: Inventory) -> dict[str, list[str]]:
    """Modules with a matrix in plain numbers, by pattern."""
    found: dict[str, list[str]] = defaultdict(list)
    for tensor in inventory.checkpoint.tensors.values():
        module = module_of(tensor.name)
        if module not in inventory.summaries and len(tensor.shape) > 1:
            found[pattern_of(module)].append(module)
    return dict(sorted(found.items()))


def _grouped(summaries: Mapping[str, ModuleSummary]) -> dict[str, dict[str, int]]:
    """How many modules of each pattern are stored in each format."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module, summary in summaries.items():
        found[pattern_of(module)][_stored_as(summary)] += 1
    return {pattern: dict(formats) for pattern, formats in sorted(found.items())}


def _stored_as(summary: ModuleSummary) -> str:
    """A format with its options, as in ``nf4 block 64, double quantization``."""
    options = [
        name if value == "yes" else f"{name} {value}" for name, value in summary.options.items()
    ]
    return f"{summary.format} {', '.join(options)}".rstrip()


def _aligned(grouped: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    width = max(map(len, grouped), default=0)
    for pattern, formats in grouped.items():
        for form, count in formats.items():
            yield pattern.ljust(width), f"{count} x {form}"


def _layers(modules: Iterable[str]) -> str:
    """The first number in each name, as in `` (layers 0, 29)``."""
    parts = [[part for part in name.split(".") if part.isdigit()] for name in modules]
    numbers = [int(found[0]) for found in parts if found]
    return f" (layers {ranges(numbers)})" if numbers else ""


CHECKS = (
    Check(
        "model.weights",
        GROUP,
        "which weights are quantized, and how",
        stored,
        needs=("model.method",),
    ),
    Check(
        "model.experts",
        GROUP,
        "how routed experts are stored",
        experts,
        needs=("model.method",),
    ),
)
