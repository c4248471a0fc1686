"""The one function that vLLM calls, in the front end, the engine core and every worker."""

from __future__ import annotations

import logging

_done = False


def register() -> None:
    """Register all backends with vLLM. Idempotent, and lets no exception out.

    vLLM guards the import of a plugin but not the call, so an exception here would stop
    every engine, also of models that need nothing from us. What goes wrong is logged, and
    ``oot-quant doctor`` shows it.
    """
    global _done  # noqa: PLW0603 - once for each process
    if _done:
        return
    _done = True
    # vLLM only shows loggers below its own name.
    log = logging.getLogger("vllm.oot_quant")
    try:
        from oot_quant.vllm_glue import compat

        version = compat.installed_version()
        verdict = compat.verdict(version) if version else "supported"
        if verdict == "older":
            log.error(
                "oot-quant: vLLM %s is older than %s; nothing was registered. "
                'Fix: python -m pip install --upgrade "vllm>=%s"',
                version,
                compat.OLDEST,
                compat.OLDEST,
            )
            return
        if verdict == "newer":
            log.warning(
                "oot-quant: vLLM %s is newer than %s, the newest that this release was tested "
                "with.",
                version,
                compat.NEWEST_TESTED,
            )
        from oot_quant.vllm_glue.registration import register_backends

        register_backends()
    except Exception:
        log.exception("oot-quant: registration failed; run: oot-quant doctor")
