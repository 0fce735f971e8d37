"""Which layers look far: the numbers are those of the whole attention, of a base as its tokenizer begins texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from tests.models.conversion.bases import byte_level, converted, made, save, write_gguf
from trailmark.evaluation import far_layers
from trailmark.evaluation.far_layers import FarLayers, expect_far_layers, measure_far_layers
from trailmark.models.conversion.convert import open_any_base

pytestmark = pytest.mark.usefixtures("one_thread")


def long_base(name: str, folder: Path, length: int = 4096) -> Path:
    """That was, it says, trained on longer texts."""
    model = made(name).float()
    model.config.max_position_embeddings = length
    return save(model, folder)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.sampled(2)
def test_the_mass_is_that_of_the_whole_attention(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are made of the last tokens alone; here of all."""
    base = long_base("llama", tmp_path / "base")
    if begins:
        tokenizer = byte_level()
        tokenizer.add_special_tokens({"bos_token": "</s>"})
        number = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", number)]
        )
        tokenizer.save_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    masses, right = [], []

    def whole(_: Any, ids: torch.Tensor, answer: int, needle: slice) -> tuple[Any, bool]:
        assert (ids[0, 0] == 1) == begins
        said = byte_level().decode(ids[0, needle])
        assert said.startswith(" The secret number of ")
        assert byte_level().decode(ids[0, -answer:]).strip() in said
        assert ids.shape[1] - needle.stop >= 512
        with torch.no_grad():
            out = model(ids, output_attentions=True)
        asking = slice(ids.shape[1] - answer - 1, -1)
        masses.append([x[0, :, asking, needle].sum(-1).mean(-1).max() for x in out.attentions])
        given = out.logits[0, asking].argmax(-1)
        right.append(bool((given == ids[0, -answer:]).all()))
        found = watched(_, ids, answer, needle)
        own = torch.cat([ids[0, :-1], given[-1:]])[None]  # a text that ends as the model would end it
        assert watched(_, own, 1, needle)[1]
        return found

    watched = far_layers.watched
    monkeypatch.setattr(far_layers, "watched", whole)
    found = measure_far_layers(open_any_base(base), texts=2, length=900)
    torch.testing.assert_close(torch.tensor(found.mass), torch.tensor(masses).mean(0))
    assert found.right == sum(right) / 2


def test_a_model_of_ours_and_a_gguf_file_look_alike(tmp_path: Path) -> None:
    base = long_base("llama", tmp_path / "base")
    expected = measure_far_layers(open_any_base(base), texts=1, length=900)
    converted(base, tmp_path / "ours", "sliding_window")
    found = measure_far_layers(open_any_base(tmp_path / "ours"), texts=1, length=900)
    torch.testing.assert_close(torch.tensor(found.mass), torch.tensor(expected.mass))
    model = AutoModelForCausalLM.from_pretrained(base)
    file = write_gguf(model, tmp_path / "base.gguf")
    of_file = measure_far_layers(open_any_base(file), texts=1, length=900)  # with a tokenizer of its own
    assert len(of_file.mass) == 4
    assert min(of_file.mass) > 0


def test_a_layer_with_a_window_of_its_own_is_never_among_them(tmp_path: Path) -> None:
    base = open_any_base(long_base("qwen2, mixed windows", tmp_path / "base"))
    found = measure_far_layers(base, texts=1, length=900)
    assert found.full == expect_far_layers(base, 2) == [False, True, False, True]
    assert found.best(2) == [1, 3]
    with pytest.raises(ValueError, match="expected 1 to 2, for so many layers see all of a text, got 3"):
        expect_far_layers(base, 3)
    none = open_any_base(long_base("mistral, its own window", tmp_path / "none"))
    with pytest.raises(ValueError, match="none of this one does, got 1"):
        expect_far_layers(none, 1)


def test_the_best_are_those_that_look_most() -> None:
    found = FarLayers([0.1, 0.4, 0.2, 0.4, 0.9], [True] * 4 + [False], 1.0)
    assert [found.best(count) for count in (1, 2, 3)] == [[1], [1, 3], [1, 2, 3]]


def test_a_base_of_short_texts_is_refused(tmp_path: Path) -> None:
    base = long_base("llama", tmp_path / "base", length=512)
    with pytest.raises(ValueError, match=r"on texts of at least \d+ tokens, .* base was on 512"):
        measure_far_layers(open_any_base(base))
