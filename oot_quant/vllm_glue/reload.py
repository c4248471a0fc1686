"""Leaves a model serving when a reload of its weights is refused half-way.

vLLM takes every layer's tensors away at the start of a reload and gives them back, filled
anew, one layer at a time. If an error ends the stream, the layers that were not reached would
stay without any.
"""

from __future__ import annotations

from vllm.model_executor.model_loader.reload import layerwise


def keep_old_weights() -> None:
    """Give all layers that wait for a reload their old tensors back, and end the reload.

    Layers whose new weights had all arrived keep those. Without a reload under way, nothing
    happens.
    """
    for layer, info in list(layerwise.LAYERWISE_INFO.items()):
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - there is no other way
            info.reset()
