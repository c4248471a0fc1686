"""The bitsandbytes backend keeps the contract, for each of its formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from oot_quant.testing.checkpoints import Store, Stored
from oot_quant.testing.contract import BackendContract

if TYPE_CHECKING:
    import torch


def store_4bit(
    module: str, weight: torch.Tensor, *, quant_type: str = "nf4", nested: bool = False
) -> Stored:
    """A matrix as bitsandbytes itself quantizes and saves it."""
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=quant_type
    )
    tensors = {f"{module}.weight": packed}
    tensors |= {f"{module}.weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return Stored(tensors, bnb.dequantize_4bit(packed, state))


class FourBitContract(BackendContract):
    @pytest.fixture
    def method(self) -> str:
        return "bitsandbytes"

    @pytest.fixture
    def section(self) -> Mapping[str, Any]:
        return {"quant_method": "bitsandbytes", "load_in_4bit": True}


class TestNf4(FourBitContract):
    @pytest.fixture
    def store(self) -> Store:
        return store_4bit


class TestFp4(FourBitContract):
    @pytest.fixture
    def store(self) -> Store:
        return partial(store_4bit, quant_type="fp4")

    @pytest.fixture
    def section(self) -> Mapping[str, Any]:
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}


class TestNf4WithDoubleQuantization(FourBitContract):
    @pytest.fixture
    def store(self) -> Store:
        return partial(store_4bit, nested=True)
