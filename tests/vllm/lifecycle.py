"""What can happen to a served model's weights: lost and reloaded, pushed anew, saved.

Run as a script by ``test_lifecycle``, with a request as JSON on standard input; it prints the
greedy tokens after each step, or just what the parameters hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

MARK = "LIFECYCLE-RESULT "
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def zero(worker: Any) -> None:
    """Lose every weight that a parameter holds."""
    for parameter in worker.model_runner.model.parameters():
        parameter.data.zero_()


def digests(worker: Any) -> dict[str, str]:
    """What every parameter of a process holds, by name."""
    import torch

    return {
        name: hashlib.sha256(value.detach().flatten().view(torch.uint8).numpy()).hexdigest()
        for name, value in worker.model_runner.model.named_parameters()
    }


def main() -> None:
    from vllm import LLM

    request = json.load(sys.stdin)
    llm = LLM(**request["arguments"])
    asks_digests = request.get("digests")
    result = {"digests": llm.collective_rpc(digests)} if asks_digests else live(llm, request)
    sys.stdout.write("\n" + MARK + json.dumps(result) + "\n")


def live(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The steps that a request asks for."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    def tokens() -> list[list[int]]:
        params = SamplingParams(temperature=0, detokenize=False, max_tokens=12, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    result: dict[str, Any] = {"loaded": tokens()}
    if request.get("save"):
        Path(request["save"]).mkdir(parents=True)
        llm.collective_rpc("save_sharded_state", args=(request["save"],))
        for file in Path(request["arguments"]["model"]).glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, request["save"])
    if request.get("reloads"):
        llm.collective_rpc(zero)
        result["lost"] = tokens()
        memory = []
        for _ in range(request["reloads"]):
            llm.collective_rpc("reload_weights")
            memory.append(resident_bytes())
        result["reloaded"], result["memory"] = tokens(), memory
    if request.get("push"):
        weights = list(load_file(request["push"]).items())
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        result["pushed"] = tokens()
    if request.get("push_packed"):
        stored = load_file(request["push_packed"])
        packed = [(name, tensor) for name, tensor in stored.items() if ".weight." not in name]
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": packed})
        except Exception as error:  # noqa: BLE001 - what is refused is what is tested
            result["refused"] = str(error)
        result["still"] = tokens()
    return result


if __name__ == "__main__":
    main()
