"""Stored tensors of layers whose rows vLLM's model class sorts before it loads them.

It cuts every tensor of such a layer into as many equal parts as there are groups of rows. A
scale that speaks for weights of two groups would be lost or, where the count happens to
divide, go to the wrong one. So scales come as a matrix with one line for each row, which may
be sorted like the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from oot_quant.manager import backends
from oot_quant.sharding import granule
from oot_quant.types import Runs, ShardRequest
from oot_quant.vllm_glue.params import Site, to_matrix

if TYPE_CHECKING:
    import torch

    NamedTensors = Iterable[tuple[str, torch.Tensor]]


class RowKeeper:
    """Brings repeatable items, like scales, into lines of as many as a row needs.

    method: the backend's. formats: of the modules concerned, by their stored names. shape_of:
    a module's (rows, columns). rename: a stored tensor's name to its parameter's.
    """

    def __init__(
        self,
        method: str,
        formats: Mapping[str, object],
        shape_of: Callable[[str], tuple[int, int]],
        rename: Callable[[str], str | None],
    ) -> None:
        self.method, self.formats = method, formats
        self.shape_of, self.rename = shape_of, rename

    def __call__(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            module, _, parameter = (self.rename(name) or "").rpartition(".")
            if module in self.formats:
                yield name, self._in_rows(module, parameter, tensor)
            else:
                yield name, tensor

    def _in_rows(self, module: str, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = self.shape_of(module)
        request = ShardRequest(self.method, self.formats[module], columns)
        rules = backends().call(self.method, "oot_quant_shard_rule", request=request)
        layout = {rule.name: rule.layout for rule in rules}.get(parameter)
        if not isinstance(layout, Runs) or not layout.repeatable:
            return tensor
        size = granule(layout, columns, columns)
        return to_matrix(tensor, layout, Site(f"{module}.{parameter}", rows, columns), size)
