"""What a built wheel holds, and that pyproject.toml, the code and the set-up agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import oot_quant
from oot_quant.vllm_glue import compat
from oot_quant_backends import bitsandbytes as bitsandbytes_backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
ROOMS = {"oot_quant": "oot_quant", "backends": "oot_quant_backends", "cli": "oot_quant_cli"}
"""Folder of each room, and the name it is imported by."""


def modules_on_disk() -> set[str]:
    """Every module of the three rooms, as the path that it has in a wheel."""
    return {
        str(Path(package) / path.relative_to(ROOT / folder))
        for folder, package in ROOMS.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for folder in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(out), str(source)]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_every_package_on_disk_is_listed() -> None:
    packages = {str(Path(m).parent).replace("/", ".") for m in modules_on_disk()}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages


def test_every_folder_with_code_is_a_package() -> None:
    folders = {(ROOT / f / p).parent for f in ROOMS for p in (ROOT / f).rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    assert modules_on_disk() == {name for name in wheel.namelist() if name.endswith(".py")}


@pytest.mark.parametrize("package", ROOMS.values())
def test_every_room_in_the_wheel_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_the_wheel_carries_what_is_compiled_on_the_users_machine(wheel: zipfile.ZipFile) -> None:
    assert "oot_quant_backends/bitsandbytes/cpu_4bit.c" in wheel.namelist()


def test_nothing_else_reaches_site_packages(wheel: zipfile.ZipFile) -> None:
    metadata = f"oot_quant-{oot_quant.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {*ROOMS.values(), metadata}


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_every_entry_point_leads_to_a_module_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    text = wheel.read(f"oot_quant-{oot_quant.__version__}.dist-info/entry_points.txt").decode()
    for group, points in groups.items():
        assert f"[{group}]" in text
        for name, value in points.items():
            assert f"{name} = {value}" in text
            path = value.split(":")[0].replace(".", "/")
            assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist())


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == oot_quant.__version__


@pytest.mark.parametrize("extra", ["bitsandbytes", "cpu", "cuda"])
def test_extras_that_the_readme_promises_exist(extra: str) -> None:
    assert PROJECT["optional-dependencies"][extra]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf'"oot-quant\[([a-z]+,)*{extra}\]"', readme)


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_engine_extras_allow_exactly_the_supported_releases(extra: str) -> None:
    (engine,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    newest = Version(compat.NEWEST_TESTED)
    assert compat.OLDEST in engine.specifier
    assert compat.NEWEST_TESTED in engine.specifier
    assert f"{newest.major}.{newest.minor + 1}.0" not in engine.specifier
    assert "0.27.0" not in engine.specifier


def test_the_library_extra_asks_for_the_version_that_the_backend_needs() -> None:
    library = bitsandbytes_backend.LIBRARY
    expected = f"{library.distribution}>={library.minimum}"
    assert PROJECT["optional-dependencies"]["bitsandbytes"] == [expected]


def test_pinned_versions_are_in_the_declared_ranges() -> None:
    pins = constraints()
    groups = PROJECT["optional-dependencies"].values()
    declared = [Requirement(line) for group in [PROJECT["dependencies"], *groups] for line in group]
    outside = [str(r) for r in declared if r.name in pins and pins[r.name] not in r.specifier]
    assert outside == []


def constraints() -> dict[str, str]:
    text = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, flags=re.MULTILINE))
