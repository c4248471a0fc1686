"""Routed experts: left alone in 16 bit, refused by name when packed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oot_quant.errors import UnsupportedFormat
from oot_quant.types import MoeRequest
from oot_quant_backends.bitsandbytes.formats import FourBit
from oot_quant_backends.bitsandbytes.fused_moe import refuse_packed_experts


def request(*modules: str) -> MoeRequest:
    config = SimpleNamespace(formats={name: FourBit("nf4", 64, False) for name in modules},
                             prequantized=bool(modules))  # fmt: skip
    return MoeRequest(config, None, "model.layers.0.mlp.experts")


def test_experts_in_16_bit_stay_as_they_are():
    assert refuse_packed_experts(request("model.layers.0.self_attn.q_proj")) is None


def test_packed_experts_are_refused_by_name():
    with pytest.raises(UnsupportedFormat) as caught:
        refuse_packed_experts(request("model.layers.0.mlp.experts.3.up_proj"))
    assert "where: model.layers.0.mlp.experts.3.up_proj" in str(caught.value)


def test_the_name_that_vllm_gives_the_layer_of_experts_is_seen_through():
    packed = request("model.layers.0.mlp.experts.3.up_proj")
    inner = MoeRequest(packed.config, None, f"{packed.prefix}.routed_experts")
    with pytest.raises(UnsupportedFormat, match="1 quantized expert weights"):
        refuse_packed_experts(inner)


def test_in_flight_says_that_experts_stay_in_16_bit(caplog_vllm):
    refuse_packed_experts(request())
    assert "experts stay in 16 bit" in caplog_vllm.text
