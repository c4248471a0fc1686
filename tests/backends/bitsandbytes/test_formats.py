"""Which modules are 4-bit, told from headers; and every way in which they can be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oot_quant.checkpoint import read_checkpoint
from oot_quant.errors import (
    CheckpointIncomplete,
    CheckpointSurplus,
    UnsupportedFormat,
    WeightMismatch,
)
from oot_quant_backends.bitsandbytes.formats import (
    BLOCKSIZES,
    EightBit,
    FourBit,
    parse_state,
    read_formats,
    summarize,
)
from tests.backends.bitsandbytes.stored import (
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)

STATE = "m.weight.quant_state.bitsandbytes__nf4"
Tensors = dict[str, torch.Tensor]


def formats_of(folder, tensors):
    return read_formats(read_checkpoint(str(write_checkpoint(folder, tensors))))


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_headers_tell_type_block_and_nesting(tmp_path, quant_type, blocksize, nested, storage):
    tensors, _ = pack(
        "m",
        random_matrix(64, 256),
        quant_type=quant_type,
        blocksize=blocksize,
        nested=nested,
        storage=storage,
    )
    (found,) = formats_of(tmp_path, tensors).values()
    assert found.layout == (quant_type, blocksize, nested)
    assert found.shape == (64, 256)
    assert found.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_headers_tell_8_bit_modules(tmp_path):
    tensors, _ = pack_8bit("m", random_matrix(64, 256))
    (found,) = formats_of(tmp_path, tensors).values()
    assert found == EightBit(bytes=sum(t.nbytes for t in tensors.values()), shape=(64, 256))


def test_plain_tensors_are_no_formats(tmp_path):
    assert formats_of(tmp_path, {"m.weight": random_matrix(4, 4), "m.bias": torch.ones(4)}) == {}


def test_headers_that_cannot_be_read_tell_nothing(tmp_path):
    folder = write_checkpoint(tmp_path, {"m.weight": torch.ones(1)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert read_formats(read_checkpoint(str(folder))) is None


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("nested", "edit", "error", "words"),
    [
        (False, drop("m.weight.absmax"), CheckpointIncomplete, "lacks its absmax"),
        (False, drop("m.weight.quant_map"), CheckpointIncomplete, "lacks its quant_map"),
        (False, drop(STATE), CheckpointIncomplete, "lacks its quant_state"),
        (True, drop("m.weight.nested_absmax"), CheckpointIncomplete, "lacks its nested_absmax"),
        (True, drop("m.weight.nested_quant_map"), CheckpointIncomplete, "nested_quant_map"),
        (True, drop("m.weight.absmax"), CheckpointIncomplete, "lacks its absmax"),
        (False, drop("m.weight"), CheckpointSurplus, "statistics of a quantized weight"),
        (False, put("m.weight.zero", torch.ones(1)), CheckpointSurplus, "no known part in it"),
        (False, put("m.weight.absmax", torch.ones(7)), CheckpointIncomplete, "7 scales for 16384"),
        (False, put("m.weight", torch.ones(9, 1, dtype=torch.uint8)), CheckpointIncomplete,
         "256 scales for 18 weights"),
        (False, rename(STATE, STATE.replace("nf4", "nf3")), UnsupportedFormat, "'nf3'"),
        (False, put(STATE, torch.ones(5, dtype=torch.uint8)), WeightMismatch, "does not parse"),
        (False, put("n.SCB", torch.ones(4)), CheckpointSurplus, "scales of an 8-bit weight"),
        (False, put("n.weight", torch.ones(4, 4, dtype=torch.int8)), CheckpointIncomplete,
         "lacks its SCB"),
        (False, put("m.SCB", torch.ones(4)), CheckpointIncomplete, "do not fit together"),
    ],
)  # fmt: skip
def test_a_damaged_set_of_tensors_is_refused_by_name(tmp_path, nested, edit, error, words):
    tensors, _ = pack("m", random_matrix(64, 256), nested=nested)
    edit(tensors)
    with pytest.raises(error) as caught:
        formats_of(tmp_path, tensors)
    text = str(caught.value)
    assert words in text
    assert any(f"where: {name}" in text for name in ("m.weight", "n.SCB", "n.weight"))
    assert "fix: " in text


@pytest.mark.parametrize(
    ("raw", "error", "words"),
    [
        (b"", WeightMismatch, "0 bytes"),
        (b"\xff\xfe", WeightMismatch, "2 bytes"),
        (b"[]", WeightMismatch, "does not parse"),
        (b"{}", WeightMismatch, "quant_type"),
        (b'{"quant_type": "nf4", "blocksize": "x", "shape": [1, 2]}', WeightMismatch, "does not"),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": null}', WeightMismatch, "does not"),
        (b'{"quant_type": "nf4", "blocksize": Infinity, "shape": [1, 2]}', WeightMismatch,
         "OverflowError"),
        (b'{"quant_type": "int2", "blocksize": 64, "shape": [1, 2]}', UnsupportedFormat, "'int2'"),
        (b'{"quant_type": "nf4", "blocksize": 48, "shape": [1, 2]}', UnsupportedFormat, "48"),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": [1, 2, 3]}', UnsupportedFormat,
         "not a matrix"),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": [1, 2], "nested_blocksize": 128}',
         UnsupportedFormat, "nested_blocksize"),
    ],
)  # fmt: skip
def test_a_quant_state_that_makes_no_sense_is_refused(raw, error, words):
    with pytest.raises(error) as caught:
        parse_state(raw, "m.weight.quant_state")
    assert words in str(caught.value)
    assert "where: m.weight.quant_state" in str(caught.value)


def test_a_summary_names_block_and_double_quantization():
    summary = summarize(FourBit("fp4", 128, nested=True, bytes=10, shape=(4, 4)))
    assert (summary.format, summary.bytes, summary.shape) == ("fp4", 10, (4, 4))
    assert dict(summary.options) == {"block": "128", "double quantization": "yes"}
