"""What a diagnosis yields: results in display order, counts, the answer for a model, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from oot_quant.types import DoctorRequest, Fix, Status

SCHEMA = 1
"""Version of the JSON form. Renaming an id or a status needs a new one."""
PROBLEMS = frozenset({Status.FAIL, Status.ERROR})


@dataclass(frozen=True)
class Result:
    """What one check found, and how long it took."""

    id: str
    group: str
    status: Status
    summary: str
    detail: str = ""
    fix: Fix | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_problem(self) -> bool:
        return self.status in PROBLEMS


@dataclass(frozen=True)
class Verdict:
    """The answer for a model. ``method`` is None for one that needs no backend."""

    model: str
    method: str | None
    loads: bool
    text: str


@dataclass(frozen=True)
class Report:
    """Everything that one run of the doctor found."""

    request: DoctorRequest
    results: tuple[Result, ...]
    verdict: Verdict | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed and no check crashed; warnings are allowed."""
        return not any(result.is_problem for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """How many results have each status, zeros included."""
        found = [result.status for result in self.results]
        return {status.value: found.count(status) for status in Status}

    def groups(self) -> dict[str, list[Result]]:
        """The results by group, both in display order."""
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.group, []).append(result)
        return groups

    def exit_code(self, *, strict: bool = False) -> int:
        """0 if all is well, 1 if something failed; ``strict`` counts warnings as failures."""
        return int(not self.ok or (strict and self.counts["warn"] > 0))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types; docs/checks.md describes the fields."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "request": asdict(self.request),
            "counts": self.counts,
            "verdict": asdict(self.verdict) if self.verdict else None,
            "checks": [_result_to_json(result) for result in self.results],
        }


def worst(statuses: list[Status]) -> Status:
    """The status of a group; facts and skipped checks do not lower it."""
    order = [Status.SKIP, Status.INFO, Status.OK, Status.WARN, Status.FAIL, Status.ERROR]
    found = max(statuses, key=order.index)
    return Status.OK if found == Status.INFO else found


def _result_to_json(result: Result) -> dict[str, Any]:
    fix = result.fix
    return {
        "id": result.id,
        "group": result.group,
        "status": result.status.value,
        "summary": result.summary,
        "detail": result.detail,
        "fix": {"text": fix.text, "commands": list(fix.commands), "link": fix.link}
        if fix
        else None,
        "data": dict(result.data),
        "seconds": round(result.seconds, 3),
    }
