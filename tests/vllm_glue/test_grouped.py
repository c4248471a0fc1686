"""What vLLM's modular kernel asks of experts, with kernels of plain torch in place of a GPU's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from oot_quant.errors import UnsupportedFormat
from oot_quant.testing.experts import build_experts, load_experts
from oot_quant.testing.layers import config_for
from oot_quant.vllm_glue.grouped import Int8Experts, Int8Rows, PackedExperts, make_kernel
from tests.backends.bitsandbytes.stored import write_checkpoint
from tests.backends.bitsandbytes.test_fused_moe import (
    HIDDEN,
    PREFIX,
    SIZES,
    activated_layer,
    error_of,
    matrices,
    routing,
)
from tests.backends.bitsandbytes.triton_4bit.routing import silu_gated, through_experts


@pytest.fixture(autouse=True)
def workspaces(monkeypatch):
    """Of plain tensors: what vLLM 0.28 and 0.29 have, also on the CPU, wants an accelerator."""

    def get_simultaneous(*wanted):
        return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]

    manager = SimpleNamespace(get_simultaneous=get_simultaneous)
    monkeypatch.setattr(modular_kernel, "current_workspace_manager", lambda: manager)


class PlainKernel:
    """A ``PackedKernel`` that unpacks, for at most so many pairs."""

    def __init__(self, method, largest=1000):
        self.method, self.largest = method, largest

    def takes(self, pairs, experts):
        return pairs <= self.largest

    def unpack(self, layer, group):
        return self.method.dequantize_all(layer, group)

    def multiply(self, layer, step, out):
        def activate(merged):
            if step.activate is None:
                return silu_gated(merged)
            result = torch.empty(1, len(merged) // 2, dtype=torch.float32)
            step.activate(result, merged.float().unsqueeze(0))
            return result[0].double()

        weights = [self.unpack(layer, group) for group in ("w13", "w2")]
        found = through_experts(
            step.x, weights, step.ids, step.shares, step.biases, activate, step.expert_map
        )
        out.copy_(found)


def served(layer, chosen):
    """The layer with the kernel that it would have on a GPU."""
    method = layer.quant_method
    method.moe_kernel = make_kernel(method, layer, chosen)
    return method.apply


def layer_of(folder, **arguments):
    tensors = {f"{name}.weight": matrix for name, matrix in matrices().items()}
    config = config_for("bitsandbytes", write_checkpoint(folder, tensors, None), {})
    layer = build_experts(config, PREFIX, SIZES, **arguments)
    load_experts(layer, config, tensors.items())
    return layer


def both(layer, x, shares, chosen):
    """What experts do one by one, and through vLLM's kernel."""
    alone = layer.quant_method.apply(layer, x, shares, chosen)
    apply = served(layer, PlainKernel(layer.quant_method))
    return alone, apply(layer, x, shares, chosen)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_multiplies_its_part(tmp_path, rank, expert_parallel):
    layer = layer_of(tmp_path, rank=rank, ranks=2, expert_parallel=expert_parallel)
    alone, found = both(layer, torch.randn(9, HIDDEN), *routing(9))
    assert error_of(found, alone.double()) < 1e-5


@pytest.mark.parametrize("name", ["silu", "silu-limit"])
def test_biases_and_limits_reach_the_kernel(tmp_path, monkeypatch, name):
    """The limited activation is vLLM's own, whose kernel is not in its build for the CPU."""
    limited = []

    def activation(self, which, output, merged, **kwargs):
        limit = self.activation_config.clamp_limit
        limited.append(limit)
        gate, up = merged.chunk(2, dim=-1)
        output.copy_(silu_gated(torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), -1)))

    monkeypatch.setattr(TritonExperts, "activation", activation)
    layer, _, biases = activated_layer(tmp_path, name, {})
    assert biases[0].abs().sum() > 0
    alone, found = both(layer, torch.randn(5, HIDDEN), *routing(5))
    assert error_of(found, alone.double()) < 1e-5
    assert set(limited) == ({0.5} if name == "silu-limit" else set())


def test_router_weights_count_before_the_experts(tmp_path):
    layer = layer_of(tmp_path, top_k=1, apply_router_weight_on_input=True)
    shares, chosen = (value[:, :1].contiguous() for value in routing(5))
    alone, found = both(layer, torch.randn(5, HIDDEN), shares, chosen)
    assert error_of(found, alone.double()) < 1e-5


def test_many_tokens_go_through_vllm_with_all_experts_unpacked(tmp_path, monkeypatch):
    layer, given = layer_of(tmp_path, rank=1, ranks=2), {}
    monkeypatch.setattr(TritonExperts, "apply", lambda self, **what: given.update(what, own=self))
    apply = served(layer, PlainKernel(layer.quant_method, largest=17))
    apply(layer, torch.randn(8, HIDDEN), *routing(8))
    assert not given
    apply(layer, torch.randn(9, HIDDEN), *routing(9))
    experts = given["own"]
    assert isinstance(experts, PackedExperts)
    for name, group in (("w1", "w13"), ("w2", "w2")):
        assert torch.equal(given[name], layer.quant_method.dequantize_all(layer, group))
    sizes = experts.moe_problem_size(
        given["hidden_states"], layer.w13_weight, layer.w2_weight, given["topk_ids"]
    )
    assert sizes == (4, 9, len(given["w1"][0]), HIDDEN, 2)


def test_int8_rows_are_given_as_they_are(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(TritonExperts, "apply", lambda self, **what: given.update(what, own=self))
    layer, weights, _ = activated_layer(tmp_path, "silu", {"load_in_8bit": True})
    served(layer, Int8Rows("weight_scb", 127))(layer, torch.randn(3, HIDDEN), *routing(3))
    experts = given["own"]
    assert isinstance(experts, Int8Experts)
    assert experts.quant_config.use_int8_w8a16
    for name, scale, weight in zip(
        ("w1", "w2"), (experts.w1_scale, experts.w2_scale), weights, strict=True
    ):
        assert given[name].dtype == torch.int8
        assert given[name].shape[:2] == scale.shape
        assert error_of(given[name].double() * scale.double()[..., None], weight) < 1e-6


def test_a_reload_is_seen_by_the_kernel(tmp_path):
    """It reads the layer's parameters anew in each step."""
    layer = layer_of(tmp_path)
    x, (shares, chosen) = torch.randn(3, HIDDEN), routing(3)
    apply = served(layer, PlainKernel(layer.quant_method))
    before = apply(layer, x, shares, chosen)
    layer.w2_weight_absmax.data.mul_(2)
    assert error_of(apply(layer, x, shares, chosen), 2 * before.double()) < 1e-5


def test_tokens_in_batches_for_each_expert_are_refused(tmp_path, monkeypatch):
    layer = layer_of(tmp_path)
    monkeypatch.setattr(PackedExperts, "activation_format", lambda self: "batches")
    with pytest.raises(UnsupportedFormat, match="all2all backend"):
        served(layer, PlainKernel(layer.quant_method))
