"""There and back: transformers computes with what comes back what it computed before, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.conversion.bases import BASES, TEMPLATE, WINDOWS, converted, ids, made, save
from tests.models.tiny import assert_same, logits_of, window_model
from tests.models.transformers64 import in_float64
from trailmark.models.conversion.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*BASES, *WINDOWS])
def test_there_and_back_is_the_base(name: str, tmp_path: Path) -> None:
    theirs = made(name)
    base = save(theirs, tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window")
    convert(model=str(tmp_path / "ours"), output=tmp_path / "back", to=name.split(",")[0])
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[key]) for key, x in before.items())
    with in_float64(), torch.no_grad():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").double().eval()
        assert back.config.max_position_embeddings == 512
        assert torch.equal(back(ids(60)).logits, theirs(ids(60)).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == TEMPLATE


def test_positions_that_transformers_has_not_are_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "in_range", "turns": 2, "original_max_position_embeddings": 64}
    ours = window_model(sliding_window=None, window_position="rope", rope_scaling=scaling, vocab_size=300)
    save(ours, tmp_path / "ours")
    with pytest.raises(ValueError, match="rope_scaling"):
        convert(str(tmp_path / "ours"), tmp_path / "back", "llama", ("max_position_embeddings=64",))


def test_a_model_of_ours_needs_the_length_of_its_training(tmp_path: Path) -> None:
    """One that never came from another family."""
    ours = window_model(sliding_window=None, window_position="rope", vocab_size=300)
    save(ours, tmp_path / "ours")
    settings = {"model": str(tmp_path / "ours"), "output": tmp_path / "back", "to": "llama"}
    for record in (
        None,
        "nonsense",
        '{"base": ["of another program"]}',
        '{"base": {"trained_length": "long"}}',
    ):
        if record is not None:
            (tmp_path / "ours" / "conversion.json").write_text(record)
        with pytest.raises(ValueError, match="fields: expected max_position_embeddings=NUMBER"):
            convert(**settings)
    with pytest.raises(ValueError, match="Did you mean 'max_position_embeddings'"):
        convert(**settings, fields=("max_positions=64",))
    convert(**settings, fields=("max_position_embeddings=64",))
    with in_float64(), torch.no_grad():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").double().eval()
        assert_same(logits_of(ours, ids(60)), back(ids(60)).logits)


def test_layers_that_all_see_everything_have_no_window_as_mistrals(tmp_path: Path) -> None:
    theirs = made("llama")
    kinds = ["full_attention"] * theirs.config.num_hidden_layers
    fields = ("sliding_window=4", "num_sinks=0", f"layer_types={kinds}".replace("'", ""))
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "sliding_window", *fields)
    convert(model=str(tmp_path / "ours"), output=tmp_path / "back", to="mistral")
    with in_float64(), torch.no_grad():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").double().eval()
        assert back.config.sliding_window is None
        assert_same(back(ids(60)).logits, logits_of(ours, ids(60)))


def test_a_folder_of_links_is_the_folder_that_they_lead_to(tmp_path: Path) -> None:
    """As the hub's cache has it."""
    converted(
        save(made("llama"), tmp_path / "base"),
        tmp_path / "ours",
        "sliding_window",
        "num_sinks=0",
        "sliding_window=null",
    )
    (tmp_path / "links").mkdir()
    for path in (tmp_path / "ours").iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    convert(model=str(tmp_path / "links"), output=tmp_path / "back", to="llama")
    convert(
        model=str(tmp_path / "links"),
        output=tmp_path / "window",
        to="sliding_window",
        fields=("sliding_window=9",),
    )
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "back"))
    assert all(torch.equal(x, after[key]) for key, x in before.items())
