"""Discovery of backends: whatever goes wrong with one is data, and the others work."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from oot_quant.errors import BackendFailed
from oot_quant.manager import BackendManager

GOOD = """
from oot_quant import hookimpl
from oot_quant.types import BackendInfo

@hookimpl
def oot_quant_describe():
    return BackendInfo("{name}", "a toy", ("{method}",), ("toy",), ("cpu",))

@hookimpl
def oot_quant_config(method):
    return "config of {name} ({method}) for " + method
"""
BROKEN = {
    "import fails": ("import not_a_module_at_all", "ModuleNotFoundError: No module named"),
    "import exits": ("raise SystemExit('needs a newer framework')", "SystemExit: needs a newer"),
    "needs a newer framework": ("from oot_quant import newer_name", "ImportError: cannot import"),
    "describe raises": (
        GOOD.replace("return BackendInfo(", "raise ValueError('no such thing') # "),
        "ValueError: no such thing",
    ),
    "describe returns nothing": (
        GOOD.replace("return BackendInfo(", "return None # "),
        "TypeError: oot_quant_describe returned NoneType",
    ),
    "unknown hook": (
        GOOD + "\n@hookimpl\ndef oot_quant_shard_rules(request):\n    return ()\n",
        "TypeError: unknown hook oot_quant_shard_rules; known: oot_quant_describe",
    ),
    "unknown argument": (
        GOOD + "\n@hookimpl\ndef oot_quant_shard_rule(layer):\n    return ()\n",
        "TypeError: unknown hook argument 'layer' of oot_quant_shard_rule; known: request",
    ),
    "required hook missing": (
        GOOD.split("@hookimpl\ndef oot_quant_config", maxsplit=1)[0],
        "TypeError: required hook oot_quant_config is not implemented",
    ),
    "no hooks at all": ("", "TypeError: required hook oot_quant_config is not implemented"),
}


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an entry point whose module has the given source."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(source: str, name: str = "toy", method: str = "toy") -> EntryPoint:
        module = f"toy_backend_{len(made)}"
        made.append(module)
        text = source.replace("{name}", name).replace("{method}", method)
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
        return EntryPoint(name, module, "oot_quant.backends")

    yield make
    for module in made:
        sys.modules.pop(module, None)


def with_distribution(point: EntryPoint, name: str, folder: Path) -> EntryPoint:
    """The same entry point, as if an installed distribution had it."""
    from importlib.metadata import PathDistribution

    info = folder / f"{name.replace('-', '_')}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 2.0\n", encoding="utf-8")
    return point._for(PathDistribution(info))


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_backend_is_listed_with_its_reason_and_others_work(point, kind):
    source, reason = BROKEN[kind]
    manager = BackendManager([point(source, "bad", "bad"), point(GOOD, "good", "good")])
    bad, good = sorted(manager.records, key=lambda record: record.name)
    assert (bad.status, good.status) == ("failed", "ok")
    assert bad.error.startswith(reason)
    assert "\n" not in bad.error
    assert "Traceback" in bad.trace
    assert (
        manager.call("good", "oot_quant_config", method="good") == "config of good (good) for good"
    )


@pytest.mark.parametrize("kind", BROKEN)
def test_asking_for_a_broken_backend_repeats_the_reason(point, kind):
    source, reason = BROKEN[kind]
    manager = BackendManager([point(source, "bad", "bad")])
    with pytest.raises(BackendFailed) as caught:
        manager.call("bad", "oot_quant_config", method="bad")
    assert caught.value.found.startswith(reason)
    assert "oot-quant list" in caught.value.fix


def test_unknown_method_lists_the_methods_that_exist(point):
    manager = BackendManager([point(GOOD, "one", "m1"), point(GOOD, "two", "m2")])
    with pytest.raises(BackendFailed, match="one of: m1, m2"):
        manager.record_for("m3")
    with pytest.raises(BackendFailed, match="none is installed"):
        BackendManager([]).record_for("m3")


def test_taken_method_fails_and_names_the_owner(point, tmp_path):
    first = with_distribution(point(GOOD, "first", "shared"), "first-dist", tmp_path)
    second = with_distribution(point(GOOD, "second", "shared"), "second-dist", tmp_path)
    manager = BackendManager([first, second])
    by_name = {record.name: record for record in manager.records}
    assert by_name["second"].error == "the method 'shared' is taken by first-dist 2.0"
    assert manager.record_for("shared").name == "first"
    assert manager.call("shared", "oot_quant_config", method="shared").startswith("config of first")


def test_taken_name_fails_and_names_the_owner(point, tmp_path):
    first = with_distribution(point(GOOD, "same", "m1"), "first-dist", tmp_path)
    second = with_distribution(point(GOOD, "same", "m2"), "second-dist", tmp_path)
    manager = BackendManager([first, second])
    assert [record.status for record in manager.records] == ["ok", "failed"]
    assert manager.records[1].error == "the name 'same' is taken by first-dist 2.0"
    assert manager.call("m1", "oot_quant_config", method="m1") == "config of same (m1) for m1"


def test_one_module_under_two_names_is_usable_under_the_first(point):
    nameless = point(GOOD.replace('("{method}",)', "()"), "first", "none")
    again = EntryPoint("second", nameless.value, nameless.group)
    manager = BackendManager([nameless, again, point(GOOD, "good", "good")])
    assert [record.status for record in manager.records] == ["ok", "failed", "ok"]
    assert "already registered" in manager.records[1].error


@pytest.mark.parametrize("in_tree_first", [True, False])
def test_in_tree_backend_keeps_its_method_whatever_the_order(point, tmp_path, in_tree_first):
    ours = with_distribution(point(GOOD, "ours", "shared"), "oot-quant", tmp_path)
    theirs = with_distribution(point(GOOD, "theirs", "shared"), "other", tmp_path)
    points = [ours, theirs] if in_tree_first else [theirs, ours]
    manager = BackendManager(points)
    assert manager.record_for("shared").name == "ours"
    assert {record.name: record.origin for record in manager.records} == {
        "ours": "in-tree",
        "theirs": "third-party",
    }


def test_addressed_hook_reaches_only_its_backend(point):
    greedy = GOOD + (
        "\n@hookimpl\ndef oot_quant_weight_names(method):\n    raise AssertionError(method)\n"
    )
    manager = BackendManager([point(GOOD, "asked", "asked"), point(greedy, "greedy", "greedy")])
    assert manager.call("asked", "oot_quant_weight_names", method="asked") is None


def test_broadcast_asks_each_usable_backend_in_a_call_of_its_own(point):
    checks = "\n@hookimpl\ndef oot_quant_checks():\n    return [{what}]\n"
    raising = "\n@hookimpl\ndef oot_quant_checks():\n    raise ValueError('mine alone')\n"
    manager = BackendManager(
        [
            point(GOOD + raising, "raises", "m1"),
            point(GOOD + checks.replace("{what}", "1, 2"), "answers", "m2"),
            point(GOOD, "silent", "m3"),
            point(BROKEN["import fails"][0], "broken", "m4"),
        ]
    )
    calls = {record.name: call for record, call in manager.broadcast("oot_quant_checks")}
    assert set(calls) == {"raises", "answers"}
    assert calls["answers"]() == [1, 2]
    with pytest.raises(ValueError, match="mine alone"):
        calls["raises"]()


def test_interrupt_while_importing_is_not_taken_for_a_broken_backend(point):
    with pytest.raises(KeyboardInterrupt):
        BackendManager([point("raise KeyboardInterrupt")])
