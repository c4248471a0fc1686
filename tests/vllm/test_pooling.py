"""Models that classify and embed, against transformers on unpacked weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle

PROMPTS = [[1, 5, 9, 33], [7, 8, 200, 4, 4, 100, 31], [511, 3]]
IN_FLIGHT = {"quantization": "bitsandbytes"}


@pytest.fixture(params=["nf4", "int8", "in-flight"])
def kind(request):
    return request.param


def pool(shelf, name, kind):
    """What the engine makes of each prompt, and transformers' model for it."""
    quantized = shelf.quantized(shelf.family(name), "int8" if kind == "int8" else "nf4")
    folder = shelf.family(name) if kind == "in-flight" else quantized
    run = run_engine(
        folder, prompts=PROMPTS, dtype="float32", runner="pooling", skip_tokenizer_init=False,
        **(IN_FLIGHT if kind == "in-flight" else {}),
    )  # fmt: skip
    assert run.code == 0, run.log[-4000:]
    return torch.tensor(run.pooled), Oracle.unpacked(quantized).model


@torch.inference_mode()
def test_class_probabilities(shelf, kind):
    """The score head is not quantized: it decides, and is small."""
    found, model = pool(shelf, "llama_classifier", kind)
    expected = torch.cat([model(torch.tensor([ids])).logits.softmax(-1) for ids in PROMPTS])
    assert expected.amax() - expected.amin() > 0.2
    assert (found - expected).abs().max() < 0.02


@pytest.mark.parametrize(("name", "token"), [("llama_embedder", -1), ("bert", 0)])
@torch.inference_mode()
def test_embeddings(shelf, kind, name, token):
    """Of the last token, or the first; names without ``model.`` find their layers."""
    found, model = pool(shelf, name, kind)
    states = [model(torch.tensor([ids])).last_hidden_state[:, token] for ids in PROMPTS]
    assert cosine_similarity(found, torch.cat(states)).min() > 0.999
