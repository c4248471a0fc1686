"""The contract itself: it has to fail where a backend is wrong."""

from __future__ import annotations

import pytest

from oot_quant.testing import contract_storage
from oot_quant.testing.contract import BackendContract
from oot_quant.testing.contract_storage import assert_items_follow_weights
from oot_quant.types import Runs


class Overriding(BackendContract):
    def test_name_rules_are_unambiguous(self, method: str) -> None:
        """Passes, whatever the backend says."""


class Admitting(BackendContract):
    @pytest.mark.xfail(reason="names are ambiguous in this format")
    def test_name_rules_are_unambiguous(self, method: str) -> None:
        """Says why it fails."""


# pytest would collect the two as suites of their own.
for suite in (Overriding, Admitting):
    suite.__test__ = False


def test_lock_refuses_an_override_and_names_it():
    with pytest.raises(AssertionError, match="test_name_rules_are_unambiguous is overridden"):
        Overriding().test_no_contract_test_is_overridden()


def test_lock_lets_an_xfail_with_a_reason_pass():
    Admitting().test_no_contract_test_is_overridden()


def test_every_contract_test_has_a_hint():
    tests = [name for name in dir(BackendContract) if name.startswith("test_")]
    assert tests
    for name in tests:
        assert "Troubleshooting:" in (getattr(BackendContract, name).__doc__ or ""), name


@pytest.mark.parametrize("elements", [1, 2])
@pytest.mark.parametrize("rank_columns", [32, 48, 64])
def test_items_of_split_runs_follow_their_weights(elements, rank_columns):
    layout = Runs(weights=64, elements=elements, repeatable=True)
    assert_items_follow_weights(layout, rows=3, columns=2 * rank_columns, rank_columns=rank_columns)


def test_items_at_the_wrong_rank_are_noticed(monkeypatch: pytest.MonkeyPatch):
    right = contract_storage.to_matrix
    monkeypatch.setattr(contract_storage, "to_matrix", lambda *given: right(*given).roll(1, 1))
    with pytest.raises(AssertionError, match="does not find its own item"):
        assert_items_follow_weights(Runs(weights=2), rows=3, columns=16, rank_columns=8)
