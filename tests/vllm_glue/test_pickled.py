"""PyTorch files: their names and shapes are told, damage is named."""

from __future__ import annotations

import json

import pytest
import torch

from oot_quant.checkpoint import read_checkpoint
from oot_quant.errors import CheckpointUnreadable
from oot_quant.vllm_glue.pickled import with_pickled_tensors


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    return tmp_path


def test_names_dtypes_and_shapes_of_all_files(folder):
    torch.save({"a": torch.ones(2, 3, dtype=torch.uint8)}, folder / "pytorch_model-1.bin")
    torch.save({"b": torch.ones(4).bfloat16()}, folder / "pytorch_model-2.bin")
    found = with_pickled_tensors(read_checkpoint(str(folder)))
    assert found.readable
    assert {name: (t.dtype, t.shape) for name, t in found.tensors.items()} == {
        "a": ("U8", (2, 3)),
        "b": ("BF16", (4,)),
    }
    assert found.read("a") is None


def test_a_folder_without_any_weights_stays_unreadable(folder):
    assert not with_pickled_tensors(read_checkpoint(str(folder))).readable


@pytest.mark.parametrize("content", [b"", b"not a pickle"])
def test_a_damaged_file_is_named(folder, content):
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointUnreadable) as caught:
        with_pickled_tensors(read_checkpoint(str(folder)))
    assert "pytorch_model.bin" in str(caught.value)
