"""Options are honoured or refused, never ignored."""

from __future__ import annotations

import pytest

from oot_quant.errors import UnknownOption
from oot_quant_backends.bitsandbytes.options import Options, is_skipped, parse, refuse_unknown


def test_without_options_it_is_plain_nf4_in_blocks_of_64():
    options = parse({})
    assert (options.quant_type, options.blocksize, options.nested) == ("nf4", 64, False)
    assert options.skip == ()


def test_what_transformers_writes_is_understood_in_full():
    transformers = pytest.importorskip("transformers")
    section = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head"],
    ).to_dict()
    options = parse(section)
    assert options == Options(quant_type="fp4", nested=True, skip=("lm_head",), given=options.given)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"bnb_4bit_quant_type": "nf3"}, "needed: one of: fp4, nf4"),
        ({"bnb_4bit_quant_type": 4}, "found: 4"),
        ({"bnb_4bit_blocksize": 48}, "32, 64, 128"),
        ({"bnb_4bit_blocksize": True}, "found: True"),
        ({"bnb_4bit_use_double_quant": "yes"}, "true or false"),
        ({"llm_int8_skip_modules": "lm_head"}, "a list of module names"),
        ({"llm_int8_skip_modules": [3]}, "a list of module names"),
    ],
)
def test_a_value_that_an_option_does_not_have_is_refused(section, words):
    with pytest.raises(UnknownOption) as caught:
        parse(section)
    assert words in str(caught.value)
    assert f"where: quantization_config.{next(iter(section))}" in str(caught.value)


@pytest.mark.parametrize("name", ["load_in_8bit", "_load_in_8bit"])
def test_8_bit_never_becomes_4_bit(name):
    assert parse({name: True}).bits == 8
    assert parse({}).bits == 4


def test_4_and_8_bit_at_once_are_refused():
    with pytest.raises(UnknownOption, match="both true"):
        parse({"load_in_8bit": True, "load_in_4bit": True})


def test_an_unknown_option_is_named_with_those_that_exist():
    with pytest.raises(UnknownOption) as caught:
        refuse_unknown(parse({"bnb_4bit_blockszie": 64}))
    assert "where: quantization_config.bnb_4bit_blockszie" in str(caught.value)
    assert "bnb_4bit_blocksize" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "skipped"),
    [
        ("lm_head", "lm_head", True),
        ("mlp", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("up_proj", "model.layers.0.mlp.up_proj", True),
        ("proj", "model.layers.0.mlp.up_proj", False),
        (r"model\.layers\.\d+\.mlp\..*", "model.layers.3.mlp.up_proj", True),
        ("[", "model.layers.3.mlp.up_proj", False),
    ],
)
def test_a_skip_list_matches_whole_parts_of_names_or_a_pattern(name, module, skipped):
    assert is_skipped(module, (name,)) is skipped
