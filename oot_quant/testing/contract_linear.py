"""Part of the contract: a linear layer of vLLM, filled, finished and multiplied.

Linear methods need ``dequantize_weight`` beside what vLLM asks of them
(``oot_quant.vllm_glue.linear``): weights are compared, bit for bit, not only products.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from oot_quant.errors import OotQuantError
from oot_quant.testing.cases import CASES, MERGED, QKV, Case, Loader, dequantized
from oot_quant.testing.checkpoints import write_plain
from oot_quant.testing.layers import config_for, process, rank_weight, tensor_parallel

RANKS = ((0, 1), (0, 2), (1, 2), (3, 4))
"""(rank, ranks). With four, the two key heads are held by two ranks each."""
IN_FLIGHT_MARGIN = 1.05
"""How much larger the error (by norm) may be in flight than stored. Each rank quantizes its
own part, so it may well be smaller."""
every_kind = pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
every_merged_kind = pytest.mark.parametrize("case", [MERGED, QKV], ids=lambda case: case.kind)
every_rank = pytest.mark.parametrize(
    ("rank", "size"), RANKS, ids=[f"rank{rank}of{size}" for rank, size in RANKS]
)


class LinearContract:
    """Tests of ``oot_quant_linear_method`` on all of vLLM's linear layers."""

    @every_kind
    @every_rank
    def test_rank_holds_its_part_bit_for_bit(
        self, loader: Loader, case: Case, rank: int, size: int
    ) -> None:
        """Unpacking a rank's part gives the rank's part of the unpacked weight.

        Tensors arrive in any order. Troubleshooting: if only some ranks fail, look at the
        shard rule; if only merged layers do, at what is kept for each matrix.
        """
        stored = {name: loader.store(name, m) for name, m in case.matrices().items()}
        with tensor_parallel(rank, size):
            layer = loader.loaded(case, stored.values(), seed=rank)
            found = dequantized(layer)
        expected = rank_weight(case.kind, [part.weight for part in stored.values()], rank, size)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    @every_merged_kind
    @every_rank
    def test_layer_fused_on_disk_is_split_as_well(
        self, loader: Loader, case: Case, rank: int, size: int
    ) -> None:
        """A checkpoint may hold a merged layer as one matrix, as Phi-3 does.

        Troubleshooting: such a layer is listed under its own name; its loader gets no shard.
        """
        matrices = list(case.matrices().values())
        stored = loader.store(case.prefix, torch.cat(matrices))
        with tensor_parallel(rank, size):
            layer = loader.loaded(case, [stored], seed=rank)
            found = dequantized(layer)
        parts = torch.split(stored.weight, [matrix.shape[0] for matrix in matrices])
        expected = rank_weight(case.kind, parts, rank, size)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_product_is_close_to_float64(
        self, loader: Loader, tolerance: Mapping[torch.dtype, float], dtype: torch.dtype
    ) -> None:
        """``apply`` multiplies with the stored weight and adds the bias, for any batch shape.

        Troubleshooting: overflow in float16? a scale rounded to 16 bits? the bias twice?
        """
        stored = [loader.store(name, m) for name, m in QKV.matrices().items()]
        with tensor_parallel():
            layer = loader.loaded(QKV, stored, dtype=dtype)
        weight = torch.cat([part.weight for part in stored]).double()
        bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        for shape in ((1,), (7,), (2, 3)):
            x = activations(*shape, weight.shape[1], dtype=dtype)
            found = layer.quant_method.apply(layer, x, bias)
            expected = x.double() @ weight.T + bias.double()
            assert found.dtype == dtype
            assert found.shape == expected.shape
            error = (found.double() - expected).norm() / expected.norm()
            assert error < tolerance[dtype], f"relative error {error:.2g}"

    def test_processing_twice_changes_nothing(self, loader: Loader) -> None:
        """vLLM may process a layer again; it stays as it is.

        Troubleshooting: derive from ``StoredLinearMethod``, or mark a processed layer.
        """
        stored = [loader.store(name, m) for name, m in MERGED.matrices().items()]
        with tensor_parallel():
            layer = loader.loaded(MERGED, stored)
            before = {name: value.clone() for name, value in layer.named_parameters()}
            process(layer)
        after = dict(layer.named_parameters())
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_finished_weights_serve_another_engine(self, loader: Loader) -> None:
        """A weight cache (load format ``ipc_cache``) puts finished parameters into new layers.

        Troubleshooting: what ``finish`` leaves on the method itself, ``adopt`` has to find again.
        """
        utils = pytest.importorskip("vllm.model_executor.utils")
        if not hasattr(utils, "weights_already_processed"):
            pytest.skip("this vLLM has no weight cache; 0.30 brought it")
        stored = [loader.store(name, m) for name, m in MERGED.matrices().items()]
        with tensor_parallel():
            layer = loader.loaded(MERGED, stored)
            with torch.device("meta"):
                other = MERGED.build(config_for(loader.method, loader.folder / MERGED.name))
            for name, value in layer.named_parameters():
                other.register_parameter(name, value)
            with utils.weights_already_processed():
                process(other)
        assert dict(other.named_parameters()).keys() == dict(layer.named_parameters()).keys()
        x = activations(3, 256, dtype=torch.float32)
        found, expected = (part.quant_method.apply(part, x) for part in (other, layer))
        assert torch.equal(found, expected)

    def test_apply_compiles_as_one_graph(self, loader: Loader) -> None:
        """torch.compile traces ``apply`` without a break, as CUDA graphs need it.

        Troubleshooting: no ``.item()``, no branch on a value, library calls as custom ops.
        """
        stored = [loader.store(name, m) for name, m in MERGED.matrices().items()]
        with tensor_parallel():
            layer = loader.loaded(MERGED, stored, dtype=torch.bfloat16)
        x = activations(3, 256, dtype=torch.bfloat16)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x: layer.quant_method.apply(layer, x), backend="eager", fullgraph=True
        )
        torch.testing.assert_close(compiled(x), layer.quant_method.apply(layer, x))

    @every_kind
    @every_rank
    def test_in_flight_is_as_exact_as_stored(
        self, loader: Loader, plain_folder: Path, case: Case, rank: int, size: int
    ) -> None:
        """16-bit matrices, quantized while loading, err no more than when they are stored.

        Troubleshooting: is every merged matrix quantized with scales of its own?
        """
        matrices = case.matrices()
        with tensor_parallel(rank, size):
            layer = loader.in_flight(case, plain_folder, matrices)
            found = dequantized(layer)
        expected = rank_weight(case.kind, list(matrices.values()), rank, size)
        stored = [loader.store(name, matrix).weight for name, matrix in matrices.items()]
        usual = (rank_weight(case.kind, stored, rank, size) - expected).norm()
        assert (found - expected).norm() <= IN_FLIGHT_MARGIN * usual

    @pytest.mark.parametrize("missing", QKV.members)
    def test_in_flight_layer_without_a_matrix_is_refused(
        self, loader: Loader, plain_folder: Path, missing: str
    ) -> None:
        """If one of the merged matrices never arrives, loading ends with an ``OotQuantError``.

        Troubleshooting: derive from ``OnlineLinearMethod``, which counts them.
        """
        matrices = {name: m for name, m in QKV.matrices().items() if not name.endswith(missing)}
        with tensor_parallel(), pytest.raises(OotQuantError) as caught:
            loader.in_flight(QKV, plain_folder, matrices)
        assert QKV.prefix in str(caught.value)

    def test_in_flight_is_refused_where_it_is_not_served(
        self, method: str, serves_in_flight: bool, tmp_path: Path
    ) -> None:
        """A backend that cannot quantize in flight says so before a layer is filled.

        Troubleshooting: raise UnsupportedFormat in the config's ``check``, or declare
        ``serves_in_flight``.
        """
        folder = write_plain(tmp_path)
        with tensor_parallel(), nullcontext() if serves_in_flight else pytest.raises(OotQuantError):
            QKV.build(config_for(method, folder))

    @pytest.fixture
    def plain_folder(self, serves_in_flight: bool, tmp_path: Path) -> Path:
        """A 16-bit checkpoint to quantize in flight; skips where that is declared as absent."""
        if not serves_in_flight:
            pytest.skip("declared: does not serve in flight")
        return write_plain(tmp_path / "plain")


def activations(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random activations, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
