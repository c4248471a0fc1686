"""What a model is, who serves it, and which of its weights are quantized. Headers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from oot_quant.doctor.inventory import (
    Inventory,
    is_vllms_own,
    last_name,
    pattern_of,
    probe_checkpoint,
    probe_inventory,
    ranges,
)
from oot_quant.memory import NOT_LINEAR, is_expert, module_of, weights
from oot_quant.types import Check, Facts, Fix, ModuleSummary, Outcome, Status

GROUP = "model"
STEP = 1024
SUPPORTED_MODELS = "https://docs.vllm.ai/en/latest/models/supported_models/"


def config(_: Facts, checkpoint: Any) -> Outcome:
    found = checkpoint.config
    text = found.get("text_config") or found
    dtype = text.get("dtype") or text.get("torch_dtype") or found.get("dtype")
    architectures = found.get("architectures") or []
    data = {
        "architectures": architectures,
        "dtype": dtype,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "strays": list(checkpoint.strays),
    }
    if not architectures:
        summary = "config.json names no architecture, so vLLM cannot choose a model class"
        fix = Fix('add "architectures" to config.json, as in the original model.')
        return Outcome(Status.FAIL, summary, fix=fix, data=data)
    if not checkpoint.readable:
        summary = f"{architectures[0]}; its weights are not in safetensors files"
        detail = "Their headers cannot be read without loading them, so less is checked."
        return Outcome(Status.INFO, summary, detail, data=data)
    summary = f"{architectures[0]}, {dtype or 'no dtype'}, {len(checkpoint.tensors)} tensors"
    if checkpoint.strays:
        strays = ", ".join(checkpoint.strays)
        return Outcome(
            Status.INFO, summary, f"Not read, since not in the index: {strays}.", None, data
        )
    return Outcome(Status.OK, summary, data=data)


def method(facts: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    asked, declared = facts.request.quantization, inventory.declared
    data: dict[str, Any] = {"declared": declared, "asked": asked, "method": inventory.method}
    if asked and declared and asked != declared:
        return Outcome(
            Status.FAIL,
            f"--quantization says {asked}, config.json says {declared}",
            "A checkpoint that is already quantized can only be served with its own method.",
            Fix("leave --quantization out, or use a checkpoint that is not quantized yet."),
            data,
        )
    if inventory.method is None and inventory.checkpoint.quantization_config:
        return Outcome(
            Status.FAIL,
            "config.json has a quantization_config that names no quant_method",
            fix=Fix("name the method with --quantization, here and when starting vLLM."),
            data=data,
        )
    if inventory.method is None:
        return Outcome(
            Status.INFO,
            "not quantized, and no --quantization given: vLLM serves it as it is",
            data=data,
        )
    if not inventory.is_ours:
        return _not_ours(inventory, data)
    if inventory.formats is None:
        summary = f"served by {inventory.method}, to go by config.json"
        return Outcome(Status.INFO, summary, data=data | {"prequantized": bool(declared)})
    count = len(inventory.formats)
    how = f"pre-quantized, {count} modules" if count else "quantized in flight, while loading"
    summary = f"served by {inventory.method}: {how}"
    return Outcome(Status.OK, summary, data=data | {"prequantized": count > 0, "modules": count})


def _not_ours(inventory: Inventory, data: dict[str, Any]) -> Outcome:
    name = inventory.method
    if is_vllms_own(name):
        return Outcome(
            Status.INFO, f"{name} is a method of vLLM itself, no backend is needed", data=data
        )
    return Outcome(
        Status.FAIL,
        f"no installed backend serves the method {name!r}",
        "vLLM has no method of that name either.",
        Fix("install the backend that serves it; these are installed:", ("oot-quant list",)),
        data,
    )


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


def supported(facts: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    architectures = inventory.checkpoint.config.get("architectures") or []
    head = [name for name in inventory.summaries if last_name(name) in NOT_LINEAR]
    if head:
        return Outcome(
            Status.FAIL,
            f"{head[0]} is quantized; embeddings and output heads must not be",
            fix=Fix("use a checkpoint of this model that skips it."),
            data={"modules": head},
        )
    if inventory.registry is None:
        return Outcome(Status.SKIP, "whether vLLM knows the model: no vLLM found to look in")
    unknown = [name for name in architectures if f'"{name}"' not in inventory.registry]
    data = {"architectures": architectures, "unknown": unknown}
    if unknown == architectures:
        version = facts.vllm.get("version")
        return Outcome(
            Status.WARN,
            f"{architectures[0]} is not in the list of models of vLLM {version}",
            "vLLM then tries Transformers' own model class, which may or may not work.",
            Fix("see whether a newer vLLM lists it.", (), SUPPORTED_MODELS),
            data,
        )
    return Outcome(Status.OK, f"vLLM knows {architectures[0]}", data=data)


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


def readable(size: float) -> str:
    """Bytes as people write them."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < STEP:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= STEP
    return f"{size:.1f} GiB"


def experts(_: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    tensors = inventory.checkpoint.tensors.values()
    plain = [
        tensor
        for tensor in tensors
        if is_expert(tensor.name) and module_of(tensor.name) not in inventory.summaries
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


CHECKS = (
    Check(
        "model.config",
        GROUP,
        "the model is found and its headers can be read",
        config,
        probe=probe_checkpoint,
    ),
    Check(
        "model.method",
        GROUP,
        "a backend serves its method, pre-quantized or in flight",
        method,
        needs=("model.config",),
        probe=probe_inventory,
    ),
    Check(
        "model.weights",
        GROUP,
        "which weights are quantized, and how",
        stored,
        needs=("model.method",),
    ),
    Check(
        "model.supported",
        GROUP,
        "vLLM knows the model, and nothing is quantized that cannot be",
        supported,
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
