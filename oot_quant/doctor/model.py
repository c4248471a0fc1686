"""What a model is, who serves it, and whether vLLM knows it."""

from __future__ import annotations

from typing import Any

from oot_quant.doctor.inventory import (
    Inventory,
    is_vllms_own,
    last_name,
    probe_checkpoint,
    probe_inventory,
)
from oot_quant.memory import EMBEDDINGS
from oot_quant.types import Check, Facts, Fix, Outcome, Status

GROUP = "model"
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
    strays = ", ".join(checkpoint.strays)
    if any(name.startswith("consolidated") for name in checkpoint.strays):
        detail = f"vLLM's default load format prefers {strays} to the files of the index."
        fix = Fix("start with --load-format safetensors.")
        return Outcome(Status.WARN, summary, detail, fix, data)
    if checkpoint.strays:
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


def supported(facts: Facts, seen: Any) -> Outcome:
    inventory: Inventory = seen
    architectures = inventory.checkpoint.config.get("architectures") or []
    tables = [name for name in inventory.summaries if last_name(name) in EMBEDDINGS]
    if tables:
        return Outcome(
            Status.FAIL,
            f"{tables[0]} is quantized; input embeddings must not be",
            fix=Fix("use a checkpoint of this model that skips it."),
            data={"modules": tables},
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
        "model.supported",
        GROUP,
        "vLLM knows the model, and nothing is quantized that cannot be",
        supported,
        needs=("model.method",),
    ),
)
