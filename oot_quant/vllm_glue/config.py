"""The configuration class that every backend derives its own from.

vLLM makes one for each engine: ``from_config`` with the model's quantization section (or
nothing), ``maybe_update_config`` in the front end before anything is built, then
``get_quant_method`` for every layer on every rank. This class reads the checkpoint's headers,
keeps the formats found there under vLLM's module names and asks the backend's hooks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper

from oot_quant.checkpoint import Checkpoint, StoredTensor, read_checkpoint
from oot_quant.errors import CheckpointSurplus, UnsupportedFormat
from oot_quant.manager import backends
from oot_quant.types import LinearRequest, MoeRequest
from oot_quant.vllm_glue.architectures import (
    Limit,
    architectures_of,
    limits_of,
    moved_rows,
    refuse_packed,
    stays_plain,
)
from oot_quant.vllm_glue.heads import HEAD, becomes_scores, is_score_head
from oot_quant.vllm_glue.missing import Namesakes, refuse_unnamed_members
from oot_quant.vllm_glue.names import (
    accept_stored_names,
    other_root,
    renamed_module,
    renamed_tensor,
    stacked_members,
    stored_group,
)
from oot_quant.vllm_glue.pickled import with_pickled_tensors
from oot_quant.vllm_glue.rivals import refuse_rivals
from oot_quant.vllm_glue.rows import RowKeeper
from oot_quant.vllm_glue.unpacking import Claims, Unpacker, UnpackingMapper

if TYPE_CHECKING:
    from typing_extensions import Self

logger = init_logger("vllm.oot_quant")
DRAFT = "draft_model."
"""What vLLM puts before the names of a draft model's layers, but not before its weights'."""


class PluginConfig(QuantizationConfig):  # type: ignore[misc]
    """Base of a backend's config. A subclass sets ``method`` and reads its options.

    ``formats`` maps vLLM's module names to the backend's format objects; ``prequantized``
    tells whether the checkpoint holds any, which is decided by its tensors where their
    headers can be read and by the presence of a quantization section otherwise.
    ``stored_modules`` are the modules that have a stored weight, quantized or not.
    ``quantizes_head`` asks for output heads to be quantized in flight like linear layers;
    ``is_tied`` tells that the model uses its input embedding as the head.
    """

    method: ClassVar[str]
    min_capability: ClassVar[int] = 60
    """Oldest CUDA compute capability, times ten."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.options = dict(options or {})
        self.formats: dict[str, object] = {}
        self.prequantized = bool(options)
        self.quantizes_head = False
        self.is_tied = False
        self.limits: tuple[Limit, ...] = ()
        self.moved: tuple[str, ...] = ()
        self.stored_modules: set[str] = set()
        self._consolidated: list[str] = []
        self._saved: dict[str, dict[str, StoredTensor]] | None = None
        self._namesakes = Namesakes()
        self._claims = Claims({})
        self._source: tuple[str, str | None] = ("", None)

    # ------------------------------------------------ what a backend overrides

    def check(self, checkpoint: Checkpoint | None) -> None:
        """Compare the options with what was found; called once, before a model is built.

        Raises OotQuantError: this is where an impossible request has to stop.
        """

    # ------------------------------------------------ vLLM's interface

    def get_name(self) -> str:
        return self.method

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.min_capability

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a section of options that names no method, if the user names ours.

        vLLM asks every registered class for every quantized model, so this never raises.
        """
        named = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        return cls.method if user_quant == cls.method and not named else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the checkpoint's headers and settle what is quantized, and how."""
        refuse_rivals(self.method)
        self.is_tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        checkpoint = _read(model_name, revision)
        found = None
        if checkpoint is not None and checkpoint.is_sharded_state:
            self._saved = _by_module(checkpoint)
        elif checkpoint is not None:
            found = backends().call(self.method, "oot_quant_read_formats", checkpoint=checkpoint)
        if found is not None and checkpoint is not None:
            self.formats = dict(found)
            self.prequantized = bool(found)
            self.stored_modules = set(_modules(checkpoint.tensors))
            self._source = model_name, revision
            self._claims = Claims(found, checkpoint.tensors)
            strays = checkpoint.strays
            self._consolidated = [name for name in strays if name.startswith("consolidated")]
        self._learn_limits(hf_config, checkpoint)
        self.check(checkpoint)
        if hf_config is not None:
            # vLLM keys its compile cache by the model's config, not by what this class
            # found in the tensors; without this a re-quantized folder runs a stale graph.
            hf_config.oot_quant_fingerprint = self.fingerprint()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename modules to where vLLM's model class puts them."""
        rename = partial(renamed_module, hf_to_vllm_mapper)
        formats = ((rename(name), form) for name, form in self.formats.items())
        self.formats = {name: form for name, form in formats if name is not None}
        self.stored_modules = set(filter(None, map(rename, self.stored_modules)))
        self._claims.rename(rename)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """What stored tensors are called in vLLM; those that no layer takes so are converted."""
        unpacker, names = Unpacker(self, self._claims, self._read_formats), self.name_mapper()
        stored = self._claims.formats.items()
        moved = {name: form for name, form in stored if name.rpartition(".")[2] in self.moved}
        keeper = RowKeeper(self.method, moved, unpacker.shape_of, partial(renamed_tensor, names))
        return UnpackingMapper(unpacker=lambda stream: keeper(unpacker(stream))) | names

    def name_mapper(self) -> WeightsMapper:
        """What stored tensors are called in vLLM."""
        rules = backends().call(self.method, "oot_quant_weight_names", method=self.method) or ()
        suffixes = {rule.stored_suffix: rule.parameter_suffix for rule in rules}
        # vLLM leaves out a tied head's weight itself, but would stumble over its statistics.
        tied = {f"{HEAD}{suffix}": None for suffix in suffixes} if self.is_tied else {}
        return WeightsMapper(orig_to_new_suffix=suffixes, orig_to_new_prefix=tied)

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Ours too: vLLM 0.28 and 0.29, and some drafts, ask for this mapper only."""
        return QuantizationConfig.get_cache_scale_mapper() | self.get_checkpoint_weight_mapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer; None leaves what is not ours to vLLM."""
        self._check_layout()
        prefix = prefix.removeprefix(DRAFT)
        if isinstance(layer, LinearBase):
            if is_score_head(prefix) and not self._is_quantized_head(prefix):
                return UnquantizedLinearMethod()
            self._check_stored(layer, prefix)
            if self._stays_plain(prefix):
                return UnquantizedLinearMethod()
            return self._claiming_method(layer, prefix) or UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return self._head_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            self._claims.claim_below(prefix)
            experts = MoeRequest(self, layer, prefix)
            return backends().call(self.method, "oot_quant_moe_method", request=experts)
        if isinstance(layer, VocabParallelEmbedding) and prefix in self.formats:
            raise UnsupportedFormat(
                "a quantized input embedding is not supported",
                where=prefix,
                needed="this module in 16 bit",
                fix="use a checkpoint of this model that does not quantize its embedding",
            )
        return None

    # ------------------------------------------------ for backends

    def members(self, prefix: str) -> tuple[str, ...]:
        """Names of the matrices that a layer merges; just its own for a plain layer."""
        parent, _, name = prefix.rpartition(".")
        if name in self.packed_modules_mapping:
            return stored_group(parent, self.packed_modules_mapping[name], self.stored_modules)
        return stacked_members(prefix) or (prefix,)

    def stored_names(self, prefix: str) -> tuple[str, ...]:
        """Names under which a layer's matrices are stored: its own if they are fused on disk."""
        return (prefix,) if prefix in self.formats else self.members(prefix)

    @property
    def is_saved(self) -> bool:
        """Whether the model comes from a sharded state, in which every layer is finished."""
        return self._saved is not None

    def saved_parameters(self, prefix: str) -> Mapping[str, StoredTensor] | None:
        """A module's finished parameters in a sharded state; None without one."""
        return None if self._saved is None else self._saved.get(prefix, {})

    def fingerprint(self) -> str:
        """A digest of everything that shapes the compiled model."""
        stored = sorted((name, repr(value)) for name, value in self.formats.items())
        options = sorted((name, repr(value)) for name, value in self.options.items())
        return hashlib.sha256(repr((self.method, stored, options)).encode()).hexdigest()

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not hasattr(layer, "prefix"):
            layer.prefix = prefix  # type: ignore[assignment] # heads up to vLLM 0.30 do not keep it
        saved = self.saved_parameters(prefix)
        request = LinearRequest(self, layer, prefix, self.stored_names(prefix), saved)
        method: QuantizeMethodBase | None = backends().call(
            self.method, "oot_quant_linear_method", request=request
        )
        if method is not None:
            accept_stored_names(layer, self.name_mapper())
        return method

    def _claiming_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer of the model, which takes its modules' tensors if it has one."""
        method = self.linear_method(layer, prefix)
        if method is not None:
            members = self.members(prefix)
            self._claims.claim((prefix, *members))
            if len(getattr(layer, "output_sizes", ())) > len(members):
                # MiniMax-M3's class names three of the five that its loader puts in here.
                self._claims.claim_beside(prefix)
        return method

    def _head_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """An output head's method: like a linear layer's, where it is stored or asked for so."""
        if becomes_scores():
            return None  # not claimed either, so a stored one is unpacked
        if self.is_tied:
            if prefix in self.formats or self.quantizes_head:
                logger.warning(
                    "%s: the model uses its input embedding as output head, so %s is not "
                    "quantized.",
                    self.method,
                    prefix,
                )
            return None
        return self._claiming_method(layer, prefix) if self._is_quantized_head(prefix) else None

    def _read_formats(self) -> Mapping[str, object]:
        """The formats of the checkpoint's modules, by stored names, read once more."""
        checkpoint = _read(*self._source)
        found = backends().call(self.method, "oot_quant_read_formats", checkpoint=checkpoint)
        return found or {}

    def _is_quantized_head(self, prefix: str) -> bool:
        return prefix in self.formats or self.is_saved or self.quantizes_head

    def _learn_limits(self, hf_config: Any, checkpoint: Checkpoint | None) -> None:
        """Know what the model's class does to weights; raise if packed ones do not survive it."""
        stored = checkpoint.config if checkpoint else {}
        config = hf_config.to_dict() if hasattr(hf_config, "to_dict") else stored
        architectures = architectures_of(config)
        self.limits = limits_of(architectures)
        self.moved = moved_rows(architectures)
        refuse_packed(architectures, self.formats)

    def _stays_plain(self, prefix: str) -> bool:
        """Whether the model's class needs a layer's weight itself, so it is left in 16 bit."""
        in_flight = not (self.prequantized or self.is_saved)
        plain = in_flight and stays_plain(self.limits, (prefix, *self.members(prefix)))
        if plain:
            logger.warning_once(
                "%s: %s stays unquantized, since vLLM's model class uses its weight itself.",
                self.method,
                re.sub(r"\d+", "*", prefix),
            )
        return plain

    def _check_layout(self) -> None:
        """Raise if vLLM is going to read another file than those with the quantized tensors."""
        config = get_current_vllm_config_or_none()
        chosen = config.load_config.load_format if config else None
        if self._consolidated and self.formats and chosen == "auto":
            raise CheckpointSurplus(
                "the checkpoint has a second copy of its weights, and vLLM would read that one",
                where=", ".join(self._consolidated),
                found="the load format 'auto', which prefers files of this name",
                needed="the quantized weights, which are in other files",
                fix="--load-format safetensors",
            )

    def _check_stored(self, layer: LinearBase, prefix: str) -> None:
        """Raise if a layer has no stored weight although it, or its namesakes, must have one."""
        if not self.stored_modules:
            return
        self._adopt_root(prefix)
        members = self.members(prefix)
        is_stored = not self.stored_modules.isdisjoint((prefix, *members))
        if not is_stored:
            refuse_unnamed_members(layer, prefix, self.formats, self.packed_modules_mapping)
        self._namesakes.note(prefix, members, is_stored=is_stored)

    def _adopt_root(self, prefix: str) -> None:
        """Know the stored modules by vLLM's names too, if all of those begin otherwise."""
        roots = (other_root(name, self.stored_modules) for name in (prefix, *self.members(prefix)))
        for old, new in filter(None, roots):
            renamed = {n: f"{new}{n[len(old) :]}" for n in self.stored_modules if n.startswith(old)}
            self.stored_modules.update(renamed.values())
            self.formats |= {renamed[n]: self.formats[n] for n in renamed if n in self.formats}
            self._claims.rename(renamed.get)
            return


def _by_module(checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module, {})[parameter] = tensor
    return modules


def _read(model: str, revision: str | None) -> Checkpoint | None:
    """What the checkpoint holds; None for a store that only vLLM's loaders can reach."""
    if "://" in model:
        return None
    return with_pickled_tensors(read_checkpoint(model, revision))


def _modules(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        module, found, _ = name.partition(".weight")
        if found:
            yield module
