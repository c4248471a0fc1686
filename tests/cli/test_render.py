"""The page: width, indents, symbols, colours."""

import io
import sys

import pytest

from oot_quant.doctor.report import Report, Result, Verdict
from oot_quant.types import DoctorRequest, Fix, Status
from oot_quant_cli import render as rendering
from oot_quant_cli.render import ASCII, SYMBOLS, WIDTH, Page, ascii_wanted, render

LONG = "a sentence that goes on and on " * 6


def report_of(*results, verdict=None):
    return Report(DoctorRequest(), tuple(results), verdict)


def result(status="fail", group="environment", name="env.torch", **fields):
    return Result(name, group, Status(status), fields.pop("summary", "a summary"), **fields)


def test_every_status_has_a_symbol_in_both_alphabets():
    names = {status.value for status in Status}
    assert set(SYMBOLS) == set(ASCII) == names
    assert all(mark.isascii() and len(mark) == 2 for mark in ASCII.values())


def test_long_text_hangs_under_its_first_line_within_the_page():
    fix = Fix("do something about it " * 8, ("python -m pip install " + "x" * 99,))
    text = render(report_of(result(summary=LONG, detail=LONG, fix=fix))).plain_text()
    lines = [line for line in text.splitlines() if "xxx" not in line]
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].startswith("    ✗ a sentence")
    assert lines[2].startswith("      ")


def test_a_command_is_alone_on_its_line_and_never_wrapped():
    command = "python -m pip install " + " ".join(["package"] * 30)
    text = render(report_of(result(fix=Fix("do this.", (command,))))).plain_text()
    assert f"\n        {command}\n" in text


def test_prepared_lines_of_a_detail_stay_as_they_are():
    detail = "  model.layers.*.mlp.down_proj     30 x nf4\nwords"
    text = render(report_of(result("info", detail=detail))).plain_text()
    assert "        model.layers.*.mlp.down_proj     30 x nf4\n      words\n" in text


def test_groups_that_are_fine_are_one_line():
    text = render(report_of(result("ok", summary="hidden"))).plain_text()
    assert text == "[✓] environment\n\n1 passed.\n"


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (["ok", "info", "skip"], "✓"),
        (["info"], "✓"),
        (["skip"], "-"),
        (["ok", "warn"], "!"),
        (["warn", "fail", "ok"], "✗"),
        (["error"], "✗"),
    ],
)
def test_a_group_shows_its_worst_status(statuses, worst):
    text = render(report_of(*(result(status) for status in statuses))).plain_text()
    assert text.startswith(f"[{worst}] environment")


def test_skips_with_one_cause_share_a_line():
    skips = [result("skip", name=f"a.{i}", data={"cause": "x failed"}) for i in range(3)]
    text = render(report_of(*skips, result("skip", summary="alone"))).plain_text()
    assert "    - not tried, x failed: a.0, a.1, a.2\n    - alone\n" in text
    assert render(report_of(*skips), verbose=True).plain_text().count("a summary") == 3


def test_the_answer_for_a_model_is_the_last_line():
    verdict = Verdict("m", "bitsandbytes", loads=False, text="m will not load.")
    text = render(report_of(result(), verdict=verdict)).plain_text()
    assert text.endswith("\n1 problem, 0 passed.\nm will not load.\n")


def test_counts_are_said_in_words():
    made = ["fail", "error", "warn", "warn", "ok", "skip", "info"]
    text = render(report_of(*(result(status) for status in made))).plain_text()
    assert text.endswith("2 problems, 2 warnings, 1 passed, 1 skipped.\n")


def test_a_traceback_is_shown_on_request():
    crashed = result("error", data={"traceback": "Traceback\n  File x\n"})
    assert "File x" not in render(report_of(crashed)).plain_text()
    assert "File x" in render(report_of(crashed), verbose=True).plain_text()


@pytest.mark.parametrize(
    ("encoding", "plain"), [("utf-8", False), ("UTF8", False), ("ascii", True)]
)
def test_ascii_is_chosen_where_stdout_is_not_utf_8(monkeypatch, encoding, plain):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert ascii_wanted() is plain


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_colours_only_on_a_terminal_that_wants_them(monkeypatch, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    page, terminal = Page(plain=False), Terminal()
    page.finding("fail", "text", indent=0)
    monkeypatch.setattr(rendering.sys, "stdout", terminal)
    page.show()
    assert ("\x1b[31m" in terminal.getvalue()) is coloured
    assert "✗" in terminal.getvalue()
