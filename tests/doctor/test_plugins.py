"""Judges of the plugins' checks, on made-up entry points and on backends that really load."""

import pytest

from oot_quant.doctor import plugins
from oot_quant.types import DoctorRequest, Status

IN_TREE = ("oot-quant", "0.1.0", {"bitsandbytes": "oot_quant_backends.bitsandbytes"})
OURS = {"oot_quant": ("oot_quant.vllm_plugin:register", "oot-quant 0.1.0")}
RIVAL = OURS | {"bitsandbytes": ("vllm_bnb_plugin:register", "vllm-bnb-plugin 0.0.3")}
BACKEND = """
from oot_quant import hookimpl
from oot_quant.types import BackendInfo

@hookimpl
def oot_quant_describe():
    return BackendInfo("{name}", "a test", ("{method}",), (), ())
"""
CONFIG = """
@hookimpl
def oot_quant_config():
    raise NotImplementedError
"""


def test_a_missing_entry_point_is_reported(manager_of, facts):
    found = plugins.entry_point(facts(manager_of(), plugins={"other": ("x:y", "z 1")}), None)
    assert found.status == Status.FAIL
    assert found.data["found"] == ["other"]


@pytest.mark.parametrize(
    ("value", "status", "command"),
    [
        (None, "ok", ""),
        ("oot_quant", "ok", ""),
        ("a,oot_quant", "ok", ""),
        ("bitsandbytes", "fail", "export VLLM_PLUGINS=bitsandbytes,oot_quant"),
        ("", "fail", "export VLLM_PLUGINS=oot_quant"),
        ("oot-quant", "fail", "export VLLM_PLUGINS=oot-quant,oot_quant"),
        ("a b", "fail", "export VLLM_PLUGINS='a b,oot_quant'"),
    ],
)
def test_an_allowlist_must_name_the_entry_point(manager_of, facts, value, status, command):
    environment = {} if value is None else {"VLLM_PLUGINS": value}
    found = plugins.allowlist(facts(manager_of(), environment=environment), None)
    assert found.status == Status(status)
    assert (found.fix.commands[0] if found.fix else "") == command


def test_a_backend_that_does_not_import_is_named_with_its_reason(manager_of, facts, module):
    name = module("does_not_import", "raise RuntimeError('no luck')\n")
    made = facts(manager_of(IN_TREE, ("third", "2.0", {"theirs": name})))
    found = plugins.load(made, None)
    assert found.status == Status.FAIL
    assert "RuntimeError: no luck" in found.detail
    assert found.data["methods"] == ["theirs"]
    assert plugins.hooks(made, None).status == Status.OK


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (
            CONFIG + "\n@hookimpl\ndef oot_quant_shard_rul(): ...\n",
            "unknown hook oot_quant_shard_rul",
        ),
        ("", "required hook oot_quant_config"),
        (CONFIG + "\n@hookimpl\ndef oot_quant_shard_rule(wrong): ...\n", "unknown hook argument"),
    ],
)
def test_an_ill_fitting_hook_is_told_from_a_failed_import(manager_of, facts, module, hook, words):
    name = module("ill_fitting", BACKEND.format(name="theirs", method="mine") + hook)
    made = facts(manager_of(IN_TREE, ("third", "2.0", {"theirs": name})))
    found = plugins.hooks(made, None)
    assert found.status == Status.FAIL
    assert words in found.detail
    assert plugins.load(made, None).status == Status.OK


@pytest.mark.parametrize(("key", "method"), [("bitsandbytes", "mine"), ("theirs", "bitsandbytes")])
def test_a_second_provider_in_our_group_is_a_warning(manager_of, facts, module, key, method):
    name = module("second", BACKEND.format(name=key, method=method) + CONFIG)
    found = plugins.duplicate_method(
        facts(manager_of(IN_TREE, ("third", "2.0", {key: name}))), None
    )
    assert found.status == Status.WARN
    assert "third 2.0" in found.detail
    assert found.fix.commands == ("python -m pip uninstall third",)


@pytest.mark.parametrize(
    ("points", "allowed", "status"),
    [
        (OURS, None, "ok"),
        (RIVAL, None, "fail"),
        (RIVAL, "oot_quant", "ok"),
        (RIVAL, "bitsandbytes", "fail"),
    ],
)
def test_a_rival_counts_if_vllm_would_load_it(manager_of, facts, points, allowed, status):
    environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    made = facts(manager_of(), plugins=points, environment=environment)
    found = plugins.duplicate_method(made, None)
    assert found.status == Status(status)
    if status == "fail":
        assert found.fix.commands[0] == "python -m pip uninstall vllm-bnb-plugin"


def test_a_rival_for_a_method_that_nobody_here_serves_is_none(manager_of, facts):
    points = OURS | {"gguf": ("vllm_gguf_plugin:register", "vllm-gguf-plugin 0.0.5")}
    assert plugins.duplicate_method(facts(manager_of(), plugins=points), None).status == Status.OK


@pytest.mark.parametrize(
    ("method", "status"), [("nf5", "fail"), ("bitsandbytes", "ok"), ("fp8", "ok")]
)
def test_a_named_method_must_be_served_by_somebody(manager_of, facts, method, status):
    found = plugins.load(facts(manager_of(), DoctorRequest(quantization=method)), None)
    assert found.status == Status(status)


def test_no_backend_at_all_is_a_failure(facts):
    class Empty:
        records = ()

    assert plugins.load(facts(Empty), None).summary == "no backend is installed"
