"""How bitsandbytes stores a quantized weight, and which modules of a checkpoint are stored so.

A 4-bit module ``m`` (``bitsandbytes.functional.QuantState.as_dict(packed=True)``) is

* ``m.weight``: the codes, two in each byte, high nibble first, flat; viewed as any storage
  dtype, so a float32 storage has an eighth as many elements as there are weights;
* ``m.weight.absmax``: the scale of each block, float32, or uint8 when quantized again;
* ``m.weight.quant_map``: the 16 values that the codes stand for;
* ``m.weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``): the rest as JSON in bytes;
* with double quantization, ``nested_absmax`` and ``nested_quant_map`` of the scales.

All of it but the JSON's content can be told from names, dtypes and shapes.

An 8-bit module (``bitsandbytes.nn.Linear8bitLt``) is ``m.weight`` int8 [rows, columns],
``m.SCB`` float32 [rows], the largest weight of each row, which is stored as 127, and
``m.weight_format``, a code for the layout, 0 for plain rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oot_quant.errors import (
    CheckpointIncomplete,
    CheckpointSurplus,
    UnsupportedFormat,
    WeightMismatch,
)
from oot_quant.types import ModuleSummary

if TYPE_CHECKING:
    from oot_quant.checkpoint import Checkpoint, StoredTensor

QUANT_TYPES = ("nf4", "fp4")
BLOCKSIZES = (64, 32, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes offers, the usual one first."""
NESTED_BLOCKSIZE = 256
STATE = "quant_state.bitsandbytes__"
SIDE_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
ROW_LAYOUT = 0


@dataclass(frozen=True)
class FourBit:
    """A 4-bit module. ``blocksize`` is weights for each scale; ``bytes`` is all of it on disk.

    ``shape`` is (out_features, in_features), known where the JSON could be read.
    """

    quant_type: str
    blocksize: int
    nested: bool
    bytes: int = 0
    shape: tuple[int, int] | None = None

    @property
    def layout(self) -> tuple[str, int, bool]:
        """What decides how the parameters look; equal for modules that can be merged."""
        return (self.quant_type, self.blocksize, self.nested)


@dataclass(frozen=True)
class EightBit:
    """An 8-bit module; the fields are as in ``FourBit``."""

    bytes: int = 0
    shape: tuple[int, int] | None = None

    @property
    def layout(self) -> tuple[str, int, bool]:
        """All 8-bit modules can be merged with each other."""
        return ("int8", 0, False)


def read_formats(checkpoint: Checkpoint) -> Mapping[str, object] | None:
    """Which modules of a checkpoint are quantized; None if its headers cannot be read.

    Raises CheckpointIncomplete for a quantized weight without one of its tensors,
    CheckpointSurplus for a side tensor without a weight, UnsupportedFormat for unknown types.
    """
    if not checkpoint.readable:
        return None
    tensors = checkpoint.tensors
    eight_bit = [name.removesuffix(".SCB") for name in tensors if name.endswith(".SCB")]
    sides = _side_tensors(tensors)
    _check_int8_weights(tensors, eight_bit)
    return {
        **{module: _eight_bit(checkpoint, module) for module in eight_bit},
        **{module: _four_bit(checkpoint, module, side) for module, side in sides.items()},
    }


def summarize(format: object) -> ModuleSummary:
    """One module's format for people."""
    if isinstance(format, EightBit):
        return ModuleSummary("int8", format.bytes, {}, format.shape)
    assert isinstance(format, FourBit)
    options = {"block": str(format.blocksize)}
    if format.nested:
        options["double quantization"] = "yes"
    return ModuleSummary(format.quant_type, format.bytes, options, format.shape)


def label(format: object) -> str:
    """One module's format in a few words, for messages; anything else is unquantized."""
    if isinstance(format, EightBit):
        return "int8"
    if not isinstance(format, FourBit):
        return "unquantized"
    nested = ", double quantization" if format.nested else ""
    return f"{format.quant_type}, blocks of {format.blocksize}{nested}"


def parse_state(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON of a quant state, with the fields that loading needs checked.

    Raises WeightMismatch if it does not parse or lacks a field, UnsupportedFormat for a
    quant type or block size that bitsandbytes does not have.
    """
    try:
        state = json.loads(raw)
        parsed: dict[str, Any] = {
            "quant_type": str(state["quant_type"]),
            "blocksize": int(state["blocksize"]),
            "shape": tuple(int(n) for n in state["shape"]),
            "nested_offset": float(state.get("nested_offset", 0.0)),
            "nested_blocksize": int(state.get("nested_blocksize", NESTED_BLOCKSIZE)),
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WeightMismatch(
            "a quant state does not parse",
            where=where,
            found=f"{len(raw)} bytes, {type(error).__name__}: {error}",
            needed="JSON with quant_type, blocksize and shape",
            fix="save the checkpoint again with the library that wrote it",
        ) from error
    _check_known(parsed, where)
    return parsed


def _check_known(state: Mapping[str, Any], where: str) -> None:
    wrong = {
        "quant_type": (state["quant_type"], QUANT_TYPES),
        "blocksize": (state["blocksize"], tuple(sorted(BLOCKSIZES))),
        "nested_blocksize": (state["nested_blocksize"], (NESTED_BLOCKSIZE,)),
    }
    for field, (found, known) in wrong.items():
        if found not in known:
            raise UnsupportedFormat(
                f"a quant state has an unknown {field}",
                where=where,
                found=repr(found),
                needed=f"one of: {', '.join(map(str, known))}",
                fix="quantize the model again with bitsandbytes 0.50 or newer",
            )
    if len(state["shape"]) != 2:
        raise UnsupportedFormat(
            "a packed weight is not a matrix",
            where=where,
            found=f"shape {list(state['shape'])}",
            needed="two dimensions, (out_features, in_features)",
            fix="use a checkpoint in which only linear layers are quantized",
        )


def _side_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Side tensors by module and by what they are, as in ``{"absmax": ...}``."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, found, side = name.rpartition(".weight.")
        if not found:
            continue
        if side not in SIDE_TENSORS and not side.startswith(STATE):
            raise CheckpointSurplus(
                "a tensor belongs to a weight but has no known part in it",
                where=name,
                found=f"side tensor {side!r}",
                needed=f"one of: {', '.join(SIDE_TENSORS)}, {STATE}<type>",
                fix="remove the tensor, or save the checkpoint again",
            )
        key = "state" if side.startswith(STATE) else side
        sides.setdefault(module, {})[key] = tensor
    return sides


def _eight_bit(checkpoint: Checkpoint, module: str) -> EightBit:
    tensors = checkpoint.tensors
    weight, scb = tensors.get(f"{module}.weight"), tensors[f"{module}.SCB"]
    if weight is None:
        raise CheckpointSurplus(
            "scales of an 8-bit weight that is not there",
            where=scb.name,
            needed=f"the tensor {module}.weight",
            fix="download or save the checkpoint again",
        )
    if weight.dtype != "I8" or len(weight.shape) != 2 or scb.elements != weight.shape[0]:
        raise CheckpointIncomplete(
            "an 8-bit weight and its scales do not fit together",
            where=weight.name,
            found=f"{weight.dtype} of shape {list(weight.shape)}, {scb.elements} scales",
            needed="an I8 matrix, and one scale for each row",
            fix="download or save the checkpoint again",
        )
    layout = tensors.get(f"{module}.weight_format")
    total = weight.bytes + scb.bytes + (layout.bytes if layout else 0)
    return EightBit(total, (weight.shape[0], weight.shape[1]))


def _check_int8_weights(tensors: Mapping[str, StoredTensor], eight_bit: list[str]) -> None:
    """Raise CheckpointIncomplete for int8 matrices that nobody would know how to scale."""
    known = {f"{module}.weight" for module in eight_bit}
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype == "I8" and name not in known:
            raise CheckpointIncomplete(
                "an 8-bit weight lacks its SCB",
                where=name,
                found=f"{tensor.dtype} of shape {list(tensor.shape)}, no scales",
                needed=f"{name.removesuffix('weight')}SCB, one scale for each row",
                fix="download or save the checkpoint again",
            )


def _four_bit(checkpoint: Checkpoint, module: str, side: dict[str, StoredTensor]) -> FourBit:
    weight = checkpoint.tensors.get(f"{module}.weight")
    if weight is None:
        raise CheckpointSurplus(
            "statistics of a quantized weight that is not there",
            where=next(iter(side.values())).name,
            needed=f"the tensor {module}.weight",
            fix="download or save the checkpoint again",
        )
    nested = side["absmax"].dtype == "U8" if "absmax" in side else "nested_absmax" in side
    needed = ["absmax", "quant_map", "state"]
    needed += ["nested_absmax", "nested_quant_map"] if nested else []
    for part in needed:
        if part not in side:
            raise CheckpointIncomplete(
                f"a quantized weight lacks its {'quant_state' if part == 'state' else part}",
                where=f"{module}.weight",
                found=f"only {', '.join(sorted(side))}",
                needed=", ".join("quant_state" if p == "state" else p for p in needed),
                fix="download or save the checkpoint again",
            )
    quant_type = side["state"].name.rpartition("__")[2]
    if quant_type not in QUANT_TYPES:
        raise UnsupportedFormat(
            "unknown 4-bit quant type",
            where=side["state"].name,
            found=repr(quant_type),
            needed=f"one of: {', '.join(QUANT_TYPES)}",
            fix="quantize the model again as nf4 or fp4",
        )
    raw = checkpoint.read(side["state"].name)
    state = parse_state(raw, side["state"].name) if raw is not None else None
    total = weight.bytes + sum(tensor.bytes for tensor in side.values())
    blocksize = _blocksize(weight, side["absmax"], state)
    shape = state["shape"] if state else None
    return FourBit(quant_type, blocksize, nested, total, shape)


def _blocksize(weight: StoredTensor, absmax: StoredTensor, state: Mapping[str, Any] | None) -> int:
    """Weights for each scale, from the counts of both; the JSON, where read, must agree."""
    weights = 2 * weight.bytes
    fitting = [size for size in BLOCKSIZES if -(-weights // size) == absmax.elements]
    if state is not None and state["blocksize"] in fitting:
        return int(state["blocksize"])
    if not fitting or state is not None:
        wanted = f"blocks of {state['blocksize']}" if state else "blocks of 32 to 4096"
        raise CheckpointIncomplete(
            "a quantized weight and its scales do not fit together",
            where=absmax.name,
            found=f"{absmax.elements} scales for {weights} weights",
            needed=f"one scale for each block, {wanted}",
            fix="download or save the checkpoint again",
        )
    return fitting[0]
