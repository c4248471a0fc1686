"""Plain transformers in float32 on the unpacked weights: what an engine has to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.models import dequantized_weights, model_class


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens, and by how much each was ahead of the second best, in log probability."""

    tokens: list[int]
    leads: list[float]


class Oracle:
    """Plain transformers in float32 on the CPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.float().eval()

    @classmethod
    def unpacked(cls, folder: Path) -> Oracle:
        """On weights that bitsandbytes unpacked to float32: exact."""
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        weights = dequantized_weights(folder)
        with torch.device("meta"):
            modules = model_class(folder)(config).named_modules()
        for name in [name for name, module in modules if isinstance(module, Conv1D)]:
            # transformers transposes what it quantizes: these have become linear layers.
            weights[f"{name}.weight"] = weights[f"{name}.weight"].T.contiguous()
        # Attention in plain torch: others leave out what Gemma 2 does to its scores.
        model, keys = model_class(folder).from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32,
            attn_implementation="eager", output_loading_info=True,
        )  # fmt: skip
        assert not any(keys.values()), keys
        return cls(model)

    @classmethod
    def dequantized(cls, folder: Path) -> Oracle:
        """As transformers dequantizes a checkpoint itself: rounded to its stored bfloat16."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.dequantize(dtype=torch.float32))

    @torch.inference_mode()
    def continue_greedily(self, prompt: Sequence[int], count: int = 16) -> Continuation:
        ids, leads = list(prompt), []
        for _ in range(count):
            scores = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            best = scores.topk(2)
            leads.append(float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        return Continuation(ids[len(prompt) :], leads)

    @torch.inference_mode()
    def sure_tokens(self, prompt: Sequence[int], near_tie: float, router_tie: float) -> list[int]:
        """Of a mixture: greedy tokens up to the first near-tie, also of a router on the way.

        A router that is nearly undecided sends a token to another expert when its scores are
        rounded otherwise, and all that follows is another text.
        """
        found = self.continue_greedily(prompt)
        ids, top_k = [*prompt, *found.tokens], self.model.config.num_experts_per_tok
        routers = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        shares = torch.stack([r.view(len(ids), -1).softmax(-1) for r in routers])
        shares = shares.sort(-1, descending=True).values
        margins = (shares[..., top_k - 1] - shares[..., top_k]).amin(0).cummin(0).values
        sure = [
            lead >= near_tie and margin >= router_tie
            for lead, margin in zip(
                found.leads, margins[len(prompt) - 1 : -1].tolist(), strict=True
            )
        ]
        return found.tokens[: [*sure, False].index(False)]

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], **inputs: torch.Tensor) -> list[float]:
        """inputs: what else the model sees, an image for one."""
        scores = self.model(torch.tensor([list(ids)]), **inputs).logits[0, :-1].log_softmax(-1)
        picked = scores.gather(1, torch.tensor(list(ids[1:])).unsqueeze(1))
        return [float(value) for value in picked.flatten()]


def perplexity(logprobs: Sequence[float]) -> float:
    return exp(-sum(logprobs) / len(logprobs))


def agree(tokens: Sequence[int], expected: Continuation, near_tie: float) -> bool:
    """Whether greedy tokens are equal up to the first near-tie of the oracle's own."""
    for found, wanted, lead in zip(tokens, expected.tokens, expected.leads, strict=True):
        if lead < near_tie:
            return True
        if found != wanted:
            return False
    return True
