"""Fixtures for all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.models"]


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog for loggers below ``vllm``, which stop propagating once vLLM has set them up."""
    logger = logging.getLogger("vllm")
    attached = not logger.propagate
    if attached:
        logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog
    if attached:
        logger.removeHandler(caplog.handler)
