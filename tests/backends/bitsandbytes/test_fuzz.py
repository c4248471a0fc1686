"""Whatever a file holds, reading it ends in a result or in an error with a code."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oot_quant.checkpoint import Checkpoint, StoredTensor, read_header
from oot_quant.errors import OotQuantError
from oot_quant_backends.bitsandbytes.formats import parse_state, read_formats
from oot_quant_backends.bitsandbytes.options import parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "I8", "??", "", "BF16"]) | JSON,
        "shape": st.lists(st.integers(-2, 2**40), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-5, 2**40), max_size=3) | JSON,
    },
)
NAMES = st.sampled_from(
    [
        "m.weight",
        "m.weight.absmax",
        "m.weight.quant_map",
        "m.weight.nested_absmax",
        "m.weight.nested_quant_map",
        "m.weight.quant_state.bitsandbytes__nf4",
        "m.weight.quant_state.bitsandbytes__x",
        "m.weight.unknown",
        "m.SCB",
        "m.weight_format",
        ".weight.",
        "",
    ]
)
STATE = st.fixed_dictionaries(
    {},
    optional={
        "quant_type": st.sampled_from(["nf4", "fp4", "x"]) | JSON,
        "blocksize": st.sampled_from([64, 0, -1]) | JSON,
        "shape": st.lists(st.integers(-2, 2**40), max_size=3) | JSON,
        "nested_offset": JSON,
        "nested_blocksize": JSON,
    },
)
OPTIONS = st.dictionaries(
    st.sampled_from(
        ["load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_blocksize",
         "llm_int8_skip_modules", "bnb_4bit_use_double_quant", "other"]
    ),
    JSON,
)  # fmt: skip
ROUNDS = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def ends_well(call, *arguments):
    """Either a result or an error that names what is wrong."""
    try:
        return call(*arguments)
    except OotQuantError as error:
        assert str(error).startswith(f"{error.code}: ")  # noqa: PT017 - any error is fine
        return None


@ROUNDS
@given(raw=st.binary(max_size=64), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_file(tmp_path: Path, raw: bytes, length: int | None):
    path = tmp_path / "model.safetensors"
    start = b"" if length is None else length.to_bytes(8, "little")
    path.write_bytes(start + raw)
    ends_well(read_header, path)


@ROUNDS
@given(header=JSON | st.dictionaries(NAMES, ENTRY, max_size=4), data=st.binary(max_size=32))
def test_any_json_as_a_header(tmp_path: Path, header: object, data: bytes):
    path = tmp_path / "model.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = ends_well(read_header, path)
    for tensor in (found or {}).values():
        assert tensor.start + tensor.bytes <= path.stat().st_size


@ROUNDS
@given(state=JSON | STATE)
def test_any_json_as_a_quant_state(state: object):
    found = ends_well(parse_state, json.dumps(state).encode(), "m.weight.quant_state")
    assert found is None or found["quant_type"] in {"nf4", "fp4"}


@ROUNDS
@given(raw=st.binary(max_size=64))
def test_any_bytes_as_a_quant_state(raw: bytes):
    ends_well(parse_state, raw, "m.weight.quant_state")


@ROUNDS
@given(
    headers=st.dictionaries(
        NAMES,
        st.tuples(
            st.sampled_from(["U8", "F32", "I8", "BF16", "??"]),
            st.lists(st.integers(0, 512), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_set_of_tensors_as_a_checkpoint(headers: dict[str, tuple[str, list[int]]]):
    tensors = {
        name: StoredTensor(name, dtype, tuple(shape), "model.safetensors", 0)
        for name, (dtype, shape) in headers.items()
    }
    ends_well(read_formats, Checkpoint("m", None, {}, tensors))


@ROUNDS
@given(section=OPTIONS)
def test_any_values_as_options(section: dict[str, object]):
    ends_well(parse, section)
