"""Tiny random image-text models with their processors, and what transformers needs to see.

Two text layers as in ``tests.families`` below a tower of two layers. The towers' widths (144,
304) are no multiples of 64, like those of published models (1152 with heads of 72, 4304).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.families import GATED

PIXELS = 28
FIRST, START, END, VIDEO, IMAGE = 1, 507, 508, 509, 510
NAMED = {
    "bos_token": FIRST, "boi_token": START, "eoi_token": END,
    "video_token": VIDEO, "image_token": IMAGE,
}  # fmt: skip
"""Tokens that stand for something else than their number, by transformers' names of them."""
NEWLINES = {"\n" * count: 499 + count for count in range(1, 5)}
"""vLLM's Gemma-3 surrounds images with them."""
PROMPTS = {
    "gemma3_image_text": [1, 5, START, 7, 8, 200, 31],
    "qwen2_5_vl": [1, 5, START, IMAGE, END, 7, 8, 200, 31],
    "paligemma": [5, 7, 8, 200, 31],
}
"""For each family, a prompt with one image."""


def gemma3_image_text() -> Gemma3ForConditionalGeneration:
    tower = {
        "hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": PIXELS, "patch_size": 7, "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(
        text_config={**GATED, "head_dim": 64, "query_pre_attn_scalar": 64},
        vision_config=tower, mm_tokens_per_image=4,
        boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> Qwen2_5_VLForConditionalGeneration:
    """The tower's q, k and v are one tensor on disk; its projector is two linear layers."""
    tower = {
        "hidden_size": 144, "intermediate_size": 304, "depth": 2, "num_heads": 2,
        "out_hidden_size": 256, "patch_size": 7, "window_size": PIXELS,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config={**GATED, "rope_parameters": rope}, vision_config=tower,
        image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def paligemma() -> PaliGemmaForConditionalGeneration:
    """vLLM builds its projector, a linear layer, without quantization."""
    tower = {
        "hidden_size": 144, "intermediate_size": 304, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": PIXELS, "patch_size": 14, "projection_dim": 256,
        "vision_use_head": False,
    }  # fmt: skip
    config = PaliGemmaConfig(
        text_config={**GATED, "head_dim": 64, "model_type": "gemma"}, vision_config=tower,
        image_token_index=IMAGE, projection_dim=256,
    )  # fmt: skip
    return PaliGemmaForConditionalGeneration(config)


IMAGE_TEXT: dict[str, Callable[[], PreTrainedModel]] = {
    make.__name__: make for make in (gemma3_image_text, qwen2_5_vl, paligemma)
}


def save_processor(name: str, folder: Path) -> None:
    """What vLLM needs to prepare text and images, without torchvision."""
    if name == "gemma3_image_text":
        images = Gemma3ImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
        Gemma3Processor(images, _tokenizer(), image_seq_length=4).save_pretrained(folder)
    elif name == "paligemma":
        images = SiglipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
        images.image_seq_length = 4
        PaliGemmaProcessor(images, _tokenizer()).save_pretrained(folder)
    else:
        # Together they would need a video processor, which is there with torchvision only.
        area = PIXELS**2
        Qwen2VLImageProcessorPil(
            patch_size=7, size={"shortest_edge": area, "longest_edge": area}
        ).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)


def save_image(folder: Path) -> Path:
    """A picture of random pixels that needs no resizing."""
    pixels = np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    file = folder / "image.png"
    Image.fromarray(pixels).save(file)
    return file


def image_inputs(folder: Path, image: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """What transformers' model needs to see an image in a prompt, its placeholders expanded.

    Gemma-3 looks in both directions within an image, PaliGemma within its whole prompt; vLLM's
    CPU backend does not, which is what transformers does when no token is marked.
    """
    prepared = AutoImageProcessor.from_pretrained(folder)(Image.open(image), return_tensors="pt")
    if "image_grid_thw" not in prepared:
        return {"pixel_values": prepared["pixel_values"]}
    return {**prepared, "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).long()}


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token."""
    special = {name: f"<{name.removesuffix('_token')}>" for name in NAMED}
    numbers = {str(number): number for number in range(512)}
    taken = {**NEWLINES, **{special[name]: number for name, number in NAMED.items()}}
    words = {w: n for w, n in numbers.items() if n not in taken.values()} | taken
    tokenizer = Tokenizer(models.WordLevel(words, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(sorted(NEWLINES, reverse=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special)
