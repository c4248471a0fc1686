"""Tables of ``docs/vllm-versions.md``, made of the results that ``tools/matrix.py`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.matrix import GROUPS, RESULTS, VLLM

ROW = dict[str, Any]


def tables() -> str:
    """The page's generated part."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    served = [row for row in rows if "groups" in row]
    newest = max((row["bitsandbytes"] for row in served), key=_number)
    by_vllm = [row for row in served if row["bitsandbytes"] == newest]
    by_library = [row for row in served if row["vllm"] == VLLM[-1]]
    parts = [
        f"### vLLM, with bitsandbytes {newest}\n\n{_table(by_vllm, 'vllm')}",
        f"### bitsandbytes, with vLLM {VLLM[-1]}\n\n{_table(by_library, 'bitsandbytes')}",
        *_not_there(served),
        *_failed(served),
        *(_refused(row) for row in rows if "refusal" in row),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[ROW], of: str) -> str:
    lines = [("tests", *(row[of] for row in rows)), ("---",) * (len(rows) + 1)]
    lines += [(name, *(_cell(row["groups"].get(name)) for row in rows)) for name in GROUPS]
    facts = ("torch", "transformers", "python", "date")
    lines += [(name, *(str(row[name]) for row in rows)) for name in facts]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(group: ROW | None) -> str:
    """How many passed, and whatever did not."""
    if group is None:
        return "not run"
    parts = [f"{group['passed']} passed"] if group["passed"] else []
    parts += [f"**{len(group['failed'])} failed**"] if group["failed"] else []
    parts += ["not in this vLLM"] if group["not_there"] else []
    return ", ".join(parts) or "not run"


def _not_there(rows: list[ROW]) -> Iterable[str]:
    lacking: dict[str, list[str]] = {}
    for row in rows:
        for group in row["groups"].values():
            for reason in group["not_there"].values():
                what = reason.partition(": ")[2]
                lacking.setdefault(what, []).append(row["vllm"])
    if lacking:
        lines = [
            f"* vLLM {', '.join(dict.fromkeys(where))}: {what}." for what, where in lacking.items()
        ]
        yield "Not in this vLLM:\n\n" + "\n".join(lines)


def _failed(rows: list[ROW]) -> Iterable[str]:
    lines = [
        f"* vLLM {row['vllm']}, bitsandbytes {row['bitsandbytes']}: `{name}`"
        for row in rows
        for group in row["groups"].values()
        for name in group["failed"]
    ]
    if lines:
        yield "Failed:\n\n" + "\n".join(lines)


def _refused(row: ROW) -> str:
    said = row["refusal"] or "nothing: it was not refused"
    return (
        f"### bitsandbytes {row['bitsandbytes']}: refused\n\n"
        f"What an engine of vLLM {row['vllm']} says to it ({row['date']}):\n\n```\n{said}\n```"
    )


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
