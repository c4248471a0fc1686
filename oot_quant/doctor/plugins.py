"""Will vLLM find us and let us in, and is every backend of the group usable?"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from oot_quant.doctor.vllm_methods import VLLM_METHODS
from oot_quant.manager import DISTRIBUTION, ENTRY_POINT_GROUP, BackendRecord
from oot_quant.types import Check, Facts, Fix, Outcome, Status
from oot_quant.vllm_glue.rivals import KNOWN_RIVALS, VLLM_PLUGIN_GROUP

GROUP = "plugins"
ENTRY = "oot_quant"
ALLOWLIST = "VLLM_PLUGINS"
REINSTALL = f"python -m pip install --force-reinstall --no-deps {DISTRIBUTION}"
CLASH = ("the name '", "the method '")
ILL_FITTING = (
    "TypeError: unknown hook",
    "TypeError: required hook",
    "TypeError: hook ",
    "TypeError: oot_quant_describe returned",
    "PluginValidationError",
)
"""How the manager words the two kinds of failure that are not a failure to import."""


def entry_point(facts: Facts, _: Any) -> Outcome:
    found = facts.plugins.get(ENTRY)
    data = {"group": VLLM_PLUGIN_GROUP, "found": sorted(facts.plugins)}
    if found is None:
        return Outcome(
            Status.FAIL,
            "vLLM will not find oot-quant: its entry point is not registered",
            f"vLLM asks for plugins in the group {VLLM_PLUGIN_GROUP}; {ENTRY} is not among them.",
            Fix("install oot-quant again, in the environment that vLLM runs in.", (REINSTALL,)),
            data,
        )
    return Outcome(Status.OK, f"vLLM finds {ENTRY} ({found[1]})", data=data)


def allowlist(facts: Facts, _: Any) -> Outcome:
    value = facts.environment.get(ALLOWLIST)
    if value is None:
        return Outcome(Status.OK, f"{ALLOWLIST} is not set, so vLLM loads every plugin")
    data = {"value": value, "needed": ENTRY}
    if ENTRY in value.split(","):
        return Outcome(Status.OK, f"{ALLOWLIST} lists {ENTRY}", data=data)
    wanted = ",".join([*filter(None, value.split(",")), ENTRY])
    return Outcome(
        Status.FAIL,
        f"{ALLOWLIST}={value} keeps oot-quant out",
        f"vLLM goes by the names of plugins, and the name of this one is {ENTRY}, whatever "
        "the quantization method is called.",
        Fix("add the name to the list.", (f"export {ALLOWLIST}={shlex.quote(wanted)}",)),
        data,
    )


def load(facts: Facts, _: Any) -> Outcome:
    wanted = facts.request.quantization
    served = {method for record in facts.backends for method in record.methods}
    if wanted and wanted not in served | VLLM_METHODS:
        return Outcome(
            Status.FAIL,
            f"no installed backend serves the method {wanted!r}",
            f"Methods served here: {', '.join(sorted(served)) or 'none'}.",
            Fix("correct the name, or install the backend for it.", ("oot-quant list",)),
            {"method": wanted, "served": sorted(served), "methods": [wanted]},
        )
    failed = [record for record in facts.backends if _kind(record) == "load"]
    if failed:
        return _failed_backends(failed, "cannot be used")
    if not facts.backends:
        fix = Fix("install oot-quant again; it brings the bitsandbytes backend.", (REINSTALL,))
        data = {"group": ENTRY_POINT_GROUP}
        return Outcome(Status.FAIL, "no backend is installed", fix=fix, data=data)
    usable = [record.name for record in facts.backends if record.ok]
    summary = f"{len(usable)} usable backend{'' if len(usable) == 1 else 's'}: "
    return Outcome(Status.OK, summary + ", ".join(usable), data={"usable": usable})


def hooks(facts: Facts, _: Any) -> Outcome:
    failed = [record for record in facts.backends if _kind(record) == "hooks"]
    if failed:
        return _failed_backends(failed, "does not fit the hooks of this release")
    count = sum(len(record.hooks) for record in facts.backends)
    return Outcome(Status.OK, f"all {count} hooks fit their specification", data={"hooks": count})


def duplicate_method(facts: Facts, _: Any) -> Outcome:
    rival = _rival(facts)
    if rival:
        method, label = rival
        name = label.split()[0]
        return Outcome(
            Status.FAIL,
            f"{method!r} is also registered by {label}",
            "Its patches send every model of this method through a loader of its own, which "
            "cannot fill the parameters of oot-quant; so oot-quant refuses to start beside it.",
            Fix(
                "remove the other one, or let vLLM load only this one.",
                (f"python -m pip uninstall {name}", f"export {ALLOWLIST}={ENTRY}"),
            ),
            {"methods": [method], "rival": label},
        )
    beaten = [record for record in facts.backends if _kind(record) == "clash"]
    if beaten:
        labels = [f"{record.distribution} {record.version}: {record.error}" for record in beaten]
        uninstall = _uninstalls(beaten)
        return Outcome(
            Status.WARN,
            "two backends claim the same name or method; the first one keeps it",
            "\n".join(labels),
            Fix("remove the one that you do not want.", uninstall),
            {"beaten": [_as_data(record) for record in beaten], "methods": []},
        )
    return Outcome(Status.OK, "every method has one provider")


def _rival(facts: Facts) -> tuple[str, str] | None:
    """A method of ours that a known plugin also provides, and that plugin's label."""
    allowed = facts.environment.get(ALLOWLIST)
    for name, (value, label) in facts.plugins.items():
        listed = allowed is None or name in allowed.split(",")
        module = value.split(":")[0].split(".")[0]
        for record in facts.backends:
            for method in record.methods:
                if listed and record.ok and KNOWN_RIVALS.get(method) == module:
                    return method, label
    return None


def _kind(record: BackendRecord) -> str:
    """Which check speaks of a record: ``""`` for a good one."""
    if record.ok:
        return ""
    if record.error.startswith(CLASH):
        return "clash"
    return "hooks" if record.error.startswith(ILL_FITTING) else "load"


def _failed_backends(failed: list[BackendRecord], what: str) -> Outcome:
    first = failed[0]
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    ours = first.distribution == DISTRIBUTION
    text = (
        "install it again." if ours else "upgrade that package; if that does not help, remove it."
    )
    commands = (REINSTALL,) if ours else (_upgrade(first), *_uninstalls([first]))
    labels = [f"{r.name} ({r.distribution} {r.version}): {r.error}" for r in failed]
    return Outcome(
        Status.FAIL,
        f"backend {first.name!r} of {first.distribution} {first.version} {what}{more}",
        "\n".join(labels),
        Fix(text, commands),
        {
            "failed": [_as_data(record) for record in failed],
            "methods": sorted({method for record in failed for method in record.methods}),
        },
    )


def _as_data(record: BackendRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "error": record.error,
        "traceback": record.trace,
    }


def _upgrade(record: BackendRecord) -> str:
    return f"python -m pip install --upgrade {shlex.quote(record.distribution)}"


def _uninstalls(records: Iterable[BackendRecord]) -> tuple[str, ...]:
    names = dict.fromkeys(record.distribution for record in records)
    return tuple(f"python -m pip uninstall {shlex.quote(name)}" for name in names)


CHECKS = (
    Check("plugin.entry-point", GROUP, "vLLM finds oot-quant", entry_point),
    Check("plugin.allowlist", GROUP, f"{ALLOWLIST} lets oot-quant in", allowlist),
    Check("plugin.load", GROUP, "every backend imports", load),
    Check("plugin.hooks", GROUP, "every hook of every backend is known and fits", hooks),
    Check("plugin.duplicate-method", GROUP, "each method has one provider", duplicate_method),
)
