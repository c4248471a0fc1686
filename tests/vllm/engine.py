"""Runs one vLLM engine in a process of its own and reports what it generated and scored.

As a script it reads a request as JSON from its standard input; ``run_engine`` is the way in
for tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "ENGINE-RESULT "
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """What an engine did.

    ``tokens`` are the greedy continuations, ``logprobs`` those of each scored text's tokens but
    the first; ``log`` is all that the process printed.
    """

    code: int
    log: str
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


def run_engine(
    model: Path,
    *,
    prompts: Sequence[Sequence[int]] = (),
    texts: Sequence[Sequence[int]] = (),
    max_tokens: int = 16,
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Run:
    """Start an engine, continue ``prompts`` greedily and score ``texts`` (both token ids).

    arguments: for ``vllm.LLM``; eager and with a small context unless they say otherwise.
    """
    ranks = int(arguments.get("tensor_parallel_size", 1))
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if ranks > 1 else "0",
        **({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}),
        **(env or {}),
    }
    request = {
        "prompts": prompts, "texts": texts, "max_tokens": max_tokens,
        "arguments": {
            "model": str(model), "enforce_eager": True, "max_model_len": 1024,
            "skip_tokenizer_init": True, **arguments,
        },
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), env=variables, cwd=ROOT,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result = json.loads(line.removeprefix(MARK))
            return Run(0, log, result["tokens"], result["logprobs"])
    return Run(done.returncode or 1, log)


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    llm = LLM(**request["arguments"])

    def ask(inputs: list[list[int]], **options: Any) -> list[Any]:
        params = SamplingParams(temperature=0, detokenize=False, **options)
        return llm.generate([{"prompt_token_ids": ids} for ids in inputs], params, use_tqdm=False)

    tokens, logprobs = [], []
    if request["prompts"]:
        outputs = ask(request["prompts"], max_tokens=request["max_tokens"], ignore_eos=True)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    for ids in request["texts"]:
        entries = ask([ids], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs[1:]
        scored = zip(ids[1:], entries, strict=True)
        logprobs.append([entry[token].logprob for token, entry in scored])
    sys.stdout.write("\n" + MARK + json.dumps({"tokens": tokens, "logprobs": logprobs}) + "\n")


if __name__ == "__main__":
    main()
