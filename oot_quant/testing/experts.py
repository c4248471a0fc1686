"""vLLM's own layers of routed experts, without an engine or a second process, on any rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

if TYPE_CHECKING:
    from oot_quant.vllm_glue.config import PluginConfig


def build_experts(  # noqa: PLR0913 - what a layer of vLLM takes
    config: PluginConfig | None,
    prefix: str,
    sizes: tuple[int, int, int],
    *,
    rank: int = 0,
    ranks: int = 1,
    expert_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Any:
    """A layer of experts for one rank of several.

    sizes: experts, hidden size, inner size, over all ranks. arguments: for vLLM's factory.
    Nothing may communicate: call ``layer.quant_method.apply``, not the layer. On a GPU, chosen as
    torch's default device, with the workspaces that an engine would give its kernels.
    """
    if torch.get_default_device().type != "cpu" and not is_workspace_manager_initialized():
        init_workspace_manager(torch.get_default_device())
    count, hidden, inner = sizes
    whole = VllmConfig()
    whole.parallel_config.enable_expert_parallel = expert_parallel
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(whole))
        target = "get_tensor_model_parallel_rank"
        stack.enter_context(mock.patch.object(moe_config, target, return_value=rank))
        runner = FusedMoEFactory(
            num_experts=count,
            hidden_size=hidden,
            intermediate_size=inner,
            params_dtype=dtype,
            quant_config=config,
            prefix=prefix,
            tp_size=ranks,
            dp_size=1,
            pcp_size=1,
            **{"top_k": 2, **arguments},
        )
    return runner.routed_experts


def load_experts(
    layer: Any, config: PluginConfig, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Give a layer its stored tensors as a model of vLLM would, and finish it.

    tensors: names as in the checkpoint; those of other modules are left out.
    """
    inside = f"{layer.layer_name}."
    renamed = config.get_checkpoint_weight_mapper().apply(tensors)
    own = ((name.removeprefix(inside), t) for name, t in renamed if name.startswith(inside))
    for _ in layer.load_weights(own):
        pass
    finalize_layerwise_processing(layer, None)
    layer.quant_method.process_weights_after_loading(layer)
