"""A model of ours with a window alone becomes what its base would have become with the same windows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.conversion.bases import MIXED, converted, made, save
from tests.models.tiny import window_model
from trailmark.models.conversion.additions import ADDITIONS, Additions
from trailmark.models.conversion.convert import convert
from trailmark.pretrained import load_config
from trailmark.training.verification import verify

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = ("sliding_window=24", f"layer_types={MIXED}".replace("'", '"'))


@pytest.mark.parametrize("to", ["drt", "hils", "hsa", "landmark", "sliding_window"])
@pytest.mark.parametrize("name", ["llama, untied, scaled", "qwen2", "qwen3"])
@pytest.mark.sampled(3)
def test_it_becomes_what_its_base_becomes(name: str, to: str, tmp_path: Path) -> None:
    base = save(made(name), tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window")
    converted(base, tmp_path / "directly", to)
    converted(tmp_path / "ours", tmp_path / "further", to)
    _expect_same(tmp_path / "directly", tmp_path / "further")


def test_its_windows_and_sinks_are_kept(tmp_path: Path) -> None:
    """Layers with a window keep it, the others choose chunks; as if all had been said of the base."""
    base = save(made("llama"), tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window", *WINDOWS, "num_sinks=2")
    (tmp_path / "ours" / "conversion.json").unlink()  # as where a training has written the model
    converted(tmp_path / "ours", tmp_path / "further", "hils")
    converted(base, tmp_path / "directly", "hils", *WINDOWS, "num_sinks=2")
    _expect_same(tmp_path / "directly", tmp_path / "further")
    config = load_config(tmp_path / "further", "model")
    assert (config.retrieving_layers, config.num_sinks, config.max_sink_distance) == ([1, 3], 2, 511)
    converted(tmp_path / "ours", tmp_path / "again", "sliding_window")
    _expect_same(tmp_path / "ours", tmp_path / "again")


def test_its_card_says_what_it_was_made_of(tmp_path: Path) -> None:
    """And of how many layers tokens choose."""
    converted(save(made("llama"), tmp_path / "base"), tmp_path / "ours", "sliding_window", *WINDOWS)
    converted(tmp_path / "ours", tmp_path / "further", "hils")
    record = json.loads((tmp_path / "further" / "conversion.json").read_text())
    begun = json.loads((tmp_path / "ours" / "conversion.json").read_text())["base"]
    assert record["base"]["of"] == {name: begun[name] for name in ("name", "family", "sha256")}
    card = (tmp_path / "further" / "README.md").read_text()
    assert "Converted from ours (llama, " in card
    assert f"which came from base (SHA-256 {begun['sha256']})" in card
    assert "in 2 of its 4 layers, to the few chunks" in card
    assert r"| `layer_types` | sliding\_attention 0, 2; full\_attention the other 2 |" in card


def test_its_weights_are_those_that_were_written(tmp_path: Path) -> None:
    converted(save(made("llama"), tmp_path / "base"), tmp_path / "ours", "sliding_window")
    file, said = tmp_path / "ours" / "model.safetensors", list[str]()
    assert verify(tmp_path / "ours", say=said.append) == [str(file)]
    assert said[0].endswith("configuration and tokenizer have no hash, and were not compared.")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^folder: the weights in .* are not those that trailmark convert wrote"
    ):
        verify(tmp_path / "ours")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"^model: expected a regular file"):
        verify(tmp_path / "ours")


def test_a_strangers_record_of_a_conversion_goes_no_further(tmp_path: Path) -> None:
    converted(save(made("llama"), tmp_path / "base"), tmp_path / "ours", "sliding_window", *WINDOWS)
    file = tmp_path / "ours" / "conversion.json"
    own = json.loads(file.read_text())["base"]
    hostile = {"of": [], "name": ["x"], "family": {}, "sha256": "x" * 3_000_000}
    for number, record in enumerate(([], "x", {"base": []}, {"base": own | hostile})):
        file.write_text(json.dumps(record))
        further = tmp_path / f"{number}"
        converted(tmp_path / "ours", further, "hils")
        assert "of" not in json.loads((further / "conversion.json").read_text())["base"]


def test_what_a_window_was_trained_without_is_not_added(tmp_path: Path) -> None:
    base = save(made("llama"), tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window", *WINDOWS, "num_sinks=0")
    for to, fields in (("hils", ()), ("sliding_window", ()), ("sliding_window", ("sliding_window=16",))):
        made_of_it = tmp_path / "-".join(["of", to, *fields])
        converted(tmp_path / "ours", made_of_it, to, *fields)
        config = load_config(made_of_it, "model")
        assert (config.num_sinks, config.max_sink_distance, config.layer_types) == (0, None, MIXED)
    converted(base, tmp_path / "with", "sliding_window", *WINDOWS)
    converted(tmp_path / "with", tmp_path / "without", "sliding_window", "num_sinks=0")
    assert load_config(tmp_path / "without", "model").max_sink_distance is None
    full = ("sliding_window=24", f"layer_types={['full_attention'] * 4}".replace("'", '"'))
    converted(base, tmp_path / "full", "sliding_window", *full)
    converted(tmp_path / "full", tmp_path / "whole", "sliding_window")
    assert load_config(tmp_path / "whole", "model").windows == [None] * 4


def test_a_layer_that_gets_a_window_gets_sinks(tmp_path: Path) -> None:
    base = save(made("qwen2, mixed windows"), tmp_path / "base")
    every = f"layer_types={['sliding_attention'] * 4}".replace("'", '"')
    for to in ("hils", "sliding_window"):
        kept = f"layer_types={['sliding_attention'] * 3 + ['full_attention']}".replace("'", '"')
        converted(base, tmp_path / to, to, kept)
        config = load_config(tmp_path / to, "model")
        assert (config.num_sinks, config.sliding_window, config.layer_types[1]) == (4, 7, "sliding_attention")
        with pytest.raises(ValueError, match="layer 0, which has a window of 7 in this qwen2"):
            convert(str(base), tmp_path / "new", to, (every.replace("sliding", "full"),))
    converted(base, tmp_path / "as it is", "sliding_window")
    assert load_config(tmp_path / "as it is", "model").num_sinks == 0


def test_a_training_leaves_what_says_the_length(tmp_path: Path) -> None:
    """In additions.safetensors, where there is no conversion.json; else the way out is one that can be gone."""
    base = save(made("llama").float(), tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window", *WINDOWS, "num_sinks=0")
    additions = Additions.of(tmp_path / "ours")
    assert additions is not None
    (tmp_path / "ours" / "conversion.json").unlink()
    with pytest.raises(ValueError, match=r"got neither\. Convert the base"):
        convert(str(tmp_path / "ours"), tmp_path / "new", "hils")
    additions.write(tmp_path / "ours" / ADDITIONS)
    converted(tmp_path / "ours", tmp_path / "further", "hils")
    record = json.loads((tmp_path / "further" / "conversion.json").read_text())
    assert record["base"]["trained_length"] == 512


def _expect_same(one: Path, other: Path) -> None:
    first, second = (load_config(folder, "model").to_diff_dict() for folder in (one, other))
    assert first | {"_name_or_path": None} == second | {"_name_or_path": None}
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_a_layer_that_no_family_has_is_refused(tmp_path: Path) -> None:
    ours = window_model(sliding_window=None, window_position="rope", mlp="gelu", vocab_size=300)
    with pytest.raises(ValueError, match="qwen2 or qwen3 has them, ours has mlp = 'gelu'"):
        convert(str(save(ours, tmp_path / "ours")), tmp_path / "new", "hils")


def test_it_must_say_how_long_its_texts_were(tmp_path: Path) -> None:
    ours = save(window_model(sliding_window=None, window_position="rope", vocab_size=300), tmp_path / "ours")
    with pytest.raises(ValueError, match="--to llama max_position_embeddings=NUMBER"):
        convert(str(ours), tmp_path / "new", "hils")
    convert(str(ours), tmp_path / "back", "llama", ("max_position_embeddings=64",))
    converted(tmp_path / "back", tmp_path / "new", "hils", "sliding_window=24")
