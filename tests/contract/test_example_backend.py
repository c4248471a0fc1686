"""The example backend keeps the contract, from a distribution of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oot_quant.manager import backends
from oot_quant.testing.checkpoints import Store
from oot_quant.testing.contract import BackendContract
from tests.contract.example import install_example, store_int8


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install_example(tmp_path_factory.mktemp("example")))
        backends.cache_clear()
        yield
    backends.cache_clear()


class TestRtnInt8(BackendContract):
    @pytest.fixture
    def method(self) -> str:
        return "rtn_int8"

    @pytest.fixture
    def store(self) -> Store:
        return store_int8
