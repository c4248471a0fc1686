"""Routed experts on CUDA: kernels and layers against float64, models in graphs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from oot_quant.testing.layers import tensor_parallel
from oot_quant.vllm_glue.grouped import (
    Int8Experts,
    PackedExperts,
    UnpackedExperts,
    step_of,
)
from oot_quant_backends.bitsandbytes import experts_4bit
from oot_quant_backends.bitsandbytes.experts_4bit import TritonExperts4bit
from oot_quant_backends.bitsandbytes.triton_4bit.units import reorder
from oot_quant_backends.bitsandbytes.weights import code_table, unpack
from tests.backends.bitsandbytes.test_fused_moe import (
    ACTIVATIONS,
    HIDDEN,
    activated_layer,
    error_of,
    reference,
    routing,
    serve,
    stored,
)
from tests.backends.bitsandbytes.triton_4bit.routing import sort_pairs, through_experts
from tests.mixtures import packed_mixture, plain_mixture
from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle

LIMIT = 0.01
NEAR_TIE, ROUTER_TIE = 0.12, 0.02
"""In bfloat16 transformers itself moves this model's log probabilities by 0.117, and its routers'
shares by 0.013."""
PROMPTS = [[1, 5, 9, 33], [511], *([n, 3 * n % 512] for n in range(10, 510, 10))]
EXPERTS, TOP_K, ROWS, COLUMNS = 8, 2, 328, 512
"""Sizes for kernels alone; the hidden size does not fill a group of rows, blocks do fill rows."""


# ------------------------------------------------ kernels


def kernel_and_weights(quant_type="nf4", dtype=torch.bfloat16, blocksize=64, inner=256):
    """Random packed experts in the kernels' order, and their weights in float64."""
    kept, plain = SimpleNamespace(), []
    values = code_table(quant_type, torch.device("cuda"))
    for group, (rows, columns) in {"w13": (2 * inner, COLUMNS), "w2": (ROWS, inner)}.items():
        codes = torch.randint(
            0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device="cuda"
        )
        absmax = torch.rand(EXPERTS, rows, columns // blocksize, device="cuda") * 0.1 + 0.01
        plain.append(torch.stack([unpack(*one, values) for one in zip(codes, absmax, strict=True)]))
        words, scales = zip(*map(reorder, codes, absmax), strict=True)
        setattr(kept, f"{group}_weight", torch.stack(words))
        setattr(kept, f"{group}_weight_absmax", torch.stack(scales))
        setattr(kept, f"{group}_weight_quant_map", values.view(1, 16))
    kernel = TritonExperts4bit(quant_type, {"w13": 2 * inner, "w2": ROWS}, dtype)
    return kernel, kept, [weight.double() for weight in plain]


def choices(tokens, kind="random"):
    """[tokens, k] experts: random ones; only some; all tokens to the same."""
    if kind == "one":
        return torch.full((tokens, TOP_K), 3, device="cuda", dtype=torch.int32)
    among = 3 if kind == "few" else EXPERTS
    return torch.rand(tokens, among, device="cuda").topk(TOP_K).indices.int()


def in_float64(x, weights, ids, shares):
    """As ``through_experts``, one expert after the other, for many tokens."""
    out = torch.zeros(len(x), ROWS, dtype=torch.float64, device="cuda")
    for expert in set(ids.flatten().tolist()) - {-1}:
        tokens, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ weights[0][expert].t()).chunk(2, dim=-1)
        value = (functional.silu(gate) * up) @ weights[1][expert].t()
        out.index_add_(0, tokens, value * shares[tokens, choice, None].double())
    return out


def run(kernel, kept, x, ids, shares, **others):
    out = torch.full((len(x), ROWS), torch.nan, device="cuda", dtype=x.dtype)
    kernel.multiply(kept, step_of(x, ids, shares=shares, **{"experts": EXPERTS, **others}), out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("kind", ["random", "few", "one"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 300, 4096])
def test_packed_experts_against_float64(tokens, kind, quant_type, dtype):
    kernel, kept, weights = kernel_and_weights(quant_type, dtype)
    x = torch.randn(tokens, COLUMNS, device="cuda").to(dtype)
    ids, shares = choices(tokens, kind), torch.rand(tokens, TOP_K, device="cuda")
    found = run(kernel, kept, x, ids, shares)
    assert error_of(found, in_float64(x, weights, ids, shares)) < LIMIT


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
def test_every_block_size(blocksize):
    kernel, kept, weights = kernel_and_weights(blocksize=blocksize)
    for tokens in (1, 16, 64, 300):
        x = torch.randn(tokens, COLUMNS, device="cuda").bfloat16()
        ids, shares = choices(tokens), torch.rand(tokens, TOP_K, device="cuda")
        found = run(kernel, kept, x, ids, shares)
        assert error_of(found, in_float64(x, weights, ids, shares)) < LIMIT
    for group, weight in zip(("w13", "w2"), weights, strict=True):
        assert error_of(kernel.unpack(kept, group), weight) < 0.002


@pytest.mark.parametrize("tokens", [1, 2, 16, 300])
def test_experts_of_other_ranks_and_of_nobody(tokens):
    """16 experts over all ranks, 8 of them here, in another order; some choices are -1."""
    kernel, kept, weights = kernel_and_weights()
    here = torch.randperm(2 * EXPERTS, device="cuda")[:EXPERTS]
    expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device="cuda")
    expert_map[here] = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    ids = torch.rand(tokens, 2 * EXPERTS, device="cuda").topk(TOP_K).indices.int()
    ids[0, 0] = here[2]
    x = torch.randn(tokens, COLUMNS, device="cuda").bfloat16()
    shares = torch.rand(tokens, TOP_K, device="cuda")
    found = run(kernel, kept, x, ids, shares, experts=2 * EXPERTS, expert_map=expert_map)
    assert error_of(found, in_float64(x, weights, expert_map[ids.long()], shares)) < LIMIT


@pytest.mark.parametrize("tokens", [2, 16, 300])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_vllm_sorts_pairs_as_the_tests_without_a_gpu_do(tokens, block):
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    expert_map = torch.tensor([0, -1, 1, 2, -1, -1, 3, 4], dtype=torch.int32, device="cuda")
    step = step_of(ids, ids, EXPERTS, expert_map=expert_map)
    found = [value.cpu() for value in step.align(block)]
    wanted = sort_pairs(ids.cpu(), EXPERTS, expert_map.cpu(), block)
    filled = int(wanted[2])
    assert int(found[2]) == filled
    assert torch.equal(found[1][: filled // block], wanted[1][: filled // block])
    # Within an expert, any order will do.
    pairs = [side[0][:filled].clamp(max=ids.numel()).view(-1, block) for side in (found, wanted)]
    for expert in wanted[1][: filled // block].unique():
        mine = wanted[1][: filled // block] == expert
        assert torch.equal(*(side[mine].flatten().sort().values for side in pairs))


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_graph_replays_with_other_routing(tokens):
    kernel, kept, weights = kernel_and_weights()
    x = torch.randn(tokens, COLUMNS, device="cuda").bfloat16()
    ids, shares = choices(tokens), torch.rand(tokens, TOP_K, device="cuda")
    run(kernel, kept, x, ids, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(kernel, kept, x, ids, shares)
    for kind in ("random", "one", "few", "random") * 3:
        x.copy_(torch.randn_like(x))
        ids.copy_(choices(tokens, kind))
        shares.copy_(torch.rand_like(shares))
        graph.replay()
        assert error_of(out, in_float64(x, weights, ids, shares)) < LIMIT


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_the_same_bits_every_time(tokens):
    """Also where memory for products holds NaN before."""
    kernel, kept, _ = kernel_and_weights(inner=1024)
    x = torch.randn(tokens, COLUMNS, device="cuda").bfloat16()
    ids, shares = choices(tokens), torch.rand(tokens, TOP_K, device="cuda")
    first = run(kernel, kept, x, ids, shares)
    assert first.isfinite().all()
    for _ in range(100):
        torch.full((1 << 22,), torch.nan, device="cuda")
        assert torch.equal(run(kernel, kept, x, ids, shares), first)


# ------------------------------------------------ layers


def classes(layer):
    return type(layer.quant_method.moe_kernel.fused_experts)


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
            assert classes(layer) is (Int8Experts if kind == "int8" else PackedExperts)
        assert error_of(total.cpu(), reference(x, unpacked, (shares, chosen))) < LIMIT


def test_what_the_kernels_do_not_take_is_unpacked(tmp_path):
    tensors, unpacked = stored("nf4")
    with torch.device("cuda"):
        layer = serve(tmp_path, "nf4", tensors, dtype=torch.float32)
    assert classes(layer) is UnpackedExperts
    x, (shares, chosen) = torch.randn(9, HIDDEN), routing(9)
    found = layer.quant_method.apply(layer, x.cuda(), shares.cuda(), chosen.cuda())
    assert error_of(found.cpu(), reference(x, unpacked, (shares, chosen))) < LIMIT


def test_a_kernel_that_computes_wrongly_is_not_used(tmp_path, monkeypatch, caplog_vllm):
    tensors, unpacked = stored("nf4")
    right = TritonExperts4bit.multiply

    def wrong(self, layer, step, out):
        right(self, layer, step, out)
        out.mul_(1.5)

    monkeypatch.setattr(TritonExperts4bit, "multiply", wrong)
    monkeypatch.setattr(experts_4bit, "_troubles", {})
    with torch.device("cuda"):
        layer = serve(tmp_path, "nf4", tensors, dtype=torch.bfloat16)
    assert classes(layer) is UnpackedExperts
    x, (shares, chosen) = torch.randn(9, HIDDEN).bfloat16(), routing(9)
    found = layer.quant_method.apply(layer, x.cuda(), shares.cuda(), chosen.cuda())
    assert "0.01 is allowed" in caplog_vllm.text
    assert error_of(found.cpu(), reference(x, unpacked, (shares, chosen))) < LIMIT


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_biases_and_activations(tmp_path, monkeypatch, name, packed, options):
    if not packed:
        monkeypatch.setattr(experts_4bit, "LARGEST_AVERAGE", -1)
    layer, weights, biases = activated_layer(tmp_path, name, options, torch.bfloat16, "cuda")
    for tokens in (1, 9):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        shares, chosen = (value.cuda() for value in routing(tokens))
        found = layer.quant_method.apply(layer, x, shares, chosen)
        wanted = through_experts(x, weights, chosen, shares, biases, ACTIVATIONS[name][1])
        assert error_of(found, wanted) < LIMIT


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_router_weights_may_count_before_the_experts(tmp_path, monkeypatch, packed):
    if not packed:
        monkeypatch.setattr(experts_4bit, "LARGEST_AVERAGE", -1)
    layer, weights, biases = activated_layer(
        tmp_path, "silu", {}, torch.bfloat16, "cuda", top_k=1, apply_router_weight_on_input=True
    )
    x = torch.randn(5, HIDDEN, device="cuda").bfloat16()
    shares, chosen = (value[:, :1].contiguous().cuda() for value in routing(5))
    found = layer.quant_method.apply(layer, x, shares, chosen)
    activation = ACTIVATIONS["silu"][1]
    wanted = through_experts(x * shares.bfloat16(), weights, chosen, None, biases, activation)
    assert error_of(found, wanted) < LIMIT


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_layer_in_a_graph(tmp_path, kind):
    tensors, unpacked = stored(kind)
    with torch.device("cuda"):
        layer = serve(tmp_path, kind, tensors, dtype=torch.bfloat16)
    x = torch.randn(5, HIDDEN, device="cuda").bfloat16()
    shares, chosen = (value.cuda() for value in routing(5))
    apply = partial(layer.quant_method.apply, layer, x, shares, chosen)
    apply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply()
    for seed in range(5):
        x.copy_(torch.randn_like(x))
        new = routing(5, seed)
        shares.copy_(new[0])
        chosen.copy_(new[1])
        graph.replay()
        assert error_of(out.cpu(), reference(x.cpu(), unpacked, new)) < LIMIT


# ------------------------------------------------ models


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
    oracle, compared = Oracle.unpacked(packed), 0
    for tokens, prompt in zip(run.tokens, PROMPTS, strict=True):
        sure = oracle.sure_tokens(prompt, NEAR_TIE, ROUTER_TIE)
        assert tokens[: len(sure)] == sure
        compared += len(sure)
    assert compared > 40
