"""Runs vLLM engines in processes of their own and reports what they generated and scored.

Importing vLLM takes longer than starting a small engine, so plain runs (one rank, eager, no
variables of their own) share a worker process, one engine after the other; any other run gets
a process for itself. As a script this is the worker: requests come in as JSON lines, results go
out as JSON lines on what was stdout, and all that libraries print goes to stderr.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVED = "OOT_QUANT_TEST_MODEL"
"""The variable by which a rank's process knows the model, before vLLM tells it anything."""
TIMEOUT_SECONDS = 500


@dataclass(frozen=True)
class Run:
    """What an engine did.

    ``tokens`` are the greedy continuations, ``leads`` by how much each token was ahead of the
    second best (if asked for), ``logprobs`` those of each scored text's tokens but the first,
    ``pooled`` the vectors of a pooling model; ``log`` is all that was printed.
    A text about an image is the last of the scored ones, ``expanded`` as the engine saw it.
    """

    code: int
    log: str
    tokens: list[list[int]] = field(default_factory=list)
    leads: list[list[float]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    pooled: list[list[float]] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)


def run_engine(
    model: Path,
    *,
    prompts: Sequence[Sequence[int]] = (),
    texts: Sequence[Sequence[int]] = (),
    max_tokens: int = 16,
    leads: bool = False,
    lora: Path | None = None,
    choices: Sequence[str] = (),
    image: tuple[Path, Sequence[int]] | None = None,
    pairs: Sequence[tuple[str, str]] = (),
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Run:
    """Start an engine, continue ``prompts`` greedily and score ``texts`` (both token ids).

    lora: an adapter's folder, used for the prompts. choices: what the continuations have to be
    one of; the model then needs its tokenizer. image: a picture, and a text about it to be
    scored.
    arguments: for ``vllm.LLM``; eager and with a small context unless they say otherwise. With
    ``runner="pooling"``, prompts are embedded or classified instead, or ``pairs`` of texts scored.
    """
    request = {
        "prompts": prompts,
        "texts": texts,
        "max_tokens": max_tokens,
        "leads": leads,
        "lora": str(lora) if lora else None,
        "choices": list(choices),
        "image": (str(image[0]), image[1]) if image else None,
        "pairs": list(pairs),
        "arguments": {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 1024,
            "skip_tokenizer_init": True,
            **arguments,
        },
    }
    ranks = int(arguments.get("tensor_parallel_size", 1))
    shared = ranks == 1 and not env and request["arguments"]["enforce_eager"]
    if shared:
        return _shared_worker().ask(request)
    several = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        SERVED: str(model),
    }
    worker = Worker({**(several if ranks > 1 else {}), **(env or {})})
    try:
        return worker.ask(request)
    finally:
        worker.close()


class Worker:
    """A process that runs engines."""

    def __init__(self, env: Mapping[str, str]) -> None:
        variables = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self.log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, **variables, **env},
            cwd=ROOT,
            text=True,
        )

    def ask(self, request: Mapping[str, Any]) -> Run:
        """Run one engine; a worker that dies of it is reported with its exit code."""
        start = self.log.seek(0, os.SEEK_END)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self.log.seek(start)
        log = self.log.read().decode(errors="replace")
        if not line:
            return Run(self.process.wait() or 1, log)
        return Run(log=log, **json.loads(line))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End the process; judged by its results, so how it exits does not matter."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


_worker: list[Worker] = []


def _shared_worker() -> Worker:
    if not _worker or not _worker[0].alive:
        _worker[:] = [Worker({})]
        atexit.register(_worker[0].close)
    return _worker[0]


def serve(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one engine in this process and leave nothing of it behind."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import ModelRegistry

    from tests.vllm import image_text, toy

    image_text.prepare(Path(request["arguments"]["model"]))
    ModelRegistry.register_model(toy.ToyForCausalLM.__name__, toy.ToyForCausalLM)
    llm = None
    try:
        llm = LLM(**request["arguments"])
        if request["arguments"].get("runner") == "pooling":
            return {"pooled": _pool(llm, request)}
        return _generate(llm, request)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _generate(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from PIL import Image
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    lora = LoRARequest("adapter", 1, request["lora"]) if request["lora"] else None
    limits: dict[str, Any] = {"ignore_eos": True}
    if request["leads"]:
        limits["logprobs"] = 2
    if request["choices"]:
        limits = {"structured_outputs": StructuredOutputsParams(choice=request["choices"])}

    def ask(inputs: list[Any], **options: Any) -> list[Any]:
        params = SamplingParams(temperature=0, detokenize=False, **options)
        return llm.generate(inputs, params, use_tqdm=False, lora_request=lora)

    texts = [{"prompt_token_ids": ids} for ids in request["texts"]]
    if request["image"]:
        file, ids = request["image"]
        texts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": Image.open(file)}})
    tokens: list[list[int]] = []
    leads: list[list[float]] = []
    logprobs: list[list[float]] = []
    expanded: list[int] = []
    if request["prompts"]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = ask(prompts, max_tokens=request["max_tokens"], **limits)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if request["leads"]:
            leads = [[_lead(best) for best in output.outputs[0].logprobs] for output in outputs]
    for text in texts:
        (output,) = ask([text], max_tokens=1, prompt_logprobs=0)
        expanded = list(output.prompt_token_ids)
        scored = zip(expanded[1:], output.prompt_logprobs[1:], strict=True)
        logprobs.append([entry[token].logprob for token, entry in scored])
    return {"tokens": tokens, "leads": leads, "logprobs": logprobs, "expanded": expanded}


def _lead(best: Mapping[int, Any]) -> float:
    first, second = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
    return float(first - second)


def _pool(llm: Any, request: Mapping[str, Any]) -> list[list[float]]:
    if request["pairs"]:
        queries, documents = map(list, zip(*request["pairs"], strict=True))
        return [[output.outputs.score] for output in llm.score(queries, documents)]
    inputs = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    tasks = llm.supported_tasks
    outputs = llm.classify(inputs) if "classify" in tasks else llm.embed(inputs)
    return [list(getattr(o.outputs, "probs", None) or o.outputs.embedding) for o in outputs]


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = {"code": 0, **serve(json.loads(line))}
        except Exception:  # noqa: BLE001 - reported with its traceback
            traceback.print_exc()
            sys.stderr.flush()
            result = {"code": 1}
        results.write(json.dumps(result) + "\n")
        results.flush()
    # vLLM's threads sometimes abort in the interpreter's own shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and SERVED in os.environ:
    # A rank, which starts with the imports of this script and without what its parent registered.
    from tests.vllm import image_text

    image_text.prepare(Path(os.environ[SERVED]))
