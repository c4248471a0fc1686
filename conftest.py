"""Which tests start an engine or need a GPU, told by their folder; what a vLLM does not have.

Tests that start an engine run one after the other, on one worker of pytest-xdist: each keeps
all cores busy.
"""

from __future__ import annotations

import os
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
    if item.get_closest_marker("engine"):
        item.add_marker(pytest.mark.xdist_group("engine"))
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_SECONDS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    if marker := item.get_closest_marker("needs_vllm"):
        leave_out_on_an_older_vllm(*marker.args)


def leave_out_on_an_older_vllm(version: str, what: str) -> None:
    """tools/matrix.py tells this reason, by its beginning, from any other."""
    found = installed_version()
    if found and is_before(found, version):
        pytest.skip(f"not in vLLM {found}: {what}, {version} or newer")
