"""Names of stored tensors and of layers, where vLLM's model classes do not bring them together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import WeightsMapper

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def accept_stored_names(layer: LinearBase, mapper: WeightsMapper) -> None:
    """Let a layer take its own tensors under their stored names too.

    vLLM renames them for a whole model, but only if the model's class, or one of its direct
    children, keeps its quantization config as an attribute; Mamba-2 does not.
    """
    reference = weakref.ref(layer)

    def load_weights(weights: NamedTensors) -> Iterable[str]:
        layer = reference()
        assert layer is not None, "a loader outlived its layer"
        load = getattr(type(layer), "load_weights", _load_parameters)
        # Suffixes in the mapper start with a dot, as they do in a whole name.
        renamed = mapper.apply((f".{name}", tensor) for name, tensor in weights)
        yield from load(layer, ((name[1:], tensor) for name, tensor in renamed))

    layer.load_weights = load_weights


def renamed_tensor(mapper: WeightsMapper, name: str) -> str | None:
    """What a mapper of vLLM calls a stored tensor; None if it drops it."""
    # vLLM 0.28 to 0.30 call it _map_name.
    rename = getattr(mapper, "map_name", None) or mapper._map_name  # noqa: SLF001
    new: str | None = rename(name)
    return new


def renamed_module(mapper: WeightsMapper, module: str) -> str | None:
    """What it would call a module, by its weight."""
    new = renamed_tensor(mapper, f"{module}.weight")
    return None if new is None else new.removesuffix(".weight")


def stacked_members(prefix: str) -> tuple[str, ...]:
    """Names of the matrices that a layer merges, by its model's table of stacked weights.

    That table is what vLLM loads by. Empty if it does not name the layer.
    """
    mapper = getattr(_model_class(), "hf_to_vllm_mapper", None)
    stacked = getattr(mapper, "orig_to_new_stacked", {})
    return tuple(
        f"{prefix.removesuffix(merged.strip('.'))}{member.strip('.')}"
        for member, (merged, _) in stacked.items()
        if f".{prefix}".endswith(f".{merged.strip('.')}")
    )


def stored_group(parent: str, parts: Sequence[str], stored: AbstractSet[str]) -> tuple[str, ...]:
    """Names of the matrices that a layer merges, as they are stored.

    They are its neighbours by name, as a rule. vLLM's BERT calls its layer
    ``attention.output.qkv_proj`` while it is, and is loaded, in ``attention.self``: the only
    group with these parts in the nearest surrounding module is meant then.
    """
    own = tuple(f"{parent}.{part}".removeprefix(".") for part in parts)
    around = parent
    while stored.isdisjoint(own) and _is_numbered(around):
        around = around.rpartition(".")[0]
        inside = {name.rpartition(".")[0] for name in stored if name.startswith(f"{around}.")}
        groups = [tuple(f"{module}.{part}" for part in parts) for module in inside]
        found = [group for group in groups if stored >= set(group)]
        if found:
            return found[0] if len(found) == 1 and _is_numbered(around) else own
    return own


def other_root(name: str, stored: AbstractSet[str]) -> tuple[str, str] | None:
    """How the stored names begin, and how vLLM's do, if nothing is stored under vLLM's root.

    Base models are saved without the ``model.`` that vLLM adds when it embeds with them. Where a
    layer's own name is not stored, the module around it tells: BERT's first layer is a merged
    and misspelt one (see ``stored_group``), which vLLM 0.28 to 0.31 do not rename.
    """
    if any(module.startswith(f"{name.partition('.')[0]}.") for module in stored):
        return None
    parent = name.rpartition(".")[0]
    around = {module.rpartition(".")[0] for module in stored}
    ends_with_number = parent.rpartition(".")[2].isdigit()
    return _root(name, stored) or (None if ends_with_number else _root(parent, around))


def _root(name: str, stored: AbstractSet[str]) -> tuple[str, str] | None:
    """How the only stored name with the same numbered end begins, and how this one does."""
    rest = name.split(".")
    while _is_numbered(".".join(rest)) and not rest[0].isdigit():
        tail = ".".join(rest)
        matches = [module for module in stored if f".{module}".endswith(f".{tail}")]
        if matches:
            roots = matches[0].removesuffix(tail), name.removesuffix(tail)
            return roots if len(matches) == 1 else None
        del rest[0]
    return None


def model_class_name() -> str:
    """The class of the model that is being built, for messages."""
    found = _model_class()
    return "the model class" if found is None else found.__name__


def _model_class() -> type | None:
    from vllm.model_executor.model_loader.utils import get_model_architecture

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    found: type = get_model_architecture(config.model_config)[0]
    return found


def _is_numbered(module: str) -> bool:
    """Whether a name belongs to one layer of the model, as ``layers.0.mlp`` does."""
    return any(part.isdigit() for part in module.split("."))


def _load_parameters(layer: LinearBase, weights: NamedTensors) -> Iterator[str]:
    """Give tensors to the parameters of the same names; only vLLM's merged layers do."""
    for name, tensor in weights:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
        yield name
