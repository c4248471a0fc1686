"""What an engine says to a release of bitsandbytes that it cannot work with."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from oot_quant_backends.bitsandbytes import LIBRARY
from tests.vllm.engine import run_engine

OLD = "0.49.2"


def pretend_to_be_old(site: Path) -> dict[str, str]:
    """Variables that make a process find the metadata of an old release first."""
    info = site / f"bitsandbytes-{OLD}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: bitsandbytes\nVersion: {OLD}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(site)}


def test_an_older_library_is_refused_with_the_command_that_upgrades_it(
    shelf, tmp_path, record_property
):
    """Really, where an old one is installed; where not, its metadata is laid over."""
    found, env = metadata.version("bitsandbytes"), {}
    if Version(found) >= Version(LIBRARY.minimum):
        found, env = OLD, pretend_to_be_old(tmp_path / "old")
    run = run_engine(shelf.llama(), quantization="bitsandbytes", env=env)
    assert run.code != 0
    said = re.search(r"library-too-old: .*?\n *fix: .*?(?=\n)", run.log, flags=re.DOTALL)
    assert said, run.log[-4000:]
    assert f"bitsandbytes {found} is installed, {LIBRARY.minimum} or newer is needed" in said[0]
    command = shlex.split(said[0].rpartition("fix: ")[2].partition(": ")[2])
    assert command[:5] == ["python", "-m", "pip", "install", "--upgrade"]
    assert Requirement(command[5]).specifier.contains(LIBRARY.minimum)
    assert not Requirement(command[5]).specifier.contains(found)
    record_property("refusal", said[0])
