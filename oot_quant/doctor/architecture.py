"""What vLLM's class for the model does to weights that packed ones do not survive."""

from __future__ import annotations

from typing import Any

from oot_quant.doctor.inventory import Inventory
from oot_quant.doctor.model import GROUP
from oot_quant.types import Check, Facts, Outcome, Status
from oot_quant.vllm_glue.architectures import architectures_of, limits_of, refuse_packed


def architecture(_: Facts, seen: Any) -> Outcome:
    """Raises what loading would."""
    inventory: Inventory = seen
    if not inventory.is_ours:
        return Outcome(Status.OK, "the model class is not for a backend to judge")
    architectures = architectures_of(inventory.checkpoint.config)
    limits = limits_of(architectures)
    refuse_packed(architectures, inventory.formats or ())
    data = {"architectures": architectures}
    kept = sorted({m for limit in limits if not limit.is_about_arrival for m in limit.modules})
    if kept and inventory.formats == {}:
        return Outcome(
            Status.INFO,
            f"vLLM's model class uses some weights itself: {', '.join(kept)}",
            "Layers of these names stay in 16 bit.",
            data=data | {"kept": kept},
        )
    if limits and inventory.formats is None:
        reasons = "; it ".join(sorted({limit.reason.value for limit in limits}))
        return Outcome(
            Status.INFO,
            "vLLM's model class cannot load every weight quantized",
            f"It {reasons}. Which weights are quantized cannot be told from these files.",
            data=data,
        )
    return Outcome(Status.OK, "vLLM's model class can load its weights quantized", data=data)


CHECKS = (
    Check(
        "model.architecture",
        GROUP,
        "vLLM's model class can load the weights that are quantized",
        architecture,
        needs=("model.method",),
    ),
)
