"""How much memory loading a model takes at its worst, and how much is left in use after it.

Run as a script by ``test_memory``: a request as JSON on standard input, the result as JSON behind
a mark. A model is loaded by vLLM's own loader, without an engine around it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self

MARK = "MEMORY-RESULT "
STATUS = Path("/proc/self/status")
SECONDS_BETWEEN_LOOKS = 0.001


def anonymous_bytes() -> int:
    """Memory of this process in RAM that is no page of a file: files are mapped, not read."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell anonymous memory apart")


class Peak:
    """The most anonymous memory seen by a thread that keeps looking, and how often it looked."""

    def __init__(self) -> None:
        self.bytes = self.looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_LOOKS):
            self.bytes = max(self.bytes, anonymous_bytes())
            self.looks += 1


@contextmanager
def one_rank(config: Any) -> Iterator[None]:
    """vLLM's idea of a distributed world, with nobody else in it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield


def load(arguments: dict[str, Any]) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def measure(arguments: dict[str, Any]) -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not be there to be used again
    before = anonymous_bytes()
    with Peak() as peak:
        model = load(arguments)
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state(model)}
    return {
        "peak": peak.bytes - before,
        "weights": sum(tensors.values()),
        "after": anonymous_bytes() - before,
        "looks": peak.looks,
    }


def state(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def main() -> None:
    import torch
    from vllm.config import VllmConfig

    torch.accelerator.empty_cache = lambda: None  # as vLLM's runner for CPUs has it
    request = json.load(sys.stdin)
    with one_rank(VllmConfig()):
        load(request["warm_up"])  # libraries and threads take memory once
        result = measure(request["arguments"])
    sys.stdout.write("\n" + MARK + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
