"""Which model the demo serves: the default one, a folder, or one from the Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from demo import smollm2
from demo.smollm2 import ModelUnavailable
from oot_quant.checkpoint import read_checkpoint
from oot_quant.errors import OotQuantError

if TYPE_CHECKING:
    from rich.console import Console

MODELS = Path("models")
DEFAULT = MODELS / "smollm2-135m-instruct"
# What vLLM reads; repositories also hold copies in other formats.
PATTERNS = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
# Seconds. Without a network the demo should say so at once.
HUB_TIMEOUTS = {"HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DOWNLOAD_TIMEOUT": "10"}


@dataclass(frozen=True)
class Model:
    """A model on this machine. ``method`` is its quantization method, None for 16-bit."""

    name: str
    folder: Path
    method: str | None

    @property
    def packed_folder(self) -> Path:
        """Where the demo keeps the nf4 checkpoint that it makes of a 16-bit model."""
        name = self.folder.name if self.is_local else self.name.replace("/", "--")
        return MODELS / f"{name}-nf4"

    @property
    def is_local(self) -> bool:
        return Path(self.name) == self.folder


def resolve(name: str | None, console: Console) -> Model:
    """The model to serve; made or downloaded if it is not here yet.

    Raises ModelUnavailable.
    """
    if not name:
        if not is_complete(DEFAULT):
            _build_default(console)
        return _read(str(DEFAULT), DEFAULT)
    if Path(name).is_dir():
        return _read(name, Path(name))
    return _read(name, _from_hub(name, console))


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a config and all the weights that it lists."""
    try:
        return folder.is_dir() and bool(read_checkpoint(str(folder)).tensors)
    except OotQuantError:
        return False


def _read(name: str, folder: Path) -> Model:
    try:
        checkpoint = read_checkpoint(str(folder))
    except OotQuantError as error:
        raise ModelUnavailable(str(error)) from error
    section = checkpoint.quantization_config
    method = str(section.get("quant_method", "unknown")) if section else None
    return Model(name, folder, method)


def _build_default(console: Console) -> None:
    with Progress(console=console) as bar:
        task = bar.add_task("making the default model")
        smollm2.build(DEFAULT, lambda done, total: bar.update(task, completed=done, total=total))


def _from_hub(name: str, console: Console) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelUnavailable(f"there is no folder {name}; a Hub model is written owner/name")
    for variable, seconds in HUB_TIMEOUTS.items():
        os.environ.setdefault(variable, seconds)
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
        if is_complete(cached):
            return cached
    except OSError:
        pass  # not in the cache
    console.print(f"downloading {name} from the Hugging Face Hub")
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # many kinds, all meaning the same to a user
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelUnavailable(
            f"{name} is not in the cache and cannot be downloaded from the Hub\n"
            f"  found: {type(error).__name__}: {reason}\n"
            "  fix: check the name and the network, or run the default model: make demo"
        ) from error
