"""From a base of transformers to a model that was trained in two stages, by the files that a user has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.tiny import TEXT, save_converted_llama, weights_of
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.run import Run

CONFIGS = Path(__file__).parents[2] / "configs"
FIRST = """
init_from: {folder}/drt
model: {{}}
training:
  train: additions
  steps: 6
  tokens_per_step: 192
  context_length: 96
  loss_positions: 0.5
  optimizer: adamw
  learning_rate: 0.003
  logging_steps: 1
  warmup_steps: 1
distil: {{model: {folder}/full, retrieval_weight: 1.0}}
"""
SECOND = """
init_from: {folder}/first
model: {{}}
training:
  steps: 3
  tokens_per_step: 192
  context_length: 96
  optimizer: adamw
  learning_rate: 0.0001
  addition_learning_rate_factor: 3.0
  weight_decay: 0.1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers for 96 tokens, and what it was converted to."""
    folder = tmp_path_factory.mktemp("bases")
    drt = ["sliding_window=16", "chunk_size=7", "num_retrieved_chunks=2", "num_encoder_layers=1"]
    save_converted_llama(folder, {"drt": ("drt", drt), "full": ("sliding_window", [])})
    return folder


def run_of(text: str, folder: Path, output: str, *overrides: str) -> Run:
    path = folder / f"{output}.yaml"
    path.write_text(text.format(folder=folder))
    return Run(load_run_config(path, [f"output={folder / output}", *overrides]), text=TEXT)


@pytest.mark.slow
def test_a_base_becomes_a_model_in_two_stages(folder: Path) -> None:
    first = run_of(FIRST, folder, "first")
    assert first.model_config.model_type == "trailmark_drt"
    assert (first.model_config.sliding_window, first.model_config.num_sinks) == (16, 4)
    model = first.train()
    assert model is not None
    assert all({"distil", "distil_retrieval"} <= line.keys() for line in first.history)
    before, after = weights_of(folder / "drt"), weights_of(folder / "first")
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x.float(), after[name].float()) == (
            model.part_of(name) not in ("retriever", "additions")
        ), name
    card = (folder / "first" / "README.md").read_text()
    assert "Of its weights only those that a plain language model lacks were trained." in card
    assert "Beside the text it learned from the model full." in card

    second = run_of(SECOND, folder, "second")
    assert second.train() is not None
    later = weights_of(folder / "second")
    assert not any(torch.equal(after[name], later[name]) for name in after)
    opened = AutoModelForCausalLM.from_pretrained(folder / "second")
    ids = torch.from_numpy(TEXT[:90].astype("int64"))[None]
    opened.generate(ids, max_new_tokens=3, do_sample=False)


def test_texts_longer_than_the_base_knows_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^training.context_length: expected at most the 96 tokens"):
        run_of(FIRST, folder, "longer", "training.context_length=192")


def test_fields_of_the_base_may_be_changed(folder: Path) -> None:
    """Those that no weight depends on; a run is the same as with all of them written down."""
    config = run_of(FIRST, folder, "changed", "model.num_retrieved_chunks=3").model_config
    assert (config.num_retrieved_chunks, config.chunk_size, config.hidden_size) == (3, 7, 24)
    named = RunConfig(init_from=str(folder / "drt"), model={"architecture": "drt"}).model_config()
    assert named.hidden_size == 768
