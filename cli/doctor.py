"""``oot-quant doctor``: will it work here, and if not, what is to be done?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from oot_quant.manager import backends
from oot_quant.types import Check, DoctorRequest
from oot_quant_cli.render import Page, ascii_wanted, render

if TYPE_CHECKING:
    from oot_quant.doctor.report import Report


@click.command(short_help="Say whether it will work here, and if not, what to do.")
@click.option("--model", metavar="MODEL", help="A model folder, or owner/name on the Hub.")
@click.option(
    "--quantization", metavar="METHOD", help="The method that vLLM would be started with."
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Devices that each weight is split over.",
)
@click.option("--online", is_flag=True, help="Allow asking the Hub about the model.")
@click.option("--deep", is_flag=True, help="Import vLLM and compute something; takes longer.")
@click.option(
    "--only",
    multiple=True,
    metavar="ID",
    help="Only this check, or this group of checks; may be repeated.",
)
@click.option("--list-checks", is_flag=True, help="Print every check's id and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--ascii", "plain", is_flag=True, help="Use no symbols beyond ASCII.")
@click.option("-v", "--verbose", is_flag=True, help="Also show what passed, and tracebacks.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.pass_context
def doctor(  # noqa: PLR0913, PLR0917 - one argument for each option
    context: click.Context,
    model: str | None,
    quantization: str | None,
    tensor_parallel_size: int,
    online: bool,
    deep: bool,
    only: tuple[str, ...],
    list_checks: bool,
    as_json: bool,
    plain: bool,
    verbose: bool,
    strict: bool,
) -> None:
    """Say whether this will work here, and if not, what to do.

    Changes nothing and needs no network. With --model, the last line is the answer for that
    model; only the headers of its files are read.

    Exit codes: 0 no problem (warnings allowed), 1 at least one problem, 2 wrong usage.
    """
    # Not at the top: ``oot-quant list`` has no use for it.
    from oot_quant.doctor.runner import diagnose

    if list_checks:
        show_checks(as_json=as_json)
        return
    request = DoctorRequest(model, quantization, tensor_parallel_size, online, deep)
    with only_stderr():
        refuse_unknown(only)
        report = diagnose(request, only)
    refuse_empty(report, only)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        render(report, plain=plain or ascii_wanted(), verbose=verbose).show()
    context.exit(report.exit_code(strict=strict))


def show_checks(*, as_json: bool) -> None:
    """Print the table of checks."""
    checks = all_checks()
    if as_json:
        rows = [{"id": c.id, "group": c.group, "title": c.title} for c in checks]
        click.echo(json.dumps({"schema": 1, "checks": rows}, indent=2))
        return
    page, width = Page(plain=ascii_wanted()), max(len(check.id) for check in checks)
    for check in checks:
        page.line(f"{check.id.ljust(width)}  {check.title}")
    page.show()


def refuse_unknown(only: Sequence[str]) -> None:
    """Raise a usage error for an id or a group that no check has."""
    checks = all_checks()
    known = {name for check in checks for name in names_of(check)}
    for name in only:
        if name not in known and not name.startswith("model "):
            ids = ", ".join(check.id for check in checks)
            text = f"no check and no group is called {name!r}; checks: {ids}"
            raise click.BadParameter(text, param_hint="'--only'")


def refuse_empty(report: Report, only: Sequence[str]) -> None:
    """Raise a usage error if what was asked for needs another option."""
    if not report.results:
        text = f"{', '.join(only)} needs --model or --deep"
        raise click.UsageError(text)


def all_checks() -> list[Check]:
    """Every check that there is."""
    from oot_quant.doctor.table import every_check

    return every_check(backends())


def names_of(check: Check) -> tuple[str, str, str]:
    """What ``--only`` may call a check: its id, its group, or the group's first word."""
    return (check.id, check.group, check.group.split()[0])


@contextmanager
def only_stderr() -> Iterator[None]:
    """Send to stderr what libraries print, also below Python: stdout holds the answer only."""
    try:
        stdout, stderr = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        with redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    saved = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, stdout)
        os.close(saved)
