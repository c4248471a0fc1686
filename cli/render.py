"""Puts findings on a page of 78 columns. Knows symbols, colours and indents, and no checks."""

from __future__ import annotations

import os
import sys
import textwrap
from dataclasses import dataclass

import click

from oot_quant.doctor.report import Report, Result, worst
from oot_quant.types import Status

WIDTH = 78
SYMBOLS = {"ok": "✓", "info": "•", "skip": "-", "warn": "!", "fail": "✗", "error": "✗"}
ASCII = {"ok": "ok", "info": "..", "skip": "--", "warn": "!!", "fail": "XX", "error": "XX"}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "error": "red"}
INDENT = 4


@dataclass(frozen=True)
class Line:
    """A line of text; ``style`` is for the part from ``start`` to ``end``, in characters."""

    text: str
    style: str = ""
    start: int = 0
    end: int | None = None


def ascii_wanted() -> bool:
    """Whether stdout cannot show symbols."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"


class Page:
    """Lines of text that are shown at once. ``plain`` uses ASCII only."""

    def __init__(self, *, plain: bool) -> None:
        self.plain = plain
        self.symbols = ASCII if plain else SYMBOLS
        self.lines: list[Line] = []

    def line(self, text: str = "", style: str = "") -> None:
        """A line as it is."""
        self.lines.append(Line(self._shown(text), style))

    def text(self, text: str, indent: int) -> None:
        """A paragraph, wrapped; lines of it that begin with a space stay as they are."""
        margin = " " * indent
        for part in text.splitlines():
            if part.startswith(" "):
                self.line(f"{margin}{part}")
                continue
            for line in _wrapped(part, margin, margin):
                self.line(line)

    def finding(self, status: str, text: str, indent: int) -> None:
        """A sentence behind its symbol, with a hanging indent."""
        symbol = self.symbols[status]
        first = f"{' ' * indent}{symbol} "
        for number, line in enumerate(_wrapped(text, first, " " * len(first))):
            style = COLOURS.get(status, "") if number == 0 else ""
            self.lines.append(Line(self._shown(line), style, indent, indent + len(symbol)))

    def heading(self, status: str, text: str) -> None:
        """The line of a group, with its worst status in a box."""
        symbol = self.symbols[status]
        shown = self._shown(f"[{symbol}] {text}")
        self.lines.append(Line(shown, COLOURS.get(status, ""), 1, 1 + len(symbol)))

    def command(self, command: str, indent: int) -> None:
        """A command alone on its line, never wrapped, to be pasted."""
        self.line(f"{' ' * indent}{command}", style="bold")

    def show(self) -> None:
        """Print everything; colours only on a terminal, and not with NO_COLOR."""
        if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
            click.echo(self.plain_text(), nl=False)
            return
        # Not at the top: it takes longer to import than ``oot-quant list`` needs to run.
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        for line in self.lines:
            shown = Text(line.text)
            shown.stylize(line.style, line.start, line.end)
            console.print(shown)

    def plain_text(self) -> str:
        """Everything, without colours."""
        return "".join(f"{line.text}\n" for line in self.lines)

    def _shown(self, text: str) -> str:
        return text.encode("ascii", "replace").decode() if self.plain else text


def render(report: Report, *, plain: bool = False, verbose: bool = False) -> Page:
    """A report as a page. Groups that are fine are one line; ``verbose`` shows what passed."""
    page = Page(plain=plain)
    for group, results in report.groups().items():
        page.heading(worst([result.status for result in results]).value, group)
        for result in results:
            if verbose or result.status not in {Status.OK, Status.SKIP}:
                _write(page, result, verbose=verbose)
        if not verbose:
            _write_skipped(page, [result for result in results if result.status == Status.SKIP])
    page.line()
    page.line(_counted(report))
    if report.verdict:
        page.line(report.verdict.text, style="bold")
    return page


def _write(page: Page, result: Result, *, verbose: bool) -> None:
    page.finding(result.status.value, result.summary, INDENT)
    deeper = INDENT + len(page.symbols["ok"]) + 1
    page.text(result.detail, deeper)
    if verbose and "traceback" in result.data:
        page.text(textwrap.indent(str(result.data["traceback"]), " "), deeper)
    if result.fix:
        page.text(f"fix: {result.fix.text}", deeper)
        for command in result.fix.commands:
            page.command(command, deeper + 2)
        if result.fix.link:
            page.line(f"{' ' * (deeper + 2)}{result.fix.link}")
    if result.fix or verbose:
        page.line(f"{' ' * deeper}[{result.id}]", style="dim")


def _write_skipped(page: Page, skipped: list[Result]) -> None:
    """Checks that were not made; those with the same cause share a line."""
    causes: dict[str, list[Result]] = {}
    for result in skipped:
        causes.setdefault(str(result.data.get("cause", result.id)), []).append(result)
    for cause, results in causes.items():
        text = results[0].summary
        if len(results) > 1:
            ids = ", ".join(result.id for result in results)
            text = f"not tried, {cause}: {ids}"
        page.finding("skip", text, INDENT)


def _counted(report: Report) -> str:
    counts = report.counts
    problems = counts["fail"] + counts["error"]
    parts = [
        _number(problems, "problem") if problems else "",
        _number(counts["warn"], "warning") if counts["warn"] else "",
        f"{counts['ok']} passed",
        f"{counts['skip']} skipped" if counts["skip"] else "",
    ]
    return ", ".join(filter(None, parts)) + "."


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
