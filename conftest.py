"""Which tests start an engine or need a GPU, told by their folder; what a vLLM does not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from oot_quant.vllm_glue.compat import installed_version, is_before

ENGINE_SECONDS = 600
# A thread that waits without spinning: another worker may need its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_itemcollected(item: pytest.Item) -> None:
    folders = item.path.relative_to(Path(__file__).parent).parts
    if folders[:2] == ("tests", "gpu"):
        item.add_marker("gpu")
    if folders[:2] in {("tests", "vllm"), ("tests", "gpu")}:
        item.add_marker("engine")
    if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(ENGINE_SECONDS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    if marker := item.get_closest_marker("needs_vllm"):
        version, what = marker.args
        leave_out_if(lambda found: is_before(found, version), f"{what}, {version} or newer")
    if marker := item.get_closest_marker("not_in_vllm"):
        version, what = marker.args
        leave_out_if(lambda found: found.startswith(f"{version}."), what)


def leave_out_if(lacks: Callable[[str], bool], what: str) -> None:
    """Skip on a vLLM that lacks something; tools/matrix.py knows this reason by its beginning."""
    found = installed_version()
    if found and lacks(found):
        pytest.skip(f"not in vLLM {found}: {what}")
