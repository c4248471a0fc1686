"""Plain tensor functions: tables in float32, names, double quantization."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from oot_quant_backends.bitsandbytes.weights import (
    NAME_RULES,
    SMALLEST_SLICE,
    code_table,
    decode_absmax,
    quantize,
    quantize_rows,
)


@pytest.fixture
def bfloat16_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_tables_are_float32_while_vllm_loads_a_bfloat16_model(bfloat16_default, quant_type):
    table = code_table(quant_type, torch.device("cpu"))
    assert table.dtype == torch.float32
    assert not torch.equal(table, table.bfloat16().float())
    assert torch.get_default_dtype() == torch.bfloat16


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_quantizing_does_not_depend_on_the_default_dtype(request, quant_type, nested):
    weight = torch.randn(8, 256)
    expected = quantize(weight, quant_type, 64, nested)
    request.getfixturevalue("bfloat16_default")
    found = quantize(weight, quant_type, 64, nested)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_double_quantization_is_undone_as_the_library_does():
    absmax = torch.rand(1024) + 0.5
    offset = absmax.mean()
    codes, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    expected = bnb.dequantize_blockwise(codes, state) + offset
    found = decode_absmax(codes.view(4, 256), state.code, state.absmax.view(4, 1), offset.view(1))
    assert torch.equal(found.flatten(), expected)


def test_no_stored_suffix_is_the_end_of_another():
    suffixes = [rule.stored_suffix for rule in NAME_RULES]
    clashes = [(a, b) for a in suffixes for b in suffixes if a != b and a.endswith(b)]
    assert clashes == []


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("columns", [1024, 1001])
def test_a_weight_quantized_in_parts_is_what_the_library_makes_of_the_whole(
    quant_type, columns, nested
):
    weight = torch.randn(600, columns, generator=torch.Generator().manual_seed(1))
    assert weight.numel() > 2 * SMALLEST_SLICE
    whole, state = bnb.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
    absmax = state.absmax
    if nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    octets, scales, _ = quantize(weight, quant_type, 64, nested)
    assert torch.equal(octets, whole.flatten())
    assert torch.equal(scales, absmax)


def test_rows_of_several_matrices_are_rounded_by_their_own_largest_weight():
    generator = torch.Generator().manual_seed(2)
    matrices = [torch.randn(rows, 1024, generator=generator).bfloat16() for rows in (600, 8, 300)]
    assert matrices[0].numel() > 2 * SMALLEST_SLICE
    octets, largest = quantize_rows(*matrices)
    exact = torch.cat(matrices).double()
    needed = exact.abs().amax(dim=1, keepdim=True)
    assert torch.equal(largest.double(), needed)
    steps = exact / needed * 127
    assert octets.dtype == torch.int8
    assert float((octets.double() - steps).abs().max()) < 0.5 + 1e-4
