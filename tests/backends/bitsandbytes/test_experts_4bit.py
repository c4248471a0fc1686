"""Which layers of experts the Triton kernels serve, with plain torch in place of a GPU's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oot_quant_backends.bitsandbytes import experts_4bit
from oot_quant_backends.bitsandbytes.experts_4bit import TritonExperts4bit, choose
from oot_quant_backends.bitsandbytes.kernels_4bit import Kernel, TritonGemm
from oot_quant_backends.bitsandbytes.triton_4bit.units import reorder
from oot_quant_backends.bitsandbytes.weights import code_table, unpack
from tests.backends.bitsandbytes.triton_4bit.routing import through_experts

EXPERTS, HIDDEN, INNER = 3, 128, 64
ROWS = {"w13": 2 * INNER, "w2": HIDDEN}


@pytest.fixture(autouse=True)
def nothing_tried_yet(monkeypatch):
    monkeypatch.setattr(experts_4bit, "_troubles", {})


def methods(quant_types=("nf4", "nf4"), kernel=TritonGemm):
    return {
        group: SimpleNamespace(
            kernel=TritonGemm(quant_type, rows) if kernel is TritonGemm else kernel(),
            dtype=torch.bfloat16,
        )
        for (group, rows), quant_type in zip(ROWS.items(), quant_types, strict=True)
    }


def finished_layer():
    """A layer in the kernels' order, and its weights in float32."""
    layer, plain = SimpleNamespace(), {}
    values = code_table("nf4", torch.device("cpu"))
    for group, columns in (("w13", HIDDEN), ("w2", INNER)):
        codes = torch.randint(0, 256, (EXPERTS, ROWS[group], columns // 2), dtype=torch.uint8)
        absmax = torch.rand(EXPERTS, ROWS[group], columns // 64) * 0.1 + 0.01
        plain[group] = torch.stack([unpack(*e, values) for e in zip(codes, absmax, strict=True)])
        words, scales = zip(*map(reorder, codes, absmax), strict=True)
        setattr(layer, f"{group}_weight", torch.stack(words))
        setattr(layer, f"{group}_weight_absmax", torch.stack(scales))
        setattr(layer, f"{group}_weight_quant_map", values.expand(EXPERTS, 16))
    return layer, plain


@pytest.fixture
def computing(monkeypatch):
    """Kernels in plain torch, each result times a factor, and the numbers of tokens they saw."""
    factors, seen = {"multiply": 1.0, "unpack": 1.0}, []
    layer, plain = finished_layer()

    def multiply(self, layer, step, out):
        def activate(merged):
            result = torch.empty(1, len(merged) // 2, dtype=torch.bfloat16)
            step.activate(result, merged.bfloat16().unsqueeze(0))
            return result[0].double()

        seen.append(len(step.x))
        weights = list(plain.values())
        found = through_experts(step.x, weights, step.ids, None, (None, None), activate)
        out.copy_(found * factors["multiply"])

    def unpacked(self, layer, group):
        return (plain[group] * factors["unpack"]).bfloat16()

    monkeypatch.setattr(TritonExperts4bit, "multiply", multiply)
    monkeypatch.setattr(TritonExperts4bit, "unpack", unpacked)
    return SimpleNamespace(layer=layer, factors=factors, seen=seen)


def test_kernels_that_compute_rightly_serve(computing):
    kernel = choose(methods(), computing.layer)
    assert kernel == TritonExperts4bit("nf4", ROWS, torch.bfloat16)
    assert computing.seen == [1, EXPERTS, 16 * EXPERTS, 32 * EXPERTS]


@pytest.mark.parametrize(("what", "factor"), [("multiply", 1.02), ("unpack", 1.03)])
def test_kernels_that_compute_wrongly_do_not(computing, caplog_vllm, what, factor):
    """By another factor each time, since the same text is logged once only."""
    computing.factors[what] = factor
    assert choose(methods(), computing.layer) is None
    assert "0.01 is allowed" in caplog_vllm.text
    assert "unpacked in every step" in caplog_vllm.text


def test_layers_that_are_alike_are_tried_once(computing):
    choose(methods(), computing.layer)
    tried = len(computing.seen)
    assert choose(methods(), finished_layer()[0]) is not None
    assert len(computing.seen) == tried


def test_kernels_that_cannot_run_here_do_not_serve(caplog_vllm):
    """There is no GPU, or the weights are not on it: whatever it is, it is told."""
    layer, _ = finished_layer()
    assert choose(methods(), layer) is None
    assert "Error" in caplog_vllm.text


@pytest.mark.parametrize("given", [methods(("nf4", "fp4")), methods(kernel=Kernel)])
def test_other_layers_are_not_tried(computing, given):
    assert choose(given, computing.layer) is None
    assert not computing.seen


def test_experts_with_many_tokens_are_unpacked():
    kernel = TritonExperts4bit("nf4", ROWS, torch.bfloat16)
    assert kernel.takes(256 * 8, 8)
    assert not kernel.takes(256 * 8 + 1, 8)
