"""Does a model fit here: can it be split over that many devices, and is there memory for it?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oot_quant.doctor.inventory import ROW_PARALLEL, Inventory, last_name
from oot_quant.doctor.model import GROUP
from oot_quant.doctor.stored import readable
from oot_quant.errors import ShardMisaligned
from oot_quant.memory import is_linear, module_of, weights
from oot_quant.sharding import granule
from oot_quant.types import Check, Facts, Fix, Outcome, ParameterRule, Runs, Status

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Tensor-parallel sizes that are tried when one is to be recommended."""
ROOM = 0.9
"""Share of the free memory that weights may take before little is left for the KV cache."""


def tensor_parallel(facts: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    wanted = facts.request.tensor_parallel_size
    reason = _why_not(inventory, wanted)
    data: dict[str, Any] = {"size": wanted, "sizes": _sizes(inventory)}
    if reason:
        working = ", ".join(map(str, data["sizes"]))
        text = f"use a tensor-parallel size that works: {working}."
        if not working:
            text = (
                "use a checkpoint of this model that is not quantized, or quantized in another way."
            )
        summary, detail = reason
        return Outcome(Status.FAIL, summary, detail, Fix(text), data)
    kind, count = facts.accelerator.get("kind"), facts.accelerator.get("count", 0)
    if kind in {"cuda", "rocm", "xpu"} and wanted > count:
        return Outcome(
            Status.WARN,
            f"tensor-parallel size {wanted}, but {count} GPU{'' if count == 1 else 's'} here",
            fix=Fix(f"use at most {count}, or start vLLM on several machines."),
            data=data | {"devices": count},
        )
    if wanted == 1:
        return Outcome(Status.OK, "one device: nothing is split", data=data)
    return Outcome(Status.OK, f"every weight can be split over {wanted} devices", data=data)


def memory(facts: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    if not inventory.checkpoint.tensors:
        return Outcome(Status.SKIP, "memory for the weights: the headers cannot be read")
    ranks = facts.request.tensor_parallel_size
    needed = _device_bytes(inventory, ranks)
    free, device = facts.accelerator.get("free_bytes"), _device(facts)
    data = {"device_bytes": needed, "free_bytes": free, "ranks": ranks}
    each = f"each of {ranks} {device}s" if ranks > 1 else f"1 {device}"
    summary = f"about {readable(needed)} of weights on {each}"
    if free is None:
        return Outcome(Status.INFO, summary, data=data)
    # Processes on a machine without a GPU share its memory.
    share = free if device == "GPU" else free / ranks
    summary += f", {readable(share)} free"
    if needed <= ROOM * share:
        return Outcome(Status.INFO, summary, data=data)
    fix = _memory_fix(inventory, facts, share)
    if needed <= share:
        detail = "Little is left for the KV cache and for activations."
        return Outcome(Status.WARN, summary, detail, fix, data)
    return Outcome(Status.FAIL, summary, fix=fix, data=data)


def _memory_fix(inventory: Inventory, facts: Facts, share: float) -> Fix:
    larger = [
        size
        for size in _sizes(inventory)
        if facts.request.tensor_parallel_size < size <= facts.accelerator.get("count", 1)
        and _device_bytes(inventory, size) <= ROOM * share
    ]
    if larger:
        return Fix(f"use --tensor-parallel-size {larger[0]}, or free memory on the device.")
    return Fix("free memory on the device, use a larger one, or a smaller model.")


def _device_bytes(inventory: Inventory, ranks: int) -> int:
    found = weights(inventory.checkpoint, inventory.summaries, ranks, inventory.in_flight)
    return found.device_bytes


def _device(facts: Facts) -> str:
    return "GPU" if facts.accelerator.get("kind") in {"cuda", "rocm", "xpu"} else "device"


def _sizes(inventory: Inventory) -> list[int]:
    return [size for size in SIZES if _why_not(inventory, size) is None]


def _why_not(inventory: Inventory, ranks: int) -> tuple[str, str] | None:
    """Why a model cannot be split over ``ranks`` devices: a sentence and more words, or None."""
    heads = inventory.text_config.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        return f"{heads} attention heads cannot be split over {ranks} devices", ""
    shared = inventory.text_config.get("num_key_value_heads")
    if isinstance(shared, int) and shared > 0 and max(shared, ranks) % min(shared, ranks):
        return f"{shared} key-value heads cannot be split over {ranks} devices", ""
    for module, columns, rules in _row_parallel(inventory):
        if columns % ranks:
            return f"{columns} columns of {module} cannot be split over {ranks} devices", ""
        for rule in rules:
            if not isinstance(rule.layout, Runs):
                continue
            try:
                granule(rule.layout, columns, columns // ranks, where=module)
            except ShardMisaligned as error:
                return f"{error.what}: {module}", f"Found: {error.found}. Needed: {error.needed}."
    return None


def _row_parallel(
    inventory: Inventory,
) -> Iterable[tuple[str, int, tuple[ParameterRule, ...]]]:
    """Name, width and stored parameters of the layers that are split along their input."""
    plain: Mapping[tuple[str, int], str] = {
        (last_name(module_of(tensor.name)), tensor.shape[1]): module_of(tensor.name)
        for tensor in reversed(list(inventory.checkpoint.tensors.values()))
        if is_linear(tensor)
        and last_name(module_of(tensor.name)) in ROW_PARALLEL
        and module_of(tensor.name) not in inventory.summaries
    }
    for module, (columns, rules) in inventory.rules.items():
        yield module, columns, rules
    for (_, columns), module in plain.items():
        yield module, columns, ()


CHECKS = (
    Check(
        "model.tensor-parallel",
        GROUP,
        "every weight can be split over that many devices",
        tensor_parallel,
        needs=("model.method", "env.accelerator"),
    ),
    Check(
        "model.memory",
        GROUP,
        "weights on each device against its free memory",
        memory,
        needs=("model.method", "env.accelerator"),
    ),
)
