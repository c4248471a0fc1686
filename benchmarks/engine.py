"""Whole engines: tokens a second, step times, loading and memory, beside what users could take.

    python -m benchmarks.engine --shape llama-8b --served 16-bit nf4 plugin-nf4

Each is served by a process of its own, one after the other, from checkpoints of random weights
that are made on the first run. vllm-bnb-plugin claims the same method as this project, so it is
not installed but lies in a folder beside, which only its own engine sees.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, ready
from benchmarks.report import Table, arguments, write

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "benchmarks"
PLUGIN = "vllm-bnb-plugin==0.0.3"
PROMPT, REPEATS = 32, 3
LOADED = re.compile(r"Model loading took ([0-9.]+) GiB memory and ([0-9.]+) seconds")
WEIGHTS = re.compile(r"Loading weights took ([0-9.]+) seconds")
RESULT = "BENCHMARK-RESULT "


@dataclass(frozen=True)
class Served:
    """One way to serve a model: a checkpoint's form, vLLM's arguments, and whose plugin."""

    form: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin: bool = False


IN_FLIGHT = {"quantization": "bitsandbytes"}
SERVED: Mapping[str, Served] = {
    "16-bit": Served("16-bit"),
    "nf4": Served("nf4"),
    "nf4-in-flight": Served("16-bit", IN_FLIGHT),
    "int8": Served("int8"),
    "gptq": Served("gptq"),
    "plugin-nf4": Served("nf4", plugin=True),
    "plugin-nf4-in-flight": Served("16-bit", IN_FLIGHT, plugin=True),
    "plugin-int8": Served("int8", plugin=True),
}
"""By the name that the tables give it; ``gptq`` is what vLLM itself does best in 4 bits."""


def main() -> None:
    parser = arguments("engine-SHAPE")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--served", nargs="+", choices=SERVED, default=list(SERVED))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="decoded for each prompt")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=int, default=1, help="long prompts at once")
    parser.add_argument("--eager", action="store_true", help="without compilation and graphs")
    parser.add_argument("--work", type=Path, default=WORK, help="where checkpoints are made")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run measured")
    parser.add_argument("--one", help="for its own processes")
    options = parser.parse_args()
    if options.one:
        found = measure(SERVED[options.one], options)
        sys.stdout.write(f"\n{RESULT}{json.dumps(found)}\n")
        sys.stdout.flush()
        # What matters has been said; vLLM's threads sometimes abort in the interpreter's end.
        os._exit(0)
    kept = options.work / f"{options.shape}.json"
    results = json.loads(kept.read_text()) if options.resume and kept.is_file() else {}
    for name in options.served:
        ready(options.work, options.shape, SERVED[name].form)
        if found := run(name, options):
            results[name] = found
            kept.write_text(json.dumps(results))
    name = options.name.replace("SHAPE", options.shape)
    write(options.folder, name, tables(options, results))


def run(name: str, options: Namespace) -> dict[str, Any]:
    """Measure one in a process of its own; empty if it could not be served."""
    served = SERVED[name]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if served.plugin:
        paths = [str(rival(options.work)), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "bitsandbytes"}
    else:
        env["VLLM_PLUGINS"] = "oot_quant"
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:], "--one", name],
            cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        log.seek(0)
        text = log.read()
    lines = [line for line in text.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        print(f"{name}: could not be served\n{text[-3000:]}", file=sys.stderr)
        return {}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    if loaded := LOADED.search(text):
        found["GiB"], found["loading"] = float(loaded[1]), float(loaded[2])
    elif weights := WEIGHTS.search(text):
        found["loading"] = float(weights[1])
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def rival(work: Path) -> Path:
    """A folder with vllm-bnb-plugin and nothing else."""
    folder = work / "vllm-bnb-plugin"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), PLUGIN], check=True)
    return folder


def measure(served: Served, options: Namespace) -> dict[str, Any]:
    """Decode at each batch size and read a long prompt; medians after a warm-up."""
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(
        model=str(ready(options.work, options.shape, served.form)),
        skip_tokenizer_init=True,
        max_model_len=max(options.prefill + 16, PROMPT + options.tokens + 16),
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=max(2048, options.prompts * options.prefill),
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        compilation_config=None if options.eager else {"cudagraph_capture_sizes": options.batches},
        **served.arguments,
    )
    found: dict[str, Any] = {"start": time.monotonic() - start, "step": {}, "rate": {}}

    def seconds(batch: int, length: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + 31 * j) % 1000 + 2 for i in range(length)]}
            for j in range(batch)
        ]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

        def once() -> float:
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        once()
        return statistics.median(once() for _ in range(REPEATS))

    for batch in options.batches:
        whole, first = seconds(batch, PROMPT, options.tokens), seconds(batch, PROMPT, 1)
        found["rate"][batch] = batch * options.tokens / whole
        found["step"][batch] = 1000 * (whole - first) / (options.tokens - 1)
    read = options.prompts * options.prefill
    found["prefill"] = read / seconds(options.prompts, options.prefill, 1)
    llm.llm_engine.engine_core.shutdown()
    return found


def tables(options: Namespace, results: Mapping[str, Any]) -> list[Table]:
    names = tuple(results)
    batches = [str(batch) for batch in options.batches]

    def rows(key: str) -> list[tuple[tuple[str, ...], list[float | None]]]:
        return [((batch,), [results[name][key].get(batch) for name in names]) for batch in batches]

    def facts(*keys: str) -> list[tuple[tuple[str, ...], list[float | None]]]:
        return [((key,), [results[name].get(key) for name in names]) for key in keys]

    shape = options.shape
    return [
        Table(f"{shape}: decoding", "tokens/s", ("batch",), names, rows("rate"), False),
        Table(f"{shape}: a step", "ms", ("batch",), names, rows("step")),
        Table(
            f"{shape}: prompts, {options.prompts} of {options.prefill}", "tokens/s", ("",), names,
            facts("prefill"), False,
        ),
        Table(f"{shape}: the model", "GiB, s, s", ("",), names, facts("GiB", "loading", "start")),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
