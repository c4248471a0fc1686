"""Part of the contract: what a backend says about stored tensors, before any is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oot_quant.checkpoint import Checkpoint, read_checkpoint
from oot_quant.errors import OotQuantError, ShardMisaligned
from oot_quant.manager import backends
from oot_quant.sharding import granule, items_per_row, stored_items
from oot_quant.testing.cases import COLUMN, Loader
from oot_quant.testing.checkpoints import (
    LINEAR_MODULES,
    Store,
    Stored,
    llama_weights,
    write_checkpoint,
    write_plain,
)
from oot_quant.testing.layers import config_for, tensor_parallel
from oot_quant.types import ModuleSummary, Runs, ShardRequest
from oot_quant.vllm_glue.params import Site, to_matrix

MODULE = "model.layers.0.mlp.down_proj"
INHERITED = settings(
    deadline=None,
    max_examples=60,
    # The fixtures are constants, and every backend's class runs this test.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class StorageContract:
    """Tests of names, formats and shard rules."""

    def test_name_rules_are_unambiguous(self, method: str) -> None:
        """No stored suffix is the end of another, and each is replaced by a whole component.

        Troubleshooting: make the shorter suffix longer, up to its ``.weight``.
        """
        rules = backends().call(method, "oot_quant_weight_names", method=method) or ()
        suffixes = [rule.stored_suffix for rule in rules]
        for rule in rules:
            assert rule.stored_suffix.startswith(".")
            assert (rule.parameter_suffix or ".").startswith(".")
            assert [s for s in suffixes if rule.stored_suffix.endswith(s)] == [rule.stored_suffix]

    def test_stored_names_become_parameters(
        self, method: str, store: Store, section: Mapping[str, Any], tmp_path: Path
    ) -> None:
        """Every stored tensor of a module has a parameter of the shard rule, or is dropped.

        Troubleshooting: compare ``oot_quant_weight_names`` with ``oot_quant_shard_rule``.
        """
        weight = llama_weights()[f"{MODULE}.weight"]
        tensors = store(MODULE, weight).tensors
        config = config_for(method, write_checkpoint(tmp_path, tensors, section=section))
        rules = self._rules(method, config.formats[MODULE], weight.shape[1])
        mapped = dict(config.name_mapper().apply(tensors.items()))
        assert set(mapped) <= {f"{MODULE}.{rule.name}" for rule in rules}

    def test_formats_name_the_quantized_modules(self, method: str, quantized_folder: Path) -> None:
        """``read_formats`` lists just the quantized modules, and each can be summarized.

        Troubleshooting: module names are those of the file, without ``.weight``.
        """
        checkpoint = read_checkpoint(str(quantized_folder))
        formats = self._formats(method, checkpoint)
        assert set(formats or {}) == set(LINEAR_MODULES)
        shapes = {name: tuple(w.shape) for name, w in llama_weights().items()}
        info = backends().record_for(method).info
        assert info is not None
        for module, stored_as in (formats or {}).items():
            summary = backends().call(method, "oot_quant_summarize_format", format=stored_as)
            assert isinstance(summary, ModuleSummary)
            assert summary.format in info.formats
            stored = [t.bytes for name, t in checkpoint.tensors.items() if f"{module}." in name]
            assert summary.bytes == sum(stored)
            assert summary.shape in (None, shapes[f"{module}.weight"])

    def test_foreign_checkpoints_have_no_formats(self, method: str, tmp_path: Path) -> None:
        """A checkpoint that is empty, plain or of an unknown method is nobody's, not an error.

        Troubleshooting: ``read_formats`` looks only at tensors that it knows by name.
        """
        plain = read_checkpoint(str(write_plain(tmp_path / "plain")))
        empty = Checkpoint("empty", None, {}, {})
        foreign = {f"{MODULE}.qweight": torch.zeros(2, 2, dtype=torch.int32)}
        other = read_checkpoint(str(write_checkpoint(tmp_path / "other", foreign)))
        for checkpoint in (plain, empty, other):
            assert not self._formats(method, checkpoint), checkpoint.model
        unreadable = Checkpoint("unreadable", None, {}, {}, readable=False)
        assert self._formats(method, unreadable) is None, "headers that are not there say nothing"

    @pytest.mark.parametrize("damage", ["missing", "one element short"])
    def test_damaged_modules_are_refused(self, loader: Loader, damage: str) -> None:
        """A missing or short tensor is an ``OotQuantError`` that names the module.

        Either the headers show it or loading does; in silence it would be wrong numbers.

        Troubleshooting: give the rule of a tensor that may be missing ``poison=nan``, or
        raise CheckpointIncomplete in ``read_formats``.
        """
        ((module, weight),) = COLUMN.matrices().items()
        whole = loader.store(module, weight)
        for name, tensor in whole.tensors.items():
            tensors = {other: value for other, value in whole.tensors.items() if other != name}
            if damage != "missing":
                tensors[name] = tensor.flatten()[:-1]
            with tensor_parallel(), pytest.raises(OotQuantError) as caught:
                loader.loaded(COLUMN, [Stored(tensors, whole.weight)])
            assert module in str(caught.value), f"{name}: the message does not name the module"
            assert caught.value.code != OotQuantError.code, "raise one of the derived classes"

    def test_tensor_that_never_arrives_is_refused(self, loader: Loader) -> None:
        """A scale or table that the file has but no loader saw is an ``OotQuantError``.

        Not asked of codes: every whole number is one, so nothing marks an empty parameter.

        Troubleshooting: give the tensor's rule ``poison=nan``.
        """
        ((module, weight),) = COLUMN.matrices().items()
        whole = loader.store(module, weight)
        config = config_for(loader.method, loader.write("whole", whole.tensors))
        rules = self._rules(loader.method, config.formats[module], weight.shape[1])
        floating = {f"{module}.{rule.name}" for rule in rules if "float" in rule.dtype}
        for stored in whole.tensors.items():
            if floating & set(dict(config.name_mapper().apply([stored]))):
                with tensor_parallel(), pytest.raises(OotQuantError) as caught:
                    loader.loaded(COLUMN, [whole], lost=stored[0])
                assert module in str(caught.value), f"{stored[0]}: the message must name it"

    @INHERITED
    @given(
        ranks=st.integers(1, 8),
        rank_columns=st.integers(1, 40) | st.sampled_from((64, 96, 172, 256, 512)),
        rows=st.integers(1, 5),
    )
    def test_every_weight_keeps_its_items_on_its_rank(
        self, method: str, quantized_folder: Path, ranks: int, rank_columns: int, rows: int
    ) -> None:
        """Split over any number of ranks, a rule cuts no item and moves none to another weight.

        Troubleshooting: ``weights`` counts along a row of the unpacked matrix; only an item
        that holds for each of its weights alone is ``repeatable``.
        """
        columns = ranks * rank_columns
        for stored in self._known_formats(method, quantized_folder):
            for rule in self._rules(method, stored, columns):
                if isinstance(rule.layout, Runs):
                    assert_items_follow_weights(rule.layout, rows, columns, rank_columns)

    def _known_formats(self, method: str, folder: Path) -> list[object]:
        formats = self._formats(method, read_checkpoint(str(folder))) or {}
        return list({repr(stored): stored for stored in formats.values()}.values())

    def _formats(self, method: str, checkpoint: Checkpoint) -> Mapping[str, object] | None:
        found: Mapping[str, object] | None = backends().call(
            method, "oot_quant_read_formats", checkpoint=checkpoint
        )
        return found

    def _rules(self, method: str, format: object, columns: int) -> Any:
        request = ShardRequest(method, format, columns)
        return backends().call(method, "oot_quant_shard_rule", request=request)


def assert_items_follow_weights(layout: Runs, rows: int, columns: int, rank_columns: int) -> None:
    """Check a layout on one matrix: every rank's slice holds the items of just its weights."""
    try:
        size = granule(layout, columns, rank_columns)
    except ShardMisaligned:
        assert not layout.repeatable, "a repeatable item can always be split"
        assert rank_columns % layout.weights != 0, "refused although every rank has whole items"
        return
    assert layout.weights % size == columns % size == rank_columns % size == 0
    items = torch.arange(stored_items(layout, rows, columns))
    matrix = to_matrix(items, layout, Site("rule", rows, columns), size)
    width = items_per_row(layout, rank_columns, size)
    slices = torch.split(matrix, width, dim=1)
    assert len(slices) == columns // rank_columns
    run_of_weight = torch.arange(rows * columns).view(rows, columns) // layout.weights
    for part, runs in zip(slices, torch.split(run_of_weight, rank_columns, dim=1), strict=True):
        found = part.reshape(rows, -1, layout.elements).repeat_interleave(size, dim=1)
        expected = runs.unsqueeze(-1) * layout.elements + torch.arange(layout.elements)
        assert torch.equal(found, expected), "a weight does not find its own item on its rank"
    if not layout.repeatable:
        every_item = torch.cat([part.flatten() for part in slices]).sort().values
        assert torch.equal(every_item, items), "an item is lost or kept twice"
