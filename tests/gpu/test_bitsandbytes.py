"""bitsandbytes on CUDA: layers against float64, quantization beside other streams, graphs."""

from __future__ import annotations

import pytest
import torch

from oot_quant.testing.layers import (
    build_linear,
    config_for,
    load_stored,
    process,
    rank_weight,
    tensor_parallel,
)
from oot_quant_backends.bitsandbytes.kernels_4bit import Packed
from oot_quant_backends.bitsandbytes.weights import quantize
from tests.backends.bitsandbytes.stored import pack, random_matrix, write_checkpoint
from tests.vllm.engine import run_engine

NAME = "model.layers.0.mlp.down_proj"
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.01}
TOKENS = (1, 2, 3, 4, 5, 8, 17, 64, 300)
PROMPTS = [[1, 5, 9, 33], [7, 8, 200, 4, 4, 100, 31], [511]]


def stored_layer(folder, dtype, columns, ranks=1, rank=0, **how):
    """A row-parallel layer on the GPU, and its weight unpacked on the CPU in float32."""
    tensors, whole = pack(NAME, random_matrix(256, columns), **how)
    write_checkpoint(folder, tensors)
    with tensor_parallel(rank, ranks), torch.device("cuda"):
        config = config_for("bitsandbytes", folder)
        layer = build_linear("row", config, NAME, columns, 256, dtype=dtype)
        load_stored(layer, config, tensors.items())
        process(layer)
    return layer, rank_weight("row", [whole], rank, ranks)


def error_of(output, reference):
    return float((output.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(("columns", "ranks"), [(1024, 1), (704, 2), (100, 1)])
def test_output_against_float64(tmp_path, quant_type, nested, dtype, columns, ranks):
    layer, weight = stored_layer(
        tmp_path, dtype, columns, ranks, quant_type=quant_type, nested=nested
    )
    for tokens in TOKENS:
        x = torch.randn(tokens, columns // ranks, device="cuda", dtype=dtype)
        bias = torch.randn(256, device="cuda", dtype=dtype)
        reference = x.double() @ weight.cuda().double().t() + bias.double()
        assert error_of(layer.quant_method.apply(layer, x, bias), reference) < LIMIT[dtype]


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_every_block_size(tmp_path, blocksize):
    layer, weight = stored_layer(tmp_path, torch.bfloat16, 4096, blocksize=blocksize)
    packed = Packed(layer.weight, layer.weight_absmax, layer.weight_quant_map)
    assert torch.equal(layer.quant_method.kernel.dequantize(packed).cpu(), weight)
    x = torch.randn(7, 4096, device="cuda", dtype=torch.bfloat16)
    reference = x.double() @ weight.cuda().double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 0.01


@pytest.mark.parametrize("tokens", TOKENS)
def test_activations_that_are_not_contiguous(tmp_path, tokens):
    layer, weight = stored_layer(tmp_path, torch.bfloat16, 1024)
    wide = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    x = wide[:, 512:1536]
    reference = x.double() @ weight.cuda().double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 0.01


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
def test_quantizing_on_another_stream_waits_for_the_weight(nested):
    """Fifty times a weight that is still being written when its quantization is asked for."""
    source = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    expected = quantize(source, "nf4", 64, nested)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            weight = torch.zeros_like(source)
            for _ in range(3):
                weight.mul_(0.5)
            weight.copy_(source)
            found = quantize(weight, "nf4", 64, nested)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in-flight"])
def test_graphs_give_the_tokens_of_eager(shelf, stored):
    folder = shelf.quantized(shelf.llama(), nested=True) if stored else shelf.llama()
    arguments = {} if stored else {"quantization": "bitsandbytes"}
    runs = [
        run_engine(folder, prompts=PROMPTS, enforce_eager=eager, gpu_memory_utilization=0.3,
                   **arguments)
        for eager in (True, False)
    ]  # fmt: skip
    assert [run.code for run in runs] == [0, 0], runs[-1].log[-4000:]
    assert "cudagraph" in runs[1].log.lower() or "CUDA graph" in runs[1].log
    assert runs[0].tokens == runs[1].tokens
