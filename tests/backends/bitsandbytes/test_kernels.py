"""Kernels: which one is chosen, and what each makes of a packed weight."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from oot_quant_backends.bitsandbytes import kernels
from oot_quant_backends.bitsandbytes.kernels import Gemm4bit, PackedCpu, Reference, choose
from oot_quant_backends.bitsandbytes.weights import code_table, quantize, unpack
from tests.backends.bitsandbytes.stored import random_matrix

ROWS, COLUMNS = 64, 512
HAS_KERNEL = bool(bnb.has_avx512bf16())


def packed(quant_type="nf4", blocksize=64):
    codes, absmax, table = quantize(random_matrix(ROWS, COLUMNS), quant_type, blocksize, False)
    return codes.view(ROWS, -1), absmax.view(ROWS, -1), table


def chosen(dtype=torch.bfloat16, rows=ROWS, blocksize=64, scale=1.0):
    absmax = torch.ones(rows, COLUMNS // blocksize)
    table = code_table("nf4", torch.device("cpu")) * scale
    return choose("nf4", absmax, table, (rows, COLUMNS), dtype)


@pytest.mark.parametrize("available", [True, False])
def test_the_avx512_kernel_is_used_where_the_processor_has_it(monkeypatch, available):
    monkeypatch.setattr(bnb, "has_avx512bf16", lambda: available)
    wanted = PackedCpu if available else Gemm4bit
    assert type(chosen()) is wanted
    assert type(chosen(dtype=torch.float32)) is Gemm4bit
    assert type(chosen(dtype=torch.float16)) is Gemm4bit
    assert type(chosen(rows=ROWS + 1)) is Gemm4bit


def test_what_the_library_has_no_kernel_for_goes_to_the_reference():
    assert type(chosen(blocksize=16)) is Reference
    assert type(chosen(scale=0.5)) is Reference


def test_long_blocks_are_shortened_on_the_cpu_without_changing_a_value():
    kernel = Gemm4bit("nf4", 1024, repeat=4)
    absmax = torch.tensor([[1.0, 2.0]])
    assert kernel.prepare(torch.zeros(1, 4096), absmax)[1].tolist() == [[1.0] * 4 + [2.0] * 4]
    long = choose("nf4", torch.ones(ROWS, 1), code_table("nf4", torch.device("cpu")),
                  (ROWS, 4096), torch.float32)  # fmt: skip
    assert long == kernel


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_the_avx512_layout_unpacks_to_the_same_weights(quant_type, blocksize):
    weight, absmax, table = packed(quant_type, blocksize)
    kernel = PackedCpu(quant_type, blocksize)
    moved, scales = kernel.prepare(weight, absmax)
    assert moved.shape == weight.shape
    assert scales.dtype == torch.bfloat16
    expected = unpack(weight, absmax.bfloat16().float(), table)
    assert torch.equal(kernel.dequantize(moved, scales, table), expected)


def test_the_avx512_kernel_is_called_with_that_layout(monkeypatch):
    """Where the processor lacks it, the library's operator has no kernel for the layout."""
    weight, absmax, table = packed()
    kernel = PackedCpu("nf4", 64)
    moved, scales = kernel.prepare(weight, absmax)
    x, bias = torch.randn(3, COLUMNS).bfloat16(), torch.randn(ROWS).bfloat16()
    if not HAS_KERNEL:

        def gemv_4bit(a, b, shape, absmax, code, blocksize):
            assert (list(shape), blocksize) == ([ROWS, COLUMNS], 64)
            return a @ kernel.dequantize(b, absmax, code).bfloat16().t()

        stand_in = type("Ops", (), {"gemv_4bit": staticmethod(gemv_4bit)})
        monkeypatch.setattr(kernels.torch.ops, "bitsandbytes", stand_in, raising=False)
    output = kernel(x, moved, scales, table, bias)
    reference = x.double() @ unpack(weight, absmax, table).double().t() + bias.double()
    assert float((output - reference).norm() / reference.norm()) < 0.01


def test_a_reference_serves_any_table_and_block():
    weight, absmax, table = packed()
    x = torch.randn(2, COLUMNS)
    output = Reference()(x, weight, absmax, table * 3, None)
    reference = x.double() @ unpack(weight, absmax, table * 3).double().t()
    assert float((output - reference).norm() / reference.norm()) < 1e-5
