"""Every method ends in vLLM's registry; one whose backend failed ends there as a stand-in."""

from __future__ import annotations

import pytest
from vllm.model_executor.layers.quantization import get_quantization_config

from oot_quant.errors import BackendFailed, LibraryMissing
from oot_quant.manager import BackendManager, BackendRecord
from oot_quant.types import BackendInfo
from oot_quant.vllm_glue import registration
from oot_quant.vllm_glue.config import PluginConfig


class Fake:
    """A manager with one backend, whose config hook does what it is told."""

    def __init__(self, answer=None, **changes) -> None:
        info = BackendInfo("toy", "a toy", ("toy_method",), (), ())
        self.records = (BackendRecord("toy", "toy", "toy-dist", "1.0", "third-party", info=info),)
        self.answer = answer
        if changes:
            self.records = (self.records[0].failed(**changes),)

    def call(self, method, hook, /, **arguments):
        assert (method, hook) == ("toy_method", "oot_quant_config")
        return self.answer()


@pytest.fixture
def register(monkeypatch):
    def run(fake: Fake) -> type[PluginConfig]:
        monkeypatch.setattr(registration, "backends", lambda: fake)
        registration.register_backends()
        return get_quantization_config("toy_method")

    return run


def raising(error: Exception):
    def answer():
        raise error

    return answer


def test_a_config_class_is_registered_as_it_is(register):
    class ToyConfig(PluginConfig):
        method = "toy_method"

    assert register(Fake(lambda: ToyConfig)) is ToyConfig


@pytest.mark.parametrize(
    ("fake", "kind", "words"),
    [
        (Fake(error="ImportError: no toys"), BackendFailed, "ImportError: no toys"),
        (Fake(raising(ValueError("bad toy"))), BackendFailed, "ValueError: bad toy"),
        (Fake(lambda: dict), BackendFailed, "not a PluginConfig"),
        (Fake(lambda: None), BackendFailed, "not a PluginConfig"),
        (Fake(raising(LibraryMissing("toylib is not installed"))), LibraryMissing, "toylib"),
    ],
    ids=["failed", "raises", "wrong-class", "nothing", "own-error"],
)
def test_a_stand_in_repeats_the_recorded_reason(register, caplog_vllm, fake, kind, words):
    stand_in = register(fake)
    assert stand_in.override_quantization_method({"quant_method": "other"}, None) is None
    for ask in (stand_in, lambda: stand_in.from_config({"quant_method": "toy_method"})):
        with pytest.raises(kind, match=words):
            ask()
    assert "method 'toy_method' is not usable" in caplog_vllm.text


def test_a_usable_backend_is_not_replaced_by_a_failed_one_of_the_same_method(register):
    class ToyConfig(PluginConfig):
        method = "toy_method"

    fake = Fake(lambda: ToyConfig)
    broken = BackendRecord("toy_method", "x", "other", "1", "third-party").failed("broken")
    fake.records = (broken, *fake.records)
    assert register(fake) is ToyConfig


def test_the_real_manager_serves_bitsandbytes():
    assert registration.register_backends()["bitsandbytes"].method == "bitsandbytes"


def test_an_unknown_method_names_those_that_exist():
    with pytest.raises(BackendFailed, match="none is installed"):
        BackendManager([]).record_for("toy_method")
