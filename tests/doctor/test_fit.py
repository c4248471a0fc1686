"""Splitting over devices and memory, on small checkpoints made here."""

import pytest

from oot_quant.doctor.runner import diagnose
from oot_quant.types import DoctorRequest

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GPU = {"kind": "cuda", "name": "GPU", "capability": "9.0", "count": 8}
CPU = {"kind": "cpu", "name": "CPU", "count": 1}
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def examine(manager_of, facts, look):
    def run(model, size=1, device=GPU, free=2**30):
        request, manager = DoctorRequest(model, tensor_parallel_size=size), manager_of()
        made = facts(manager, request)
        seen = look(env__accelerator=device | {"free_bytes": free})
        report = diagnose(request, ["model"], manager=manager, facts=made, look=seen)
        return {result.id: result for result in report.results}

    return run


@pytest.mark.parametrize(
    "case",
    [
        (128, 2, "ok"),
        (128, 4, "ok"),  # 32 columns: half a block, the scale is repeated
        (128, 3, "fail"),  # not whole columns
        (96, 32, "fail"),  # 3 columns: a byte would be cut
        (96, 48, "ok"),
        (97, 1, "fail"),  # a byte reaches into the next row
    ],
)
def test_a_split_must_not_cut_a_stored_byte(examine, model, nf4, case):
    columns, size, status = case
    name = model(nf4(DOWN, 64, columns), quantization_config=BNB)
    result = examine(name, size, GPU | {"count": 99})["model.tensor-parallel"]
    assert result.status.value == status
    assert (size in result.data["sizes"]) == (status == "ok")


@pytest.mark.parametrize(
    "case",
    [(8, 8, 8, "ok"), (8, 2, 8, "ok"), (8, 2, 1, "ok"), (9, 3, 2, "fail"), (12, 4, 6, "fail")],
)
def test_heads_must_be_split_evenly(examine, model, case):
    heads, shared, size, status = case
    tensors = {f"{DOWN}.weight": ("BF16", (64, 144))}
    name = model(tensors, num_attention_heads=heads, num_key_value_heads=shared)
    assert examine(name, size)["model.tensor-parallel"].status.value == status


def test_more_ranks_than_gpus_is_a_warning(examine, model):
    name = model({f"{DOWN}.weight": ("BF16", (64, 128))})
    found = examine(name, 2, GPU | {"count": 1})["model.tensor-parallel"]
    assert (found.status.value, found.data["devices"]) == ("warn", 1)
    assert examine(name, 2, CPU)["model.tensor-parallel"].status.value == "ok"


@pytest.mark.parametrize(
    "case",
    [
        (20_000, GPU, 1, "info"),
        (17_000, GPU, 1, "warn"),
        (16_000, GPU, 1, "fail"),
        (16_000, GPU, 2, "info"),
        (17_000, CPU, 2, "warn"),  # both ranks share the machine's memory
        (None, GPU, 1, "info"),
    ],
)
def test_weights_against_free_memory(examine, model, case):
    free, device, size, status = case
    name = model({f"{DOWN}.weight": ("BF16", (64, 128))})  # 16384 bytes
    found = examine(name, size, device, free)["model.memory"]
    assert found.status.value == status


def test_a_size_that_would_fit_is_recommended(examine, model):
    name = model({f"{DOWN}.weight": ("BF16", (64, 128))})
    assert "--tensor-parallel-size 4," in examine(name, 1, GPU, 6_000)["model.memory"].fix.text
    assert "smaller model" in examine(name, 1, GPU | {"count": 1}, 6_000)["model.memory"].fix.text
