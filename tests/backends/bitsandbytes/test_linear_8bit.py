"""8-bit layers of vLLM against the stored whole numbers and their scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oot_quant.errors import (
    CheckpointIncomplete,
    UnsupportedFormat,
    WeightMismatch,
)
from oot_quant.testing.layers import process, rank_weight
from tests.backends.bitsandbytes.layers import (
    PREFIX,
    ROWS,
    error_of,
    load,
    names_of,
    weight_of,
)
from tests.backends.bitsandbytes.stored import (
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)

SECTION = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.01}


def stored_members(kind: Any, columns: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    whole = []
    for seed, (name, rows) in enumerate(zip(names_of(kind), ROWS[kind], strict=True)):
        stored, weight = pack_8bit(name, random_matrix(rows, columns, seed))
        tensors |= stored
        whole.append(weight)
    return tensors, whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["replicated", "column", "row", "merged", "qkv"])
def test_each_rank_holds_its_slice_of_the_unpacked_weight(tmp_path, kind, ranks):
    tensors, whole = stored_members(kind, 512)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    for rank in range(ranks):
        layer = load(kind, folder, tensors, 512, rank=rank, ranks=ranks)
        part = rank_weight(kind, whole, rank, ranks)
        assert torch.allclose(weight_of(layer), part, rtol=1e-6, atol=0)
        assert layer.weight.dtype == torch.int8
        assert layer.weight.numel() == part.numel()


def test_a_weight_that_the_model_class_transposed_is_turned_back(tmp_path):
    """GPT-2's class does so with each weight; of a square one the shape tells nothing."""
    tensors, whole = stored_members("column", ROWS["column"][0])
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    turned = {name: t.t() if t.ndim == 2 else t for name, t in tensors.items()}
    layer = load("column", folder, turned, ROWS["column"][0])
    assert torch.allclose(weight_of(layer), whole[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("columns", [512, 96, 90])
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_output_of_every_dtype(tmp_path, dtype, columns):
    tensors, whole = stored_members("merged", columns)
    layer = load("merged", write_checkpoint(tmp_path, tensors, SECTION), tensors, columns,
                 dtype=dtype)  # fmt: skip
    weight = torch.cat(whole)
    for tokens in (1, 5, 64):
        x = torch.randn(tokens, columns).to(dtype)
        bias = torch.randn(weight.shape[0]).to(dtype)
        reference = x.double() @ weight.double().t() + bias.double()
        output = layer.quant_method.apply(layer, x, bias)
        assert output.dtype == dtype
        assert error_of(output, reference) < LIMIT[dtype]


def test_large_activations_do_not_overflow_float16(tmp_path):
    tensors, whole = stored_members("row", 512)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    layer = load("row", folder, tensors, 512, dtype=torch.float16)
    x = torch.full((1, 512), 60.0, dtype=torch.float16)
    reference = x.double() @ whole[0].double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 0.01


def test_in_flight_rounds_each_weight_to_the_nearest_step(tmp_path):
    plain = {
        f"{name}.weight": random_matrix(rows, 512, seed)
        for seed, (name, rows) in enumerate(zip(names_of("qkv"), ROWS["qkv"], strict=True))
    }
    folder = write_checkpoint(tmp_path, plain, section=None)
    layer = load("qkv", folder, plain, 512, options={"load_in_8bit": True})
    weight = torch.cat(list(plain.values()))
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert layer.weight.dtype == torch.int8
    assert (layer.weight.numel(), layer.weight_scb.numel()) == (weight.numel(), weight.shape[0])
    assert torch.equal(layer.weight_scb, largest)
    assert ((weight_of(layer) - weight).abs() <= largest / 254 * 1.0001).all()


def test_in_flight_is_what_the_library_stores_but_for_its_rounding_to_float16(tmp_path):
    matrix = random_matrix(64, 512)
    plain = {f"{PREFIX['row']}.weight": matrix}
    folder = write_checkpoint(tmp_path, plain, section=None)
    layer = load("row", folder, plain, 512, options={"load_in_8bit": True})
    stored, _ = pack_8bit("x", matrix)
    steps = (layer.weight.int() - stored["x.weight"].int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.02


def test_a_row_of_zeros_stays_zero(tmp_path):
    matrix = random_matrix(64, 512)
    matrix[3] = 0
    plain = {f"{PREFIX['row']}.weight": matrix}
    folder = write_checkpoint(tmp_path, plain, section=None)
    layer = load("row", folder, plain, 512, options={"load_in_8bit": True})
    assert torch.equal(weight_of(layer)[3], torch.zeros(512))


def test_a_checkpoint_without_a_layout_code_is_taken_as_rows(tmp_path):
    tensors, whole = stored_members("row", 512)
    del tensors[f"{PREFIX['row']}.weight_format"]
    layer = load("row", write_checkpoint(tmp_path, tensors, SECTION), tensors, 512)
    assert torch.allclose(weight_of(layer), whole[0], rtol=1e-6, atol=0)


def test_a_layout_of_an_old_gpu_is_refused_by_name(tmp_path):
    tensors, _ = stored_members("row", 512)
    tensors[f"{PREFIX['row']}.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    with pytest.raises(UnsupportedFormat) as caught:
        load("row", folder, tensors, 512)
    assert f"where: {PREFIX['row']}.weight_format" in str(caught.value)
    assert "found: weight_format 2" in str(caught.value)


def test_a_16_bit_weight_is_not_cut_to_whole_numbers(tmp_path):
    tensors, _ = stored_members("row", 512)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    tensors[f"{PREFIX['row']}.weight"] = random_matrix(64, 512)
    with pytest.raises(WeightMismatch, match="not 8-bit"):
        load("row", folder, tensors, 512)


def test_scales_that_never_arrive_are_named(tmp_path):
    tensors, _ = stored_members("row", 512)
    folder = write_checkpoint(tmp_path, tensors, SECTION)
    del tensors[f"{PREFIX['row']}.SCB"]
    with pytest.raises(CheckpointIncomplete, match="weight_scb"):
        load("row", folder, tensors, 512)


def test_8_and_4_bit_in_one_fused_layer_are_refused_by_name(tmp_path):
    gate, up = names_of("merged")
    tensors = pack_8bit(gate, random_matrix(128, 256))[0] | pack(up, random_matrix(128, 256))[0]
    folder = write_checkpoint(tmp_path, tensors, {"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedFormat) as caught:
        load("merged", folder, tensors, 256)
    assert f"{gate}: int8; {up}: nf4, blocks of 64" in str(caught.value)


def test_a_finished_layer_may_be_finished_again(tmp_path):
    tensors, whole = stored_members("row", 256)
    layer = load("row", write_checkpoint(tmp_path, tensors, SECTION), tensors, 256)
    process(layer)
    assert torch.allclose(weight_of(layer), whole[0], rtol=1e-6, atol=0)
    assert sorted(dict(layer.named_parameters())) == ["weight", "weight_scb"]


def test_computing_traces_into_one_graph(tmp_path):
    tensors, _ = stored_members("row", 512)
    layer = load("row", write_checkpoint(tmp_path, tensors, SECTION), tensors, 512)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, x) + 1

    compiled = torch.compile(forward, fullgraph=True, backend="eager", dynamic=True)
    x = torch.randn(3, 512)
    assert torch.equal(compiled(x), forward(x))
