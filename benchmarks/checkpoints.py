"""Llama checkpoints of random weights, for speed alone: in 16 bit and as others quantize them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 64
"""Weights that share a scale, in nf4 and in GPTQ."""
PER_INT32 = 8
SPREAD = 0.02
Tensors = dict[str, torch.Tensor]

SHAPES: Mapping[str, Mapping[str, int]] = {
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""As in config.json: SmolLM2, Llama 3.2 and Llama 3.1."""
TIED = {"smollm2-135m", "llama-1b"}
SECTIONS: Mapping[str, Mapping[str, Any] | None] = {
    "16-bit": None,
    "nf4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
    },
}  # fmt: skip
"""``quantization_config`` of each form."""


def ready(root: Path, shape: str, form: str) -> Path:
    """The folder of a checkpoint, made if it is not there."""
    folder = root / f"{shape}-{form}"
    if not (folder / "config.json").is_file():
        _write(folder, shape, form)
    return folder


def linear_bytes(shape: str) -> int:
    """How many weights the linear layers of a model hold."""
    return SHAPES[shape]["num_hidden_layers"] * sum(
        rows * columns for rows, columns in _linears(SHAPES[shape]).values()
    )


def _write(folder: Path, shape: str, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = SHAPES[shape]
    store, device = FORMS[form], "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    files: dict[str, str] = {}

    def save(file: str, tensors: Tensors) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        files.update(dict.fromkeys(tensors, file))

    for number in range(size["num_hidden_layers"]):
        inside = f"model.layers.{number}."
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {
            f"{inside}{name}.weight": torch.ones(size["hidden_size"], dtype=torch.bfloat16)
            for name in norms
        }
        for name, (rows, columns) in _linears(size).items():
            tensors |= store(f"{inside}{name}", _random(rows, columns, device))
        save(f"layer-{number:03}.safetensors", tensors)
    heads = ("model.embed_tokens", *(() if shape in TIED else ("lm_head",)))
    ends = {
        f"{name}.weight": _random(size["vocab_size"], size["hidden_size"], device) for name in heads
    }
    ends["model.norm.weight"] = torch.ones(size["hidden_size"], dtype=torch.bfloat16)
    save("ends.safetensors", ends)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # Last: it says that the folder is complete.
    (folder / "config.json").write_text(json.dumps(_config(shape, form)), encoding="utf-8")


def _linears(size: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's matrices, by name."""
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    keys = hidden // size["num_attention_heads"] * size["num_key_value_heads"]
    attention = {"q_proj": hidden, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    return {
        **{f"self_attn.{name}": (rows, hidden) for name, rows in attention.items()},
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _random(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * SPREAD


def _plain(name: str, weight: torch.Tensor) -> Tensors:
    return {f"{name}.weight": weight}


def _nf4(name: str, weight: torch.Tensor) -> Tensors:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=GROUP, quant_type="nf4")
    sides = state.as_dict(packed=True)
    return {
        f"{name}.weight": packed,
        **{f"{name}.weight.{side}": value for side, value in sides.items()},
    }


def _int8(name: str, weight: torch.Tensor) -> Tensors:
    from bitsandbytes.functional import int8_vectorwise_quant

    rows, scb, _ = int8_vectorwise_quant(weight.half())
    form = torch.tensor(0, dtype=torch.uint8)
    return {f"{name}.weight": rows, f"{name}.SCB": scb, f"{name}.weight_format": form}


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    """Codes at random: what counts is their layout and size."""
    rows, columns = weight.shape
    codes = torch.randint(-(2**31), 2**31 - 1, (columns // PER_INT32, rows), dtype=torch.int32)
    groups = columns // GROUP
    return {
        f"{name}.qweight": codes,
        f"{name}.qzeros": torch.full((groups, rows // PER_INT32), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.full((groups, rows), SPREAD / 8, dtype=torch.bfloat16),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


FORMS: Mapping[str, Callable[[str, torch.Tensor], Tensors]] = {
    "16-bit": _plain,
    "nf4": _nf4,
    "int8": _int8,
    "gptq": _gptq,
}


def _config(shape: str, form: str) -> dict[str, Any]:
    size = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape in TIED,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **size,
    }
    section = SECTIONS[form]
    return {**config, "quantization_config": section} if section else config
