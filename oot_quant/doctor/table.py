"""The table of checks: the doctor's own and those of backends, in display order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from oot_quant.doctor import architecture, environment, fit, model, plugins, stored, trial
from oot_quant.manager import BackendManager, BackendRecord
from oot_quant.types import Check, DoctorRequest, Facts, Outcome

CORE = (*environment.CHECKS, *plugins.CHECKS)
MODEL = (*model.CHECKS, *architecture.CHECKS, *stored.CHECKS, *fit.CHECKS)


def checks_for(request: DoctorRequest, manager: BackendManager) -> list[Check]:
    """The checks that a request calls for.

    Without a model, those that need to know one are left out; without ``deep``, the trial.
    If a method is named, only the backend that serves it is looked at.
    """
    rows = [
        check for check in every_check(manager, request.quantization) if _wanted(check, request)
    ]
    title = f"model {request.model}"
    return [replace(row, group=title) if row.group == model.GROUP else row for row in rows]


def every_check(manager: BackendManager, method: str | None = None) -> list[Check]:
    """Every check that there is; those of backends that serve ``method``, if that is given."""
    added: list[Check] = []
    for record, call in manager.broadcast("oot_quant_checks"):
        if method is None or method in record.methods or not _is_served(manager, method):
            added += _checks_of(record, call)
    about_model = [check for check in added if check.group == model.GROUP]
    trials = [check for check in added if check.group == trial.GROUP]
    about_backend = [check for check in added if check.group.startswith("backend ")]
    return [*CORE, *about_backend, *MODEL, *about_model, *(trials or [trial.NO_TRIAL])]


def needs_model(check: Check) -> bool:
    """Whether a check can only be made for a model."""
    return any(need.startswith("model.") for need in check.needs) or check.group == model.GROUP


def _wanted(check: Check, request: DoctorRequest) -> bool:
    if needs_model(check):
        return request.model is not None
    return request.deep or check.group != trial.GROUP


def _is_served(manager: BackendManager, method: str) -> bool:
    return any(method in record.methods for record in manager.records)


def _checks_of(record: BackendRecord, call: Callable[[], Any]) -> Iterable[Check]:
    """A backend's rows in their groups; a hook that does not do its part becomes a row too."""
    try:
        checks: Sequence[Check] = call()
        return [_placed(check, record) for check in checks]
    except Exception as error:  # noqa: BLE001 - becomes a result with status error
        return [_broken_hook(record, error)]


def _placed(check: Check, record: BackendRecord) -> Check:
    prefix = f"backend.{record.name}."
    if not check.id.startswith(prefix):
        raise ValueError(f"the id {check.id!r} does not begin with {prefix!r}")
    if check.id == f"{prefix}trial":
        return trial.as_trial(check)
    if needs_model(check):
        return replace(check, group=model.GROUP)
    return replace(check, group=f"backend {record.name}")


def _broken_hook(record: BackendRecord, error: Exception) -> Check:
    def judge(_: Facts, __: Any) -> Outcome:
        raise error

    title = f"the checks of {record.distribution} can be asked for"
    return Check(f"backend.{record.name}.checks", f"backend {record.name}", title, judge)
