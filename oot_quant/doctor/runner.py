"""Runs checks: times them, skips those whose needs failed, and turns a crash into a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from oot_quant.doctor import facts as gathering
from oot_quant.doctor.answer import answer
from oot_quant.doctor.failures import crash, from_error
from oot_quant.doctor.privacy import private
from oot_quant.doctor.report import Report, Result
from oot_quant.doctor.table import checks_for
from oot_quant.errors import OotQuantError
from oot_quant.manager import BackendManager, backends
from oot_quant.types import Check, DoctorRequest, Facts, Outcome, Status

FILLS = {
    "env.torch": "torch",
    "env.vllm": "vllm",
    "env.accelerator": "accelerator",
    "model.config": "checkpoint",
}
"""Facts that a check's probe finds out, for the checks after it."""
PASSED = frozenset({Status.OK, Status.INFO, Status.WARN})
HOW = {Status.FAIL: "failed", Status.ERROR: "crashed"}

Look = Callable[[Check, Facts], Any]


def diagnose(
    request: DoctorRequest,
    only: Sequence[str] = (),
    *,
    manager: BackendManager | None = None,
    facts: Facts | None = None,
    look: Look | None = None,
) -> Report:
    """Run the checks that a request calls for. Prints nothing and changes nothing.

    only: ids or groups to report, all if empty; what they need runs with them. manager,
    facts and look stand in for the machine: the installed backends, what was gathered, and
    what each probe sees.
    """
    manager = manager or backends()
    facts = facts or gathering.gather(request, manager)
    run = Run(checks_for(request, manager), facts, look or probe)
    results = run.results_of(check for check in run.checks if is_selected(check, only))
    verdict = None if only else answer(run.facts, results)
    report = Report(request, tuple(results), verdict)
    return private(report)


def probe(check: Check, facts: Facts) -> Any:
    """What a check's probe sees on this machine."""
    return check.probe(facts) if check.probe else None


def is_selected(check: Check, only: Sequence[str]) -> bool:
    """Whether a check is named, itself or by its group; the group of a model is ``model``."""
    return not only or check.id in only or check.group in only or check.group.split()[0] in only


class Run:
    """One run over a table of checks. ``facts`` grow while probes find out more."""

    def __init__(self, checks: Sequence[Check], facts: Facts, look: Look) -> None:
        self.checks, self.facts = checks, facts
        self._look = look
        self._rows = {check.id: check for check in checks}
        self._results: dict[int, Result] = {}
        self._seen: dict[str, Any] = {}
        self._causes: dict[str, str] = {}

    def results_of(self, checks: Iterable[Check]) -> list[Result]:
        """Results in the order asked for; each check runs once, after what it needs."""
        return [self._result(check) for check in checks]

    def _result(self, check: Check) -> Result:
        if id(check) not in self._results:
            outcome, start = self._blocked(check), perf_counter()
            if outcome is None:
                outcome = self._outcome(check)
            self._results[id(check)] = _result(check, outcome, perf_counter() - start)
        return self._results[id(check)]

    def _blocked(self, check: Check) -> Outcome | None:
        """The outcome of a check that cannot be made, naming the first cause."""
        for need in check.needs:
            row = self._rows.get(need)
            result = self._result(row) if row else None
            if result and result.status in PASSED:
                continue
            first = self._causes.get(need)
            how = HOW.get(result.status, "was not checked") if result else "is unknown"
            cause = self._causes[check.id] = first or f"{need} {how}"
            return Outcome(Status.SKIP, f"{check.title}: not tried, {cause}", data={"cause": cause})
        return None

    def _outcome(self, check: Check) -> Outcome:
        try:
            seen = self._look(check, self.facts) if check.probe else self._shared(check)
            self._seen[check.id] = seen
            if check.id in FILLS:
                self.facts = replace(self.facts, **{FILLS[check.id]: seen})
            return check.judge(self.facts, seen)
        except OotQuantError as error:
            return from_error(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - becomes data
            return crash(check, error)

    def _shared(self, check: Check) -> Any:
        """A check without a probe judges what the probe of its first need saw."""
        return self._seen.get(check.needs[0]) if check.needs else None


def _result(check: Check, outcome: Outcome, seconds: float) -> Result:
    return Result(
        check.id,
        check.group,
        outcome.status,
        outcome.summary,
        outcome.detail,
        outcome.fix,
        outcome.data,
        seconds,
    )
