"""Tiny pretrained models of other families, with random weights and a tokenizer, in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models.tiny import LINEAR, LLAMA3
from tests.models.transformers64 import build, rope
from trailmark.models.conversion.convert import convert

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


BASES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0), tie_word_embeddings=True)),
    "llama, untied, scaled": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0, LLAMA3))),
    "llama, wide heads": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0, LINEAR), head_dim=10)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, **rope(500.0), sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **rope(1e6), tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **rope(1e6), head_dim=12)),
}
WINDOWS: dict[str, tuple[Any, Any]] = {
    "mistral, its own window": (
        MistralForCausalLM,
        MistralConfig(**SIZES, **rope(500.0), sliding_window=7),
    ),
    "qwen2, mixed windows": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, **rope(1e6), layer_types=MIXED, use_sliding_window=True, sliding_window=7),
    ),
}


def made(name: str) -> Any:
    """transformers' model in float64."""
    kind, config = (BASES | WINDOWS)[name]
    return build(kind, type(config).from_dict(config.to_dict()))


def save(model: Any, folder: Path, **options: Any) -> Path:
    """With a tokenizer that has a chat template, and how to generate."""
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, max_new_tokens=7)
    model.config.dtype = model.dtype
    model.save_pretrained(folder, **options)
    byte_level().save_pretrained(folder)
    return folder


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, after three special ones, with a chat template."""
    words = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    rust = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=TEMPLATE, **special)


def converted(model: str | Path, output: Path, to: str, *fields: str, **options: Any) -> Any:
    """The model that a conversion leaves, opened by transformers' own function."""
    from trailmark.models import architectures
    from trailmark.models.registry import MODELS

    convert(model=str(model), output=output, to=to, fields=fields, **options)
    kinds = architectures()
    assert to in kinds
    loaded = MODELS[kinds[to].config_class.model_type].from_pretrained(output)
    return loaded.eval()


def write_gguf(model: Any, path: Path, **more: Any) -> Path:
    """A Llama as llama.cpp writes it: float32, rows of q and k in its order, which is ours."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    for name, value in more.items():
        writer.add_string(name.replace("__", "."), value)
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    words += [f"<unused{n}>" for n in range(c.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, ending = name.rsplit(".", 1)
        values = x.float().numpy()
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """[B, T] without special tokens."""
    return torch.randint(3, 259, (batch, length), generator=torch.Generator().manual_seed(seed))
