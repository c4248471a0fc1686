"""The example distribution, installed as a user would, and how its checkpoints are made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from oot_quant.testing.checkpoints import Stored

SOURCE = Path(__file__).parents[1] / "example_backend"


def install_example(folder: Path) -> Path:
    """Install the example into ``folder / "site"``; its own folder stays as it is."""
    source = shutil.copytree(SOURCE, folder / "source")
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(command, check=True)
    return target


def store_int8(module: str, weight: torch.Tensor) -> Stored:
    """A matrix as the example's format holds it, in plain torch."""
    scale = weight.abs().amax(dim=1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    tensors = {f"{module}.weight": codes, f"{module}.weight.scale": scale}
    return Stored(tensors, codes * scale[:, None])
