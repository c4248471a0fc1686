"""Loading that only a GPU has: files read straight to it, weights that another process keeps."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.gpu.test_bitsandbytes import NEAR_TIE, PROMPTS
from tests.vllm.engine import ROOT, run_engine
from tests.vllm.oracle import Oracle, agree

START_SECONDS = 180
# `vllm preload`, without the other commands' imports.
DAEMON = (
    "from vllm.entrypoints.cli.preload import PreloadSubcommand as Preload\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
    "parser = Parser()\n"
    "Preload.add_cli_args(parser)\n"
    "Preload.cmd(parser.parse_args())\n"
)


def kinds(shelf, kind):
    """A folder, vLLM's arguments for it, and transformers' model of the same quantized weights."""
    plain = shelf.llama()
    in_flight = {"quantization": "bitsandbytes"} if kind == "in-flight" else {}
    stored = shelf.quantized(plain, "int8" if kind == "int8" else "nf4", nested=kind == "nf4")
    return plain if in_flight else stored, in_flight, Oracle.unpacked(stored)


def check(run, oracle):
    assert run.code == 0, run.log[-4000:]
    for tokens, prompt in zip(run.tokens, PROMPTS, strict=True):
        assert agree(tokens, oracle.continue_greedily(prompt), NEAR_TIE), tokens


@pytest.mark.skipif(not importlib.util.find_spec("fastsafetensors"), reason="no fastsafetensors")
@pytest.mark.parametrize("kind", ["nf4", "int8", "in-flight"])
def test_fastsafetensors(shelf, kind):
    folder, arguments, oracle = kinds(shelf, kind)
    run = run_engine(
        folder, prompts=PROMPTS, load_format="fastsafetensors", gpu_memory_utilization=0.3,
        **arguments,
    )  # fmt: skip
    check(run, oracle)


@pytest.fixture
def sockets():
    """A folder with a short name: a socket's path may have a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="oot") as folder:
        yield Path(folder)


@contextlib.contextmanager
def preloaded(model: Path, sockets: Path):
    """A weight cache daemon that holds a model, as ``vllm preload`` starts it."""
    log = sockets / "log"
    with log.open("w") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-c", DAEMON, "--model", str(model), "--max-model-len", "1024",
             "--skip-tokenizer-init", "--weight-cache-socket-dir", str(sockets)],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
        )  # fmt: skip
    try:
        limit = time.monotonic() + START_SECONDS
        while "daemon READY" not in log.read_text():
            assert daemon.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < limit, log.read_text()[-4000:]
            time.sleep(0.5)
        yield
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)


@pytest.mark.needs_vllm("0.32", "a weight cache")
@pytest.mark.parametrize(
    ("kind", "mode"), [("nf4", "zero_copy"), ("nf4", "copy"), ("int8", "zero_copy")]
)
def test_weights_that_another_process_keeps(shelf, sockets, kind, mode):
    """Without the way back to the files, which would hide that the cache is not used."""
    folder, _, oracle = kinds(shelf, kind)
    with preloaded(folder, sockets):
        run = run_engine(
            folder, prompts=PROMPTS, load_format="ipc_cache", gpu_memory_utilization=0.3,
            model_loader_extra_config={
                "socket_dir": str(sockets), "fallback": False, "mode": mode,
            },
        )  # fmt: skip
        check(run, oracle)
