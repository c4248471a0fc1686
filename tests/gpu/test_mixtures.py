"""Routed experts on CUDA: a layer against float64, a model in graphs against transformers."""

from __future__ import annotations

import pytest
import torch

from oot_quant.testing.layers import tensor_parallel
from tests.backends.bitsandbytes.test_fused_moe import (
    HIDDEN,
    error_of,
    reference,
    routing,
    serve,
    stored,
)
from tests.gpu.test_bitsandbytes import NEAR_TIE, PROMPTS
from tests.mixtures import packed_mixture, plain_mixture
from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle, agree


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp4", "int8"])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_the_ranks_outputs_add_up_to_float64(tmp_path, kind, expert_parallel):
    tensors, unpacked = stored(kind)
    for tokens in (1, 17, 300):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        shares, chosen = routing(tokens)
        total = torch.zeros(tokens, HIDDEN, device="cuda")
        for rank in range(2):
            with torch.device("cuda"), tensor_parallel(rank, 2):
                layer = serve(
                    tmp_path, kind, tensors, rank=rank, ranks=2, dtype=torch.bfloat16,
                    expert_parallel=expert_parallel,
                )  # fmt: skip
                total += layer.quant_method.apply(layer, x.cuda(), shares.cuda(), chosen.cuda())
        assert error_of(total.cpu(), reference(x, unpacked, (shares, chosen))) < 0.01


@pytest.mark.parametrize("kind", ["nf4", "int8", "in-flight"])
def test_a_mixture_in_graphs_agrees_with_transformers(shelf, kind):
    plain = plain_mixture(shelf, "mixtral")
    packed = packed_mixture(shelf, plain, "int8" if kind == "int8" else "nf4")
    arguments = {"quantization": "bitsandbytes"} if kind == "in-flight" else {}
    run = run_engine(
        plain if arguments else packed, prompts=PROMPTS, enforce_eager=False,
        gpu_memory_utilization=0.3, **arguments,
    )  # fmt: skip
    assert run.code == 0, run.log[-4000:]
    oracle = Oracle.unpacked(packed)
    for tokens, prompt in zip(run.tokens, PROMPTS, strict=True):
        assert agree(tokens, oracle.continue_greedily(prompt), NEAR_TIE), tokens
