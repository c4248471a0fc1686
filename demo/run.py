"""``make demo``: one model in 16 bits, quantized in flight, and from an nf4 checkpoint.

    python -m demo.run [MODEL]      a folder or a Hub repository; default: SmolLM2-135M-Instruct

Prints the texts side by side and the measured bytes of the weights, then what ``oot-quant
list`` and ``oot-quant doctor`` say.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo.models import Model, is_complete, resolve
from demo.smollm2 import ModelUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self

LOG = Path("build/demo.log")
LOG_LINES_SHOWN = 25
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "Water boils at a temperature of",
]
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is on this machine by now
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin slow down tenfold when a core is shared
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's weights are in reach of the worker
    "VLLM_NO_USAGE_STATS": "1",
}


class DemoFailed(Exception):
    """A step failed; the text says which and why."""


@dataclass(frozen=True)
class Serving:
    """One column of the table: how a model is served, as one would write it."""

    title: str
    call: str
    model: Path
    options: dict[str, Any]


class Worker:
    """The process that runs engines; see ``demo.worker``. Its log is a file."""

    def __enter__(self) -> Self:
        LOG.parent.mkdir(exist_ok=True)
        self._log = LOG.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENGINE_ENVIRONMENT},
        )
        return self

    def __exit__(self, *exception: object) -> None:
        if any(exception):
            self._process.kill()
        self._process.communicate()
        self._log.close()

    def run(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Do one job. Raises DemoFailed with the end of the log."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and the empty answer below says so
            print(json.dumps({"task": task, **arguments}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise DemoFailed(f"the engine's process died\n{_log_tail()}")
        result: dict[str, Any] = json.loads(answer)
        if not result["ok"]:
            raise DemoFailed(f"an engine failed\n{_log_tail()}")
        return result


def _log_tail() -> str:
    with LOG.open(encoding="utf-8", errors="replace") as log:
        return "".join(deque(log, LOG_LINES_SHOWN)) + f"  the whole log: {LOG}"


@contextmanager
def step(console: Console, title: str) -> Iterator[None]:
    """Show a step while it runs, and how long it took."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(f"... {title}", highlight=False, markup=False, soft_wrap=True)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(title, total=None)
        yield
    done = f"ok  {title} ({time.monotonic() - started:.0f} s)"
    console.print(done, highlight=False, markup=False, soft_wrap=True)


def compare(model: Model, console: Console) -> Path | str:
    """Serve the model in every way that fits it; returns the checkpoint for the doctor."""
    call = f'LLM("{model.name}")'
    results = []
    with Worker() as worker:
        if model.method:
            servings = [Serving(f"as stored: {model.method}", call, model.folder, {})]
        else:
            servings = _servings(model, call)
        for serving in servings:
            if serving.model == model.packed_folder and not is_complete(serving.model):
                with step(console, f"making the nf4 checkpoint {serving.model}"):
                    worker.run("quantize", model=str(model.folder), out=str(serving.model))
            with step(console, f"serving {serving.title}: {serving.call}"):
                job = {"model": str(serving.model), "options": serving.options}
                results.append(worker.run("serve", prompts=PROMPTS, **job))
    console.print(_table(servings, results))
    return model.name if model.method else model.packed_folder


def _servings(model: Model, call: str) -> list[Serving]:
    flagged = call[:-1] + ', quantization="bitsandbytes")'
    packed = f'LLM("{model.packed_folder}")'
    return [
        Serving("16-bit", call, model.folder, {}),
        Serving("4-bit, in flight", flagged, model.folder, {"quantization": "bitsandbytes"}),
        Serving("4-bit, pre-quantized", packed, model.packed_folder, {}),
    ]


def _table(servings: list[Serving], results: list[dict[str, Any]]) -> Table:
    table = Table(show_lines=True)
    table.add_column("")
    for serving in servings:
        table.add_column(serving.title)
    for number, prompt in enumerate(PROMPTS):
        # Without the model's line breaks, so that columns can be compared at a glance.
        texts = (" ".join(result["texts"][number].split()) for result in results)
        table.add_row(prompt, *map(Text, texts))
    table.add_row("bytes of weights", *(f"{result['bytes']:,}" for result in results))
    table.add_row("seconds until ready", *(f"{result['seconds']:.1f}" for result in results))
    return table


def _own_command(console: Console, *arguments: str) -> int:
    """Run ``oot-quant`` as a user would."""
    console.print(f"\n$ {shlex.join(('oot-quant', *arguments))}", highlight=False, markup=False)
    script = Path(sys.executable).with_name("oot-quant")
    return subprocess.run([str(script), *arguments], check=False).returncode


def main() -> int:
    console = Console()
    try:
        model = resolve(sys.argv[1] if len(sys.argv) > 1 else None, console)
        console.print(f"model: {model.folder}\nengine log: {LOG}", highlight=False, soft_wrap=True)
        checkpoint = compare(model, console)
    except (ModelUnavailable, DemoFailed) as error:
        text = f"demo: error: {error}"
        console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("demo: stopped")
        return 130
    codes = [
        _own_command(console, "list"),
        _own_command(console, "doctor", "--model", str(checkpoint)),
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
