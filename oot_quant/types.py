"""What crosses a hook: frozen dataclasses, and nothing that imports torch or vLLM.

The first half serves loading (who a backend is, how a weight is stored), the second half
the doctor (a check, what it found, how to mend it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

    from oot_quant.checkpoint import Checkpoint, StoredTensor
    from oot_quant.vllm_glue.config import PluginConfig


@dataclass(frozen=True)
class Library:
    """The Python distribution that does a backend's arithmetic.

    ``minimum`` is the oldest version that works, as in ``"0.50.0"``.
    """

    distribution: str
    minimum: str

    @property
    def upgrade_command(self) -> str:
        """A shell command that installs a version that works; survives pasting."""
        return f'python -m pip install --upgrade "{self.distribution}>={self.minimum}"'


@dataclass(frozen=True)
class BackendInfo:
    """Who a backend is; cheap to make, shown by ``oot-quant list``.

    ``methods`` are the names that vLLM's ``quantization=`` accepts, ``formats`` the storage
    formats that checkpoints may hold, ``platforms`` names as vLLM's ``device_type``.
    """

    name: str
    summary: str
    methods: tuple[str, ...]
    formats: tuple[str, ...]
    platforms: tuple[str, ...]
    library: Library | None = None


@dataclass(frozen=True)
class NameRule:
    """How one kind of stored tensor becomes a parameter of its layer.

    A name that ends in ``stored_suffix`` (as in ``".weight.absmax"``) ends in
    ``parameter_suffix`` (as in ``".weight_absmax"``) afterwards; None drops the tensor.
    """

    stored_suffix: str
    parameter_suffix: str | None


@dataclass(frozen=True)
class Runs:
    """A tensor stored flat: ``elements`` items for each run of ``weights`` weights.

    The weight matrix is read row by row. nf4 codes are ``Runs(weights=2)`` in bytes, the
    scale of a block of 64 is ``Runs(weights=64, repeatable=True)``. An item is repeatable
    when it holds a value that counts for each weight of its run alone (a scale): it may be
    stored again for a part of the run. Items that pack several weights may not.
    """

    weights: int
    elements: int = 1
    repeatable: bool = False


@dataclass(frozen=True)
class PerMatrix:
    """A tensor of ``elements`` items for each matrix that a fused layer merges; never split."""

    elements: int


@dataclass(frozen=True)
class ParameterRule:
    """One parameter of a layer: its name, its dtype (torch's name) and how it is stored.

    ``poison`` fills the parameter before loading, so that what no tensor filled can be told
    from what was loaded; None leaves it as allocated.
    """

    name: str
    dtype: str
    layout: Runs | PerMatrix
    poison: float | None = None


@dataclass(frozen=True)
class ShardRequest:
    """Which parameters does a weight of this format need?

    ``columns`` is the unpacked weight's input width in elements, over all ranks. ``format``
    is the backend's own description of how the weight is stored.
    """

    method: str
    format: object
    columns: int


@dataclass(frozen=True)
class LinearRequest:
    """A linear layer asks for its method, while the model is built.

    ``prefix`` is vLLM's name of the layer, ``members`` the names of the matrices that it
    merges (just the prefix for a plain layer). ``saved`` is None but for a sharded state: the
    layer's parameters as they were once loading had finished, by name.
    """

    config: PluginConfig
    layer: Module
    prefix: str
    members: tuple[str, ...]
    saved: Mapping[str, StoredTensor] | None = None


@dataclass(frozen=True)
class MoeRequest:
    """A layer of routed experts asks for its method, while the model is built."""

    config: PluginConfig
    layer: Module
    prefix: str


@dataclass(frozen=True)
class ModuleSummary:
    """How one module is stored, for reports: format name, bytes on disk, options as text."""

    format: str
    bytes: int
    options: Mapping[str, str] = field(default_factory=dict)
    shape: tuple[int, int] | None = None


class Status(str, Enum):
    """What a check found; the order is from best to worst."""

    OK = "ok"
    INFO = "info"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"
    ERROR = "error"


@dataclass(frozen=True)
class Fix:
    """What to do: a sentence, and commands that can be pasted as they are."""

    text: str
    commands: tuple[str, ...] = ()
    link: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a check found. ``data`` holds the numbers behind the sentence, JSON types only."""

    status: Status
    summary: str
    detail: str = ""
    fix: Fix | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DoctorRequest:
    """What the user asked the doctor."""

    model: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int = 1
    online: bool = False
    deep: bool = False


@dataclass(frozen=True)
class Facts:
    """Everything that checks may look at; gathered once, so that a test can make it up.

    ``versions`` maps a distribution's name to its version (absent: not installed).
    ``torch`` and ``vllm`` hold ``{"version", "error", ...}`` of trying to import them;
    ``accelerator`` holds ``{"kind", "name", "capability", "free_bytes", "count"}``.
    ``environment`` holds the variables that matter. ``backends`` are the manager's records.
    ``plugins`` are the entry points that vLLM will see, as ``name -> (value, distribution)``.
    """

    request: DoctorRequest
    python: str
    versions: Mapping[str, str]
    torch: Mapping[str, Any]
    vllm: Mapping[str, Any]
    accelerator: Mapping[str, Any]
    environment: Mapping[str, str]
    backends: tuple[Any, ...]
    plugins: Mapping[str, tuple[str, str]]
    checkpoint: Checkpoint | None = None
    checkpoint_error: str = ""


@dataclass(frozen=True)
class Check:
    """One row of the table of checks.

    ``needs`` are ids that must have passed; otherwise this check is skipped and says so.
    ``probe`` reads the machine (or is None); ``judge`` turns facts and what the probe
    returned into an outcome and reads nothing itself, so that it can be tested with made-up
    values. ``title`` says in one line what is decided; docs/checks.md shows it.
    """

    id: str
    group: str
    title: str
    judge: Callable[[Facts, Any], Outcome]
    needs: tuple[str, ...] = ()
    probe: Callable[[Facts], Any] | None = None
