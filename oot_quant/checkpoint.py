"""What a checkpoint holds, read from safetensors headers without loading a weight.

Works on a local folder, on the Hub's cache and, where the network allows, on the Hub's own
metadata. Needs neither torch nor vLLM.

Format: https://huggingface.co/docs/safetensors - eight bytes of little-endian header length,
a JSON header with dtype, shape and offsets of every tensor, then the data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from oot_quant.errors import CheckpointMissing, CheckpointUnreadable

BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of one element, by safetensors' name of a dtype."""
INDEX = "model.safetensors.index.json"
SHARDED_STATE = re.compile(r"model-rank-\d+-part-\d+\.safetensors")
"""vLLM's names of a sharded state's files; all ranks have tensors of the same names and shapes."""
MAX_HEADER_BYTES = 100_000_000
HUB_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. ``start`` is where its data begins in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and the headers of its weights.

    ``tensors`` is empty when the weights are in a format whose names cannot be read without
    loading it; ``readable`` tells this from a checkpoint without tensors. ``strays`` are
    safetensors files that the index does not list, which nobody reads.
    """

    model: str
    folder: Path | None
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    readable: bool = True
    strays: tuple[str, ...] = ()
    files: tuple[str, ...] = field(default=())

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """The config's quantization section; multimodal models may nest it in text_config."""
        for section in (self.config, self.config.get("text_config") or {}):
            found = section.get("quantization_config") or section.get("compression_config")
            if found:
                return dict(found)
        return None

    @property
    def is_sharded_state(self) -> bool:
        """Whether vLLM saved these files, one set for each rank, from a loaded model."""
        return bool(self.files) and all(SHARDED_STATE.fullmatch(file) for file in self.files)

    def read(self, name: str) -> bytes | None:
        """The bytes of one small tensor; None if the file is not on this machine."""
        tensor = self.tensors[name]
        if self.folder is None:
            return None
        with (self.folder / tensor.file).open("rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.bytes)


def read_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Read a model's config and headers.

    model: a folder, or a repository on the Hub (cache first, then the network).

    Raises CheckpointMissing if there is no such model or a listed file is absent, and
    CheckpointUnreadable if a file is truncated or its header makes no sense.
    """
    folder = Path(model)
    if folder.is_dir():
        return _read_folder(model, folder)
    if folder.exists():
        raise CheckpointMissing(
            "a model is a folder or a Hub repository, not a file",
            where=str(folder),
            fix="give the folder that holds config.json",
        )
    if "/" not in model or model.startswith((".", "/", "~")):
        raise CheckpointMissing(
            "no such model folder",
            where=model,
            fix="check the path; a Hub repository is written owner/name",
        )
    return _read_hub(model, revision)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file, checked against the file's size.

    Raises CheckpointUnreadable.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _unreadable(path, f"{size} bytes with a header of {length}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = dict(_parse(path, header, 8 + length, size))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _unreadable(path, f"a header that does not parse ({error})") from error
    return tensors


def _parse(
    path: Path, header: Mapping[str, Any], data: int, size: int
) -> Sequence[tuple[str, StoredTensor]]:
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(int(n) for n in entry["shape"])
        tensor = StoredTensor(name, str(entry["dtype"]), shape, path.name, data + begin)
        if not 0 <= begin <= end or min(shape, default=0) < 0:
            raise ValueError(f"{name} has offsets {begin} to {end} and shape {list(shape)}")
        if tensor.dtype in BYTES and tensor.bytes != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes, its shape needs {tensor.bytes}")
        if data + end > size:
            raise _unreadable(path, f"{size} bytes, but {name} ends at byte {data + end}")
        tensors.append((name, tensor))
    return tensors


def _unreadable(path: Path, found: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        "a safetensors file is damaged or was not downloaded whole",
        where=str(path),
        found=found,
        needed="the complete file",
        fix="download or write that file again",
    )


def _read_folder(model: str, folder: Path) -> Checkpoint:
    config = _read_json(folder / "config.json", required=True)
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = _read_json(folder / INDEX)
    listed = sorted(set(index.get("weight_map", {}).values())) if index else []
    if index:
        names = listed
    elif "model.safetensors" in present:
        names = ["model.safetensors"]
    else:
        # vLLM reads every file when there is no index; a consolidated copy is dropped then.
        names = [n for n in present if not n.startswith("consolidated")] or present
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointMissing(
                "a file that the index lists is not there",
                where=str(path),
                needed=f"every file named in {INDEX}",
                fix="download the model again",
            )
        tensors.update(read_header(path))
    strays = tuple(name for name in present if name not in names)
    return Checkpoint(model, folder, config, tensors, bool(names), strays, tuple(names))


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointMissing(
                "the model folder has no config.json",
                where=str(path.parent),
                fix="give the folder that holds config.json",
            )
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointUnreadable(
            "a JSON file of the model does not parse", where=str(path), found=str(error)
        ) from error
    if not isinstance(content, dict):
        raise CheckpointUnreadable("a JSON file of the model is not an object", where=str(path))
    return content


def _read_hub(model: str, revision: str | None) -> Checkpoint:
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.constants import HF_HUB_OFFLINE
    except ImportError as error:
        raise CheckpointMissing(
            "a Hub repository needs the package huggingface_hub",
            where=model,
            fix='python -m pip install "huggingface_hub"',
        ) from error
    try:
        cached = snapshot_download(model, revision=revision, local_files_only=True)
        return _read_folder(model, Path(cached))
    except (CheckpointMissing, OSError, ValueError):
        pass  # not in the cache, or only in part
    if HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE") == "1":
        raise CheckpointMissing(
            "the model is not in the cache and the Hub is switched off",
            where=model,
            found="HF_HUB_OFFLINE is set",
            fix="unset HF_HUB_OFFLINE, or download the model while online",
        )
    try:
        # Asks once and without retries, unlike what follows: offline, it says so at once.
        HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
        config_file = hf_hub_download(model, "config.json", revision=revision)
        config = _read_json(Path(config_file))
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    except Exception as error:
        if type(error).__name__ == "NotASafetensorsRepoError":
            return Checkpoint(model, None, config, {}, readable=False)
        raise _hub_error(model, error) from error
    tensors = {
        name: StoredTensor(name, str(info.dtype), tuple(info.shape), file, 0)
        for file, entry in metadata.files_metadata.items()
        for name, info in entry.tensors.items()
    }
    return Checkpoint(model, None, config, tensors, True, (), tuple(metadata.files_metadata))


def _hub_error(model: str, error: Exception) -> CheckpointMissing:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        fix = "accept the model's terms on its page, then run: hf auth login"
    elif kind in ("RepositoryNotFoundError", "RevisionNotFoundError"):
        fix = "check the name and the revision; a private model needs: hf auth login"
    else:
        fix = "check the name and the network, or give a local folder that exists"
    detail = str(error).strip().splitlines()
    return CheckpointMissing(
        "the model cannot be read from the Hub",
        where=model,
        found=f"{kind}: {detail[0] if detail else ''}".rstrip(": "),
        fix=fix,
    )
