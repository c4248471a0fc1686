"""Models that score a document for a query, against transformers on unpacked weights."""

from __future__ import annotations

import re

import pytest
import torch

from tests.vllm.engine import run_engine
from tests.vllm.oracle import Oracle

PAIRS = [
    ("1 5 9", " 33 7"),
    ("1 5 9", " 8 200 4 4 100 31"),
    ("511", " 3 3 250 17"),
    ("40 41 42", " 43"),
    ("77 300", " 12 499 6 258 90 90 90"),
]
"""Queries and documents, one word for each token."""
IN_FLIGHT = {"quantization": "bitsandbytes"}
NO, YES = 17, 9
"""Tokens of a judge's answers."""
ODDS = {"is_original_qwen3_reranker": True, "classifier_from_token": [str(NO), str(YES)]}
JUST_YES = {"method": "no_post_processing", "classifier_from_token": [str(YES)]}
"""How vLLM is told to make a classifier of a model's output head."""
NEAR = 0.005
"""Between scores in float32, the oracle's of which spread over a tenth at least."""


def score(folder, **arguments):
    """What the engine makes of each pair."""
    run = run_engine(
        folder, pairs=PAIRS, dtype="float32", runner="pooling", skip_tokenizer_init=False,
        **arguments,
    )  # fmt: skip
    assert run.code == 0, run.log[-4000:]
    return torch.tensor(run.pooled).squeeze(1), run.log


def check(found, expected):
    assert expected.amax() - expected.amin() > 0.1
    assert (found - expected).abs().max() < NEAR, (found, expected)


@torch.inference_mode()
def logits(folder):
    """Transformers' at the end of each pair; for BERT, whose second text is of another type."""
    model, rows = Oracle.unpacked(folder).model, []
    for texts in PAIRS:
        first, second = ([int(word) for word in text.split()] for text in texts)
        types = {"token_type_ids": torch.tensor([[0] * len(first) + [1] * len(second)])}
        found = model(
            torch.tensor([first + second]), **(types if model.config.model_type == "bert" else {})
        ).logits
        rows.append(found[0] if found.ndim == 2 else found[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in-flight"])
def test_a_cross_encoder(shelf, stored):
    """BERT's pooler and head are built without quantization: unpacked, or left in 16 bit."""
    plain_modules = ["bert.pooler.dense", "classifier"]
    plain = shelf.family("bert_reranker")
    if stored:
        quantized = shelf.quantized(plain, nested=True)
        found, log = score(quantized)
        assert re.findall(r"layers without quantization.*more: (.*)\.", log) == [
            ", ".join(plain_modules)
        ]
    else:
        quantized = shelf.quantized(plain, llm_int8_skip_modules=plain_modules)
        found, _ = score(plain, **IN_FLIGHT)
    check(found, logits(quantized)[:, 0].sigmoid())


@pytest.mark.parametrize("kind", ["stored", "head-too", "in-flight"])
def test_a_language_model_with_a_score(shelf, kind):
    """The head of one row may be quantized too, which nobody recommends."""
    plain = shelf.family("qwen3_reranker")
    skip = {"llm_int8_skip_modules": ["nothing"]} if kind == "head-too" else {}
    quantized = shelf.quantized(plain, **skip)
    found, _ = score(plain, **IN_FLIGHT) if kind == "in-flight" else score(quantized)
    check(found, logits(quantized)[:, 0].sigmoid())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_judge", "stored"),
        ("qwen3_judge", "head-too"),
        ("qwen3_judge", "in-flight"),
        ("qwen3_tied_judge", "stored"),
    ],
)
def test_the_odds_of_two_words(shelf, name, kind):
    """vLLM makes the score's one row from two of the head's, which may come quantized."""
    plain = shelf.family(name)
    skip = {"llm_int8_skip_modules": ["nothing"]} if kind == "head-too" else {}
    quantized = shelf.quantized(plain, **skip)
    folder, arguments = (plain, IN_FLIGHT) if kind == "in-flight" else (quantized, {})
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], **ODDS}
    found, _ = score(folder, hf_overrides=overrides, **arguments)
    answers = logits(quantized)
    check(found, (answers[:, YES] - answers[:, NO]).sigmoid())


def test_the_score_of_one_word(shelf):
    quantized = shelf.quantized(shelf.family("qwen3_judge"), llm_int8_skip_modules=["nothing"])
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], **JUST_YES}
    found, _ = score(quantized, hf_overrides=overrides)
    check(found, logits(quantized)[:, YES].sigmoid())
