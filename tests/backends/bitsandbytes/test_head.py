"""Output heads: stored quantized, quantized on request, tied, and split over ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from oot_quant.testing.layers import (
    config_for,
    finish_loading,
    load_stored,
    process,
    tensor_parallel,
)
from tests.backends.bitsandbytes.layers import error_of
from tests.backends.bitsandbytes.stored import pack, pack_8bit, random_matrix, write_checkpoint

HEAD = "lm_head"
VOCABULARY, HIDDEN = 514, 256


def build(folder, tensors, *, rank=0, ranks=1, tied=False, options=None):
    """A head as vLLM makes it for one rank, loaded and finished."""
    with tensor_parallel(rank, ranks), mock.patch.multiple(
        vocab_parallel_embedding,
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_world_size=lambda: ranks,
    ):  # fmt: skip
        config = config_for("bitsandbytes", folder, options)
        config.is_tied = tied
        head = ParallelLMHead(
            VOCABULARY, HIDDEN, params_dtype=torch.float32, quant_config=config, prefix=HEAD
        )
        load_stored(head, config, tensors.items(), HEAD)
        finish_loading(head)
        if not isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            process(head)
    return head


def rows_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of the vocabulary, which is padded to whole multiples of 64 a rank."""
    padded = -(-VOCABULARY // 64) * 64
    return whole[rank * padded // ranks : (rank + 1) * padded // ranks]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_a_stored_head_holds_its_part_of_the_vocabulary(tmp_path, kind, ranks):
    matrix = random_matrix(VOCABULARY, HIDDEN)
    if kind == "int8":
        tensors, whole = pack_8bit(HEAD, matrix)
    else:
        tensors, whole = pack(HEAD, matrix, nested=kind == "nf4-double")
    folder = write_checkpoint(tmp_path, tensors, {"quant_method": "bitsandbytes"})
    for rank in range(ranks):
        head = build(folder, tensors, rank=rank, ranks=ranks)
        part = rows_of(whole, rank, ranks)
        found = head.quant_method.dequantize_weight(head)[: len(part)]
        assert torch.allclose(found, part, rtol=1e-6, atol=0)
        x = torch.randn(3, HIDDEN)
        output = head.quant_method.apply(head, x)[:, : len(part)]
        assert error_of(output, x.double() @ part.double().t()) < 1e-5


def test_a_head_is_quantized_in_flight_on_request_only(tmp_path):
    tensors = {f"{HEAD}.weight": random_matrix(VOCABULARY, HIDDEN)}
    folder = write_checkpoint(tmp_path, tensors, section=None)
    plain = build(folder, tensors, options={})
    assert isinstance(plain.quant_method, UnquantizedEmbeddingMethod)
    head = build(folder, tensors, options={"quantize_lm_head": True})
    _, whole = pack("x", tensors[f"{HEAD}.weight"])
    assert torch.equal(head.quant_method.dequantize_weight(head)[:VOCABULARY], whole)


def test_a_tied_head_is_the_embedding_and_says_so(tmp_path, caplog_vllm):
    tensors, _ = pack(HEAD, random_matrix(VOCABULARY, HIDDEN))
    folder = write_checkpoint(tmp_path, tensors)
    head = build(folder, {}, tied=True)
    assert isinstance(head.quant_method, UnquantizedEmbeddingMethod)
    assert "uses its input embedding as output head" in caplog_vllm.text
    names = dict(head.quant_config.name_mapper().apply(tensors.items()))
    assert list(names) == [f"{HEAD}.weight"]
