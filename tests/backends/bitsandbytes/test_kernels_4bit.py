"""Kernels: which one is chosen, and what each makes of a packed weight."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from oot_quant_backends.bitsandbytes import kernels_4bit as kernels
from oot_quant_backends.bitsandbytes.kernels_4bit import Gemm4bit, Kernel, Packed, PackedCpu, choose
from oot_quant_backends.bitsandbytes.weights import (
    SMALLEST_SLICE,
    code_table,
    quantize,
    unpack,
)
from tests.backends.bitsandbytes.stored import random_matrix

ROWS, COLUMNS = 64, 512
HAS_KERNEL = bool(bnb.has_avx512bf16())


def packed(quant_type="nf4", blocksize=64):
    codes, absmax, table = quantize(random_matrix(ROWS, COLUMNS), quant_type, blocksize, False)
    return Packed(codes.view(ROWS, -1), absmax.view(ROWS, -1), table)


def chosen(dtype=torch.bfloat16, rows=ROWS, columns=COLUMNS, blocksize=64, scale=1.0):
    absmax = torch.ones(rows, columns // blocksize)
    table = code_table("nf4", torch.device("cpu")) * scale
    weight = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    return choose(Packed(weight, absmax, table), dtype)


@pytest.fixture
def without_compiler(monkeypatch):
    """As on a machine where our own CPU kernel cannot be built."""
    monkeypatch.setattr(kernels.cpu_4bit, "available", lambda: False)


@pytest.mark.parametrize("available", [True, False])
def test_the_avx512_kernel_is_used_where_the_processor_has_it(
    monkeypatch, available, without_compiler
):
    monkeypatch.setattr(bnb, "has_avx512bf16", lambda: available)
    wanted = PackedCpu if available else Gemm4bit
    assert type(chosen()) is wanted
    assert type(chosen(dtype=torch.float32)) is Gemm4bit
    assert type(chosen(dtype=torch.float16)) is Gemm4bit
    assert type(chosen(rows=ROWS + 1)) is Gemm4bit


def test_what_the_library_has_no_kernel_for_goes_to_the_reference(without_compiler):
    assert type(chosen(blocksize=16)) is Kernel
    assert type(chosen(scale=0.5)) is Kernel


def test_long_blocks_are_shortened_on_the_cpu_without_changing_a_value(without_compiler):
    kernel = Gemm4bit("nf4", 1024, repeat=4)
    absmax = torch.tensor([[1.0, 2.0]])
    prepared = kernel.prepare(packed()._replace(absmax=absmax))
    assert prepared.absmax.tolist() == [[1.0] * 4 + [2.0] * 4]
    assert chosen(torch.float32, columns=4096, blocksize=4096) == kernel


def test_the_avx512_layout_is_made_in_parts_as_the_library_makes_the_whole():
    codes, absmax, table = quantize(random_matrix(1120, 1024), "nf4", 64, False)
    plain = Packed(codes.view(1120, -1), absmax.view(1120, -1), table)
    assert plain.weight.numel() > 2 * SMALLEST_SLICE
    state = bnb.QuantState(
        absmax, shape=torch.Size((1120, 1024)), blocksize=64, dtype=torch.bfloat16
    )
    whole, state = bnb._convert_weight_packed_for_cpu(codes, state)
    moved = PackedCpu("nf4", 64).prepare(plain)
    assert torch.equal(moved.weight, whole)
    assert torch.equal(moved.absmax, state.absmax)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_the_avx512_layout_unpacks_to_the_same_weights(quant_type, blocksize):
    plain = packed(quant_type, blocksize)
    kernel = PackedCpu(quant_type, blocksize)
    moved = kernel.prepare(plain)
    assert moved.shape == plain.shape
    assert moved.absmax.dtype == torch.bfloat16
    expected = unpack(plain.weight, plain.absmax.bfloat16().float(), plain.quant_map)
    assert torch.equal(kernel.dequantize(moved), expected)


def test_the_avx512_kernel_is_called_with_that_layout(monkeypatch):
    """Where the processor lacks it, the library's operator has no kernel for the layout."""
    plain, kernel = packed(), PackedCpu("nf4", 64)
    moved = kernel.prepare(plain)
    x, bias = torch.randn(3, COLUMNS).bfloat16(), torch.randn(ROWS).bfloat16()
    if not HAS_KERNEL:

        def gemv_4bit(a, b, shape, absmax, code, blocksize):
            assert (list(shape), blocksize) == ([ROWS, COLUMNS], 64)
            return a @ kernel.dequantize(Packed(b, absmax, code)).bfloat16().t()

        stand_in = type("Ops", (), {"gemv_4bit": staticmethod(gemv_4bit)})
        monkeypatch.setattr(kernels.torch.ops, "bitsandbytes", stand_in, raising=False)
    output = kernel(x, moved, bias)
    reference = x.double() @ unpack(*plain).double().t() + bias.double()
    assert float((output - reference).norm() / reference.norm()) < 0.01


def test_the_plain_kernel_serves_any_table_and_block():
    plain = packed()
    tripled = plain._replace(quant_map=plain.quant_map * 3)
    x = torch.randn(2, COLUMNS)
    reference = x.double() @ unpack(*tripled).double().t()
    assert float((Kernel()(x, tripled, None) - reference).norm() / reference.norm()) < 1e-5
