"""What a model holds: its checkpoint, the method that will serve it, the format of each module.

The probes of the model's checks live here; the judges in ``model`` and ``fit`` read nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oot_quant.checkpoint import Checkpoint, read_checkpoint
from oot_quant.doctor.facts import folder_of
from oot_quant.doctor.vllm_methods import VLLM_METHODS
from oot_quant.errors import CheckpointMissing
from oot_quant.manager import backends
from oot_quant.types import DoctorRequest, Facts, ModuleSummary, ParameterRule, ShardRequest

ROW_PARALLEL = frozenset(
    {"c_proj", "dense", "dense_4h_to_h", "down_proj", "fc2", "fc_out", "o_proj", "out_proj"}
    | {"proj_out", "w2", "wo"}
)
"""Last names of the linear layers that vLLM splits along their input, in the usual models."""
REGISTRY = Path("model_executor", "models", "registry.py")


@dataclass(frozen=True)
class Inventory:
    """How a checkpoint's modules are stored, and who serves them.

    ``declared`` is the method that config.json names, ``method`` the one that will be used.
    ``formats`` is None where the headers cannot tell. ``rules`` are the parameters of the
    row-parallel modules among the quantized ones, ``registry`` the text of vLLM's list of
    models (None: not found).
    """

    checkpoint: Checkpoint
    declared: str | None
    method: str | None
    backend: str | None
    formats: Mapping[str, object] | None = None
    summaries: Mapping[str, ModuleSummary] = field(default_factory=dict)
    rules: Mapping[str, tuple[int, tuple[ParameterRule, ...]]] = field(default_factory=dict)
    in_flight: str | None = None
    registry: str | None = None

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        return self.checkpoint.config.get("text_config") or self.checkpoint.config

    @property
    def is_ours(self) -> bool:
        """Whether a backend of the group serves this model."""
        return self.backend is not None


def probe_checkpoint(facts: Facts) -> Checkpoint:
    """Read the headers of the model that the user asked about.

    Raises CheckpointMissing or CheckpointUnreadable.
    """
    request = facts.request
    assert request.model is not None
    if request.online or Path(request.model).is_dir() or not _is_hub_name(request.model):
        return read_checkpoint(request.model)
    folder = _cached_folder(request.model)
    if folder is None:
        raise CheckpointMissing(
            "the model is not on this machine, and the doctor goes online only when asked",
            where=request.model,
            needed="a local folder, a model in the Hub's cache, or --online",
            fix=f"allow it to ask the Hub: oot-quant doctor {_as_options(request)} --online",
        )
    return replace(read_checkpoint(str(folder)), model=request.model)


def probe_inventory(facts: Facts) -> Inventory:
    """Ask the backend of the model's method which modules are quantized, and how.

    Raises what ``oot_quant_read_formats`` raises, and BackendFailed for a backend that is
    not usable.
    """
    checkpoint, asked = facts.checkpoint, facts.request.quantization
    assert checkpoint is not None
    section = checkpoint.quantization_config or {}
    declared = section.get("quant_method")
    method = asked or declared
    inventory = Inventory(checkpoint, declared, method, None, registry=_registry())
    served = {name for record in facts.backends for name in record.methods}
    if method is None or method not in served or (asked and declared and asked != declared):
        return inventory
    manager = backends()
    record = manager.record_for(method)
    formats = manager.call(method, "oot_quant_read_formats", checkpoint=checkpoint)
    summaries = {
        name: manager.call(method, "oot_quant_summarize_format", format=stored)
        for name, stored in (formats or {}).items()
    }
    formats_of_backend = record.info.formats if record.info else ()
    return replace(
        inventory,
        backend=record.name,
        formats=formats,
        summaries=summaries,
        rules=_rules(method, formats or {}, summaries),
        in_flight=next(iter(formats_of_backend), None) if formats == {} else None,
    )


def last_name(module: str) -> str:
    """The last part of a module's name, as in ``down_proj``."""
    return module.rpartition(".")[2]


def pattern_of(module: str) -> str:
    """A module's name with ``*`` for every number, as in ``model.layers.*.mlp.down_proj``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: ``0, 2-5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def is_vllms_own(method: str | None) -> bool:
    """Whether vLLM serves a method itself."""
    return method in VLLM_METHODS


def _rules(
    method: str, formats: Mapping[str, object], summaries: Mapping[str, ModuleSummary]
) -> dict[str, tuple[int, tuple[ParameterRule, ...]]]:
    """Width and parameters of the row-parallel modules, one for each way of storing them."""
    found: dict[str, tuple[int, tuple[ParameterRule, ...]]] = {}
    known = set()
    for module, summary in summaries.items():
        if last_name(module) not in ROW_PARALLEL or summary.shape is None:
            continue
        key = (pattern_of(module), summary.format, tuple(summary.options.items()), summary.shape)
        if key in known:
            continue
        known.add(key)
        columns = summary.shape[1]
        request = ShardRequest(method, formats[module], columns)
        answer = backends().call(method, "oot_quant_shard_rule", request=request)
        found[module] = (columns, tuple(answer))
    return found


def _registry() -> str | None:
    """vLLM's list of models as text: importing it takes seconds, and may fail."""
    folder = folder_of("vllm")
    path = folder / REGISTRY if folder else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None


def _is_hub_name(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _cached_folder(model: str) -> Path | None:
    """Where the Hub's cache keeps a model; None if it is not there, or there is no cache."""
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _as_options(request: DoctorRequest) -> str:
    options = f"--model {shlex.quote(request.model or '')}"
    if request.quantization:
        options += f" --quantization {shlex.quote(request.quantization)}"
    if request.tensor_parallel_size != 1:
        options += f" --tensor-parallel-size {request.tensor_parallel_size}"
    return options
