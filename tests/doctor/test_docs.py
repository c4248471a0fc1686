"""The pages about checks, hooks, errors and commands say what the code does."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from oot_quant.doctor.table import every_check
from oot_quant.errors import LibraryTooOld, all_errors
from oot_quant.hookspecs import all_hooks
from oot_quant_backends.bitsandbytes import library

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("checks.md", "cli.md", "errors.md", "hooks.md", "vllm-versions.md")


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_check_is_explained(manager_of):
    missing = [c.id for c in every_check(manager_of()) if f"| `{c.id}` |" not in page("checks.md")]
    assert not missing


def test_every_hook_has_a_heading():
    assert [name for name in all_hooks() if f"## `{name}`" not in page("hooks.md")] == []


def test_every_error_has_a_row():
    assert [e.code for e in all_errors() if f"| `{e.code}` |" not in page("errors.md")] == []


def test_the_example_of_an_error_is_what_is_really_said(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.47.0")
    with pytest.raises(LibraryTooOld) as raised:
        library.require_version()
    assert f"```\n{raised.value}\n```" in page("errors.md")


def test_generated_parts_are_up_to_date():
    pytest.importorskip("cogapp")
    command = [sys.executable, "-m", "cogapp", "--check", *(str(DOCS / name) for name in PAGES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_pages_show_nothing_of_this_machine(name):
    assert str(Path.cwd()) not in page(name)
    assert str(Path.home()) + "/" not in page(name)
