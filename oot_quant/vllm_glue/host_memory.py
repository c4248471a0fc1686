"""Gives freed host memory back to the system while a model loads."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch


def release_freed(device: torch.device) -> None:
    """Let the C library return what was freed, if a layer was made in host memory.

    glibc keeps blocks of up to 32 MiB for later once one of that size was freed. A layer's
    16-bit weight and what quantizing it needs are such blocks, in ever new sizes and places, so
    that a model loaded layer by layer would hold several times its own memory.
    """
    if device.type == "cpu" and _trim() is not None:
        _trim()(0)


@lru_cache(maxsize=1)
def _trim() -> Any:
    """glibc's ``malloc_trim``; None with other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
