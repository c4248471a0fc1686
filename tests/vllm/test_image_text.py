"""Image-text models through the real engine, their towers packed and dense."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import EllipsisType

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from oot_quant_cli.main import cli
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
def test_everything_packed(shelf, image, family):
    """PaliGemma's projector is built without quantization, so it is unpacked, and says so."""
    folder = shelf.quantized(shelf.family(family), nested=True)
    run = serve(folder, family, image)
    check_with_image(run, folder, image)
    notices = re.findall(r"layers without quantization.*more: (.*)\.", run.log)
    assert notices == (["multi_modal_projector.linear"] if family == "paligemma" else [])


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_in_flight(shelf, image, family):
    """A projector that is built without quantization stays in 16 bit."""
    skip = {"llm_int8_skip_modules": ["lm_head", "model.multi_modal_projector"]}
    reference = shelf.quantized(shelf.family(family), **(skip if family == "paligemma" else {}))
    run = serve(shelf.family(family), family, image, quantization="bitsandbytes")
    check_with_image(run, reference, image)


@pytest.mark.needs_vllm("0.29", "attention on the CPU with one key head for each rank")
def test_two_ranks(shelf, image):
    """The tower's widths are no multiples of a block, a rank's part of them even less."""
    family = "gemma3_image_text"
    folder = shelf.quantized(shelf.family(family), nested=True)
    run = serve(folder, family, image, tensor_parallel_size=2)
    check_with_image(run, folder, image)


SPELLINGS = {
    "null": None,
    "empty": [],
    "missing": ...,
    "named": ["vision_tower", "lm_head"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_tower_that_stayed_dense(shelf, image, tmp_path, spelling):
    """However config.json puts it: the tensors decide."""
    family = "gemma3_image_text"
    folder = shelf.quantized(shelf.family(family), llm_int8_skip_modules=["model.vision_tower"])
    assert all(name.startswith("language_model.") for name in packed_in(folder))
    served = with_skip_list(folder, tmp_path / "served", SPELLINGS[spelling])
    check_with_image(serve(served, family, image), folder, image)


NESTINGS = {
    "before": "model.language_model.layers.0",
    "after": "language_model.model.layers.0",
    "absent": "model.layers.0",
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_skip_names_under_another_nesting_change_nothing(shelf, image, tmp_path, nesting):
    """What stayed dense is told by the tensors, and the doctor prints it."""
    family = "gemma3_image_text"
    skip = {"llm_int8_skip_modules": ["model.language_model.layers.0"]}
    folder = shelf.quantized(shelf.family(family), **skip)
    served = with_skip_list(folder, tmp_path / "served", [NESTINGS[nesting]])
    check_with_image(serve(served, family, image), folder, image)
    output = CliRunner().invoke(cli, ["doctor", "--model", str(served)]).output
    listed = " ".join(output.partition("Not quantized:")[2].split()).partition(". ")[0]
    packed = packed_in(folder)
    text = {name for name in packed if name.startswith("language_model.")}
    assert text
    assert text == {name for name in text if ".layers.1." in name}
    for name in text:
        assert f"{name.replace('.1.', '.*.')} (layers 0)" in listed


def packed_in(folder: Path) -> set[str]:
    """The modules of a checkpoint that are quantized."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        absmax = [name for name in file.keys() if name.endswith(".weight.absmax")]  # noqa: SIM118
    return {name.removesuffix(".weight.absmax") for name in absmax}


def with_skip_list(folder: Path, target: Path, skip: list[str] | EllipsisType | None) -> Path:
    """A copy of a checkpoint whose config.json has this skip list, or none at all (...)."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    section = config["quantization_config"]
    del section["llm_int8_skip_modules"]
    if skip is not ...:
        section["llm_int8_skip_modules"] = skip
    (target / "config.json").write_text(json.dumps(config))
    return target
