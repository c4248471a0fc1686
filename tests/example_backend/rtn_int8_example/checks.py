"""Rows for ``oot-quant doctor``: what can be told before a model is loaded."""

from __future__ import annotations

from typing import Any

from oot_quant.types import Check, Facts, Outcome, Status


def _judge_device(facts: Facts, probed: Any) -> Outcome:
    kind = facts.accelerator.get("kind") or "cpu"
    return Outcome(Status.OK, f"int8 weights are computed by torch on {kind}")


CHECKS = (
    Check(
        id="backend.rtn_int8.device",
        group="backend",
        title="Where rtn_int8 computes",
        judge=_judge_device,
    ),
)
