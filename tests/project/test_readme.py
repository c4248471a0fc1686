"""The README and the Makefile say what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def test_every_make_command_in_the_readme_exists() -> None:
    mentioned = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert mentioned
    assert mentioned <= TARGETS


def test_every_link_to_a_file_leads_to_one() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_alone_lists_every_command() -> None:
    command = ["make", "--no-print-directory", "-C", str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in result.stdout.splitlines()} == TARGETS


@pytest.mark.parametrize("command", ["list", "doctor"])
def test_every_command_of_the_readme_exists(command: str) -> None:
    script = Path(sys.executable).with_name("oot-quant")
    assert f"oot-quant {command}" in README
    subprocess.run([str(script), command, "--help"], capture_output=True, check=True)
