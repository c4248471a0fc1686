"""Modules that are stored quantized while vLLM builds their layer without quantization.

It does so in parts of some models, towers for images and sound above all. Such a layer asks
nobody for a method and takes plain weights only, so they are unpacked on the way to it, and a
notice says what that costs. Which modules these are is known once the model is built: those
that no layer has claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import WeightsMapper

from oot_quant.errors import CheckpointIncomplete, UnsupportedFormat
from oot_quant.manager import backends

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    from oot_quant.types import ModuleSummary
    from oot_quant.vllm_glue.config import PluginConfig

logger = init_logger("vllm.oot_quant")
NamedTensors = Iterable[tuple[str, torch.Tensor]]
NAMES_SHOWN = 5
MIB = 2**20


@dataclass(frozen=True)
class Piece:
    """One tensor of a quantized module.

    ``module`` is the module's stored name, ``name`` what it goes by in the stream, ``suffix``
    what follows that in the tensor's name.
    """

    module: str
    name: str
    suffix: str


class Claims:
    """Which of a checkpoint's quantized modules have found a layer.

    A module goes by the name that it is stored under and by those that vLLM gives it.
    ``formats`` are the backend's, by stored names.
    """

    def __init__(self, formats: Mapping[str, object], tensors: Iterable[str] = ()) -> None:
        self.formats = dict(formats)
        self.names = {module: {module} for module in formats}
        self.suffixes: dict[str, set[str]] = {module: set() for module in self.names}
        self._claimed: set[str] = set()
        self._claimed_below: set[str] = set()
        for tensor in tensors:
            module = _owner(tensor, self.names)
            if module and tensor != f"{module}.bias":
                self.suffixes[module].add(tensor.removeprefix(module))

    def rename(self, rename: Callable[[str], str | None]) -> None:
        """Know each module by what ``rename`` makes of its names too; None adds nothing."""
        for names in self.names.values():
            names.update([new for name in names if (new := rename(name))])

    def claim(self, names: Iterable[str]) -> None:
        """Note that a layer takes these modules as they are stored."""
        self._claimed.update(names)

    def claim_below(self, name: str) -> None:
        """Note that all modules inside this one are taken, as routed experts are."""
        self._claimed_below.add(f"{name}.")

    def claim_beside(self, name: str) -> None:
        """Note that all modules next to this one are taken."""
        self._claimed_below.add(name[: name.rfind(".") + 1])

    def unclaimed(self) -> dict[str, Piece]:
        """The tensors that no layer takes as they are, by each name that they may come under."""
        return {
            f"{name}{suffix}": Piece(module, name, suffix)
            for module, names in self.names.items()
            if not self._is_claimed(names)
            for name in names
            for suffix in self.suffixes[module]
        }

    def _is_claimed(self, names: set[str]) -> bool:
        below = tuple(self._claimed_below)
        return not names.isdisjoint(self._claimed) or any(n.startswith(below) for n in names)


@dataclass(frozen=True)
class Packed:
    """A module's weight as it is stored: its shape once unpacked, the bytes of all its tensors."""

    module: str
    shape: tuple[int, int]
    bytes: int


class Unpacked(torch.Tensor):
    """A weight that is unpacked when somebody computes with it or copies it.

    Many are never asked for: layers of another pipeline rank, of a draft, of a tower that the
    engine was told to leave out.
    """

    make: Callable[[], torch.Tensor]
    made: torch.Tensor | None = None

    @classmethod
    def later(cls, shape: tuple[int, int], make: Callable[[], torch.Tensor]) -> Unpacked:
        """A weight of this shape, in torch's default dtype, which is the model's while it loads."""
        # Torch offers no other way to make a tensor without data that acts on being used.
        new = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        tensor: Unpacked = new(cls, shape, dtype=torch.get_default_dtype())
        tensor.make = make
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # declared without its first argument
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


class Unpacker:
    """Puts one plain weight in the place of a module's tensors, where no layer takes those.

    claims: complete by the time of the first tensor. read_again: the formats of the
    checkpoint's modules with their shapes, which a first look over the network does not show.
    """

    def __init__(
        self, config: PluginConfig, claims: Claims, read_again: Callable[[], Mapping[str, object]]
    ) -> None:
        self.config, self.claims, self.read_again = config, claims, lru_cache(read_again)
        self.packed = lru_cache(maxsize=None)(self._packed)

    def __call__(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream of stored tensors, in any order, as vLLM's layers can take them.

        Raises CheckpointIncomplete if only some of a module's tensors come.
        """
        pieces: dict[str, Piece] | None = None
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        extra: dict[str, int] = {}
        for name, tensor in weights:
            if pieces is None:
                pieces = self.claims.unclaimed()
            piece = pieces.get(name)
            if piece is None or _is_plain(tensor, self.packed(piece.module)):
                yield name, tensor
                continue
            here = waiting.setdefault(piece.name, {})
            here[piece.suffix] = tensor
            if len(here) == len(self.claims.suffixes[piece.module]):
                del waiting[piece.name]
                yield f"{piece.name}.weight", self._later(self.packed(piece.module), here, extra)
        for name, here in waiting.items():
            raise CheckpointIncomplete(
                "some tensors of a quantized module did not come",
                where=name,
                found=f"only {', '.join(sorted(here))}",
                needed="all of them, to unpack a weight for a layer that takes plain ones",
                fix="download or save the checkpoint again",
            )
        self._notify(extra)

    def shape_of(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight, by its stored name."""
        return self.packed(module).shape

    def _packed(self, module: str) -> Packed:
        summary = self._summary(self.claims.formats[module])
        if summary.shape is None:
            summary = self._summary(self.read_again().get(module, self.claims.formats[module]))
        if summary.shape is None:
            raise UnsupportedFormat(
                "vLLM does not take a quantized module as it is stored, and the module's shape "
                "is not known",
                where=module,
                needed="the checkpoint's files on this machine, whose quant states tell it",
                fix="download the model and give its folder",
            )
        return Packed(module, summary.shape, summary.bytes)

    def _summary(self, form: object) -> ModuleSummary:
        summary: ModuleSummary = backends().call(
            self.config.method, "oot_quant_summarize_format", format=form
        )
        return summary

    def _later(
        self, packed: Packed, tensors: Mapping[str, torch.Tensor], extra: dict[str, int]
    ) -> torch.Tensor:
        dtype = torch.get_default_dtype()

        def make() -> torch.Tensor:
            weight = self._unpack(packed, tensors).to(dtype)
            extra[packed.module] = weight.nbytes - packed.bytes
            return weight

        return Unpacked.later(packed.shape, make)

    def _unpack(self, packed: Packed, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight in float32. tensors: by what follows the module's name in theirs.

        A layer of vLLM made for the purpose does it, as it does with any stored weight.
        """
        rows, columns = packed.shape
        known = [name for name in self.claims.names[packed.module] if name in self.config.formats]
        with torch.device("cpu"):
            layer = ReplicatedLinear(
                columns, rows, bias=False, params_dtype=torch.float32, disable_tp=True,
                quant_config=_OneMethod(self.config.linear_method), prefix=known[0],
            )  # fmt: skip
            list(layer.load_weights((suffix[1:], t.cpu()) for suffix, t in tensors.items()))
            weight: torch.Tensor = layer.quant_method.dequantize_weight(layer)
        return weight

    def _notify(self, extra: Mapping[str, int]) -> None:
        """Say which modules were unpacked, and how many bytes more they take now."""
        if not extra:
            return
        names = ", ".join(list(extra)[:NAMES_SHOWN])
        more = len(extra) - NAMES_SHOWN
        logger.warning(
            "%s: vLLM builds %d layers without quantization that are stored quantized, so their "
            "weights are unpacked and take %.1f MiB more: %s%s.",
            self.config.method,
            len(extra),
            sum(extra.values()) / MIB,
            names,
            f" and {more} more" if more > 0 else "",
        )


@dataclass
class UnpackingMapper(WeightsMapper):  # type: ignore[misc]
    """Renames stored tensors, after what has to be unpacked has been; merging keeps that."""

    unpacker: Callable[[NamedTensors], NamedTensors] | None = None

    def __or__(self, other: WeightsMapper) -> UnpackingMapper:
        return self._merged(super().__or__(other))

    def __ror__(self, other: WeightsMapper) -> UnpackingMapper:
        # Python asks the right-hand side first when its class is derived from the other's.
        return self._merged(WeightsMapper.__or__(other, self))

    def apply(self, weights: NamedTensors) -> NamedTensors:
        plain = self.unpacker(weights) if self.unpacker else weights
        renamed: NamedTensors = super().apply(plain)
        return renamed

    def _merged(self, mapper: WeightsMapper) -> UnpackingMapper:
        rules = {field.name: getattr(mapper, field.name) for field in fields(WeightsMapper)}
        return UnpackingMapper(**rules, unpacker=self.unpacker)


@dataclass(frozen=True)
class _OneMethod:
    """All that a layer asks of a quantization config."""

    get_quant_method: Callable[[torch.nn.Module, str], QuantizeMethodBase | None]
    online_quantization_config: None = None


def _owner(tensor: str, modules: Mapping[str, Any]) -> str | None:
    """The module that a stored tensor belongs to."""
    name = tensor
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def _is_plain(tensor: torch.Tensor, packed: Packed) -> bool:
    """Whether a tensor is a weight already, as whoever pushes new weights may send it."""
    return tensor.is_floating_point() and tuple(tensor.shape) == packed.shape


def _made(value: Any) -> Any:
    if not isinstance(value, Unpacked):
        return value
    if value.made is None:
        value.made = value.make()
    return value.made
