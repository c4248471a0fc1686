"""The trial of ``--deep``: each backend quantizes and restores a small weight on the device.

A backend offers it as a check called ``backend.<name>.trial``; the doctor shows it as
``trial.round-trip`` and runs it with ``--deep`` only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oot_quant.types import Check, Facts, Outcome, Status

GROUP = "trial"
ID = "trial.round-trip"


def as_trial(check: Check) -> Check:
    """A backend's trial as the doctor's own row."""
    return replace(check, id=ID, group=GROUP)


def no_trial(_: Facts, __: Any) -> Outcome:
    return Outcome(Status.SKIP, "trial: no backend offers one")


NO_TRIAL = Check(ID, GROUP, "quantize and restore a small weight on the device", no_trial)
