"""A Llama-like GGUF file as a folder that `from_pretrained` loads: weights, config, tokenizer, chat template.

De-quantised and renamed here rather than by transformers, whose GGUF loading changes between versions: 5.8 names the
wrong end token, and no version splits digits one by one as SmolLM2's own tokenizer does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from jaxtyping import Float32
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # half-typed stub
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
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
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the model in `gguf` into `folder`, bfloat16, head tied to the embedding.

    `say` gets a line a layer. About 3 s and 600 MB of memory for 135 M parameters.
    """
    reader = GGUFReader(gguf)
    _write_json(folder / "config.json", model_config(reader))
    _write_json(folder / "generation_config.json", generation_config(reader))
    tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(reader))
    (folder / "chat_template.jinja").write_text(_text(reader, "tokenizer.chat_template"), encoding="utf-8")
    save_file(weights(reader, say), folder / "model.safetensors", metadata={"format": "pt"})


def model_config(reader: GGUFReader) -> dict[str, object]:
    """Give config.json: every value is read from the file's metadata, save those that GGUF implies by `llama`."""
    heads = _integer(reader, "llama.attention.head_count")
    hidden = _integer(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _integer(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _integer(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _integer(reader, "llama.context_length"),
        "rms_norm_eps": _decimal(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _decimal(reader, "llama.rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        **generation_config(reader),
    }


def generation_config(reader: GGUFReader) -> dict[str, object]:
    """Give generation_config.json: where a text begins, ends and is padded."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{hf}_token_id": _integer(reader, f"tokenizer.ggml.{name}_token_id") for hf, name in names.items()}


def tokenizer_config(reader: GGUFReader) -> dict[str, object]:
    """Give tokenizer_config.json: the special tokens by name."""
    tokens = _texts(reader, "tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {f"{hf}_token": tokens[_integer(reader, f"tokenizer.ggml.{name}_token_id")] for hf, name in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **special,
    }


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """Build the byte-level BPE of `tokenizer.ggml.pre = smollm`: every digit alone, then the GPT-2 pattern."""
    tokens = _texts(reader, "tokenizer.ggml.tokens")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _texts(reader, "tokenizer.ggml.merges"))]
    built = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()

    kinds = _integers(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    special = [AddedToken(token, normalized=False, special=True) for token in control]
    built.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]  # half-typed stub
    return built


def weights(reader: GGUFReader, say: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """De-quantise every tensor to bfloat16 under its Hugging Face name; there is no lm_head, the head is tied."""
    num_layers, begun = _integer(reader, "llama.block_count"), 0
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_norm.weight"):  # a layer's first tensor; the layers lie in no order
            begun += 1
            say(f"converting layer {begun} of {num_layers}")
        state[hf_name(tensor.name)] = torch.tensor(full_precision(reader, tensor)).to(torch.bfloat16)
    return state


def hf_name(name: str) -> str:
    """Translate a GGUF tensor name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def full_precision(reader: GGUFReader, tensor: ReaderTensor) -> Float32[np.ndarray, "..."]:
    """De-quantise one tensor, its q and k rows in Hugging Face's order."""
    values = dequantize(tensor.data, tensor.tensor_type)
    if ".attn_q." in tensor.name:
        return halves_apart(values, _integer(reader, "llama.attention.head_count"))
    if ".attn_k." in tensor.name:
        return halves_apart(values, _integer(reader, "llama.attention.head_count_kv"))
    return values


def halves_apart(rows: Float32[np.ndarray, "n D"], num_heads: int) -> Float32[np.ndarray, "n D"]:
    """Undo llama.cpp's order of the n output rows of a projection.

    llama.cpp rotates neighbouring rows of a head (0 with 1), Hugging Face rows half a head apart.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])  # head, pair, member, input
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _integer(reader: GGUFReader, key: str) -> int:
    return cast(int, _value(reader, key))


def _decimal(reader: GGUFReader, key: str) -> float:
    return float(f"{cast(float, _value(reader, key)):.6g}")  # stored as float32: 9.99999975e-06 stands for 1e-05


def _text(reader: GGUFReader, key: str) -> str:
    return cast(str, _value(reader, key))


def _texts(reader: GGUFReader, key: str) -> list[str]:
    return cast(list[str], _value(reader, key))


def _integers(reader: GGUFReader, key: str) -> list[int]:
    return cast(list[int], _value(reader, key))


def _value(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata {key!r}; it is not a Llama-like chat model")
    return field.contents()
