"""Serves and quantizes models for the demo, one job after the other, in a process of its own.

One process pays only once for importing vLLM. Jobs come in as JSON lines on stdin, results go
out as JSON lines on what was stdout; everything that libraries print goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch.nn import Module

NEW_TOKENS = 24


def serve(model: str, options: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
    """Serve a model once: its completions, its weights' bytes, the seconds until it was ready."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    _keep_weights_in_sight()
    started = time.monotonic()
    llm = LLM(model=model, max_model_len=256, enforce_eager=True, **options)
    seconds = time.monotonic() - started
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    texts = [output.outputs[0].text for output in llm.generate(prompts, sampling)]
    weights = sum(llm.apply_model(_held_bytes))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"texts": texts, "bytes": weights, "seconds": seconds}


def quantize(model: str, out: str) -> dict[str, Any]:
    """Make a pre-quantized nf4 checkpoint, as a user of transformers would."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    packed = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=config
    )
    partial = Path(out + ".partial")
    # Before the first forward: on some CPUs it repacks the weights, which then save wrongly.
    packed.save_pretrained(partial)
    AutoTokenizer.from_pretrained(model).save_pretrained(partial)
    partial.rename(out)
    return {}


def _held_bytes(model: Module) -> int:
    """Bytes of memory behind the model's parameters, those shared by several counted once."""
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _keep_weights_in_sight() -> None:
    """Leave 16-bit weights in their parameters, where they can be measured.

    vLLM's CPU build moves them into handles of its matrix libraries, out of Python's sight.
    """
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Module, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = keep


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    task = job.pop("task")
    try:
        result = serve(**job) if task == "serve" else quantize(**job)
    except Exception:  # noqa: BLE001 - the log has it whole, and the parent shows its end
        traceback.print_exc()
        return {"ok": False}
    return {"ok": True, **result}


def _claim_stdout() -> TextIO:
    """Keep stdout for results; whatever else writes to it, C libraries too, gets stderr."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def main() -> None:
    results = _claim_stdout()
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=results, flush=True)
    sys.stderr.flush()
    # The jobs are done; vLLM's threads sometimes abort in the interpreter's own shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
