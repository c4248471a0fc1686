"""Config against tensors: who decides, what is refused before a model is built, what is warned."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from oot_quant import vllm_plugin
from oot_quant.errors import (
    CheckpointIncomplete,
    ConfigContradiction,
    LibraryMissing,
    LibraryTooOld,
    OotQuantError,
    UnknownOption,
    UnsupportedFormat,
)
from oot_quant.testing.layers import build_linear, config_for, tensor_parallel
from oot_quant_backends.bitsandbytes import library
from oot_quant_backends.bitsandbytes.linear_4bit import Stored4bitLinearMethod
from tests.backends.bitsandbytes.stored import (
    SECTION,
    pack,
    pack_8bit,
    random_matrix,
    write_checkpoint,
)
from tests.models import ModelShelf

UP = "model.layers.0.mlp.fc1"


def stored(folder, section, **how):
    tensors, _ = pack(UP, random_matrix(64, 128), **how)
    return write_checkpoint(folder, tensors, section)


@pytest.mark.parametrize("skip", [None, [], ["lm_head"], ["elsewhere"]])
@pytest.mark.parametrize("with_key", [True, False])
def test_the_tensors_decide_whatever_the_skip_list_says(tmp_path, skip, with_key):
    section = {**SECTION, "llm_int8_skip_modules": skip} if with_key else SECTION
    config = config_for("bitsandbytes", stored(tmp_path, section))
    assert config.prequantized
    assert list(config.formats) == [UP]


def test_a_skip_list_that_contradicts_the_tensors_is_one_warning_with_names(tmp_path, caplog_vllm):
    packed, _ = pack("model.layers.0.fc1", random_matrix(64, 128))
    packed |= pack("model.layers.1.fc1", random_matrix(64, 128))[0]
    packed["model.layers.2.fc1.weight"] = random_matrix(64, 128)
    section = {**SECTION, "llm_int8_skip_modules": ["model.layers.1"]}
    config_for("bitsandbytes", write_checkpoint(tmp_path, packed, section))
    warnings = [record for record in caplog_vllm.records if "skip_modules" in record.message]
    assert len(warnings) == 1
    assert "Stored quantized though listed: model.layers.1.fc1" in warnings[0].getMessage()
    assert "Stored unquantized though not listed: model.layers.2.fc1" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("option", "value", "how", "words"),
    [
        ("bnb_4bit_quant_type", "fp4", {}, "stored as 'nf4', config says 'fp4'"),
        ("bnb_4bit_quant_type", "nf4", {"quant_type": "fp4"}, "stored as 'fp4'"),
        ("bnb_4bit_blocksize", 128, {}, "stored as 64, config says 128"),
    ],
)
def test_an_explicit_option_that_contradicts_the_tensors_is_refused(
    tmp_path, option, value, how, words
):
    with pytest.raises(ConfigContradiction) as caught:
        config_for("bitsandbytes", stored(tmp_path, {**SECTION, option: value}, **how))
    assert words in str(caught.value)
    assert f"where: {UP}.weight (1 of 1 modules)" in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_config_of_another_number_of_bits_is_refused(tmp_path, bits):
    make = pack if bits == 8 else pack_8bit
    tensors, _ = make(UP, random_matrix(64, 128))
    section = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    with pytest.raises(ConfigContradiction) as caught:
        config_for("bitsandbytes", write_checkpoint(tmp_path, tensors, section))
    assert f"stored in {12 - bits} bits, config says {bits}" in str(caught.value)


def test_a_missing_quant_type_means_what_the_tensors_say(tmp_path):
    config = config_for("bitsandbytes", stored(tmp_path, SECTION, quant_type="fp4"))
    assert config.formats[UP].quant_type == "fp4"


def test_double_quantization_that_contradicts_the_tensors_is_a_warning(tmp_path, caplog_vllm):
    section = {**SECTION, "bnb_4bit_use_double_quant": True}
    assert config_for("bitsandbytes", stored(tmp_path, section)).formats[UP].nested is False
    assert "bnb_4bit_use_double_quant=True" in caplog_vllm.text


def test_a_config_that_promises_packed_weights_over_plain_ones_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, {f"{UP}.weight": random_matrix(64, 128)}, SECTION)
    with pytest.raises(ConfigContradiction, match="but none is") as caught:
        config_for("bitsandbytes", folder)
    assert "remove quantization_config from config.json" in str(caught.value)


def test_an_unknown_option_is_refused_in_flight_and_warned_of_on_stored_weights(
    tmp_path, caplog_vllm
):
    plain = write_checkpoint(tmp_path / "plain", {f"{UP}.weight": random_matrix(64, 128)}, None)
    with pytest.raises(UnknownOption, match="bnb_4bit_size"):
        config_for("bitsandbytes", plain, {"bnb_4bit_size": 3})
    config_for("bitsandbytes", stored(tmp_path / "packed", {**SECTION, "bnb_4bit_size": 3}))
    assert "options without effect on a stored checkpoint: bnb_4bit_size" in caplog_vllm.text


def test_options_without_effect_in_flight_are_said(tmp_path, caplog_vllm):
    plain = write_checkpoint(tmp_path, {f"{UP}.weight": random_matrix(64, 128)}, None)
    config_for("bitsandbytes", plain, {"bnb_4bit_quant_storage": "bfloat16"})
    assert "in flight to 4 bits: bnb_4bit_quant_storage" in caplog_vllm.text


def test_a_packed_input_embedding_is_refused_by_name(tmp_path):
    name = "model.embed_tokens"
    tensors, _ = pack(name, random_matrix(64, 128))
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    with pytest.raises(UnsupportedFormat, match=name), tensor_parallel():
        config.get_quant_method(VocabParallelEmbedding.__new__(VocabParallelEmbedding), name)


def test_a_layer_without_any_tensor_is_named_once_its_likes_have_some(tmp_path):
    tensors, _ = pack("model.layers.0.fc1", random_matrix(64, 128))
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    with tensor_parallel():
        build_linear("column", config, "model.layers.0.fc1", 128, 64)
        with pytest.raises(CheckpointIncomplete) as caught:
            build_linear("column", config, "model.layers.1.fc1", 128, 64)
    assert "where: model.layers.1.fc1" in str(caught.value)


def test_names_follow_the_model_class(tmp_path):
    tensors, _ = pack("model.language_model.layers.0.fc1", random_matrix(64, 128))
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model."},
        orig_to_new_suffix={".fc2.weight": ".fc3.weight"},
    )
    config.apply_vllm_mapper(mapper)
    assert list(config.formats) == ["language_model.model.layers.0.fc1"]


def test_layers_of_a_draft_model_are_found_by_their_own_names(tmp_path):
    tensors, _ = pack(UP, random_matrix(64, 128))
    config = config_for("bitsandbytes", write_checkpoint(tmp_path, tensors))
    with tensor_parallel():
        layer = build_linear("column", config, f"draft_model.{UP}", 128, 64)
    assert isinstance(layer.quant_method, Stored4bitLinearMethod)


def test_a_skip_list_follows_the_model_class(tmp_path):
    plain = write_checkpoint(tmp_path, {f"{UP}.weight": random_matrix(64, 128)}, None)
    config = config_for("bitsandbytes", plain, {"llm_int8_skip_modules": ["model.visual.fc1"]})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.visual.": "tower."}))
    assert config.is_skipped("tower.fc1")
    assert not config.is_skipped("tower.fc2")


def test_the_compile_cache_is_keyed_by_what_the_tensors_say(tmp_path):
    class Model:
        pass

    digests = []
    for number, how in enumerate([{}, {"blocksize": 128}, {"quant_type": "fp4"}, {}]):
        model = Model()
        config = config_for("bitsandbytes", stored(tmp_path / str(number), SECTION, **how))
        config.maybe_update_config(str(tmp_path / str(number)), hf_config=model)
        digests.append(model.oot_quant_fingerprint)
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]


class TestThroughTheEngineConfig:
    """What a user meets: vLLM's own way from arguments to a config, without an engine."""

    @pytest.fixture(autouse=True)
    def registered(self):
        vllm_plugin.register()

    def config(self, folder, **arguments) -> VllmConfig:
        return EngineArgs(model=str(folder), max_model_len=64, skip_tokenizer_init=True,
                          **arguments).create_engine_config()  # fmt: skip

    def test_a_stored_checkpoint_needs_no_flag(self, shelf: ModelShelf):
        config = self.config(shelf.quantized(shelf.llama())).quant_config
        assert config.get_name() == "bitsandbytes"
        assert config.prequantized
        assert len(config.formats) == 14

    def test_a_plain_checkpoint_is_quantized_in_flight_on_request(self, shelf: ModelShelf):
        config = self.config(shelf.llama(), quantization="bitsandbytes").quant_config
        assert not config.prequantized
        assert config.wanted.quant_type == "nf4"

    @pytest.mark.parametrize("named", [True, False])
    def test_options_come_through_hf_overrides(self, shelf: ModelShelf, named):
        section = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_blocksize": 128}
        section |= {"quant_method": "bitsandbytes"} if named else {}
        arguments = {} if named else {"quantization": "bitsandbytes"}
        config = self.config(
            shelf.llama(), hf_overrides={"quantization_config": section}, **arguments
        ).quant_config
        assert (config.wanted.quant_type, config.wanted.blocksize) == ("fp4", 128)
        assert not config.prequantized

    def test_other_options_give_another_compile_cache(self, shelf: ModelShelf):
        hashes = {
            self.config(
                shelf.llama(),
                quantization="bitsandbytes",
                hf_overrides={"quantization_config": {"bnb_4bit_quant_type": kind}},
            ).compute_hash()
            for kind in ("nf4", "fp4")
        }
        assert len(hashes) == 2

    @pytest.mark.parametrize(
        ("section", "words"),
        [
            ({"bnb_4bit_quant_type": "nf5"}, "unknown-option: an option of bitsandbytes"),
            ({"bnb_4bit_sort": 1}, "unknown-option: bitsandbytes has no such option"),
        ],
    )
    def test_a_bad_request_reaches_the_user_with_its_own_words(self, shelf, section, words):
        with pytest.raises(OotQuantError) as caught:
            self.config(
                shelf.llama(),
                quantization="bitsandbytes",
                hf_overrides={"quantization_config": section},
            )
        assert str(caught.value).startswith(words)

    def test_a_truncated_file_stops_before_the_engine(self, shelf: ModelShelf, tmp_path):
        import shutil

        folder = shutil.copytree(shelf.quantized(shelf.llama()), tmp_path / "broken")
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(OotQuantError, match="checkpoint-unreadable") as caught:
            self.config(folder)
        assert "model.safetensors" in str(caught.value)

    def test_a_model_of_another_method_is_left_alone(self, shelf: ModelShelf):
        assert self.config(shelf.llama()).quant_config is None


def test_float32_is_among_the_dtypes(tmp_path):
    config = config_for("bitsandbytes", stored(tmp_path, SECTION))
    assert torch.float32 in config.get_supported_act_dtypes()


@pytest.mark.parametrize("found", [None, "0.47.0"])
def test_a_library_that_is_missing_or_old_stops_before_the_engine(tmp_path, monkeypatch, found):
    monkeypatch.setattr(library, "installed_version", lambda: found)
    with pytest.raises(LibraryTooOld if found else LibraryMissing) as caught:
        config_for("bitsandbytes", stored(tmp_path, SECTION))
    assert "0.50.0 or newer" in str(caught.value)
    assert "python -m pip install" in str(caught.value)
