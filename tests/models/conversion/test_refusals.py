"""What no model here computes is refused by its name, before anything is written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors

from tests.models import tiny
from tests.models.conversion.bases import byte_level, converted, made, save
from trailmark.models.conversion.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made("llama"), tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture
def base(llama: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    folder = tmp_path / "base"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(base: Path, message: str, to: str = "drt", *fields: str) -> None:
    output = base.parent / "out"
    with pytest.raises(ValueError, match=message):
        convert(model=str(base), output=output, to=to, fields=fields)
    assert not output.exists()
    assert [path.name for path in base.parent.iterdir()] == [base.name]


@pytest.mark.parametrize("fields", [(), ("reading=windows",)])
@pytest.mark.parametrize("to", ["hils", "drt", "hsa"])
def test_a_model_that_retrieves_has_a_window(base: Path, to: str, fields: tuple[str, ...]) -> None:
    refused(
        base,
        "^sliding_window: expected a number of positions",
        to,
        "sliding_window=null",
        *fields if to == "hils" else (),
    )


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link_is_refused(base: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ValueError, match=r"^output: expected a new folder, .*link' is there already"):
        convert(model=str(base), output=tmp_path / "link", to="drt")


ROPE = {"rope_theta": 500.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mixtral"}, "this mixtral has num_local_experts = 8 .a mixture of experts"),
        ({"model_type": "qwen3_moe"}, "a mixture of experts"),
        ({"model_type": "deepseek_v3"}, "a mixture of experts"),
        ({"num_experts": 4}, "this llama has num_experts = 4 .a mixture of experts"),
        ({"kv_lora_rank": 16}, "multi-head latent attention"),
        ({"model_type": "gemma2"}, "capped"),
        ({"model_type": "gpt2"}, "expected one of the families llama, mistral, qwen2, qwen3, or a model.*got 'gpt2'"),
        ({"model_type": "olmo2"}, "got 'olmo2'"),
        ({"model_type": "smollm3"}, "layers without positions"),
        ({"attention_bias": True}, "attention_bias = True .a bias of the attention's output"),
        ({"mlp_bias": True}, "mlp_bias = True .biases in the MLP"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "this llama has 'dynamic'"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "positions in a part of each head alone"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "of shape .* by the sizes and head counts"),
        ({"num_key_value_heads": 6}, r"k_proj.weight of shape \[48, 48\] .* has \[16, 48\]"),
        ({"num_hidden_layers": 3}, "9 are left over: model.layers.3"),
        ({"num_hidden_layers": 5}, "9 are missing: model.layers.4"),
        ({"tie_word_embeddings": False}, "1 are missing: lm_head.weight"),
    ],
    ids=str,
)  # fmt: skip
def test_a_base_that_computes_otherwise(fields: dict[str, Any], message: str, base: Path) -> None:
    change(base, **fields)
    refused(base, message)


def test_weights_that_are_not_finite(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    refused(base, "expected finite weights, model.norm.weight")


def test_a_projection_that_should_be_the_embedding_and_is_not(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    converted(base, base.parent / "same", "drt", "sliding_window=24")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lm_head.weight is model.embed_tokens.weight \(tie_word_embeddings\)"
    ):
        converted(base, base.parent / "other", "drt", "sliding_window=24")


def test_weights_that_are_quantized(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    refused(base, "expected weights in BF16, F16, F32, F64, base has some in I8: they are quantized")


def test_an_index_that_leads_out_of_the_folder(base: Path) -> None:
    (base / "model.safetensors").rename(base / "model-1.safetensors")
    names = dict.fromkeys(load_file(base / "model-1.safetensors"), "../model.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(base, r"expected names of files in model.safetensors.index.json, got '../model.safetensors'")


@pytest.mark.parametrize(
    ("to", "field", "message"),
    [
        ("drt", "hidden_size=64", "hidden_size: expected 48, which the weights of base have, got 64"),
        ("drt", "window_position=alibi", "window_position: expected 'rope'"),
        ("drt", "slidng_window=64", "Did you mean 'sliding_window'"),
        ("drt", "num_retrieval_groups=3", "num_retrieval_groups: expected a divisor of the 2 upper layers"),
        ("drt", "num_lower_layers=4", "num_lower_layers: expected 0 to 3"),
        ("drt", "memory_values=next", "memory_values: expected 'same' with virtual_key 'window'"),
        (
            "drt",
            "retrieval_query=chunk",
            "retrieval_query: expected 'landmark', as a conversion says how each part begins",
        ),
        ("drt", "gca_start=lookup", "gca_start: expected 'drawn' with virtual_key 'window'"),
        ("hsa", "num_memory_heads=1", "num_memory_heads: expected 2, as many as this llama"),
        ("hsa", "chunk_summary=landmark", "chunk_summary: expected 'mean', got 'landmark'"),
        ("landmark", "mlp=gelu", "expected mlp 'swiglu'"),
        ("landmark", "gate_probability=0.5", "expected gate_probability 0"),
        ("sliding_window", "norm=layer", "expected mlp 'swiglu' and norm 'rms'"),
        ("rpt", "chunk_size=8", "to: expected one of drt, hils, hsa, landmark, sliding_window, llama"),
    ],
)
def test_fields_that_do_not_fit(to: str, field: str, message: str, base: Path) -> None:
    refused(base, message, to, field)


def test_a_base_without_a_tokenizer(base: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / name).unlink()
    refused(base, "expected a tokenizer beside the weights, base has none")


@pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is not None, reason="sentencepiece is there")
def test_a_tokenizer_that_another_package_reads(base: Path) -> None:
    (base / "tokenizer.json").rename(base / "tokenizer.model")
    refused(base, "base has tokenizer.model alone.*pip install sentencepiece protobuf")


def test_a_token_around_every_text_that_has_no_embedding(base: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<{n}>" for n in range(300 - len(tokenizer))])
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 300)]
    )
    tokenizer.save_pretrained(base)
    refused(base, r"puts others around each text \(<begin> have none\)")


def test_a_tokenizer_of_another_model(base: Path) -> None:
    tokens = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary |= {f"w{n}": len(vocabulary) + n for n in range(300)}
    (base / "tokenizer.json").write_text(json.dumps(tokens))
    refused(base, "its own has 559 without those that were added")


def test_a_folder_that_is_there(base: Path) -> None:
    (base.parent / "out").mkdir()
    (base.parent / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="output: expected a new folder"):
        convert(model=str(base), output=base.parent / "out", to="drt")
    assert (base.parent / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "{}", "[]", "nonsense"])
def test_a_folder_without_a_model(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    if content:
        (folder / "config.json").write_text(content)
    refused(folder, "model: ")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    refused(folder, r"model: cannot read .*x\.gguf.* download or save it again")


def test_a_window_that_no_layer_was_trained_with(tmp_path: Path) -> None:
    base = save(made("mistral, its own window"), tmp_path / "base")
    refused(base, "at most the 7 positions of this mistral's own window", "drt", "sliding_window=8")
    refused(
        base, "at most the 7 positions of this mistral's own window", "sliding_window", "sliding_window=null"
    )
    refused(base, "expected a base whose layers see all of a text", "landmark")


def test_what_has_no_way_back(tmp_path: Path) -> None:
    base = save(made("llama, wide heads"), tmp_path / "base")
    converted(base, tmp_path / "drt", "drt", "sliding_window=24", "num_sinks=0")
    converted(base, tmp_path / "sinks", "sliding_window", "sliding_window=24")
    converted(base, tmp_path / "window", "sliding_window", "sliding_window=24", "num_sinks=0")
    converted(base, tmp_path / "whole", "sliding_window")
    for name, value in (("mlp", "gelu"), ("norm", "layer")):
        tiny.window_model(window_position="rope", **{name: value}).save_pretrained(tmp_path / name)
    for name, to, message in (
        ("drt", "llama", "a llama has nothing that reads chunks"),
        (
            "sinks",
            "llama",
            r"a llama cannot compute .* with num_sinks = 4\. Nor can mistral, qwen2, qwen3: after",
        ),
        ("window", "llama", r"with sliding_window = 24\. Go back to mistral\."),
        ("whole", "qwen2", "with attention_bias = False"),
        ("mlp", "llama", "with mlp = 'gelu'"),
        ("norm", "mistral", "with norm = 'layer'"),
        ("whole", "qwen3", "with qk_norm = None"),
        ("base", "llama", "expected a model with a window alone"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(model=str(tmp_path / name), output=tmp_path / "x", to=to)
