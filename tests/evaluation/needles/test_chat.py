"""Needles that are asked for through a chat template, and in other words than they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.corpora import prose, save_chat_bpe
from tests.evaluation.foreign import llama
from tests.evaluation.needles.subjects import S, marks_of, record_of, subject_of
from tests.models.tiny import draw_weights, drt
from trailmark.data.corpus import tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles.haystacks import Filler, Haystack
from trailmark.data.needles.tasks import Question, make_task
from trailmark.evaluation.needles import ask as asking
from trailmark.evaluation.needles import askers
from trailmark.evaluation.needles.ask import run
from trailmark.evaluation.needles.askers import _FREE_TOKENS
from trailmark.evaluation.needles.planting import planted
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject

LENGTH = 700


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_chat_bpe(tmp_path_factory.mktemp("bpe"))


def subject(name: str, tokenizer: Any) -> Subject:
    if name == "llama":
        model: Any = llama(
            2 * LENGTH, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id
        )
        draw_weights(model, 0)
    else:
        model = drt(2, chunk_size=S, sliding_window=9, vocab_size=len(tokenizer))
    return Subject(Path(name), model, tokenizer, {"data": {"chunk_size": S}})


@pytest.mark.parametrize("name", ["drt", "llama"])
@pytest.mark.parametrize(
    ("format", "chat"), [("sentences", True), ("paraphrases", True), ("paraphrases", False)]
)
@torch.no_grad()
@pytest.mark.sampled(3)
def test_an_answer_is_what_the_model_writes_behind_the_turn(
    name: str, format: str, chat: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """Against the whole text, written naively."""
    asked = subject(name, tokenizer)
    text = tokenize([prose(0, 2000)], tokenizer)
    settings = NeedleSettings((LENGTH,), format=format, chat=chat, questions=1)
    record = record_of(tmp_path, asked)
    (result,) = run(asked, settings, text, record)
    task = make_task(tokenizer, format, "single", 1, 1, 0, None, 1, True, None, chat=chat)
    sight = asked.model.chunks_in_sight(S) if asked.ours else 0
    right = first_right = 0
    for number, line in enumerate(record.generations(result)):
        start = Draws(0, 1, number).below(len(text))
        haystack = Haystack(Filler(text), start, task.chunks(LENGTH, S), S)
        (trial,) = task.lay(haystack, LENGTH, haystack.chunks - sight, [None], 1, 0, 2, number)[None]
        (question,) = trial.questions
        rows = haystack.holding(trial.needles)[0 : haystack.chunks].reshape(-1)
        ids = torch.cat([rows, torch.from_numpy(question.prompt)])
        assert len(ids) + len(question.answer) == LENGTH
        close = marks_of(ids, question)
        written: list[int] = []
        more: dict[str, Any] = {}
        while len(written) < len(question.answer) + _FREE_TOKENS and tokenizer.eos_token_id not in written:
            more = {} if name == "llama" else {"close_chunk": close}
            written.append(int(asked.model(ids[None], **more).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor(written[-1:])])
            close = torch.cat([close, torch.zeros(1, 1, dtype=torch.bool)], 1)
        said = tokenizer.decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert line["generated"] == said
        assert line["correct"] == (question.text in said)
        assert line["first_token"] == (written[0] == question.answer[0])
        right, first_right = right + line["correct"], first_right + line["first_token"]
    assert (result["accuracy"], result["first_token_accuracy"]) == (right, first_right)
    assert result.get("chat", False) == chat
    assert run(asked, settings, text, record) == [result]  # found again


@pytest.mark.parametrize("depths", [None, (0.0,)])
def test_what_begins_a_text_begins_a_haystack(
    depths: tuple[float, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = save_chat_bpe(tmp_path / "bpe", bos=True)
    model = drt(2, chunk_size=S, sliding_window=9, vocab_size=len(own), bos_token_id=own.bos_token_id)
    asked = Subject(Path("begins"), model, own, {"data": {"chunk_size": S}})
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        askers,
        "planted",
        lambda model, read, haystack, numbers, rows: (
            seen.append((haystack[0 : haystack.chunks].reshape(-1), rows[numbers == 0].reshape(-1))),
            planted(model, read, haystack, numbers, rows),
        )[1],
    )
    monkeypatch.setattr(asking, "_MOST_HAYSTACKS", 1)
    text = tokenize([prose(0, 2000)], own)
    settings = NeedleSettings((LENGTH,), format="sentences", questions=3, depths=depths)
    run(asked, settings, text, record_of(tmp_path, asked))
    assert len(seen) == 3
    for ids, first in seen:
        for part in (
            ids,
            first,
        ):  # where a needle touches the first chunk, what is written anew begins so too
            assert torch.equal((part == own.bos_token_id).nonzero()[:, 0], torch.arange(len(part) > 0))
        assert len(first) == S or depths is None


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("48213", True),
        ("It is 48213.", True),
        ("(48213)\n", True),
        ("The number is: 48213, of course", True),
        ("148213", False),
        ("48213.5", False),
        ("48,213", False),
        ("3.48213", False),
        ("48213-7", False),
        ("a48213", False),
        ("It is 4821", False),
        ("", False),
    ],
)
def test_an_answer_holds_the_value_exactly(said: str, right: bool) -> None:
    answer = np.array([1, 2])
    question = Question(answer, (0,), None, answer, ("48213",), "48213", ((0,),), fixed=False, free=True)
    assert question.right([], said) == right


def test_several_values_are_all_in_the_answer() -> None:
    answer = np.array([1, 2])
    for any_order in (False, True):
        question = Question(
            answer, (0,), None, answer, ("12", "34"), "12, 34", ((0,),), False, any_order, free=True
        )
        assert question.right([], "They are 12 and 34.")
        assert question.right([], "They are 34 and 12.") == any_order
        assert not question.right([], "They are 12.")


def test_what_cannot_be_asked_so_is_one_line(tokenizer: Any, tmp_path: Path) -> None:
    text = tokenize([prose(0, 2000)], tokenizer)
    for asked, changes, words in (
        (
            subject("drt", tokenizer),
            {"format": "paper"},
            "^chat: expected the format 'sentences' or 'paraphrases'",
        ),
        (subject_of("drt"), {}, "^tokenizer: expected one with a chat template"),
    ):
        settings = NeedleSettings(**({"lengths": (LENGTH,), "chat": True} | changes))
        with pytest.raises(ValueError, match=words):
            run(asked, settings, text, record_of(tmp_path, asked))
    with pytest.raises(ValueError, match=r"^chat: expected False for protocol"):
        NeedleSettings((LENGTH,), protocol="paper-table-2", chat=True)
