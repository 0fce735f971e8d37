"""Models whose cost is measured: from folders, and with random weights from YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.cost.test_cost import CONFIGS, assert_as_predicted, foreign
from trailmark.data.corpus import load_tokenizer
from trailmark.evaluation.cost.inference import Text
from trailmark.evaluation.cost.models import load_or_build, random_subject

SMALL = ["hidden_size=16", "intermediate_size=24", "num_attention_heads=2"]


def test_random_weights_from_a_file() -> None:
    path = CONFIGS[0].parent / "laptop-drt-x1.yaml"
    state = torch.random.get_rng_state()
    one, two, other = (load_or_build(path, SMALL, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [next(s.model.parameters()) for s in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not one.model.training
    assert (one.model.config.vocab_size, one.model.config.chunk_size) == (384, 32)
    about = one.identity()
    assert about["weights_sha256"] is None
    assert about["set"] == {
        "weights": "random, seed 0",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
    }
    assert about != other.identity()


def test_random_weights_with_an_encoder() -> None:
    subject = load_or_build(CONFIGS[0].parent / "laptop-rpt.yaml", SMALL)
    assert_as_predicted(Text("m", subject, "device", 70, 3))


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    model = foreign()
    model.resize_token_embeddings(259)  # as many as the tokenizer has
    model.save_pretrained(tmp_path / "gpt2")
    load_tokenizer().save_pretrained(tmp_path / "gpt2")
    found = load_or_build(tmp_path / "gpt2")
    assert not found.ours
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters(), strict=True))
    assert found.identity()["weights_sha256"] is not None
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_or_build(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "model: expected a section 'model'"),
        ({"model": {"architecture": "dtr"}}, "model.architecture: expected .*'drt'"),
        ({"model": {"chunk_sise": 4}}, "model.chunk_sise: unknown field of drt. Did you mean 'chunk_size'"),
        ({"model": {"hidden_size": "wide"}}, "model.hidden_size: expected a whole number"),
        ({"model": {"hidden_size": 100, "num_attention_heads": 3, "vocab_size": 9}}, "num_attention_heads"),
    ],
)
def test_sections_that_describe_no_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_subject(settings)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot read"), ("a: [", "is no YAML"), ("- 1", "expected sections")]
)
def test_files_that_are_no_settings(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_or_build(path)
