"""Gathers what checks look at, without importing torch, vLLM or a backend's library."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from oot_quant.doctor.privacy import masked
from oot_quant.manager import BackendManager, one_line
from oot_quant.types import DoctorRequest, Facts
from oot_quant.vllm_glue.compat import DISTRIBUTIONS
from oot_quant.vllm_glue.rivals import VLLM_PLUGIN_GROUP

PREFIXES = ("VLLM_", "HF_", "BNB_", "OOT_QUANT_", "TORCH", "PYTORCH_")
NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")


def gather(request: DoctorRequest, manager: BackendManager) -> Facts:
    """The facts before any probe has run; probes fill in torch, accelerator and checkpoint."""
    libraries = [record.info.library for record in manager.records if record.info]
    names = ["oot-quant", "torch", "pluggy", *DISTRIBUTIONS]
    names += [library.distribution for library in libraries if library]
    versions = _versions(names)
    return Facts(
        request=request,
        python=platform.python_version(),
        versions=versions,
        torch={"version": versions.get("torch")},
        vllm=_vllm(versions),
        accelerator={},
        environment=_environment(),
        backends=manager.records,
        plugins=_plugins(),
    )


def try_import(name: str) -> tuple[ModuleType | None, str]:
    """A module, or None and why it cannot be imported, in one line."""
    try:
        return importlib.import_module(name), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - becomes data
        return None, one_line(error)


def folder_of(name: str) -> Path | None:
    """Where a package lies, without importing it; None if it cannot be found."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in dict.fromkeys(names):
        for distribution in metadata.distributions(name=name):
            found[name] = distribution.version
            break
    return found


def _vllm(versions: dict[str, str]) -> dict[str, str | None]:
    """vLLM by its metadata: importing it takes seconds."""
    for name in DISTRIBUTIONS:
        if name in versions:
            missing = folder_of("vllm") is None
            error = f"{name} is installed, but there is no module vllm" if missing else ""
            return {"version": versions[name], "distribution": name, "error": error}
    return {"version": None, "distribution": None, "error": "not installed"}


def _plugins() -> dict[str, tuple[str, str]]:
    points = metadata.entry_points(group=VLLM_PLUGIN_GROUP)
    return {point.name: (point.value, _label(point)) for point in points}


def _label(point: metadata.EntryPoint) -> str:
    return f"{point.dist.metadata['Name']} {point.dist.version}" if point.dist else "unknown"


def _environment() -> dict[str, str]:
    return {
        name: masked(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) or name in NAMES
    }
