"""The files in configs/ that begin with a pretrained base: their commands, at the real sizes, without weights."""

from __future__ import annotations

import json
import re
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from tests.models.conversion.bases import byte_level
from tests.models.transformers64 import rope
from trailmark.models.conversion.convert import convert
from trailmark.models.conversion.tensors import pretrained_without_weights
from trailmark.training.config import load_run_config

CONFIGS = Path(__file__).parents[3] / "configs"
BASES: dict[str, tuple[str, Any]] = {
    "smollm2": (
        "SmolLM2-135M",
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, **rope(1e5),
        ),
    ),
    "qwen3": (
        "Qwen3-0.6B",
        Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, **rope(1e6),
        ),
    ),
}  # fmt: skip


def hollow(config: Any, folder: Path) -> Path:
    """A folder with a base's configuration, a tokenizer, and a file of its tensors with holes for their values."""
    config.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    model = pretrained_without_weights(config, "base")
    header, end = {}, 0
    for name, x in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            begin, end = end, end + 2 * x.numel()
            header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("base", BASES)
def test_their_commands_make_what_they_train(base: str, tmp_path: Path) -> None:
    name, config = BASES[base]
    first, second = (CONFIGS / f"{base}-drt{stage}.yaml" for stage in ("-additions", ""))
    commands = re.findall(r"^# trailmark convert (.*)$", first.read_text(), re.M)
    made = {}
    for command in commands:
        _, _, to, _, output, *fields = shlex.split(command)
        folder = hollow(config, tmp_path / to)
        made[output] = convert(folder, tmp_path / "new", to, fields, dry_run=True)
    stages = [load_run_config(path) for path in (first, second)]
    assert stages[0].init_from in made
    assert stages[0].distil.model in made
    assert stages[0].data.tokenizer == stages[1].data.tokenizer == stages[0].init_from
    assert stages[1].init_from == stages[0].output
    assert not any(stage.model for stage in stages)  # nothing that could disagree with the folder
    drt, full = made[str(stages[0].init_from)], made[str(stages[0].distil.model)]
    assert stages[0].training.context_length <= full["base"]["trained_length"]
    assert full["fields"].get("sliding_window") is None
    assert full["parameters"]["all"] == full["parameters"]["base"]
    counts = [f"{drt['parameters'][part] / 1e6:.1f}" for part in ("base", "new")]
    assert f"| {name} | {' | '.join(counts)} |" in (CONFIGS / "README.md").read_text(), counts


def test_the_command_of_the_hils_makes_what_it_trains(tmp_path: Path) -> None:
    path = CONFIGS / "smollm2-hils.yaml"
    (command,) = re.findall(r"^# trailmark convert (.*)$", path.read_text(), re.M)
    _, _, to, _, output, *fields = shlex.split(command)
    made = convert(hollow(BASES["smollm2"][1], tmp_path / to), tmp_path / "new", to, fields, dry_run=True)
    run = load_run_config(path)
    assert run.init_from == run.data.tokenizer == output
    assert made["parameters"]["new"] == 0
    assert run.training.context_length == made["base"]["trained_length"]
