"""What PyTorch's own files (``.bin``) hold, told without loading a weight.

They are archives of pickles, which only torch reads; the doctor, which has to work without
it, cannot look into them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oot_quant.checkpoint import Checkpoint, StoredTensor
from oot_quant.errors import CheckpointUnreadable

PATTERNS = ("pytorch_model*.bin", "*.pt")
"""File names that vLLM reads where there is no safetensors file."""
NAME_OF_DTYPE = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


def with_pickled_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with the names, dtypes and shapes of its PyTorch files, if it has any.

    Raises CheckpointUnreadable, naming the file.
    """
    folder = checkpoint.folder
    if checkpoint.readable or folder is None:
        return checkpoint
    files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in PATTERNS)), [])
    tensors = {
        name: StoredTensor(name, NAME_OF_DTYPE.get(value.dtype, "?"), tuple(value.shape), file, 0)
        for path in files
        for name, value, file in _entries(path)
    }
    # Their bytes are not at an offset of the file, so nothing can be read by name.
    return replace(checkpoint, folder=None, tensors=tensors, readable=bool(tensors))


def _entries(path: Path) -> list[tuple[str, torch.Tensor, str]]:
    try:
        content: Any = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        return [
            (name, value, path.name)
            for name, value in content.items()
            if isinstance(value, torch.Tensor)
        ]
    except Exception as error:
        raise CheckpointUnreadable(
            "a PyTorch file is damaged, or not one",
            where=str(path),
            found=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            needed="a file that torch.save wrote",
            fix="download it again, or convert the checkpoint to safetensors",
        ) from error
