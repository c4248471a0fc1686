"""The last line for a model: will it load here?"""

from __future__ import annotations

from collections.abc import Sequence

from oot_quant.doctor.inventory import is_vllms_own
from oot_quant.doctor.report import Result, Verdict
from oot_quant.manager import BackendRecord
from oot_quant.types import Facts


def answer(facts: Facts, results: Sequence[Result]) -> Verdict | None:
    """The verdict on the model that was asked about; None if none was.

    A problem counts if it is about the environment, the model or the model's method; a
    backend that the model does not need may be broken.
    """
    model = facts.request.model
    if model is None:
        return None
    section = (facts.checkpoint.quantization_config if facts.checkpoint else None) or {}
    method = facts.request.quantization or section.get("quant_method")
    backend = next((record for record in facts.backends if method in record.methods), None)
    problems = [result for result in results if result.is_problem]
    loads = not any(_concerns(result, method, backend) for result in problems)
    will = "will" if loads else "will not"
    if facts.checkpoint is None or (method is None and not loads):
        text = f"{model} {will} load here."
    elif method is None:
        text = f"{model} {will} load here as it is, not quantized."
    elif backend is None and is_vllms_own(method):
        text = f"{model} {will} load here with vLLM's own {method}."
    else:
        text = f"{model} {will} load with {method} here."
    return Verdict(model, method, loads, text)


def _concerns(result: Result, method: str | None, backend: BackendRecord | None) -> bool:
    """Whether a problem stands in the way of a model that is served by ``backend``."""
    if result.id.startswith("backend.") and not result.group.startswith("model "):
        return backend is not None and result.id.startswith(f"backend.{backend.name}.")
    if result.id.startswith("plugin."):
        return backend is not None and method in result.data.get("methods", [method])
    if result.id.startswith("trial."):
        return backend is not None
    return True
