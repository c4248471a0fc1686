"""What a report must not show: the home folder's name, and values that may be secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oot_quant.doctor.report import Report
from oot_quant.types import Fix

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(?:^|_)KEY(?:$|_)|APIKEY", re.IGNORECASE)
USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


def masked(name: str, value: str) -> str:
    """A variable's value as it may be shown: ``set`` if its name suggests a secret."""
    return "set" if SECRET.search(name) else USERINFO.sub("", value)


def private(report: Report) -> Report:
    """The report with ``~`` for the home folder everywhere."""
    clean = without_home
    results = []
    for result in report.results:
        fix = result.fix
        if fix:
            fix = Fix(clean(fix.text), tuple(map(clean, fix.commands)), fix.link)
        results.append(
            replace(
                result,
                group=clean(result.group),
                summary=clean(result.summary),
                detail=clean(result.detail),
                fix=fix,
                data=clean(dict(result.data)),
            )
        )
    verdict = report.verdict
    if verdict:
        verdict = replace(verdict, model=clean(verdict.model), text=clean(verdict.text))
    request = replace(report.request, model=clean(report.request.model))
    return Report(request, tuple(results), verdict)


def without_home(value: Any) -> Any:
    """The same value with ``~`` for the home folder, in all strings, however deep."""
    home = str(Path.home())
    if len(home) <= 1:
        return value
    return _replaced(value, re.compile(re.escape(home) + r"(?=[/\\:\s'\",;)]|$)"))


def _replaced(value: Any, home: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return home.sub("~", value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, home) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(item, home) for item in value]
    return value
