"""Reading headers: what is there, what is damaged, what is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oot_quant.checkpoint import INDEX, read_checkpoint, read_header
from oot_quant.errors import CheckpointMissing, CheckpointUnreadable


def write_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_config(folder: Path, **content: object) -> None:
    (folder / "config.json").write_text(json.dumps(content))


TWO = {"a": ("U8", [3], b"abc"), "b": ("F32", [1, 2], bytes(8))}


def test_a_header_gives_names_shapes_and_where_the_bytes_are(tmp_path):
    write_config(tmp_path)
    write_file(tmp_path / "model.safetensors", TWO)
    checkpoint = read_checkpoint(str(tmp_path))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["b"].shape == (1, 2)
    assert checkpoint.tensors["b"].bytes == 8
    assert checkpoint.read("a") == b"abc"


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = write_file(tmp_path / "model.safetensors", TWO)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointUnreadable) as caught:
        read_header(path)
    assert "checkpoint-unreadable: a safetensors file is damaged" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "fix: download or write that file again" in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": {"dtype": "U8", "shape": [3]}}',
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 3]}}',
        b'{"a": {"dtype": "U8", "shape": [-3], "data_offsets": [3, 0]}}',
        b'{"a": 1}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(CheckpointUnreadable):
        read_header(path)


def test_only_indexed_files_are_read_and_strays_are_listed(tmp_path):
    write_config(tmp_path)
    write_file(tmp_path / "part-1.safetensors", {"a": TWO["a"]})
    write_file(tmp_path / "part-2.safetensors", {"b": TWO["b"]})
    write_file(tmp_path / "consolidated.safetensors", {"other": TWO["a"]})
    weight_map = {"a": "part-1.safetensors", "b": "part-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_checkpoint(str(tmp_path))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.strays == ("consolidated.safetensors",)


def test_without_an_index_the_consolidated_copy_is_a_stray(tmp_path):
    write_config(tmp_path)
    write_file(tmp_path / "part-1.safetensors", {"a": TWO["a"]})
    write_file(tmp_path / "consolidated.safetensors", {"other": TWO["a"]})
    assert set(read_checkpoint(str(tmp_path)).tensors) == {"a"}


def test_an_absent_file_of_the_index_is_named(tmp_path):
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointMissing, match=r"gone\.safetensors"):
        read_checkpoint(str(tmp_path))


def test_a_folder_without_safetensors_is_not_readable_but_no_error(tmp_path):
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert not read_checkpoint(str(tmp_path)).readable


def test_a_folder_without_config_is_missing(tmp_path):
    with pytest.raises(CheckpointMissing, match=r"no config\.json"):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where"])
def test_a_path_that_is_not_there_is_not_taken_for_a_repository(name):
    with pytest.raises(CheckpointMissing, match="no such model folder"):
        read_checkpoint(name)


def test_a_file_is_not_a_model(tmp_path):
    path = write_file(tmp_path / "model.safetensors", TWO)
    with pytest.raises(CheckpointMissing, match="not a file"):
        read_checkpoint(str(path))


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_config_that_does_not_parse_is_unreadable(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointUnreadable):
        read_checkpoint(str(tmp_path))


def test_the_quantization_section_may_be_nested(tmp_path):
    write_config(tmp_path, text_config={"quantization_config": {"quant_method": "bitsandbytes"}})
    assert read_checkpoint(str(tmp_path)).quantization_config == {"quant_method": "bitsandbytes"}


def test_an_offline_repository_says_that_the_hub_is_off(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointMissing, match="HF_HUB_OFFLINE is set"):
        read_checkpoint("nobody/no-such-model")
