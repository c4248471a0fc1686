"""bitsandbytes on CUDA: layers against float64, quantization beside other streams, graphs."""

from __future__ import annotations

import os
import subprocess
import sys

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
from oot_quant_backends.bitsandbytes.kernels_4bit import Gemm4bit, Kernel, TritonGemm
from oot_quant_backends.bitsandbytes.linear_4bit import packed_of
from oot_quant_backends.bitsandbytes.weights import quantize
from tests.backends.bitsandbytes.stored import (
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)
from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle, agree

NAME = "model.layers.0.mlp.down_proj"
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.01}
NEAR_TIE = 0.05
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
    assert torch.equal(layer.quant_method.kernel.dequantize(packed_of(layer)).cpu(), weight)
    x = torch.randn(7, 4096, device="cuda", dtype=torch.bfloat16)
    reference = x.double() @ weight.cuda().double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 0.01


@pytest.mark.parametrize(
    ("dtype", "columns", "kernel"),
    [
        (torch.bfloat16, 1024, TritonGemm),
        (torch.float16, 1024, TritonGemm),
        (torch.float32, 1024, Gemm4bit),
        (torch.bfloat16, 100, Kernel),
    ],
    ids=str,
)
def test_which_kernel_serves_a_layer(tmp_path, dtype, columns, kernel):
    layer, _ = stored_layer(tmp_path, dtype, columns)
    hopper = torch.cuda.get_device_capability()[0] == 9
    wanted = Gemm4bit if kernel is TritonGemm and not hopper else kernel
    assert type(layer.quant_method.kernel) is wanted


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


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(256, 1024), (200, 712), (64, 90)])
def test_8_bit_output_against_float64(tmp_path, rows, columns, dtype):
    """Sizes that vLLM's kernels like, that they have to pad, and that they do not take."""
    tensors, whole = pack_8bit(NAME, random_matrix(rows, columns))
    write_checkpoint(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    with tensor_parallel(), torch.device("cuda"):
        config = config_for("bitsandbytes", tmp_path)
        layer = build_linear("row", config, NAME, columns, rows, dtype=dtype)
        load_stored(layer, config, tensors.items())
        process(layer)
    weight = whole.cuda().double()
    assert error_of(layer.quant_method.dequantize_weight(layer), weight) < LIMIT[dtype]
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        bias = torch.randn(rows, device="cuda", dtype=dtype)
        reference = x.double() @ weight.t() + bias.double()
        assert error_of(layer.quant_method.apply(layer, x, bias), reference) < LIMIT[dtype]


@pytest.mark.parametrize("kind", ["nf4-double", "int8", "in-flight", "in-flight-int8"])
def test_graphs_give_the_tokens_of_eager(shelf, kind):
    """Up to where the oracle itself is undecided in bfloat16, as fused rounding may tip it."""
    plain = shelf.llama()
    folder, arguments = {
        "nf4-double": lambda: (shelf.quantized(plain, nested=True), {}),
        "int8": lambda: (shelf.quantized(plain, "int8"), {}),
        "in-flight": lambda: (plain, {"quantization": "bitsandbytes"}),
        "in-flight-int8": lambda: (
            plain,
            {
                "quantization": "bitsandbytes",
                "hf_overrides": {"quantization_config": {"load_in_8bit": True}},
            },
        ),
    }[kind]()
    runs = [
        run_engine(
            folder, prompts=PROMPTS, enforce_eager=eager, gpu_memory_utilization=0.3, **arguments
        )
        for eager in (True, False)
    ]
    assert [run.code for run in runs] == [0, 0], runs[-1].log[-4000:]
    assert "cudagraph" in runs[1].log.lower() or "CUDA graph" in runs[1].log
    name = "int8" if kind.endswith("int8") else "nf4"
    oracle = Oracle.unpacked(shelf.quantized(plain, name, nested=kind == "nf4-double"))
    for number, prompt in enumerate(PROMPTS):
        expected = oracle.continue_greedily(prompt)
        for run in runs:
            assert agree(run.tokens[number], expected, NEAR_TIE), (kind, number, run.tokens)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(shelf, level):
    """Level 1 keeps the weights, level 2 drops them, which a reload mends."""
    script = (
        "import sys; from vllm import LLM, SamplingParams\n"
        "level = int(sys.argv[2])\n"
        "llm = LLM(sys.argv[1], max_model_len=256, skip_tokenizer_init=True,\n"
        "          enable_sleep_mode=True, gpu_memory_utilization=0.3)\n"
        "ask = lambda: [o.outputs[0].token_ids for o in llm.generate(\n"
        "    [{'prompt_token_ids': [1, 5, 9, 33]}],\n"
        "    SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True))]\n"
        "before = ask()\n"
        "llm.sleep(level=level)\n"
        "llm.wake_up()\n"
        "level == 2 and llm.collective_rpc('reload_weights')\n"
        "print('SAME' if ask() == before else 'DIFFERENT')\n"
    )
    folder = shelf.quantized(shelf.llama(), nested=True)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(level)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "SAME" in done.stdout, (done.stdout + done.stderr)[-4000:]
