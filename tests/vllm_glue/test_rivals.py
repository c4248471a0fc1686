"""Another plugin for the same method is refused when the method is used, not before."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from oot_quant.errors import RivalPlugin
from oot_quant.vllm_glue import rivals

OURS = EntryPoint("oot_quant", "oot_quant.vllm_plugin:register", rivals.VLLM_PLUGIN_GROUP)
RIVAL = EntryPoint("bnb", "vllm_bnb_plugin:register", rivals.VLLM_PLUGIN_GROUP)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return lambda *points: monkeypatch.setattr(rivals, "plugins", lambda: points)


def test_alone_we_serve(installed):
    installed(OURS)
    rivals.refuse_rivals("bitsandbytes")


def test_beside_a_rival_the_text_names_it_and_both_ways_out(installed):
    installed(OURS, RIVAL)
    with pytest.raises(RivalPlugin) as caught:
        rivals.refuse_rivals("bitsandbytes")
    text = str(caught.value)
    assert text.startswith("rival-plugin: two plugins claim the quantization method 'bitsandbytes'")
    assert "vllm_bnb_plugin:register" in text
    assert "VLLM_PLUGINS=oot_quant" in text


def test_a_rival_that_vllm_is_told_not_to_load_does_no_harm(installed, monkeypatch):
    installed(OURS, RIVAL)
    monkeypatch.setenv("VLLM_PLUGINS", "oot_quant")
    rivals.refuse_rivals("bitsandbytes")


def test_a_rival_of_another_method_does_no_harm(installed):
    installed(OURS, RIVAL)
    rivals.refuse_rivals("gguf")
