"""Other vLLM plugins that claim a method of ours, and why that cannot work."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from oot_quant.errors import RivalPlugin

VLLM_PLUGIN_GROUP = "vllm.general_plugins"
KNOWN_RIVALS = {"bitsandbytes": "vllm_bnb_plugin", "gguf": "vllm_gguf_plugin"}
"""Top module of a plugin that registers the same method and patches vLLM for it."""


@cache
def plugins() -> tuple[EntryPoint, ...]:
    """The entry points of vLLM's plugins; reading them takes milliseconds."""
    return tuple(entry_points(group=VLLM_PLUGIN_GROUP))


def installed_rival(method: str) -> EntryPoint | None:
    """The entry point of a known plugin that claims a method and that vLLM would load."""
    module = KNOWN_RIVALS.get(method)
    allowed = os.environ.get("VLLM_PLUGINS")
    for point in plugins():
        listed = allowed is None or point.name in allowed.split(",")
        if module and listed and point.value.split(":")[0].split(".")[0] == module:
            return point
    return None


def refuse_rivals(method: str) -> None:
    """Raise RivalPlugin if another installed plugin would load a method's weights its own way."""
    rival = installed_rival(method)
    if rival is None:
        return
    name = rival.dist.metadata["Name"] if rival.dist else rival.value
    version = rival.dist.version if rival.dist else ""
    raise RivalPlugin(
        f"two plugins claim the quantization method {method!r}",
        found=f"{name} {version} beside oot-quant; its patches force a loader of its own",
        needed="one of them",
        fix=f"python -m pip uninstall {name}, or start with VLLM_PLUGINS=oot_quant",
    )
