"""4-bit layers of vLLM against bitsandbytes' own unpacking and plain float32 arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from oot_quant.errors import (
    CheckpointIncomplete,
    ShardMisaligned,
    UnsupportedFormat,
    WeightMismatch,
)
from oot_quant.testing.layers import (
    Kind,
    build_linear,
    config_for,
    finish_loading,
    process,
    rank_weight,
    tensor_parallel,
)
from tests.backends.bitsandbytes.layers import (
    PREFIX,
    ROWS,
    error_of,
    load,
    names_of,
    weight_of,
)
from tests.backends.bitsandbytes.stored import pack, random_matrix, write_checkpoint

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def packed_members(
    kind: Kind, columns: int, **how: Any
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    whole = []
    for seed, (name, rows) in enumerate(zip(names_of(kind), ROWS[kind], strict=True)):
        stored, weight = pack(name, random_matrix(rows, columns, seed), **how)
        tensors |= stored
        whole.append(weight)
    return tensors, whole


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["replicated", "column", "row", "merged", "qkv"])
def test_each_rank_holds_its_slice_of_the_unpacked_weight_bit_for_bit(
    tmp_path, kind, ranks, quant_type, nested
):
    tensors, whole = packed_members(kind, 512, quant_type=quant_type, nested=nested)
    folder = write_checkpoint(tmp_path, tensors)
    for rank in range(ranks):
        layer = load(kind, folder, tensors, 512, rank=rank, ranks=ranks)
        assert torch.equal(weight_of(layer), rank_weight(kind, whole, rank, ranks))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize(
    ("columns", "ranks"),
    [(704, 2), (1376, 2), (320, 2), (4304, 1), (4304, 2), (100, 1), (90, 5), (1536, 3)],
)
def test_rows_that_are_no_multiple_of_the_block_stay_exact(tmp_path, columns, ranks, nested):
    tensors, whole = packed_members("row", columns, nested=nested)
    folder = write_checkpoint(tmp_path, tensors)
    for rank in range(ranks):
        layer = load("row", folder, tensors, columns, rank=rank, ranks=ranks)
        assert torch.equal(weight_of(layer), rank_weight("row", whole, rank, ranks))
        x = torch.randn(3, columns // ranks)
        reference = x.double() @ weight_of(layer).double().t()
        assert error_of(layer.quant_method.apply(layer, x), reference) < 1e-5


@pytest.mark.parametrize("columns", [512, 100])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_output_of_every_format_and_dtype(tmp_path, quant_type, nested, blocksize, columns):
    tensors, whole = packed_members(
        "merged", columns, quant_type=quant_type, nested=nested, blocksize=blocksize
    )
    folder = write_checkpoint(tmp_path, tensors)
    weight = torch.cat(whole)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.01)):
        layer = load("merged", folder, tensors, columns, dtype=dtype)
        for tokens in (1, 5):
            x = torch.randn(tokens, columns).to(dtype)
            bias = torch.randn(weight.shape[0]).to(dtype)
            reference = x.double() @ weight.double().t() + bias.double()
            output = layer.quant_method.apply(layer, x, bias)
            assert output.dtype == dtype
            assert error_of(output, reference) < limit


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_the_storage_dtype_changes_nothing(tmp_path, storage):
    plain, _ = packed_members("qkv", 256)
    other, whole = packed_members("qkv", 256, storage=storage)
    layer = load("qkv", write_checkpoint(tmp_path / "u8", plain), plain, 256)
    same = load("qkv", write_checkpoint(tmp_path / "other", other), other, 256)
    assert torch.equal(weight_of(layer), weight_of(same))
    assert torch.equal(weight_of(same), torch.cat(whole))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
def test_matrices_that_are_fused_on_disk_are_split_by_their_parts(tmp_path, ranks, nested):
    parts = [random_matrix(rows, 704, seed) for seed, rows in enumerate(ROWS["qkv"])]
    tensors, whole = pack(PREFIX["qkv"], torch.cat(parts), nested=nested)
    folder = write_checkpoint(tmp_path, tensors)
    for rank in range(ranks):
        layer = load("qkv", folder, tensors, 704, rank=rank, ranks=ranks)
        members = whole.split(list(ROWS["qkv"]))
        assert torch.equal(weight_of(layer), rank_weight("qkv", members, rank, ranks))


def test_more_ranks_than_key_heads_share_the_heads(tmp_path):
    tensors, whole = packed_members("qkv", 256)
    folder = write_checkpoint(tmp_path, tensors)
    for rank in range(4):
        layer = load("qkv", folder, tensors, 256, rank=rank, ranks=4)
        assert torch.equal(weight_of(layer), rank_weight("qkv", whole, rank, 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_use_double_quant": True},
        {"bnb_4bit_blocksize": 128},
        {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True, "bnb_4bit_blocksize": 32},
    ],
    ids=["default", "fp4", "double", "block-128", "all"],
)
@pytest.mark.parametrize("columns", [512, 100])
def test_in_flight_equals_what_bitsandbytes_would_have_stored(tmp_path, options, columns):
    plain = {
        f"{name}.weight": random_matrix(rows, columns, seed)
        for seed, (name, rows) in enumerate(zip(names_of("qkv"), ROWS["qkv"], strict=True))
    }
    folder = write_checkpoint(tmp_path, plain, section=None)
    layer = load("qkv", folder, plain, columns, options=options)
    how = {
        "quant_type": options.get("bnb_4bit_quant_type", "nf4"),
        "nested": options.get("bnb_4bit_use_double_quant", False),
        "blocksize": options.get("bnb_4bit_blocksize", 64),
    }
    _, whole = packed_members("qkv", columns, **how)
    assert torch.equal(weight_of(layer), torch.cat(whole))
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == sum(ROWS["qkv"]) * columns // 2


@pytest.mark.parametrize(("columns", "ranks"), [(512, 2), (704, 2), (1536, 3)])
def test_in_flight_over_ranks_is_as_close_as_on_one(tmp_path, columns, ranks):
    (rows,) = ROWS["row"]
    matrix = random_matrix(rows, columns)
    plain = {f"{PREFIX['row']}.weight": matrix}
    folder = write_checkpoint(tmp_path, plain, section=None)
    _, stored = pack("x", matrix)
    for rank in range(ranks):
        layer = load("row", folder, plain, columns, rank=rank, ranks=ranks, options={})
        part = rank_weight("row", [matrix], rank, ranks)
        reference = rank_weight("row", [stored], rank, ranks)
        if (columns // ranks) % 64 == 0:
            assert torch.equal(weight_of(layer), reference)
        assert error_of(weight_of(layer), part) <= error_of(reference, part) * 1.001


@pytest.mark.parametrize("skip", [["down_proj"], ["model.layers.0.mlp"], [r"model\..*down_proj"]])
def test_a_skip_list_keeps_layers_out_of_in_flight_quantization(tmp_path, skip):
    plain = {f"{PREFIX['row']}.weight": random_matrix(64, 128)}
    folder = write_checkpoint(tmp_path, plain, section=None)
    with tensor_parallel():
        config = config_for("bitsandbytes", folder, {"llm_int8_skip_modules": skip})
        layer = build_linear("row", config, PREFIX["row"], 128, 64)
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)


def test_a_skipped_part_keeps_its_fused_layer_unquantized_and_says_so(tmp_path, caplog_vllm):
    plain = {f"{name}.weight": random_matrix(128, 128) for name in names_of("merged")}
    folder = write_checkpoint(tmp_path, plain, section=None)
    with tensor_parallel():
        config = config_for("bitsandbytes", folder, {"llm_int8_skip_modules": ["up_proj"]})
        layer = build_linear("merged", config, PREFIX["merged"], 128, (128, 128))
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert "model.layers.0.mlp.gate_up_proj stays unquantized as a whole" in caplog_vllm.text
    assert "model.layers.0.mlp.up_proj" in caplog_vllm.text


def test_a_fused_layer_with_one_unquantized_part_is_refused_by_name(tmp_path):
    tensors, _ = pack("model.layers.0.mlp.gate_proj", random_matrix(128, 128))
    tensors["model.layers.0.mlp.up_proj.weight"] = random_matrix(128, 128)
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(UnsupportedFormat) as caught:
        load("merged", folder, tensors, 128)
    text = str(caught.value)
    assert "where: model.layers.0.mlp.gate_up_proj" in text
    assert "model.layers.0.mlp.up_proj: unquantized" in text


def test_packed_codes_of_another_model_are_refused_with_both_sizes(tmp_path):
    tensors, _ = packed_members("row", 256)
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(WeightMismatch) as caught:
        load("row", folder, tensors, 512)
    text = str(caught.value)
    assert text.startswith("weight-mismatch:")
    assert "model.layers.0.mlp.down_proj" in text
    assert "64" in text


def test_a_quant_state_that_describes_another_shape_is_refused(tmp_path):
    tensors, _ = packed_members("row", 256)
    key = f"{PREFIX['row']}.weight.quant_state.bitsandbytes__nf4"
    text = bytes(tensors[key].tolist()).replace(b"[64, 256]", b"[256, 64]")
    tensors[key] = torch.tensor(list(text), dtype=torch.uint8)
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(WeightMismatch, match="does not describe the weight of its layer"):
        load("row", folder, tensors, 256)


@pytest.mark.parametrize("part", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_a_tensor_that_never_arrives_is_named(tmp_path, part):
    tensors, _ = packed_members("row", 256)
    folder = write_checkpoint(tmp_path, tensors)
    del tensors[f"{PREFIX['row']}.weight.{part}"]
    with pytest.raises(CheckpointIncomplete) as caught:
        load("row", folder, tensors, 256)
    assert f"{PREFIX['row']}.weight_{part.split('.')[0]}" in str(caught.value)


def test_one_part_of_a_fused_layer_that_never_arrives_is_named(tmp_path):
    tensors, _ = packed_members("qkv", 256)
    folder = write_checkpoint(tmp_path, tensors)
    partial = {name: tensor for name, tensor in tensors.items() if ".k_proj." not in name}
    with pytest.raises(CheckpointIncomplete, match="qkv_proj"):
        load("qkv", folder, partial, 256)


@pytest.mark.parametrize("kind", ["row", "qkv"])
def test_a_layer_in_flight_that_nothing_arrives_for_is_named(tmp_path, kind):
    """A model class that copies weights past their loader would leave it to chance."""
    plain = {f"{name}.weight": random_matrix(64, 128) for name in names_of(kind)}
    folder = write_checkpoint(tmp_path, plain, section=None)
    with tensor_parallel():
        config = config_for("bitsandbytes", folder, {})
        rows = ROWS[kind] if kind == "qkv" else ROWS[kind][0]
        layer = build_linear(kind, config, PREFIX[kind], 128, rows)
        with pytest.raises(CheckpointIncomplete) as caught:
            finish_loading(layer)
    assert f"where: {PREFIX[kind]}.weight" in str(caught.value)


def test_packed_bytes_without_a_state_do_not_enter_an_in_flight_layer(tmp_path):
    name = f"{PREFIX['row']}.weight"
    folder = write_checkpoint(tmp_path, {name: random_matrix(64, 128)}, section=None)
    with pytest.raises(WeightMismatch) as caught:
        load("row", folder, {name: torch.zeros(4096, 1, dtype=torch.uint8)}, 128, options={})
    text = str(caught.value)
    assert "packed bytes without a quant state" in text
    assert "[4096, 1]" in text


def test_a_split_through_a_byte_is_refused_naming_the_layer(tmp_path):
    tensors, _ = packed_members("row", 102)
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(ShardMisaligned) as caught:
        load("row", folder, tensors, 102, rank=1, ranks=2)
    assert f"where: {PREFIX['row']}.weight" in str(caught.value)
    assert "51" in str(caught.value)


def test_a_finished_layer_may_be_finished_again(tmp_path):
    tensors, whole = packed_members("row", 256, nested=True)
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, 256)
    process(layer)
    assert torch.equal(weight_of(layer), whole[0])
    assert sorted(dict(layer.named_parameters())) == ["weight", "weight_absmax", "weight_quant_map"]


@pytest.mark.parametrize("columns", [512, 100], ids=["operator", "plain-torch"])
def test_computing_traces_into_one_graph(tmp_path, columns):
    tensors, _ = packed_members("row", columns)
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, columns)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, x) + 1

    compiled = torch.compile(forward, fullgraph=True, backend="eager", dynamic=True)
    x = torch.randn(3, columns)
    assert torch.equal(compiled(x), forward(x))


def test_a_table_of_other_values_is_honoured(tmp_path):
    tensors, _ = packed_members("row", 256)
    key = f"{PREFIX['row']}.weight.quant_map"
    tensors[key] = tensors[key] * 0.5
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, 256)
    _, whole = packed_members("row", 256)
    assert torch.equal(weight_of(layer), whole[0] * 0.5)
    x = torch.randn(2, 256)
    reference = x.double() @ (whole[0] * 0.5).double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 1e-5
