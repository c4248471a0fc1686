"""Our AVX-512 kernel against float64, and what becomes of machines that cannot build it."""

from __future__ import annotations

import logging

import pytest
import torch

from oot_quant_backends.bitsandbytes import cpu_4bit
from oot_quant_backends.bitsandbytes.kernels_4bit import Avx512, Gemm4bit, Kernel, Packed, choose
from oot_quant_backends.bitsandbytes.weights import quantize, unpack
from tests.backends.bitsandbytes.stored import random_matrix

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 0.004, torch.float16: 0.001}
TOKENS = (1, 2, 3, 4, 5, 7, 8, 64, 65, 300)
needs_kernel = pytest.mark.skipif(
    not cpu_4bit.has_avx512() or cpu_4bit.compiler() is None, reason="no AVX-512 or no compiler"
)


def packed(rows, columns, blocksize=64, quant_type="nf4"):
    codes, absmax, table = quantize(random_matrix(rows, columns), quant_type, blocksize, False)
    return Packed(codes.view(rows, -1), absmax.view(rows, -1), table)


def error_of(output, reference):
    return float((output.double() - reference).norm() / reference.norm())


@pytest.fixture
def without_library():
    cpu_4bit._library.cache_clear()
    yield
    cpu_4bit._library.cache_clear()


@needs_kernel
def test_a_machine_with_a_compiler_has_it():
    assert cpu_4bit.available()
    assert choose(packed(64, 512), torch.float32) == Avx512()


@needs_kernel
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("rows", "columns", "blocksize"), [(64, 512, 64), (37, 96, 32), (1, 64, 64), (130, 4096, 4096)]
)
def test_output_against_float64(rows, columns, blocksize, quant_type, dtype):
    weight = packed(rows, columns, blocksize, quant_type)
    for tokens in TOKENS:
        x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
        reference = x.double() @ unpack(*weight[:3]).double().t() + bias.double()
        output = Avx512()(x, weight, bias)
        assert (output.dtype, output.shape) == (dtype, (tokens, rows))
        assert error_of(output, reference) < LIMIT[dtype], tokens


@needs_kernel
def test_it_computes_with_any_table(monkeypatch):
    weight = packed(64, 512)
    doubled = weight._replace(quant_map=torch.randn(16))
    assert choose(doubled, torch.bfloat16) == Avx512()
    x = torch.randn(2, 512)
    reference = x.double() @ unpack(*doubled[:3]).double().t()
    assert error_of(Avx512()(x, doubled, None), reference) < 1e-6


@needs_kernel
@pytest.mark.parametrize("tokens", [3, 100])
def test_activations_of_any_shape_and_stride(tokens):
    weight = packed(64, 512)
    x = torch.randn(tokens, 2, 1024)[..., 256:768]
    reference = x.double() @ unpack(*weight[:3]).double().t()
    assert error_of(Avx512()(x, weight, None), reference) < 1e-6


@needs_kernel
def test_it_is_an_operator_that_compiles():
    weight = packed(64, 512)
    x = torch.randn(3, 512)
    arguments = (x, weight.weight, weight.absmax, weight.quant_map, None)
    torch.library.opcheck(torch.ops.oot_quant.cpu_gemm_4bit.default, arguments)


def test_without_a_compiler_the_library_serves_and_the_log_says_why(
    monkeypatch, caplog_vllm, without_library
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    monkeypatch.setenv("PATH", "")
    with caplog_vllm.at_level(logging.WARNING):
        assert type(choose(packed(64, 512), torch.float32)) is Gemm4bit
        assert type(choose(packed(64, 512), torch.float32)) is Gemm4bit
    (record,) = [r for r in caplog_vllm.records if "kernel was not built" in r.getMessage()]
    assert "fix: install gcc" in record.getMessage()


def test_a_processor_without_avx512_is_served_by_the_library(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert type(choose(packed(64, 512), torch.float32)) is Gemm4bit
    table = packed(64, 512)._replace(quant_map=torch.randn(16))
    assert type(choose(table, torch.float32)) is Kernel
