"""Which heads find what is asked for: the numbers are those of the whole attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.evaluation.test_far_layers import long_base
from tests.models.conversion.bases import byte_level
from trailmark.evaluation import focus_heads
from trailmark.evaluation.focus_heads import TOLD, FocusHeads, expect_focus_heads, measure_focus_heads
from trailmark.models.conversion.convert import open_any_base

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_looks_are_those_of_the_whole_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are made of a question's tokens alone; here of all."""
    base = long_base("llama", tmp_path / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    monkeypatch.setattr(focus_heads, "TOLD", TOLD[:5])
    texts, looks = list[tuple[Any, Any]](), list[Any]()

    def laid(*given: Any) -> Any:
        texts.append(lay(*given))
        return texts[-1]

    def seen(*given: Any) -> Any:
        looks.append(look(*given))
        return looks[-1]

    lay, look = focus_heads._laid, focus_heads.looks_of
    monkeypatch.setattr(focus_heads, "_laid", laid)
    monkeypatch.setattr(focus_heads, "looks_of", seen)
    found = measure_focus_heads(open_any_base(base), texts=2)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    assert heads > groups > 1
    right, at = np.zeros((model.config.num_hidden_layers, groups)), 0
    for ids, spans in texts:
        for asked, (told, question) in enumerate(TOLD[:5]):
            assert byte_level().decode(ids[spans[asked]]) == told
            words = byte_level()(question, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                whole = model(torch.tensor([[*ids.tolist(), *words]]), output_attentions=True).attentions
            for layer, weights in enumerate(whole):
                of_heads = weights[0, :, len(ids) :]
                for group in range(groups):
                    own = of_heads[group * heads // groups : (group + 1) * heads // groups]
                    expected = [
                        sum(max(float(head[t, span].sum()) for head in own) ** 2 for t in range(len(words)))
                        for span in spans
                    ]
                    np.testing.assert_allclose(looks[at][group], expected, rtol=1e-4)
                    right[layer, group] += np.argmax(expected) == asked
                at += 1
    assert np.array_equal(found.right, right / 10)
    assert 0 < right.sum() < 10 * right.size


def test_a_layer_with_a_window_of_its_own_is_never_among_them(tmp_path: Path) -> None:
    base = open_any_base(long_base("qwen2, mixed windows", tmp_path / "base"))
    found = measure_focus_heads(base, texts=1)
    assert found.full == [False, True, False, True]
    assert {layer for layer, _ in found.best(found.right.size // 2)} == {1, 3}
    with pytest.raises(ValueError, match=r"focus_heads: expected 1 to \d key/value heads of layers that see"):
        expect_focus_heads(base, found.right.size)
    none = open_any_base(long_base("mistral, its own window", tmp_path / "none"))
    with pytest.raises(ValueError, match="expected a base with layers that see all of a text, got 1"):
        expect_focus_heads(none, 1)


def test_the_best_are_those_that_find_most() -> None:
    found = FocusHeads(np.array([[0.1, 0.4], [0.4, 0.2], [0.9, 0.9]]), [True, True, False])
    assert [found.best(count) for count in (1, 2, 3)] == [
        [[0, 1]],
        [[0, 1], [1, 0]],
        [[0, 1], [1, 0], [1, 1]],
    ]


def test_a_base_of_short_texts_is_refused(tmp_path: Path) -> None:
    base = long_base("llama", tmp_path / "base", length=512)
    with pytest.raises(ValueError, match=r"focus_heads: .* on texts of at least \d+ tokens, .* was on 512"):
        measure_focus_heads(open_any_base(base))
