"""Which layers look far: the numbers are those of the whole attention, and layers with a window have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.conversion.bases import byte_level, converted, made, save
from trailmark.evaluation import far_layers
from trailmark.evaluation.far_layers import FarLayers, measure_far_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_mass_is_that_of_the_whole_attention(tmp_path: Path) -> None:
    """Weights are made of the last tokens alone; here of all."""
    base = save(made("llama").float(), tmp_path / "base")
    found = measure_far_layers(base, texts=2, length=900)
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    masses = []
    for ids, answer, needle in far_layers._texts(byte_level(), 2, 900, 0):
        said = byte_level().decode(ids[0, needle])
        assert said.startswith(" The secret number of ")
        assert byte_level().decode(ids[0, -answer:]).strip() in said
        assert ids.shape[1] - needle.stop >= 512
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        asking = slice(ids.shape[1] - answer - 1, -1)
        masses.append([x[0, :, asking, needle].sum(-1).mean(-1).max() for x in attentions])
    torch.testing.assert_close(torch.tensor(found.mass), torch.tensor(masses).mean(0))
    assert found.right in (0, 0.5, 1)


def test_a_layer_with_a_window_of_its_own_looks_nowhere(tmp_path: Path) -> None:
    base = save(made("qwen2, mixed windows").float(), tmp_path / "base")
    found = measure_far_layers(base, texts=1, length=900)
    assert [mass > 0 for mass in found.mass] == [False, True, False, True]
    assert found.best(2) == [1, 3]
    with pytest.raises(ValueError, match="expected 1 to 2, the layers that see all of a text, got 3"):
        found.best(3)


def test_the_best_are_those_that_look_most() -> None:
    found = FarLayers([0.1, 0.4, 0.2, 0.4], 1.0)
    assert [found.best(count) for count in (1, 2, 3)] == [[1], [1, 3], [1, 2, 3]]


def test_a_model_of_ours_is_refused(tmp_path: Path) -> None:
    base = save(made("llama").float(), tmp_path / "base")
    converted(base, tmp_path / "ours", "sliding_window")
    with pytest.raises(ValueError, match="is a model of ours"):
        measure_far_layers(tmp_path / "ours")
