"""The model's checks, on small checkpoints made here."""

import pytest

from oot_quant.doctor.runner import diagnose
from oot_quant.types import DoctorRequest, Status

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DOWN = "model.layers.{}.mlp.down_proj"


@pytest.fixture
def examine(manager_of, facts, look):
    """Diagnose a model on a healthy machine; gives results by id, and the verdict."""

    def run(model, quantization=None, size=1, **changes):
        request, manager = DoctorRequest(model, quantization, size), manager_of()
        made = facts(manager, request, **changes)
        report = diagnose(request, manager=manager, facts=made, look=look())
        return {result.id: result for result in report.results}, report.verdict

    return run


def test_modules_are_grouped_with_their_format_and_bytes(examine, model, nf4):
    tensors = {**nf4(DOWN.format(0), 64, 64), **nf4(DOWN.format(1), 64, 64, block=128)}
    results, _ = examine(model(tensors, quantization_config=BNB))
    data = results["model.weights"].data
    assert data["quantized"] == {
        "model.layers.*.mlp.down_proj": {"nf4 block 64": 1, "nf4 block 128": 1}
    }
    stored = sum(2048 + scales * 4 + 64 for scales in (64, 32))
    assert data["quantized_bytes"] - stored == sum(
        len(value) for value in tensors.values() if isinstance(value, bytes)
    )


def test_layers_that_stayed_dense_are_listed(examine, model, nf4):
    tensors = {f"{DOWN.format(layer)}.weight": ("BF16", (64, 64)) for layer in (0, 2, 3)}
    results, _ = examine(model(tensors | nf4(DOWN.format(1), 64, 64), quantization_config=BNB))
    assert "model.layers.*.mlp.down_proj (layers 0, 2-3)" in results["model.weights"].detail


@pytest.mark.parametrize(
    ("listed", "status"),
    [
        ([DOWN.format(0)], "ok"),
        (["model.layers.0"], "ok"),
        (None, "warn"),
        ([DOWN.format(0), DOWN.format(1)], "warn"),
        (["language_model.model.layers.0.mlp.down_proj"], "warn"),
    ],
)
def test_a_skip_list_against_the_tensors_is_one_warning(examine, model, nf4, listed, status):
    tensors = {f"{DOWN.format(0)}.weight": ("BF16", (64, 64))} | nf4(DOWN.format(1), 64, 64)
    section = BNB | {"llm_int8_skip_modules": listed}
    results, verdict = examine(model(tensors, quantization_config=section))
    assert results["backend.bitsandbytes.skip-list"].status.value == status
    assert [r.id for r in results.values() if r.status.value == "warn"] == (
        ["backend.bitsandbytes.skip-list"] if status == "warn" else []
    )
    assert verdict.loads


def test_experts_that_stayed_16_bit_are_told_with_their_bytes(examine, model, nf4):
    tensors = nf4("model.layers.0.self_attn.o_proj", 64, 64)
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = ("BF16", (4, 64, 32))
    results, verdict = examine(model(tensors, quantization_config=BNB))
    found = results["model.experts"]
    assert (found.status.value, found.data["plain_bytes"]) == ("info", 4 * 64 * 32 * 2)
    assert found.data["other_quantized_bytes"] == results["model.weights"].data["quantized_bytes"]
    assert verdict.loads


def test_experts_that_are_packed_load(examine, model, nf4):
    tensors = nf4("model.layers.0.mlp.experts.0.down_proj", 64, 64)
    results, verdict = examine(model(tensors, quantization_config=BNB))
    assert results["backend.bitsandbytes.experts"].data == {"modules": 1}
    assert verdict.loads


def test_a_dense_expert_among_packed_ones_is_named(examine, model, nf4):
    tensors = nf4("model.layers.0.mlp.experts.0.down_proj", 64, 64)
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"] = ("BF16", (64, 64))
    results, verdict = examine(model(tensors, quantization_config=BNB))
    found = results["backend.bitsandbytes.experts"]
    assert found.status.value == "fail"
    assert "experts.1.down_proj" in found.detail
    assert not verdict.loads


@pytest.mark.parametrize(
    "case",
    [
        (BNB, None, "ok", "tiny will load with bitsandbytes here."),
        (BNB, "bitsandbytes", "ok", "tiny will load with bitsandbytes here."),
        (BNB, "fp8", "fail", "tiny will not load here with vLLM's own fp8."),
        ({"load_in_4bit": True}, None, "fail", "tiny will not load here."),
        ({"load_in_4bit": True}, "bitsandbytes", "ok", "tiny will load with bitsandbytes here."),
        ({"quant_method": "fp8"}, None, "info", "tiny will load here with vLLM's own fp8."),
        ({"quant_method": "nf5"}, None, "fail", "tiny will not load with nf5 here."),
    ],
)
def test_the_method_decides_who_serves(examine, model, nf4, case):
    section, asked, status, text = case
    name = model(nf4(DOWN.format(0), 64, 64), quantization_config=section)
    results, verdict = examine(name, asked)
    assert (results["model.method"].status.value, verdict.text) == (status, text)


def test_a_plain_model_is_served_as_it_is_or_quantized_in_flight(examine, model):
    name = model({f"{DOWN.format(0)}.weight": ("BF16", (64, 64))})
    _, verdict = examine(name)
    assert verdict.text == "tiny will load here as it is, not quantized."


def test_in_flight_is_said_and_counted(examine, model):
    name = model({f"{DOWN.format(0)}.weight": ("BF16", (64, 64))})
    results, verdict = examine(name, "bitsandbytes")
    assert results["model.method"].data["prequantized"] is False
    assert results["model.memory"].data["device_bytes"] == 64 * 64 * 4.5 / 8
    assert verdict.text == "tiny will load with bitsandbytes here."


def test_a_config_that_claims_stored_weights_without_any_will_not_load(examine, model):
    name = model({f"{DOWN.format(0)}.weight": ("BF16", (64, 64))}, quantization_config=BNB)
    results, verdict = examine(name)
    assert results["backend.bitsandbytes.options"].status.value == "fail"
    assert not verdict.loads


def test_a_quantized_input_embedding_will_not_load(examine, model, nf4):
    stored = nf4("model.embed_tokens", 64, 64)
    results, verdict = examine(model(stored, quantization_config=BNB))
    assert results["model.supported"].data == {"modules": ["model.embed_tokens"]}
    assert not verdict.loads


def test_a_quantized_output_head_loads(examine, model, nf4):
    _, verdict = examine(model(nf4("lm_head", 64, 64), quantization_config=BNB))
    assert verdict.loads


def test_an_architecture_that_vllm_does_not_list_is_a_warning(examine, model):
    name = model({"a.weight": ("BF16", (64, 64))}, architectures=["NobodysModel"])
    results, _ = examine(name)
    assert results["model.supported"].status.value == "warn"


def test_files_that_nobody_reads_are_named(examine, model, tmp_path):
    name = model({"a.weight": ("BF16", (64, 64))})
    (tmp_path / name / "left-over.safetensors").write_bytes(b"x")
    results, _ = examine(name)
    assert results["model.config"].data["strays"] == ["left-over.safetensors"]
    assert results["model.config"].status.value == "info"


def test_a_damaged_file_is_a_failure_in_the_words_of_its_error(examine, model, tmp_path):
    name = model({"a.weight": ("BF16", (64, 64))})
    file = tmp_path / name / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    results, verdict = examine(name)
    assert results["model.config"].data["code"] == "checkpoint-unreadable"
    assert results["model.memory"].data == {"cause": "model.config failed"}
    assert verdict.text == "tiny will not load here."


def test_weights_in_other_files_are_no_reason_to_fail(examine, model, tmp_path):
    name = model({"a.weight": ("BF16", (64, 64))}, quantization_config=BNB)
    (tmp_path / name / "model.safetensors").unlink()
    (tmp_path / name / "pytorch_model.bin").write_bytes(b"x")
    results, verdict = examine(name)
    assert {r.status.value for r in results.values()} <= {"ok", "info", "skip"}
    assert verdict.loads


def test_a_hub_model_is_not_asked_for_without_online(examine, monkeypatch):
    monkeypatch.setattr("oot_quant.doctor.inventory._cached_folder", lambda _: None)
    results, _ = examine("owner/name", "bitsandbytes", 2)
    options = "--model owner/name --quantization bitsandbytes --tensor-parallel-size 2 --online"
    assert results["model.config"].fix.commands == (f"oot-quant doctor {options}",)


def test_a_hub_model_in_the_cache_is_read_there(examine, model, nf4, tmp_path, monkeypatch):
    model(nf4(DOWN.format(0), 64, 64), quantization_config=BNB)
    monkeypatch.setattr("oot_quant.doctor.inventory._cached_folder", lambda _: tmp_path / "tiny")
    _, verdict = examine("owner/name")
    assert verdict.text == "owner/name will load with bitsandbytes here."


def test_matrices_that_are_merged_must_be_stored_alike(examine, model, nf4):
    gate, up = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    tensors = nf4(gate, 64, 64) | {f"{up}.weight": ("BF16", (64, 64))}
    results, verdict = examine(model(tensors, quantization_config=BNB))
    assert results["backend.bitsandbytes.fused"].data == {"modules": [gate, up]}
    assert not verdict.loads


def test_options_that_the_tensors_contradict_are_a_failure(examine, model, nf4):
    section = BNB | {"bnb_4bit_quant_type": "fp4"}
    results, verdict = examine(model(nf4(DOWN.format(0), 64, 64), quantization_config=section))
    outcome = results["backend.bitsandbytes.options"]
    assert outcome.status == Status.FAIL
    assert "stored as 'nf4', config says 'fp4'" in outcome.data["found"]
    assert not verdict.loads


def test_a_consolidated_copy_is_a_warning_with_its_way_out(examine, model, tmp_path):
    name = model({"a.weight": ("BF16", (64, 64))})
    (tmp_path / name / "consolidated.safetensors").write_bytes(b"x")
    results, _ = examine(name)
    assert results["model.config"].status.value == "warn"
    assert "--load-format safetensors" in results["model.config"].fix.text


Q_PROJ = "language_model.model.layers.0.self_attn.q_proj"


def test_a_model_class_that_reorders_what_is_packed_is_named(examine, model, nf4):
    name = model(nf4(Q_PROJ, 64, 64), quantization_config=BNB, architectures=["Llama4ForCausalLM"])
    results, verdict = examine(name)
    found = results["model.architecture"]
    assert found.status == Status.FAIL
    assert "Llama4ForCausalLM" in found.summary
    assert found.data["where"] == Q_PROJ
    assert "reorders or cuts weights" in found.detail
    assert not verdict.loads


def test_what_such_a_class_does_not_touch_loads(examine, model, nf4):
    name = model(
        nf4(DOWN.format(0), 64, 64), quantization_config=BNB, architectures=["Llama4ForCausalLM"]
    )
    results, _ = examine(name)
    assert results["model.architecture"].status == Status.OK


def test_layers_that_stay_plain_in_flight_are_named(examine, model):
    name = model({"a.weight": ("BF16", (64, 64))}, architectures=["IsaacForConditionalGeneration"])
    results, verdict = examine(name, "bitsandbytes")
    assert results["model.architecture"].data["kept"] == ["linear_fc1", "vision_embedding"]
    assert verdict.loads


def test_in_flight_nothing_is_said_of_classes_that_only_loading_packed_weights_fails(
    examine, model
):
    name = model({"a.weight": ("BF16", (64, 64))}, architectures=["ModernBertModel"])
    results, _ = examine(name, "bitsandbytes")
    assert results["model.architecture"].status == Status.OK
