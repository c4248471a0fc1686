"""The one function that vLLM calls, in the front end, the engine core and every worker."""

from __future__ import annotations

import logging
from functools import lru_cache

from oot_quant.errors import EngineUnsupported
from oot_quant.vllm_glue import compat

# vLLM shows loggers below its own name only.
log = logging.getLogger("vllm.oot_quant")


@lru_cache(maxsize=1)
def register() -> None:
    """Register all backends with vLLM. Idempotent, and lets no exception out.

    vLLM guards the import of a plugin but not the call, so an exception here would stop
    every engine, also of models that need nothing from us. What goes wrong is logged, and
    ``oot-quant doctor`` shows it.
    """
    try:
        version = compat.installed_version()
        verdict = compat.verdict(version) if version else "supported"
        if verdict == "older":
            log.error("%s", _too_old(str(version)))
            return
        if verdict == "newer":
            log.warning(
                "oot-quant: vLLM %s is newer than %s, the newest that was tested.",
                version,
                compat.NEWEST_TESTED,
            )
        from oot_quant.vllm_glue.registration import register_backends

        register_backends()
    except Exception:
        log.exception("oot-quant: registration failed; run: oot-quant doctor")


def _too_old(version: str) -> EngineUnsupported:
    return EngineUnsupported(
        "this vLLM is too old for oot-quant, so no quantization method was registered",
        found=f"vLLM {version}",
        needed=f"vLLM {compat.OLDEST} to {compat.NEWEST_TESTED}",
        fix=f'python -m pip install --upgrade "vllm>={compat.OLDEST}"',
    )
