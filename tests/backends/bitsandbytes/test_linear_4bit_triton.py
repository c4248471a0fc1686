"""Layers whose weight is in the Triton kernels' order, with their product in plain torch.

What a GPU adds, the kernels themselves, is in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from oot_quant.checkpoint import StoredTensor
from oot_quant.errors import UnsupportedFormat
from oot_quant.testing.layers import (
    build_linear,
    config_for,
    load_stored,
    process,
    rank_weight,
    tensor_parallel,
)
from oot_quant_backends.bitsandbytes import kernels_4bit
from oot_quant_backends.bitsandbytes.kernels_4bit import TritonGemm
from oot_quant_backends.bitsandbytes.linear_4bit import Saved4bitLinearMethod
from oot_quant_backends.bitsandbytes.triton_4bit.units import supported
from tests.backends.bitsandbytes.layers import PREFIX, error_of, load, names_of, weight_of
from tests.backends.bitsandbytes.stored import pack, random_matrix, write_checkpoint
from tests.backends.bitsandbytes.test_linear_4bit import packed_members

BF16 = torch.bfloat16
HOPPER = (9, 0)


@pytest.fixture
def hopper(monkeypatch):
    """The kernels are taken to serve here whatever they would serve there."""
    monkeypatch.setattr(
        kernels_4bit,
        "_fits_triton",
        lambda shape, blocksize, quant_type, dtype, device: supported(
            *shape, blocksize, dtype, HOPPER
        ),
    )


def saved(parameters):
    """What the headers of a sharded state tell of a layer, and a layer that was made from them."""
    dtypes = {torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32"}
    tensors = {
        name: StoredTensor(name, dtypes[value.dtype], tuple(value.shape), "", 0)
        for name, value in parameters.items()
    }
    layer = torch.nn.Module()
    layer.prefix, layer.quant_method = PREFIX["row"], Saved4bitLinearMethod(tensors)
    layer.quant_method.create_weights(layer, 512, [64], 512, 64, BF16)
    for name, value in parameters.items():
        getattr(layer, name).data.copy_(value)
    process(layer)
    return layer


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["replicated", "column", "row", "merged", "qkv"])
def test_each_rank_holds_its_slice_bit_for_bit(hopper, tmp_path, kind, ranks, nested):
    tensors, whole = packed_members(kind, 512, nested=nested)
    folder = write_checkpoint(tmp_path, tensors)
    for rank in range(ranks):
        layer = load(kind, folder, tensors, 512, rank=rank, ranks=ranks, dtype=BF16)
        assert layer.weight.dtype == torch.int32
        part = rank_weight(kind, whole, rank, ranks)
        assert torch.equal(weight_of(layer), part.to(BF16))
        x = torch.randn(3, part.shape[1], dtype=BF16)
        reference = x.double() @ part.double().t()
        assert error_of(layer.quant_method.apply(layer, x), reference) < 0.005


@pytest.mark.parametrize("rows", [1, 63, 100, 130])
@pytest.mark.parametrize("blocksize", [32, 256])
def test_rows_that_fill_no_group_stay_as_many(hopper, tmp_path, rows, blocksize):
    tensors, whole = pack(PREFIX["row"], random_matrix(rows, 512), blocksize=blocksize)
    with tensor_parallel():
        config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
        layer = build_linear("row", config, PREFIX["row"], 512, rows, dtype=BF16)
        load_stored(layer, config, tensors.items())
        process(layer)
    assert torch.equal(weight_of(layer), whole.to(BF16))
    assert layer.quant_method.apply(layer, torch.ones(2, 512, dtype=BF16)).shape == (2, rows)


def test_in_flight_layers_are_in_that_order_too(hopper, tmp_path):
    plain = {f"{name}.weight": random_matrix(128, 512) for name in names_of("merged")}
    folder = write_checkpoint(tmp_path, plain, section=None)
    layer = load("merged", folder, plain, 512, dtype=BF16, options={})
    _, whole = pack("x", random_matrix(128, 512).to(BF16))
    assert layer.weight.dtype == torch.int32
    assert torch.equal(weight_of(layer), torch.cat((whole, whole)).to(BF16))


def test_scratch_memory_is_no_part_of_a_saved_state(hopper, tmp_path):
    tensors, _ = packed_members("row", 512)
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, 512, dtype=BF16)
    assert sorted(layer.state_dict()) == ["weight", "weight_absmax", "weight_quant_map"]
    assert [name for name, _ in layer.named_buffers()] == ["weight_scratch"]


def test_a_saved_state_serves_where_the_kernels_do_and_is_refused_elsewhere(
    hopper, tmp_path, monkeypatch
):
    tensors, whole = packed_members("row", 512)
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, 512, dtype=BF16)
    parameters = {name: value.data for name, value in layer.named_parameters()}
    again = saved(parameters)
    assert torch.equal(weight_of(again), whole[0].to(BF16))
    assert [name for name, _ in again.named_buffers()] == ["weight_scratch"]
    monkeypatch.setattr(kernels_4bit, "_fits_triton", lambda *_: False)
    with pytest.raises(UnsupportedFormat, match="prepared for a GPU of the Hopper generation"):
        saved(parameters)


def test_a_state_that_was_saved_elsewhere_is_brought_into_that_order(hopper):
    tensors, whole = packed_members("row", 512)
    packed = {
        "weight": tensors[f"{PREFIX['row']}.weight"].view(64, -1),
        "weight_absmax": tensors[f"{PREFIX['row']}.weight.absmax"].view(64, -1),
        "weight_quant_map": tensors[f"{PREFIX['row']}.weight.quant_map"],
    }
    layer = saved(packed)
    assert type(layer.quant_method.kernel) is TritonGemm
    assert layer.weight.dtype == torch.int32
    assert torch.equal(weight_of(layer), whole[0].to(BF16))


def test_a_reload_fills_the_memory_that_graphs_know(hopper, tmp_path):
    tensors, whole = packed_members("row", 512)
    with tensor_parallel():
        config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
        layer = build_linear("row", config, PREFIX["row"], 512, 64, dtype=BF16)
        record_metadata_for_reloading(layer)
        load_stored(layer, config, tensors.items())
        process(layer)
        places = {name: value.data_ptr() for name, value in layer.state_dict().items()}
        places["weight_scratch"] = layer.weight_scratch.data_ptr()
        layer.weight.data.zero_()
        initialize_layerwise_reload(layer)
        load_stored(layer, config, tensors.items())
        finalize_layerwise_reload(layer, None)
    assert {name: getattr(layer, name).data_ptr() for name in places} == places
    assert torch.equal(weight_of(layer), whole[0].to(BF16))
    x = torch.randn(3, 512, dtype=BF16)
    reference = x.double() @ whole[0].double().t()
    assert error_of(layer.quant_method.apply(layer, x), reference) < 0.005


def test_computing_traces_into_one_graph(hopper, tmp_path):
    tensors, _ = packed_members("row", 512)
    layer = load("row", write_checkpoint(tmp_path, tensors), tensors, 512, dtype=BF16)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, x) + 1

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 7):
        x = torch.randn(tokens, 512, dtype=BF16)
        assert torch.equal(compiled(x), forward(x))


def test_why_the_kernels_do_not_serve_is_said_once(monkeypatch, caplog_vllm):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(kernels_4bit, "trouble", lambda *_: "the compiler went home")
    for _ in range(2):
        shape = (64, 512)
        fits = kernels_4bit._fits_triton(shape, 64, "nf4", BF16, torch.device("cuda"))
        assert not fits
    assert caplog_vllm.text.count("Weights of 64 x 512, blocks of 64: the compiler went home") == 1
    assert not kernels_4bit._fits_triton(shape, 64, "nf4", torch.float32, torch.device("cuda"))
    assert not kernels_4bit._fits_triton(shape, 64, "nf4", BF16, torch.device("cpu"))
