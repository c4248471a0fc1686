"""Finds backends, checks them, keeps failures as data and picks one by method.

pluggy's own entry-point loader stops at the first broken plugin and skips a taken name in
silence, so discovery is a loop of ours: the whole group is scanned first, one guard for
each entry point, and whatever goes wrong becomes a record that ``list`` and the doctor show.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pluggy

from oot_quant import hookspecs
from oot_quant.errors import BackendFailed, OotQuantError
from oot_quant.types import BackendInfo

ENTRY_POINT_GROUP = "oot_quant.backends"
DISTRIBUTION = "oot-quant"


@dataclass(frozen=True)
class BackendRecord:
    """One entry point of the group, usable or not.

    ``status`` is ``ok`` or ``failed``; ``error`` is the reason in one line and ``trace`` the
    traceback, both empty when ok. ``methods`` are the methods that this backend serves, or
    would: a backend that cannot even be imported stands for its entry point's name.
    """

    name: str
    module: str
    distribution: str
    version: str
    origin: str
    status: str = "ok"
    error: str = ""
    trace: str = ""
    hooks: tuple[str, ...] = ()
    info: BackendInfo | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        return self.info.methods if self.info else (self.name,)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def failed(self, error: str, trace: str = "") -> BackendRecord:
        return replace(self, status="failed", error=error, trace=trace)


class BackendManager:
    """The backends of one process. ``records`` holds every entry point, also failed ones."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._modules: dict[str, ModuleType] = {}  # by module: two backends may claim a name
        loaded = [self._load(point) for point in points]
        # In-tree first: on a clash of names or methods, the first one keeps it.
        loaded.sort(key=lambda record: record.origin != "in-tree")
        self.records: tuple[BackendRecord, ...] = tuple(self._settle_clashes(loaded))

    def record_for(self, method: str) -> BackendRecord:
        """The record of the backend that serves ``method``; a usable one before a failed one.

        Raises BackendFailed if there is none; the text lists the methods that exist.
        """
        candidates = [record for record in self.records if method in record.methods]
        for record in sorted(candidates, key=lambda record: not record.ok):
            return record
        known = sorted({name for record in self.records for name in record.methods})
        raise BackendFailed(
            f"no installed backend serves the quantization method {method!r}",
            needed=f"one of: {', '.join(known) or 'none is installed'}",
            fix="run: oot-quant list",
        )

    def call(self, method: str, hook: str, /, **arguments: Any) -> Any:
        """Call an addressed hook of the backend that serves ``method``, and of no other.

        Returns what the backend returned; None if it does not implement the hook. Raises
        BackendFailed with the recorded reason if the backend is not usable.
        """
        record = self.record_for(method)
        if not record.ok:
            raise failure_of(record, method)
        return self._caller(record, hook)(**arguments)

    def broadcast(self, hook: str) -> list[tuple[BackendRecord, Callable[[], Any]]]:
        """A broadcast hook, as one call for each usable backend that implements it.

        The caller runs each in a guard of its own, so that one backend cannot silence others.
        """
        return [
            (record, partial(_answer, self._caller(record, hook)))
            for record in self.records
            if record.ok and hook in record.hooks
        ]

    def _caller(self, record: BackendRecord, hook: str) -> pluggy.HookCaller:
        others = [m for name, m in self._modules.items() if name != record.module]
        return self._pm.subset_hook_caller(hook, remove_plugins=others)

    def _load(self, point: EntryPoint) -> BackendRecord:
        dist = point.dist
        distribution = dist.metadata["Name"] if dist else "unknown"
        record = BackendRecord(
            name=point.name,
            module=point.value,
            distribution=distribution,
            version=dist.version if dist else "unknown",
            origin="in-tree" if distribution == DISTRIBUTION else "third-party",
        )
        try:
            module = point.load()
            hooks = _checked_hooks(module)
            info = module.oot_quant_describe()
            if not isinstance(info, BackendInfo):
                raise TypeError(f"oot_quant_describe returned {type(info).__name__}")
        except BaseException as error:  # becomes data; a backend may even exit
            if isinstance(error, KeyboardInterrupt):
                raise
            return record.failed(one_line(error), traceback.format_exc())
        self._modules[point.value] = module
        return replace(record, hooks=hooks, info=info)

    def _settle_clashes(self, records: Sequence[BackendRecord]) -> Iterable[BackendRecord]:
        names: dict[str, BackendRecord] = {}
        owners: dict[str, BackendRecord] = {}
        for record in records:
            taken = {method: owners[method] for method in record.methods if method in owners}
            if record.name in names and record.ok:
                other = names[record.name]
                yield record.failed(f"the name {record.name!r} is taken by {_origin(other)}")
                continue
            if taken and record.ok:
                method, other = next(iter(taken.items()))
                yield record.failed(f"the method {method!r} is taken by {_origin(other)}")
                continue
            if record.ok:
                try:
                    self._pm.register(self._modules[record.module], name=record.name)
                except (pluggy.PluginValidationError, ValueError) as error:
                    yield record.failed(one_line(error), traceback.format_exc())
                    continue
                names[record.name] = record
                owners.update(dict.fromkeys(record.methods, record))
            yield record


def failure_of(record: BackendRecord, method: str) -> BackendFailed:
    """The error for a method whose backend failed, with the reason that was recorded."""
    return BackendFailed(
        f"the backend for the quantization method {method!r} could not be loaded",
        where=f"{record.distribution} {record.version} ({record.module})",
        found=record.error,
        fix="mend or remove that package; oot-quant list shows all backends",
    )


def one_line(error: BaseException) -> str:
    """An exception in one line: errors of ours by their first line, others with their type."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if isinstance(error, OotQuantError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _answer(caller: pluggy.HookCaller) -> Any:
    """What one backend answered to a broadcast hook; pluggy leaves out a None."""
    return next(iter(caller()), None)


def _origin(record: BackendRecord) -> str:
    return f"{record.distribution} {record.version}"


def _checked_hooks(module: object) -> tuple[str, ...]:
    """Names of the hooks that a module implements; raises TypeError on a wrong or missing one."""
    known = hookspecs.all_hooks()
    marked = [
        name
        for name, value in inspect.getmembers(module, callable)
        if hasattr(value, f"{hookspecs.PROJECT}_impl")
    ]
    unknown = sorted(set(marked) - set(known))
    if unknown:
        raise TypeError(f"unknown hook {unknown[0]}; known: {', '.join(known)}")
    missing = sorted(hookspecs.required_hooks() - set(marked))
    if missing:
        raise TypeError(f"required hook {missing[0]} is not implemented")
    for name in marked:
        taken = inspect.signature(getattr(module, name)).parameters
        allowed = inspect.signature(known[name]).parameters
        for argument in taken:
            if argument not in allowed:
                may = ", ".join(allowed) or "no arguments"
                raise TypeError(f"unknown hook argument {argument!r} of {name}; known: {may}")
    return tuple(name for name in known if name in marked)


@lru_cache(maxsize=1)
def backends() -> BackendManager:
    """The manager of this process, made from the installed entry points at first use."""
    return BackendManager(entry_points(group=ENTRY_POINT_GROUP))
