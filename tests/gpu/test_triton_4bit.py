"""The Triton kernels for 4-bit weights on a Hopper GPU: against float64, in graphs, for races."""

from __future__ import annotations

import pytest
import torch

from oot_quant_backends.bitsandbytes.product_4bit import tables_of, trouble
from oot_quant_backends.bitsandbytes.triton_4bit import gemm
from oot_quant_backends.bitsandbytes.triton_4bit.ptx import PERMUTE
from oot_quant_backends.bitsandbytes.triton_4bit.units import Units, new_counters, reorder
from oot_quant_backends.bitsandbytes.weights import code_table

CUDA = torch.device("cuda")
LIMIT = {torch.bfloat16: 0.004, torch.float16: 0.001}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = (1, 2, 5, 8, 16, 17, 33, 64, 100, 128, 200, 300)
PLANS = (
    gemm.Plan(tokens=16, units=1, split=1, ahead=1),
    gemm.Plan(tokens=16, units=2, split=3, ahead=1),
    gemm.Plan(tokens=16, units=4, split=4),
    gemm.Plan(tokens=16, groups=2, units=2, split=5),
    gemm.Plan(tokens=32, units=2, split=6),
    gemm.Plan(tokens=32, groups=2, units=4, scaled=True, split=2, decode=PERMUTE.value),
    gemm.Plan(tokens=64, units=4, scaled=True, split=2),
    gemm.Plan(tokens=64, units=2, split=2, decode=PERMUTE.value),
)


@pytest.fixture(autouse=True)
def needs_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels are for Hopper")


def weight_of(rows, columns, blocksize, dtype=torch.bfloat16, quant_type="nf4"):
    """A random weight as the kernels take it, and in float64."""
    generator = torch.Generator(CUDA).manual_seed(rows + columns + blocksize)
    how = {"generator": generator, "device": CUDA}
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, **how)
    absmax = torch.rand(rows, columns // blocksize, **how) * 0.1 + 0.001
    values = code_table(quant_type, CUDA)
    words, scales = reorder((codes[:, ::2] << 4) | codes[:, 1::2], absmax)
    units = Units(words, scales, values, tables_of(quant_type, dtype), new_counters(words), rows)
    weight = values.double()[codes.long()].view(*absmax.shape, -1) * absmax.double()[..., None]
    return units, weight.view(rows, columns)


def product(x, units, bias=None, quant_type="nf4"):
    """Through the operator, as a layer does."""
    return torch.ops.oot_quant.gemm_4bit(
        x, units.words, units.scales, units.values, units.counters, bias, units.rows, quant_type
    )


def activations(tokens, columns, dtype=torch.bfloat16):
    return torch.randn(tokens, columns, device=CUDA).to(dtype)


def error_of(found, reference):
    return float((found.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_products_against_float64(quant_type, blocksize, dtype):
    """Rows that fill no group, columns that fill no step, every number of tokens, a bias."""
    columns = max(3, 576 // blocksize) * blocksize
    units, weight = weight_of(200, columns, blocksize, dtype, quant_type)
    bias = torch.randn(200, device=CUDA).to(dtype)
    for tokens in TOKENS:
        x = activations(tokens, columns, dtype)
        for given in (None, bias):
            reference = x.double() @ weight.t() + (0 if given is None else given.double())
            found = product(x, units, given, quant_type)
            assert error_of(found, reference) < LIMIT[dtype], tokens


@pytest.mark.parametrize("rows", [1, 63, 65, 1000, 6144, 28672])
@pytest.mark.parametrize("tokens", [1, 16, 40, 128, 256])
def test_rows_of_every_kind_of_layer(rows, tokens):
    units, weight = weight_of(rows, 1024, 64)
    x = activations(tokens, 1024)
    assert error_of(product(x, units), x.double() @ weight.t()) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_every_way_to_cut_a_product(plan, blocksize):
    """Tiles whole and split, evenly and unevenly; twice, as the first must leave the counters."""
    units, weight = weight_of(200, 1280, blocksize)
    for tokens in (1, plan.tokens - 3):
        x = activations(tokens, 1280)
        first = gemm.run(x, units, None, plan)
        assert error_of(first, x.double() @ weight.t()) < LIMIT[torch.bfloat16]
        assert torch.equal(gemm.run(x, units, None, plan), first)
        assert not units.counters.any()


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("tokens", [5, 300])
def test_activations_of_any_form(dtype, tokens):
    """Inside a wider matrix, at an address that no vector load takes, transposed, in three axes."""
    units, weight = weight_of(128, 256, 64, dtype)
    wide = activations(tokens, 1024, dtype)
    forms = (
        wide[:, 256:512],
        wide[:, 3:259],
        wide[:, :256].t().contiguous().t(),
        wide[:, :256].unsqueeze(0),
        wide.view(tokens, 4, 256),
    )
    for x in forms:
        assert error_of(product(x, units), x.double() @ weight.t()) < LIMIT[dtype]


def test_no_tokens_at_all():
    units, _ = weight_of(128, 256, 64)
    assert product(activations(0, 256), units).shape == (0, 128)


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_unpacked_weight(quant_type, blocksize, dtype):
    """Rounded once: within half a unit in the last place, a little more in ties."""
    units, weight = weight_of(200, max(blocksize, 384), blocksize, dtype, quant_type)
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    found = gemm.dequantize(units, dtype).double()
    assert ((found - weight).abs() <= 1.02 * step * weight.abs() + 1e-7).all()


@pytest.mark.parametrize("rows", [256, 28672])
@pytest.mark.parametrize("blocksize", [32, 64, 128])
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
def test_the_kernels_pass_their_trial_here(rows, blocksize, dtype):
    assert trouble(rows, 1024, blocksize, "nf4", dtype, CUDA) is None


def test_graphs_of_several_sizes_share_the_counters():
    units, weight = weight_of(512, 2048, 64)
    inputs, outputs, graphs = {}, {}, {}
    for tokens in (1, 7, 32, 128):
        x = inputs[tokens] = activations(tokens, 2048)
        product(x, units)
        graphs[tokens] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[tokens]):
            outputs[tokens] = product(x, units)
    for _ in range(20):
        for tokens, x in inputs.items():
            x.copy_(activations(tokens, 2048))
            graphs[tokens].replay()
            reference = x.double() @ weight.t()
            assert error_of(outputs[tokens], reference) < LIMIT[torch.bfloat16]


def test_layers_on_two_streams_do_not_disturb_each_other():
    layers = [weight_of(4096, 2048, 64), weight_of(2048, 2048, 64)]
    x = activations(4, 2048)
    references = [x.double() @ weight.t() for _, weight in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    for units, _ in layers:
        product(x, units)
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(100):
        for outputs, stream, (units, _) in zip(found, streams, layers, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(product(x, units))
    torch.cuda.synchronize()
    for outputs, reference in zip(found, references, strict=True):
        assert error_of(outputs[0], reference) < LIMIT[torch.bfloat16]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_compiled_model_takes_the_operator_as_it_is():
    units, weight = weight_of(512, 1024, 64)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(product(x * 2, units))

    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    for tokens in (3, 50, 300):
        x = activations(tokens, 1024)
        reference = torch.nn.functional.silu((x.double() * 2) @ weight.t())
        assert error_of(compiled(x), reference) < 0.006


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("rows", [4096, 6144, 28672])
def test_the_same_bits_every_time(rows, tokens):
    """Also where the memory for the parts holds NaN before: a part read too early would show."""
    units, weight = weight_of(rows, 4096, 64)
    x = activations(tokens, 4096)
    first = product(x, units)
    assert error_of(first, x.double() @ weight.t()) < LIMIT[torch.bfloat16]
    for _ in range(300):
        torch.full((8 * (rows + 64) * max(tokens, 16),), float("nan"), device=CUDA)
        assert torch.equal(product(x, units), first)
