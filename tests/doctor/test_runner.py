"""The runner: order, needs, what probes share, crashes, and rows that backends add."""

from dataclasses import replace

import pytest

from oot_quant import types
from oot_quant.doctor import runner, table
from oot_quant.errors import LibraryBroken
from oot_quant.types import Check, DoctorRequest, Fix, Outcome, Status

FINE = Outcome(Status.OK, "fine")
BACKEND = """
from oot_quant import hookimpl
from oot_quant.types import BackendInfo, Check, Outcome, Status

@hookimpl
def oot_quant_describe():
    return BackendInfo("theirs", "a test", ("mine",), (), ())

@hookimpl
def oot_quant_config():
    raise NotImplementedError

def judge(facts, seen):
    return Outcome(Status.OK, f"saw {seen}")

@hookimpl
def oot_quant_checks():
    return CHECKS
"""


def check(name, judge=lambda _facts, _seen: FINE, **fields):
    return Check(name, "made up", f"title of {name}", judge, **fields)


@pytest.fixture
def run(manager_of, facts):
    """Run made-up checks; gives results by id."""

    def make(*checks, wanted=None):
        made = runner.Run(checks, facts(manager_of()), runner.probe)
        results = made.results_of(c for c in checks if wanted is None or c.id in wanted)
        return {result.id: result for result in results}

    return make


@pytest.mark.parametrize(
    ("status", "runs"),
    [("ok", True), ("info", True), ("warn", True), ("skip", False), ("fail", False)],
)
def test_a_check_runs_only_if_what_it_needs_passed(run, status, runs):
    outcome = Outcome(Status(status), "found", fix=Fix("mend it."))
    results = run(check("a", lambda *_: outcome), check("b", needs=("a",)))
    assert results["b"].status.value == ("ok" if runs else "skip")


def test_a_skipped_check_names_the_first_cause(run):
    def fail(*_):
        return Outcome(Status.FAIL, "no", fix=Fix("mend it."))

    chain = [check("a", fail), check("b", needs=("a",)), check("c", needs=("b",))]
    assert run(*chain)["c"].summary == "title of c: not tried, a failed"


def test_needs_run_before_whatever_the_display_order(run):
    order = []
    late = check("late", lambda *_: order.append("late") or FINE, needs=("early",))
    early = check("early", lambda *_: order.append("early") or FINE)
    assert list(run(late, early)) == ["late", "early"]
    assert order == ["early", "late"]


def test_needs_run_unseen_when_only_one_check_is_wanted(run):
    assert list(run(check("a"), check("b", needs=("a",)), wanted=["b"])) == ["b"]


def test_a_need_that_no_check_has_is_said(run):
    assert run(check("b", needs=("nothing",)))["b"].data == {"cause": "nothing is unknown"}


def test_a_check_without_a_probe_judges_what_its_first_need_saw(run):
    first = check("a", probe=lambda _: {"seen": 7})
    second = check("b", lambda _, seen: Outcome(Status.OK, str(seen["seen"])), needs=("a",))
    assert run(first, second)["b"].summary == "7"


@pytest.mark.parametrize("where", ["probe", "judge"])
@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), SystemExit(3)])
def test_a_crash_is_an_error_with_its_traceback_and_stops_nothing(run, where, error):
    def crash(*_):
        raise error

    broken = check("a", crash) if where == "judge" else check("a", probe=crash)
    results = run(broken, check("b"))
    assert results["a"].status == Status.ERROR
    assert "in crash" in results["a"].data["traceback"]
    assert results["a"].fix.commands == ("oot-quant doctor --only a --json",)
    assert results["b"].status == Status.OK


def test_an_error_that_a_user_can_fix_is_a_failure_in_its_own_words(run):
    def fail(*_):
        raise LibraryBroken(
            "it is broken", found="a hole", needed="none", fix="mend it: python -m mend"
        )

    result = run(check("a", fail))["a"]
    assert (result.status, result.summary) == (Status.FAIL, "it is broken")
    assert result.detail == "Found: a hole\nNeeded: none"
    assert result.fix == Fix("mend it.", ("python -m mend",))
    assert result.data["code"] == "library-broken"


def test_probes_fill_in_facts_for_those_after_them(run):
    accelerator = check("env.accelerator", probe=lambda _: {"kind": "cpu"})
    after = check("b", lambda facts, _: Outcome(Status.OK, facts.accelerator["kind"]))
    assert run(accelerator, after)["b"].summary == "cpu"


@pytest.fixture
def third_party(manager_of, module):
    """A manager with ours and a backend whose checks are given as source."""

    def make(checks):
        name = module("third_party_checks", BACKEND + f"\nCHECKS = {checks}\n")
        ours = ("oot-quant", "0.1.0", {"bitsandbytes": "oot_quant_backends.bitsandbytes"})
        return manager_of(ours, ("third", "2.0", {"theirs": name}))

    return make


def test_a_backend_adds_rows_to_its_own_group(third_party):
    manager = third_party("[Check('backend.theirs.a', 'anything', 't', judge)]")
    rows = {row.id: row.group for row in table.every_check(manager)}
    assert rows["backend.theirs.a"] == "backend theirs"


@pytest.mark.parametrize(
    "checks",
    [
        "[Check('backend.bitsandbytes.a', 'g', 't', judge)]",
        "[Check('env.torch', 'g', 't', judge)]",
        "None",
        "[1]",
    ],
)
def test_a_hook_that_returns_nonsense_is_an_error_of_that_backend(third_party, facts, look, checks):
    manager = third_party(checks)
    made = facts(manager)
    report = runner.diagnose(DoctorRequest(), manager=manager, facts=made, look=look())
    crashed = [result.id for result in report.results if result.status == Status.ERROR]
    assert crashed == ["backend.theirs.checks"]
    assert "backend.bitsandbytes.version" in [result.id for result in report.results]


def test_rows_that_need_a_model_come_with_a_model_only(third_party, facts, look):
    manager = third_party("[Check('backend.theirs.m', 'g', 't', judge, ('model.config',))]")
    rows = table.checks_for(DoctorRequest("tiny"), manager)
    assert {row.group for row in rows if row.id == "backend.theirs.m"} == {"model tiny"}
    assert "backend.theirs.m" not in [r.id for r in table.checks_for(DoctorRequest(), manager)]


def test_a_named_method_leaves_other_backends_out(third_party):
    manager = third_party("[Check('backend.theirs.a', 'g', 't', judge)]")
    rows = table.checks_for(DoctorRequest(quantization="bitsandbytes"), manager)
    assert "backend theirs" not in {row.group for row in rows}


def test_each_backend_has_its_trial_with_deep(third_party):
    manager = third_party("[Check('backend.theirs.trial', 'g', 'theirs', judge)]")
    deep = table.checks_for(DoctorRequest(deep=True), manager)
    titles = [row.title for row in deep if row.id == "trial.round-trip"]
    assert titles == ["quantize and restore a small weight on the device", "theirs"]
    assert all(row.group != "trial" for row in table.checks_for(DoctorRequest(), manager))


def test_without_any_trial_deep_says_so(manager_of, facts, look, monkeypatch):
    manager = manager_of()
    monkeypatch.setattr(manager, "broadcast", lambda _: [])
    made = facts(manager, DoctorRequest(deep=True))
    report = runner.diagnose(made.request, manager=manager, facts=made, look=look())
    assert report.results[-1].summary == "trial: no backend offers one"


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["env.torch"], {"env.torch"}),
        (["plugins"], {row.id for row in table.CORE if row.group == "plugins"}),
        (["backend bitsandbytes"], {"version", "native", "capability", "kernel"}),
        (["backend"], {"version", "native", "capability", "kernel"}),
        (["env.python", "env.torch"], {"env.python", "env.torch"}),
    ],
)
def test_only_selects_ids_and_groups(manager_of, facts, look, only, expected):
    manager = manager_of()
    made = facts(manager)
    report = runner.diagnose(DoctorRequest(), only, manager=manager, facts=made, look=look())
    assert {r.id.removeprefix("backend.bitsandbytes.") for r in report.results} == expected


def test_statuses_are_ordered_from_best_to_worst():
    assert [status.value for status in types.Status] == [
        "ok",
        "info",
        "skip",
        "warn",
        "fail",
        "error",
    ]


def test_strict_counts_warnings(manager_of, facts, look):
    manager = manager_of()
    seen = {"version": "0.40.0", "distribution": "vllm", "error": ""}
    made = facts(manager)
    report = runner.diagnose(
        DoctorRequest(), manager=manager, facts=made, look=look(env__vllm=seen)
    )
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)
    fine = replace(report, results=tuple(r for r in report.results if r.status == Status.OK))
    assert fine.exit_code(strict=True) == 0
