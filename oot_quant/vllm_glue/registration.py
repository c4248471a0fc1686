"""Registers every backend's methods with vLLM; a failed one leaves a stand-in behind."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import register_quantization_config

from oot_quant.errors import BackendFailed, OotQuantError
from oot_quant.manager import BackendRecord, backends, failure_of, one_line
from oot_quant.vllm_glue.config import PluginConfig
from oot_quant.vllm_glue.stand_in import stand_in_for

logger = init_logger("vllm.oot_quant")


def register_backends() -> dict[str, type[PluginConfig]]:
    """Register each installed method once; returns what was registered, by method.

    vLLM keeps the class that registers last and says so at debug level only, so a method
    of vLLM's own is never taken over.
    """
    registered: dict[str, type[PluginConfig]] = {}
    for record in sorted(backends().records, key=lambda record: not record.ok):
        for method in record.methods:
            if method not in registered:
                registered[method] = _config_for(record, method)
                register_quantization_config(method)(registered[method])
    return registered


def _config_for(record: BackendRecord, method: str) -> type[PluginConfig]:
    error: OotQuantError
    if not record.ok:
        error = failure_of(record, method)
    else:
        try:
            config: type[PluginConfig] = backends().call(method, "oot_quant_config", method=method)
            if not (isinstance(config, type) and issubclass(config, PluginConfig)):
                raise TypeError(f"oot_quant_config returned {config!r}, not a PluginConfig")
            return config
        except OotQuantError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - becomes the stand-in's recorded reason
            error = BackendFailed(
                f"the backend for the quantization method {method!r} gave no config",
                where=f"{record.distribution} {record.version} ({record.module})",
                found=one_line(raised),
                fix="mend or remove that package; oot-quant list shows all backends",
            )
    logger.warning("oot-quant: method %r is not usable. %s", method, one_line(error))
    return stand_in_for(method, error)
