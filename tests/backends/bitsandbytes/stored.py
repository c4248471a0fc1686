"""Packed layers as bitsandbytes itself writes them, in a folder that vLLM could load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import (
    QuantState,
    dequantize_4bit,
    dequantize_blockwise,
    int8_vectorwise_quant,
    quantize_4bit,
)
from safetensors.torch import save_file

SECTION = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """[rows, columns] float32; every block has another size, so that mixed-up scales show."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) + 0.1
    return torch.randn(rows, columns, generator=generator) * spread


def pack(
    name: str,
    matrix: torch.Tensor,
    quant_type: str = "nf4",
    blocksize: int = 64,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors of one module, and its weight unpacked independently in float32.

    By bitsandbytes itself, but for blocks that reach across rows: there its CPU kernel is
    wrong (0.50.2), so the values are looked up one by one.
    """
    packed, state = quantize_4bit(
        matrix,
        blocksize=blocksize,
        quant_type=quant_type,
        compress_statistics=nested,
        quant_storage=storage,
    )
    sides = state.as_dict(packed=True)
    tensors = {f"{name}.weight": packed}
    tensors |= {f"{name}.weight.{side}": value for side, value in sides.items()}
    read_back = QuantState.from_dict(
        {side: value.clone() for side, value in sides.items()}, device=torch.device("cpu")
    )
    if matrix.shape[1] % blocksize == 0:
        return tensors, dequantize_4bit(packed, read_back)
    return tensors, look_up(packed, read_back)


def pack_8bit(name: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors of one LLM.int8 module, and its weight unpacked in float32."""
    weight, scb, _ = int8_vectorwise_quant(matrix.half())
    tensors = {
        f"{name}.weight": weight,
        f"{name}.SCB": scb,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, weight.float() * (scb.float() / 127).unsqueeze(1)


def look_up(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Unpack in the plainest way: weight i is table[nibble i] * scale[i // blocksize]."""
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    octets = packed.contiguous().view(torch.uint8).flatten().numpy()
    nibbles = np.stack((octets >> 4, octets & 15), axis=-1).flatten()
    rows, columns = state.shape
    which = np.arange(rows * columns) // state.blocksize
    values = state.code.numpy()[nibbles[: rows * columns]] * absmax.numpy()[which]
    return torch.from_numpy(values).view(rows, columns)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    section: Mapping[str, Any] | None = SECTION,
) -> Path:
    """A folder with config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if section is not None:
        config["quantization_config"] = dict(section)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
