"""What benchmarks/pretrained_reader.py asks of single facts: each once, and gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import benchmark_scripts
from tests.data.corpora import prose, save_chat_bpe
from tests.models.tiny import hils
from trailmark.data.corpus import tokenize
from trailmark.evaluation.needles.ask import Plan
from trailmark.models import HiLSForCausalLM
from trailmark.report.console import Progress

pytestmark = pytest.mark.usefixtures("one_thread")
reader = benchmark_scripts.modules("pretrained_reader")
LENGTH, FACTS = 1200, 2


def test_facts_are_asked_once_and_each_with_the_focus_that_is_set(
    reader: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    tokenizer = save_chat_bpe(folder)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "chunk_size": 8}
    windows = {"reading": "windows", "sliding_window": 16, "far_position": "window"}
    hils(**sizes, **windows).float().save_pretrained(folder)
    monkeypatch.setattr(reader, "shipped_reader", lambda of: folder)
    monkeypatch.setattr(reader, "_focus_set", lambda of: 3)
    # the first piece that is read, and all: of the last haystack it is there when the question is asked again
    monkeypatch.setattr(reader, "SAVED", 1)
    monkeypatch.setattr("trailmark.evaluation.needles.askers._PIECES", 1)
    monkeypatch.setattr("trailmark.evaluation.needles.askers._READ_TOKENS", 400)
    text = tokenize([prose(1, 3000)], tokenizer)

    def rows(formats: Sequence[str] = reader.WORDS) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = reader.Alone(tmp_path, text, Progress(quiet=True)).ask(
            LENGTH, FACTS, formats
        )
        return found

    asked: list[int | None] = []
    ask, read = Plan.ask, HiLSForCausalLM.read
    pieces: list[int] = []

    def noted(model: Any, ids: Any, *others: Any, **more: Any) -> Any:
        pieces.append(ids.shape[1])
        return read(model, ids, *others, **more)

    monkeypatch.setattr(HiLSForCausalLM, "read", noted)

    def counted(plan: Plan, *others: Any) -> Any:
        asked.append(plan.subject.model.config.num_focus_chunks)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return ask(plan, *others)

    monkeypatch.setattr(Plan, "ask", counted)
    with pytest.raises(KeyboardInterrupt):
        rows()
    # in each of two haystacks a sentence, and a fact in other words in two ways: of the last one question was asked
    assert asked == [3] * 5
    kept, before = [*(tmp_path / "alone").iterdir()], sum(pieces)
    assert len(kept) == 1
    found = rows()
    assert sum(pieces) - before < LENGTH / 2  # not the haystack again
    assert not any((tmp_path / "alone").iterdir())
    assert len(asked) == 5 + 2
    assert [(row["format"], row["chat"]) for row in found] == list(reader.ASKED)
    assert {row["questions"] for row in found} == {FACTS}
    assert rows() == found
    assert rows(reader.WORDS[:1]) + rows(reader.WORDS[1:]) == found  # as parts of their own
    assert len(asked) == 5 + 2

    # parts of which the first was stopped, and that began together: each keeps what is the other's
    (tmp_path / "alone.json").unlink()
    asked[:] = [None] * 3  # the next question but one is the fifth
    one, other = (reader.Alone(tmp_path, text, Progress(quiet=True)) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        one.ask(LENGTH, FACTS, reader.WORDS[1:])
    (kept,) = (tmp_path / "alone").iterdir()
    other.ask(LENGTH, FACTS, reader.WORDS[:1])
    assert [*(tmp_path / "alone").iterdir()] == [kept]
    one.ask(LENGTH, FACTS, reader.WORDS[1:])
    before = len(asked)
    assert rows() == found
    assert len(asked) == before
    # what was computed in one precision is asked again in another, and said of each
    (own,) = {row["dtype"] for row in found}
    another = "float32" if own == "bfloat16" else "bfloat16"
    monkeypatch.setitem(reader.subject.__globals__, "precision", lambda: another)
    assert {row["dtype"] for row in rows(reader.WORDS[:1])} == {another}
    assert len(asked) == before + FACTS
