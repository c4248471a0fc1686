"""Layers that find no weight in the checkpoint although they must have one: refused by name.

For quantized models vLLM does not check that every parameter was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vllm.model_executor.layers.linear import LinearBase

from oot_quant.errors import CheckpointIncomplete, UnsupportedFormat
from oot_quant.vllm_glue.names import model_class_name


class Namesakes:
    """Layers that differ in nothing but a number, and whether they have stored weights."""

    def __init__(self) -> None:
        self._seen: dict[str, set[bool]] = {}
        self._without: dict[str, tuple[str, Sequence[str]]] = {}

    def note(self, prefix: str, members: Sequence[str], *, is_stored: bool) -> None:
        """Note one more layer, and the names of the matrices that it merges.

        Raises CheckpointIncomplete if it or a namesake has no weight while the other has.
        """
        kind = re.sub(r"\d+", "*", prefix)
        seen = self._seen.setdefault(kind, set())
        seen.add(is_stored)
        if not is_stored:
            self._without.setdefault(kind, (prefix, members))
        if seen == {True, False}:
            layer, matrices = self._without[kind]
            raise CheckpointIncomplete(
                "the checkpoint has no weight for a layer",
                where=layer,
                needed=", ".join(f"{name}.weight" for name in matrices),
                fix="download or save the checkpoint again",
            )


def refuse_unnamed_members(
    layer: LinearBase, prefix: str, formats: Iterable[str], packed: Mapping[str, Sequence[str]]
) -> None:
    """Raise if nobody says which of the packed matrices beside it a layer merges.

    formats: names of quantized modules; packed: ``packed_modules_mapping`` of the model's class.
    """
    parent, _, name = prefix.rpartition(".")
    beside = [module for module in formats if module.rpartition(".")[0] == parent]
    if beside and len(getattr(layer, "output_sizes", ())) > 1:
        raise UnsupportedFormat(
            "the model class does not say which stored matrices one of its layers merges",
            where=prefix,
            found=f"{model_class_name()}.packed_modules_mapping has "
            f"{packed.get(name, 'no entry')} for {name!r}; "
            f"quantized beside it: {', '.join(beside)}",
            needed="their names, which decide how the layer is quantized",
            fix=f"correct the entry {name!r} in that class, or use a 16-bit checkpoint",
        )
