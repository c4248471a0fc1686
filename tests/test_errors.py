"""Errors: their text, their trip across processes, and that every code is tested."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from oot_quant.errors import OotQuantError, ShardMisaligned, all_errors

TESTS = Path(__file__).parent


def test_the_text_has_one_line_for_each_field_that_is_given():
    error = ShardMisaligned("cannot split", where="layer", found="3", needed="2", fix="do")
    assert str(error) == (
        "shard-misaligned: cannot split\n  where: layer\n  found: 3\n  needed: 2\n  fix: do"
    )
    assert str(ShardMisaligned("cannot split")) == "shard-misaligned: cannot split"


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_an_error_survives_the_way_between_processes(kind):
    error = kind("what", where="there", found="this", needed="that", fix="so")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.where, copy.fix) == (str(error), "there", "so")


def test_codes_are_unique_and_every_class_says_what_it_means():
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes) > 10
    assert all(kind.__doc__ and kind.__doc__ != OotQuantError.__doc__ for kind in all_errors())


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_every_error_is_raised_and_matched_by_some_test(kind):
    users = [
        path
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__) and f"{kind.__name__}" in path.read_text(encoding="utf-8")
    ]
    assert users, f"no test expects {kind.__name__}"
