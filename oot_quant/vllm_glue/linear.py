"""The two ways in which a quantized linear layer gets its weight: stored, or made in flight.

A backend writes one class that computes (``apply`` and ``dequantize``) and mixes it
with each of the two below. Both leave the layer with the same final parameters, so that
saving, reloading and computing know one form only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.parameter import ModelWeightParameter

from oot_quant.errors import CheckpointIncomplete
from oot_quant.manager import backends
from oot_quant.types import ParameterRule, ShardRequest
from oot_quant.vllm_glue.host_memory import release_freed
from oot_quant.vllm_glue.params import (
    Decoder,
    LayerShape,
    check_filled,
    create_parameters,
    load_plain_weight,
    shard_members,
)

try:
    from vllm.model_executor.utils import is_weights_pre_processed
except ImportError:  # before vLLM 0.30, which brought the weight cache

    def is_weights_pre_processed() -> bool:
        return False


if TYPE_CHECKING:
    from oot_quant.checkpoint import StoredTensor

    Parameters = Mapping[str, torch.Tensor]

TORCH_DTYPE = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Dtypes of finished parameters, by safetensors' name."""
PROCESSED = "_already_called_process_weights_after_loading"
"""Set on a processed layer. vLLM's reload deletes the attribute of just this name."""


def is_dummy_load() -> bool:
    """Whether vLLM fills parameters with random numbers instead of loading them."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


class QuantizedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """What all ways share. ``shape`` is the layer's on this rank, ``dtype`` what it computes in.

    A layer is a linear one of vLLM, or an output head, which is made like one.
    """

    shape: LayerShape
    dtype: torch.dtype
    supports_pre_processed_weights = True

    def create_weights(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype = params_dtype
        rows = tuple(output_partition_sizes)
        self.shape = LayerShape(rows, input_size, input_size_per_partition)
        self.prepare(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, PROCESSED, False):
            return
        final = self.shared(layer) if comes_finished() else self.finish(layer)
        for name in loaded_names(layer):
            delattr(layer, name)
        for name, value in final.items():
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        for name, value in self.scratch(layer).items():
            layer.register_buffer(name, value, persistent=False)
        setattr(layer, PROCESSED, True)
        release_freed(next(layer.parameters()).device)

    def prepare(self, layer: LinearBase) -> None:
        """Register the parameters that loading fills."""
        raise NotImplementedError

    def finish(self, layer: LinearBase) -> Parameters:
        """The parameters that computing needs, from what loading filled."""
        raise NotImplementedError

    def adopt(self, layer: LinearBase, final: Parameters) -> None:
        """Get ready to compute with final parameters that another engine made.

        To be overridden where computing needs more than the parameters themselves.
        """

    def shared(self, layer: LinearBase) -> Parameters:
        """The final parameters that a weight cache put in place (load format ``ipc_cache``).

        What only loading needs has stayed without data.
        """
        parameters = {name: getattr(layer, name).data for name in loaded_names(layer)}
        final = {name: data for name, data in parameters.items() if not data.is_meta}
        self.adopt(layer, final)
        return final

    def scratch(self, layer: LinearBase) -> Parameters:
        """Memory that computing needs beside a finished layer's parameters, and no state saves.

        As buffers of the layer it keeps its address when weights are reloaded, where recorded
        graphs look for it, and its content when the engine sleeps.
        """
        return {}

    def dequantize(self, layer: torch.nn.Module) -> torch.Tensor:
        """A weight on this rank, [rows, columns] in ``dtype``, from its final parameters."""
        raise NotImplementedError

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight on this rank, [rows, columns] in ``dtype``.

        vLLM asks for it to quantize a stored weight anew (online fp8), before the layer is
        finished and with its loaded parameters to be left as they are.
        """
        if getattr(layer, PROCESSED, False):
            return self.dequantize(layer)
        finished = torch.nn.Module()
        for name, value in self.finish(layer).items():
            finished.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        return self.dequantize(finished)


def comes_finished() -> bool:
    """Whether a weight cache gives this engine parameters that another one has finished."""
    return bool(is_weights_pre_processed())


def loaded_names(layer: torch.nn.Module) -> list[str]:
    """Names of a layer's parameters that make up its weight."""
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    return [name for name in names if name.startswith("weight")]


class StoredLinearMethod(QuantizedLinearMethod):
    """A layer whose matrices are stored quantized; ``format`` says how.

    ``is_dummy`` tells that vLLM will fill the parameters with random numbers (load format
    ``dummy``): what has to make sense for computing, ``decode`` makes up then.
    """

    rules: Sequence[ParameterRule]

    def __init__(self, method: str, format: object) -> None:
        self.method, self.format = method, format
        self.is_dummy = is_dummy_load()

    def find_rules(self) -> Sequence[ParameterRule]:
        """The parameters that a layer of this shape needs."""
        request = ShardRequest(self.method, self.format, self.shape.columns)
        self.rules = backends().call(self.method, "oot_quant_shard_rule", request=request)
        return self.rules

    def prepare(self, layer: LinearBase) -> None:
        self.find_rules()
        create_parameters(layer, self.rules, self.shape, self.decoders())

    def finish(self, layer: LinearBase) -> Parameters:
        if not self.is_dummy:
            check_filled(layer, self.rules)
        return self.decode(layer)

    def decoders(self) -> Mapping[str, Decoder]:
        """For each parameter whose stored tensor is not yet the items of its rule: a decoder."""
        return {}

    def decode(self, layer: LinearBase) -> Parameters:
        """The final parameters; those that were loaded, unless overridden."""
        return {rule.name: getattr(layer, rule.name).data for rule in self.rules}


class SavedLinearMethod(QuantizedLinearMethod):
    """A layer whose final parameters come from a sharded state, as another engine left them.

    tensors: the headers of the layer's parameters on one rank; those of all ranks are alike.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = {name: t for name, t in tensors.items() if name != "bias"}

    def empty_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A place for each saved tensor."""
        for name, tensor in self.tensors.items():
            yield name, torch.empty(tensor.shape, dtype=TORCH_DTYPE[tensor.dtype])

    def prepare(self, layer: LinearBase) -> None:
        for name, data in self.empty_parameters():
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def finish(self, layer: LinearBase) -> Parameters:
        final = {name: getattr(layer, name).data for name in self.tensors}
        self.adopt(layer, final)
        return final


class OnlineLinearMethod(QuantizedLinearMethod):
    """A layer whose 16-bit matrices are quantized as soon as all of them have arrived.

    vLLM loads such layers one at a time, already split over ranks, so that memory never
    holds more than the quantized model and one layer.
    """

    uses_meta_device = True
    is_dummy: bool

    def prepare(self, layer: LinearBase) -> None:
        self.is_dummy = is_dummy_load()
        rows, columns = sum(self.shape.rows), self.shape.rank_columns
        data = torch.empty(rows, columns, dtype=self.dtype, device="meta")
        loader = load_plain_weight(layer)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def finish(self, layer: LinearBase) -> Parameters:
        self._check_arrived(layer)
        return self.quantize(layer, layer.weight.data.split(self.shape.rows))

    def quantize(self, layer: LinearBase, matrices: Sequence[torch.Tensor]) -> Parameters:
        """The final parameters from this rank's part of each merged matrix, [rows, columns]."""
        raise NotImplementedError

    def _check_arrived(self, layer: LinearBase) -> None:
        """Raise CheckpointIncomplete if a merged matrix was not loaded; dummy weights never are.

        Left to vLLM, such a layer would quantize whatever its memory held.
        """
        everything = range(len(self.shape.rows))
        arrived = {
            member
            for name, arguments in get_layerwise_info(layer).loaded_weights
            if name == "weight"
            for member in shard_members(arguments.arguments.get("loaded_shard_id"), len(everything))
        }
        missing = [str(member) for member in everything if member not in arrived]
        if missing and (arrived or not self.is_dummy):
            raise CheckpointIncomplete(
                "a layer was not filled by the checkpoint",
                where=f"{layer.prefix}.weight",
                found=f"no tensor for merged matrix {', '.join(missing)} of {len(everything)}",
                needed="a stored tensor for every matrix of the layer",
                fix="download or save the checkpoint again",
            )
