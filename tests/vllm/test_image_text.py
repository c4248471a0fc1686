"""Image-text models through the real engine, their towers packed and dense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.image_text import IMAGE_TEXT, PROMPTS, image_inputs, save_image
from tests.vllm.engine import Run, run_engine
from tests.vllm.oracle import Oracle
from tests.vllm.test_bitsandbytes import NEAR_TIE, TEXT, unpacked

ARGUMENTS = {"dtype": "float32", "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    return save_image(tmp_path_factory.mktemp("image"))


def check_with_image(run: Run, folder: Path, image: Path) -> None:
    """Text alone, and text about an image."""
    assert run.code == 0, run.log[-4000:]
    oracle: Oracle = unpacked(folder)
    shown = oracle.logprobs(run.expanded, **image_inputs(folder, image, run.expanded))
    for found, expected in zip(run.logprobs, (oracle.logprobs(TEXT), shown), strict=True):
        difference = torch.tensor(found) - torch.tensor(expected)
        assert difference.abs().max() < NEAR_TIE["float32"]


def serve(folder: Path, family: str, image: Path, **arguments) -> Run:
    videos = {"video": 0} if family.startswith("qwen") else {}
    limits = {"limit_mm_per_prompt": {"image": 1, **videos}}
    asked = {**ARGUMENTS, **limits, **arguments}
    return run_engine(folder, texts=[TEXT], image=(image, PROMPTS[family]), **asked)


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_a_tower_that_is_packed_too(shelf, image, family):
    folder = shelf.quantized(shelf.family(family), nested=True)
    check_with_image(serve(folder, family, image), folder, image)


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_in_flight(shelf, image, family):
    run = serve(shelf.family(family), family, image, quantization="bitsandbytes")
    check_with_image(run, shelf.quantized(shelf.family(family)), image)
