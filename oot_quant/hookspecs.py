"""Every hook that a backend can implement. This file is the manual.

A backend is a Python module, named in the entry-point group ``oot_quant.backends``, whose
functions carry ``oot_quant.hookimpl``. Two kinds of hooks:

* **Broadcast**: every backend is asked and the answers are gathered.
* **Addressed**: only the backend that serves the quantization method at hand is asked, so
  nobody can answer for a method that is not theirs.

When a model is served, the hooks run in this order: ``oot_quant_describe`` and
``oot_quant_config`` when vLLM starts (in every process), ``oot_quant_read_formats`` when the
engine is configured, ``oot_quant_linear_method`` and ``oot_quant_moe_method`` while the model
is built, each followed by ``oot_quant_shard_rule`` for the parameters,
``oot_quant_weight_names`` when weights are streamed. Nothing is looked up in the forward
pass. A hook may take fewer arguments than its specification.

Every docstring has five parts: what the hook decides; when it is called and how often; its
arguments; what it returns, and what None means; what it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from oot_quant.types import (
    BackendInfo,
    Check,
    LinearRequest,
    ModuleSummary,
    MoeRequest,
    NameRule,
    ParameterRule,
    ShardRequest,
)

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearMethodBase

    from oot_quant.checkpoint import Checkpoint
    from oot_quant.vllm_glue.config import PluginConfig

PROJECT = "oot_quant"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------- broadcast


@hookspec
def oot_quant_describe() -> BackendInfo:
    """Say who this backend is. Required.

    Called once for each process, when backends are discovered; also by ``oot-quant list``.

    No arguments. It must not import torch, vLLM or the quantization library: ``list`` runs
    where they are missing.

    Returns the backend's name, the methods it serves, its formats, platforms and library.
    None is not allowed.

    Raises nothing; an exception marks the backend as failed, with the exception as reason.
    """
    raise NotImplementedError


@hookspec
def oot_quant_checks() -> Sequence[Check]:
    """Add rows to the doctor's table of checks.

    Called once for each run of ``oot-quant doctor``.

    No arguments. Ids must begin with ``backend.<name>.``; the doctor sets the group. The
    hook itself imports nothing heavy: that is what a check's ``probe`` is for.

    Returns the checks in the order in which they are shown; an empty sequence for none.

    Raises nothing; an exception becomes a result with status ``error``.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- addressed


@hookspec(firstresult=True)
def oot_quant_config(method: str) -> type[PluginConfig]:
    """Give the configuration class for a method: config registration. Required.

    Called once for each method and process, when vLLM loads its plugins.

    method: the name that vLLM's ``quantization=`` takes.

    Returns a subclass of ``oot_quant.vllm_glue.config.PluginConfig``. None is not allowed.

    Raises OotQuantError if the method cannot be served in this environment; the method is
    then registered with a stand-in that repeats the reason to whoever asks for it.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_read_formats(checkpoint: Checkpoint) -> Mapping[str, object] | None:
    """Tell from a checkpoint's headers which modules are quantized, and how.

    Called once for each engine, in the front end, before a model is built; also by the
    doctor. No weight has been read.

    checkpoint: names, dtypes, shapes and files of all stored tensors.

    Returns the format of every quantized module, by module name as stored (no ``.weight``);
    a format is any object the backend likes. An empty mapping: nothing here is quantized,
    so the method works in flight. None: the headers cannot tell, go by the config.

    Raises CheckpointIncomplete, CheckpointSurplus or UnsupportedFormat, naming the tensor.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_summarize_format(format: object) -> ModuleSummary:
    """Describe one module's format for people.

    Called by the doctor for each module that ``oot_quant_read_formats`` returned.

    format: one value of that mapping.

    Returns the format's name, stored bytes, options and, where known, the unpacked shape.
    None is not allowed.

    Raises nothing.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_weight_names(method: str) -> Sequence[NameRule]:
    """Map stored tensor names to parameters: weight iteration for streamed formats.

    Called when vLLM starts to stream weights, once for each load.

    method: the quantization method.

    Returns suffix rules, applied to vLLM's own stream of ``(name, tensor)``; order does not
    matter, since one suffix must not be the end of another. None: names stay as they are.

    Raises nothing.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_iterate_weights(
    method: str, files: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read weights from a container that vLLM cannot read: weight iteration for files.

    Optional; only for formats that are not safetensors or PyTorch files. Nothing calls it
    yet: it waits for the first backend with such a container.

    method: the quantization method. files: paths of the container's files, in order.

    Yields ``(name, tensor)`` with Hugging Face names. None: vLLM reads the files itself.

    Raises CheckpointUnreadable, naming the file.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_shard_rule(request: ShardRequest) -> Sequence[ParameterRule]:
    """Say how a packed weight is laid out: shard indexing.

    Called once for each layer while the model is built, and by the doctor to see whether a
    tensor-parallel size works; integers only, no tensors.

    request.format: how the module is stored; request.columns: the unpacked weight's input
    width over all ranks, in elements.

    Returns the layer's parameters. The framework allocates each rank's part, and slices,
    repeats or refuses what arrives so that every rank gets exactly its share. None is not
    allowed.

    Raises UnsupportedFormat. Never rounds.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_linear_method(request: LinearRequest) -> LinearMethodBase | None:
    """Give a linear layer its method.

    Called once for each linear layer of the model, on every rank.

    request.layer: vLLM's layer under construction; request.prefix: its name;
    request.members: the modules that it merges; request.config: the engine's config, with
    the formats found in the checkpoint.

    Returns a linear method. None: this layer stays unquantized.

    Raises OotQuantError if the layer's format cannot be served, naming the layer.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def oot_quant_moe_method(request: MoeRequest) -> FusedMoEMethodBase | None:
    """Give a layer of routed experts its method: MoE handling.

    Called once for each expert layer of the model, on every rank.

    request: as for ``oot_quant_linear_method``.

    Returns a fused-MoE method; ``vllm_glue.experts.experts_method`` makes one of the backend's
    linear methods. None: the experts stay as they are stored.

    Raises OotQuantError if packed experts cannot be served, naming the layer.
    """
    raise NotImplementedError


def required_hooks() -> frozenset[str]:
    """The hooks that every backend must implement."""
    return frozenset({"oot_quant_describe", "oot_quant_config"})


def all_hooks() -> Mapping[str, Any]:
    """Every hook of this file, by name, in order."""
    return {name: value for name, value in globals().items() if name.startswith("oot_quant_")}
