"""Runs of seconds: a tiny model, a text made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from trailmark.data.corpus import Tokens, load_tokenizer, tokenize, tokenizer_fingerprint
from trailmark.models.conversion.convert import convert
from trailmark.training.config import DataConfig, RunConfig, TrainingConfig

CHUNK_SIZE = 20
SHARED: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "sliding_window": 9,
    "initialization": "fan_in",
    "logit_scale": 0.25,
}
MODELS: dict[str, dict[str, Any]] = {
    "drt": SHARED
    | {
        "architecture": "drt",
        "num_lower_layers": 1,
        "num_encoder_layers": 1,
        "chunk_size": CHUNK_SIZE,
        "num_retrieved_chunks": 2,
    },
    "window": SHARED | {"architecture": "sliding_window"},
    "landmark": SHARED
    | {
        "architecture": "landmark",
        "sliding_window": None,
        "chunk_size": CHUNK_SIZE,
        "num_retrieved_chunks": 2,
        "max_position_embeddings": 32 * (CHUNK_SIZE + 1),
        "local_length": 2 * CHUNK_SIZE,
        "landmark_phase": "fixed",
    },
    "hils": SHARED
    | {
        "architecture": "hils",
        "sliding_window": 42,  # a text is read in pieces shorter than it
        "chunk_size": CHUNK_SIZE,
        "num_retrieved_chunks": 2,
        "summary_tokens": 8,
        "calibration_rank": 2,
    },
    "hsa": SHARED
    | {
        "architecture": "hsa",
        "num_lower_layers": 1,
        "num_retrieval_groups": 1,
        "chunk_size": CHUNK_SIZE,
        "num_retrieved_chunks": 2,
        "retrieval_noise": True,
    },
}


def prose(words: int = 600) -> str:
    """Sentences of a few words, always the same."""
    rng = np.random.default_rng(0)
    chosen = rng.choice(["the", "old", "river", "sees", "a", "small", "boat", "and", "sings"], words)
    return " ".join(chosen) + ".\n"


TEXT: Tokens = tokenize([prose()], load_tokenizer())


# everything that training draws: where chunks begin, jumps of positions, what the gate controls
MODELS["landmark, drawing"] = MODELS["landmark"] | {
    "landmark_phase": "random",
    "position_jump": 5,
    "gate_probability": 0.5,
    "landmark_loss": "text",
}


def run_config(output: Path, task: Any = "text", model: str = "drt", **training: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "steps": 12,
        "tokens_per_step": 160,
        "context_length": 80,
        "save_steps": 5,
        "warmup_steps": 3,
    }
    return RunConfig(
        output=str(output),
        model=dict(MODELS[model]),
        data=DataConfig(task=task, chunk_size=CHUNK_SIZE, filler_weight=0.1 if task == "needles" else 0.0),
        training=TrainingConfig(**(settings | training)),
    )


def write_run(folder: Path, task: Any = "text", model: str = "drt", **training: Any) -> Path:
    """``folder``/config.yaml, whose text is ``folder``/text.txt; what it trains goes to ``folder``/run."""
    folder.mkdir(exist_ok=True)
    text, file = folder / "text.txt", folder / "config.yaml"
    text.write_text(prose())
    config = run_config(folder / "run", task, model, **training)
    config.data.paths = [str(text)]
    file.write_text(config.to_yaml())
    return file


def weights_of(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def without_seconds(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: x for name, x in line.items() if name != "seconds"} for line in history]


def save_converted_llama(folder: Path, made: dict[str, tuple[str, list[str]]], **changes: Any) -> None:
    """A Llama of four layers for 96 tokens as ``base``, and what it is converted to: by name the kind and fields."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=259, hidden_size=24, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    load_tokenizer().save_pretrained(folder / "base")
    for name, (to, fields) in made.items():
        convert(folder / "base", folder / name, to, fields, fingerprint=tokenizer_fingerprint)
