"""Tiny models for tests, made by transformers and bitsandbytes themselves: the oracle.

Each is made once for a test run, in a folder that all workers share.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from demo import smollm2

SPREAD = 0.1
"""Standard deviation of random weights: large enough that logits are not flat."""


def quantized_name(quant_type: str, nested: bool) -> str:
    return f"{quant_type}-double" if nested else quant_type


class ModelShelf:
    """Makes models on demand below one folder; a second request finds the first's files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str, make: Callable[[Path], None]) -> Path:
        folder = self.root / name
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                unfinished = self.root / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                make(unfinished)
                unfinished.rename(folder)
        return folder

    def llama(self, *, tied: bool = False, seed: int = 0, **changes: Any) -> Path:
        """A random two-layer Llama in bfloat16: hidden 256, MLP 512, 4 heads and 2 KV heads."""
        kind = [*(["tied"] if tied else []), *([f"seed{seed}"] if seed else [])]
        name = "-".join(["llama", *kind, *map(_part, changes.items())])

        def make(folder: Path) -> None:
            from transformers import LlamaConfig, LlamaForCausalLM

            sizes = {
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "vocab_size": 512,
                "tie_word_embeddings": tied,
            }
            _save_random(LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})), folder, seed)

        return self.get(name, make)

    def family(self, name: str) -> Path:
        """A random model of one of the families in this folder, in bfloat16."""
        from tests.families import FAMILIES, HYBRIDS, POOLING

        text = {**FAMILIES, **HYBRIDS, **POOLING}

        def make(folder: Path) -> None:
            if name in text:
                _save_random(text[name](), folder)
            else:
                _save_image_text(name, folder)
            if name in POOLING:
                _save_tokenizer(folder, typed=name.startswith("bert"))

        return self.get(name, make)

    def unpacked(self, quantized: Path, adapter: Path | None = None) -> Path:
        """A quantized model in float32; with the products of a LoRA adapter, if one is given."""
        name = f"{quantized.name}-{adapter.name if adapter else 'unpacked'}"

        def make(folder: Path) -> None:
            weights = dequantized_weights(quantized)
            if adapter:
                add_adapter(weights, adapter)
            folder.mkdir()
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((quantized / "config.json").read_text(encoding="utf-8"))
            del config["quantization_config"]
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

        return self.get(name, make)

    def quantized(
        self, plain: Path, quant_type: str = "nf4", *, nested: bool = False, **options: Any
    ) -> Path:
        """A plain model, quantized and saved by transformers."""
        parts = [plain.name, quantized_name(quant_type, nested), *map(_part, options.items())]

        def make(folder: Path) -> None:
            from transformers import BitsAndBytesConfig

            four_bit = {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": quant_type,
                "bnb_4bit_use_double_quant": nested,
                "bnb_4bit_compute_dtype": torch.bfloat16,
            }
            kind = {"load_in_8bit": True} if quant_type == "int8" else four_bit
            config = BitsAndBytesConfig(**kind, **options)
            # Saved before the first forward: bitsandbytes may repack the weights there.
            model = model_class(plain).from_pretrained(
                plain, dtype=torch.bfloat16, quantization_config=config
            )
            model.save_pretrained(folder)
            _name_as_published(folder)
            for file in (*plain.glob("tokenizer*"), *plain.glob("*processor*")):
                shutil.copy(file, folder)

        return self.get("-".join(parts), make)


def add_adapter(weights: dict[str, torch.Tensor], adapter: Path) -> None:
    """Add a LoRA adapter's products to the weights that it is for."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, up in tensors.items():
        module, found, _ = name.removeprefix("base_model.model.").partition(".lora_B")
        if found:
            weights[f"{module}.weight"] += up @ tensors[name.replace("lora_B", "lora_A")]


def model_class(folder: Path) -> Any:
    """The class of transformers that a checkpoint's config.json names."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def dequantized_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint in float32, packed ones unpacked by bitsandbytes itself.

    But for blocks that reach across rows, which its CPU kernel (0.50.2) gets wrong.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    from tests.backends.bitsandbytes.stored import look_up

    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        if ".weight." in name or name.endswith((".SCB", ".weight_format")):
            continue
        scb = stored.get(f"{name.removesuffix('weight')}SCB")
        if scb is not None:
            weights[name] = tensor.float() * (scb / 127).unsqueeze(1)
            continue
        state = {key: value for key, value in stored.items() if key.startswith(f"{name}.")}
        if state:
            quant_state = QuantState.from_dict(dict(state), device=torch.device("cpu"))
            quant_state.dtype = torch.float32
            whole_blocks = quant_state.shape[1] % quant_state.blocksize == 0
            unpack = dequantize_4bit if whole_blocks else look_up
            weights[name] = unpack(tensor, quant_state)
        else:
            weights[name] = tensor.float()
    return weights


def changed(folder: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with its tensors edited."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    """The models of this test run; with xdist, one folder for all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen") else base
    return ModelShelf(shared / "models")


@pytest.fixture(scope="session")
def smol(shelf: ModelShelf) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, a real model with tied embeddings."""
    return shelf.get("smollm2", lambda folder: smollm2.build(folder, lambda done, total: None))


def _save_random(model: torch.nn.Module, folder: Path, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or name.endswith(".bias"):  # norms' weights stay one
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SPREAD)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]


def _save_image_text(name: str, folder: Path) -> None:
    from tests.image_text import IMAGE_TEXT, save_processor

    _save_random(IMAGE_TEXT[name](), folder)
    _name_as_published(folder)
    save_processor(name, folder)


def _name_as_published(folder: Path) -> None:
    """Put ``vision_model.`` back, which transformers 5 leaves out and vLLM's Gemma-3 asks for."""
    tensors = load_file(folder / "model.safetensors")
    if not any(name.startswith("vision_tower.encoder.") for name in tensors):
        return
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _save_tokenizer(folder: Path, *, typed: bool) -> None:
    """One word for each token: vLLM does not embed without a tokenizer, needed or not.

    typed: tells the first and the second of two texts apart.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(512)}, "0"))
    words.pre_tokenizer = WhitespaceSplit()
    inputs = ["input_ids", *(["token_type_ids"] if typed else []), "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs)
    tokenizer.save_pretrained(folder)


def _part(item: tuple[str, Any]) -> str:
    # vLLM looks for files with glob, to which brackets mean something.
    return re.sub(r"[^\w.-]", "", f"{item[0]}-{item[1]}")
