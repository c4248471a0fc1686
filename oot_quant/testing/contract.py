"""The contract: what every backend must do, as tests that it inherits.

Derive one class in a test module of the backend and fill in two fixtures::

    class TestMyMethod(BackendContract):
        @pytest.fixture
        def method(self) -> str:
            return "my_method"

        @pytest.fixture
        def store(self) -> Store:
            return my_store

The other fixtures have defaults; override one to declare what the backend cannot do. Tests
must not be overridden, except by an ``xfail`` that gives its reason: a backend says what it
lacks, it does not skip it. Every test ends with a hint for whoever sees it fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from oot_quant.testing.cases import Loader
from oot_quant.testing.checkpoints import Store, write_quantized
from oot_quant.testing.contract_identity import IdentityContract
from oot_quant.testing.contract_linear import LinearContract
from oot_quant.testing.contract_storage import StorageContract


class BackendContract(IdentityContract, StorageContract, LinearContract):
    """Every test that a backend must pass, and the fixtures that describe the backend."""

    # ------------------------------------------------ to fill in

    @pytest.fixture
    def method(self) -> str:
        """The quantization method, as ``quantization=`` takes it."""
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Store:
        """How checkpoints hold a matrix: see ``oot_quant.testing.checkpoints.Store``.

        Written with the method's own library, not with the backend: it is the reference.
        """
        raise NotImplementedError

    # ------------------------------------------------ to override where the default is wrong

    @pytest.fixture
    def section(self, method: str) -> Mapping[str, Any]:
        """The ``quantization_config`` of a checkpoint that ``store`` fills."""
        return {"quant_method": method}

    @pytest.fixture
    def serves_in_flight(self) -> bool:
        """Whether 16-bit checkpoints can be quantized while they are loaded."""
        return True

    @pytest.fixture
    def tolerance(self) -> Mapping[torch.dtype, float]:
        """For each dtype of activations: largest relative error (by norm) against float64."""
        return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

    # ------------------------------------------------ made from these

    @pytest.fixture
    def quantized_folder(self, tmp_path: Path, store: Store, section: Mapping[str, Any]) -> Path:
        """A tiny Llama whose linear layers are all quantized."""
        return write_quantized(tmp_path / "quantized", store, section)

    @pytest.fixture
    def loader(
        self, method: str, store: Store, section: Mapping[str, Any], tmp_path: Path
    ) -> Loader:
        """Loads layers with this backend's method."""
        return Loader(method, store, section, tmp_path)

    # ------------------------------------------------ the lock

    def test_no_contract_test_is_overridden(self) -> None:
        """A test of the contract is replaced only by an ``xfail`` with a reason.

        Troubleshooting: remove the override and declare the missing capability by a fixture;
        if there is none for it, mark the override ``@pytest.mark.xfail(reason=...)``.
        """
        for name in dir(BackendContract):
            own = getattr(type(self), name, None)
            if name.startswith("test_") and own is not getattr(BackendContract, name):
                reasons = [
                    mark.kwargs.get("reason")
                    for mark in getattr(own, "pytestmark", [])
                    if mark.name == "xfail"
                ]
                assert any(reasons), f"{name} is overridden without an xfail that has a reason"
