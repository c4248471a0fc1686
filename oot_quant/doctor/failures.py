"""What an exception in a check becomes: a failure in its own words, or a crash on record."""

from __future__ import annotations

import re
import traceback

from oot_quant.errors import OotQuantError
from oot_quant.manager import one_line
from oot_quant.types import Check, Fix, Outcome, Status

COMMAND = re.compile(
    r"^(?P<text>.*?)(?:: |^)(?P<command>(?:python -m|oot-quant|export|hf) .+)$", re.DOTALL
)
"""A fix whose end is a command, as in ``upgrade it: python -m pip install ...``."""


def fix_of(error: OotQuantError) -> Fix:
    """An error's fix; a command at the end of its text is set apart, to be pasted."""
    found = COMMAND.match(error.fix)
    if not found:
        return Fix(_sentence(error.fix or error.needed or "see above"))
    return Fix(_sentence(found["text"] or "run this."), (found["command"],))


def from_error(error: OotQuantError) -> Outcome:
    """A problem that the user can fix, in the words of the error."""
    facts = (("Where", error.where), ("Found", error.found), ("Needed", error.needed))
    detail = "\n".join(f"{name}: {text}" for name, text in facts if text and text not in error.what)
    data = {"code": error.code, "where": error.where, "found": error.found, "needed": error.needed}
    return Outcome(Status.FAIL, error.what, detail, fix_of(error), data)


def crash(check: Check, error: BaseException) -> Outcome:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    fix = Fix(
        "this is a bug of the check; report it with what this prints.",
        (f"oot-quant doctor --only {check.id} --json",),
    )
    summary = f"the check crashed: {one_line(error)}"
    return Outcome(Status.ERROR, summary, f"It decides: {check.title}.", fix, {"traceback": trace})


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."
