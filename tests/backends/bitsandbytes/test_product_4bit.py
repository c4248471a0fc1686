"""The 4-bit product as an operator, in plain torch; what lets the Triton kernels serve, or not."""

from __future__ import annotations

import pytest
import torch

from oot_quant_backends.bitsandbytes import product_4bit
from oot_quant_backends.bitsandbytes.product_4bit import BUCKETS, tables_of, trouble
from oot_quant_backends.bitsandbytes.triton_4bit import gemm
from oot_quant_backends.bitsandbytes.triton_4bit.units import new_counters, reorder, restore
from oot_quant_backends.bitsandbytes.weights import quantize, unpack
from tests.backends.bitsandbytes.stored import random_matrix

ROWS, COLUMNS = 100, 256
SHAPE = (ROWS, COLUMNS, 64, "nf4", torch.bfloat16, torch.device("cpu"))


def operands(quant_type="nf4", blocksize=64):
    """The operator's arguments for a weight, but x and bias; and that weight in float64."""
    codes, absmax, values = quantize(random_matrix(ROWS, COLUMNS), quant_type, blocksize, False)
    packed = codes.view(ROWS, -1), absmax.view(ROWS, -1)
    words, scales = reorder(*packed)
    return (words, scales, values, new_counters(words)), unpack(*packed, values).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (0,)], ids=str)
def test_operator_against_float64(shape, quant_type, dtype):
    tensors, weight = operands(quant_type)
    x, bias = torch.randn(*shape, COLUMNS).to(dtype), torch.randn(ROWS).to(dtype)
    found = torch.ops.oot_quant.gemm_4bit(x, *tensors, bias, ROWS, quant_type)
    reference = x.double() @ weight.t() + bias.double()
    assert found.dtype == dtype
    assert found.shape == reference.shape
    limit = {torch.float32: 1e-6, torch.bfloat16: 0.005, torch.float16: 0.001}[dtype]
    assert float((found.double() - reference).norm()) <= limit * float(reference.norm())


def test_operator_keeps_what_torch_asks_of_operators():
    tensors, _ = operands()
    for bias in (None, torch.randn(ROWS)):
        arguments = (torch.randn(2, 3, COLUMNS), *tensors, bias, ROWS, "nf4")
        torch.library.opcheck(
            torch.ops.oot_quant.gemm_4bit.default,
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


def test_tables_are_read_from_the_device_once():
    assert tables_of("nf4", torch.bfloat16) is tables_of("nf4", torch.bfloat16)
    assert tables_of("nf4", torch.bfloat16) != tables_of("fp4", torch.bfloat16)
    assert tables_of("nf4", torch.bfloat16) != tables_of("nf4", torch.float16)


@pytest.fixture
def working_kernels(monkeypatch):
    """Kernels whose results are right, without a GPU."""

    def weight_of(units):
        return unpack(*restore(units.words, units.scales, units.rows), units.values)

    monkeypatch.setattr(gemm, "run", lambda x, units, *_: x @ weight_of(units).to(x.dtype).t())
    monkeypatch.setattr(gemm, "dequantize", lambda units, dtype: weight_of(units).to(dtype))
    trouble.cache_clear()
    yield
    trouble.cache_clear()


def test_kernels_that_give_what_they_must_may_serve(working_kernels):
    assert trouble(*SHAPE) is None


@pytest.mark.parametrize("tokens", BUCKETS)
def test_a_kernel_that_is_wrong_for_some_tokens_may_not(working_kernels, monkeypatch, tokens):
    right = gemm.run
    monkeypatch.setattr(
        gemm,
        "run",
        lambda x, *rest: right(x, *rest).roll(1, 1) if len(x) == tokens else right(x, *rest),
    )
    assert trouble(*SHAPE).startswith(f"{tokens} tokens: the error is")


def test_not_a_number_is_not_right(working_kernels, monkeypatch):
    right = gemm.dequantize
    monkeypatch.setattr(gemm, "dequantize", lambda *given: right(*given) * float("nan"))
    assert trouble(*SHAPE).startswith("unpacking: the error is nan")


def test_a_launch_that_is_refused_is_a_reason_and_no_error(working_kernels, monkeypatch):
    def refuse(*_):
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nand more")

    monkeypatch.setattr(gemm, "run", refuse)
    assert trouble(*SHAPE) == "RuntimeError: Triton Error [CUDA]: invalid argument"


def test_trying_leaves_the_random_numbers_of_others_alone(working_kernels):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert trouble(*SHAPE) is None
    assert torch.equal(torch.rand(3), expected)
    assert product_4bit.trouble.cache_info().misses == 1
