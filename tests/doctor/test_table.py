"""The table of checks as a whole: ids, needs, and that nothing bad is said without a fix."""

import ast
import inspect

import pytest

from oot_quant.doctor import environment, fit, model, plugins, stored, table
from oot_quant.types import Outcome
from oot_quant_backends.bitsandbytes import checks

MODULES = (environment, plugins, model, stored, fit, checks)
FIX = list(inspect.signature(Outcome).parameters).index("fix")


def test_ids_are_unique_and_needs_exist(manager_of):
    ids = [check.id for check in table.every_check(manager_of())]
    assert len(set(ids)) == len(ids)
    for check in table.every_check(manager_of()):
        assert set(check.needs) <= set(ids), check.id


def test_groups_come_in_their_order(manager_of):
    groups = dict.fromkeys(check.group for check in table.every_check(manager_of()))
    assert list(groups) == ["environment", "plugins", "backend bitsandbytes", "model", "trial"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_bad_outcome_is_written_without_a_fix(module):
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Outcome"
    ]
    assert calls
    for call in calls:
        status = ast.unparse(call.args[0])
        if status in {"Status.WARN", "Status.FAIL", "Status.ERROR"}:
            given = [keyword.arg for keyword in call.keywords]
            assert "fix" in given or len(call.args) > FIX, f"line {call.lineno}: {status}"
