"""What vLLM's one call does: once, never raising, and saying what it did not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oot_quant import vllm_plugin
from oot_quant.errors import EngineUnsupported
from oot_quant.vllm_glue import compat, registration


@pytest.fixture(autouse=True)
def fresh():
    vllm_plugin.register.cache_clear()
    yield
    vllm_plugin.register.cache_clear()


def test_a_second_call_does_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(registration, "register_backends", lambda: calls.append(1))
    vllm_plugin.register()
    vllm_plugin.register()
    assert calls == [1]


def test_a_failure_is_logged_with_its_traceback_and_not_raised(monkeypatch, caplog_vllm):
    def fail() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(registration, "register_backends", fail)
    vllm_plugin.register()
    assert "registration failed; run: oot-quant doctor" in caplog_vllm.text
    assert "broken on purpose" in caplog_vllm.text


def test_an_older_vllm_is_refused_with_both_versions_and_a_command(monkeypatch, caplog_vllm):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.27.1")
    monkeypatch.setattr(registration, "register_backends", lambda: pytest.fail("was registered"))
    vllm_plugin.register()
    assert EngineUnsupported.code in caplog_vllm.text
    assert "found: vLLM 0.27.1" in caplog_vllm.text
    assert 'fix: python -m pip install --upgrade "vllm>=0.28.0"' in caplog_vllm.text


def test_a_newer_vllm_is_tried_with_a_warning(monkeypatch, caplog_vllm):
    calls = []
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.0")
    monkeypatch.setattr(registration, "register_backends", lambda: calls.append(1))
    vllm_plugin.register()
    assert calls == [1]
    assert "vLLM 0.99.0 is newer than" in caplog_vllm.text


@pytest.mark.slow
def test_registration_leaves_the_quantization_library_alone():
    code = (
        "import sys; from oot_quant.vllm_plugin import register; register();"
        "from vllm.model_executor.layers.quantization import get_quantization_config as get;"
        "print(get('bitsandbytes').__name__, 'bitsandbytes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["BitsAndBytesConfig", "False"]
