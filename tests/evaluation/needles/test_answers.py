"""The suite: every answer is that of the whole text, read and asked naively."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.evaluation.needles.subjects import (
    BYTES,
    LENGTH,
    SIZES,
    TEXT,
    S,
    asked,
    marks_of,
    measured,
    record_of,
    subject_of,
    task_of,
    written,
)
from tests.models.tiny import assert_same, drt, hils, window_model
from trailmark.data.corpus import tokenize
from trailmark.data.needles.formats import Marks, Name, Paper, Sentences
from trailmark.data.needles.haystacks import Filler, Haystack, Needle
from trailmark.data.needles.tasks import Question
from trailmark.evaluation.needles import ask as asking
from trailmark.evaluation.needles.ask import run
from trailmark.evaluation.needles.askers import MemoryAsker, ReadingCost, WholeTextAsker
from trailmark.evaluation.needles.judging import judge
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject
from trailmark.models import DRTForCausalLM, RPTForCausalLM
from trailmark.statistics import wilson_interval

# --- what is measured is what a naive reading gives -----------------------------------------------------------


CASES: list[tuple[str, dict[str, Any]]] = [
    ("drt", {"kind": "multi-key", "needles": 2, "distractors": 1}),
    ("drt", {"kind": "hops", "distractors": 1, "landmarks": 2, "phases": "end", "questions": 2}),
    # in the haystack of seed 0 two chunks are equal, and so are their scores
    ("wide", {"format": "sentences", "lengths": (700,), "landmarks": 2, "depths": (1.0,), "seed": 1}),
    ("pretrained", {"format": "sentences", "lengths": (700,), "depths": (0.0,), "questions": 2}),
    ("rpt", {"format": "sentences", "lengths": (700,), "kind": "multi-value", "needles": 2}),
    ("drt", {"format": "paper", "kind": "multi-query", "needles": 2}),
    # questions of several lengths in one batch
    (
        "chunks",
        {"format": "sentences", "values": "words", "lengths": (900,), "kind": "multi-key", "needles": 2},
    ),
    ("window", {"straddle": True, "questions": 1}),
    ("full", {"lengths": (150,), "depths": (0.5,), "questions": 1}),
    ("recurrent", {"lengths": (250,)}),
    ("hils", {"questions": 1}),
    ("hsa", {"lengths": (250,)}),
    ("llama", {"format": "sentences", "landmarks": 2, "questions": 1}),
    ("pretrained", {"sight": "window", "lengths": (90,), "questions": 6}),
    ("mixed", {"sight": "window", "lengths": (150,), "questions": 6}),
]


SLOW = ("wide-single", "rpt-multi-value", "drt-multi-query", "chunks-multi-key", "recurrent-single")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for case in CASES
        for name in (f"{case[0]}-{case[1].get('kind', 'single')}",)
    ],
)
@pytest.mark.sampled(5)
def test_every_answer_is_that_of_the_whole_text(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated tokens, landmarks and what they selected: one reading, branches and planting change nothing."""
    monkeypatch.setattr(asking, "_MOST_HAYSTACKS", 1)  # a haystack of one trial is read with its needles
    subject = subject_of(name)
    result, lines = measured(tmp_path, subject, **changes)
    settings = NeedleSettings(**({"lengths": (LENGTH,), "format": "marks", "questions": 2} | changes))
    task, model = task_of(settings), subject.model
    sight = 0 if name in ("full", "llama", "mixed") else model.chunks_in_sight(S)
    if settings.sight == "window":
        assert name == "mixed" or sight > -(-model.config.sliding_window // S)
        sight = -(-model.config.sliding_window // S)
    expected = asked(subject, settings, task, sight)
    assert len(expected) == len(lines) == result["questions"] == settings.questions
    for line, (ids, trial, question) in zip(lines, expected, strict=True):
        assert len(ids) + len(question.answer) == settings.lengths[0]
        more = 0 if question.fixed else 4
        tokens = written(model, ids, question, len(question.answer) + more)
        text = BYTES.decode(tokens, skip_special_tokens=True)
        assert line["generated"] == text
        assert line["expected"] == question.text
        assert line["correct"] == question.right(tokens, text)
        chunks = [n.chunks(S) for n in trial.needles]
        assert line["needle_chunks"] == chunks
        if not isinstance(model, DRTForCausalLM | RPTForCausalLM):
            assert ("selected" in line) == (name in ("hils", "hsa"))  # what tokens selected has a test below
            continue
        out = model(ids[None], close_chunk=marks_of(ids, question), output_retrieval=True)
        before = (len(ids) - len(question.prompt)) // S
        closed = [before + n for n in question.closings(S)]
        assert len(closed) == settings.landmarks
        assert line["selected"] == [
            [[m for m in group.indices[0, n].tolist() if m >= 0] for group in out.retrieval] for n in closed
        ]
        at_last = {m for group in line["selected"][-1] for m in group}
        assert line["retrieved"] == (set(line["gold_chunks"][-1]) <= at_last)
        weights = [dict(zip(*pair, strict=True)) for pair in _selections(out.retrieval, closed[-1])]
        gold = [max(some.get(m, 0.0) for some in weights) for m in line["gold_chunks"][-1]]
        assert line["weight"] == pytest.approx(sum(gold) / len(gold), abs=1e-9)
        for m, rank in zip(line["gold_chunks"][-1], line["ranks"], strict=True):
            ranks = [sorted(some.values(), reverse=True).index(some[m]) + 1 for some in weights if m in some]
            assert rank == min(ranks, default=None)


@pytest.mark.parametrize("kind", [{}, {"kind": "hops", "landmarks": 2}], ids=["single", "hops"])
@pytest.mark.sampled(2)
def test_planted_or_read_whole_the_verdicts_are_the_same(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sinks that all that follows sees, and landmarks that nobody attends to."""
    subject = subject_of("pretrained")
    monkeypatch.setattr(asking, "_MOST_HAYSTACKS", 2)
    planted, lines = measured(tmp_path / "planted", subject, questions=4, **kind)
    monkeypatch.setattr(DRTForCausalLM, "can_be_planted", False)
    whole, others = measured(tmp_path / "whole", subject, questions=4, **kind)
    assert len(lines) == 4
    exact = ("generated", "expected", "correct", "needle_chunks", "selected", "retrieved", "ranks")
    for line, other in zip(lines, others, strict=True):
        assert [line[name] for name in exact] == [other[name] for name in exact]
        assert line["weight"] == pytest.approx(other["weight"], abs=1e-9)
    assert 2 * planted["tokens_read"] == whole["tokens_read"]  # two trials of each haystack


def _selections(retrieval: Any, chunk: int) -> list[tuple[list[int], list[float]]]:
    return [(group.indices[0, chunk].tolist(), group.weights[0, chunk].tolist()) for group in retrieval]


@pytest.mark.parametrize("phases", ["any", pytest.param("end", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["landmark", "hils", "hsa"])
@torch.no_grad()
@pytest.mark.sampled(3)
def test_what_tokens_selected(name: str, phases: str, tmp_path: Path) -> None:
    """In every layer, of the question's last token and the cue, as if each were asked behind its own text."""
    subject = subject_of(name)
    several = {"kind": "multi-key", "needles": 3, "questions": 3, "phases": phases}
    result, lines = measured(tmp_path, subject, **several)
    settings = NeedleSettings(lengths=(LENGTH,), format="marks", **several)
    model, task = subject.model, task_of(settings)
    expected = asked(subject, settings, task, model.chunks_in_sight(S))
    for line, (ids, _, question) in zip(lines, expected, strict=True):
        whole = torch.cat([ids, torch.from_numpy(question.answer[:-1])])
        close = marks_of(ids, question)
        close = torch.cat([close, torch.zeros(1, len(question.answer) - 1, dtype=torch.bool)], 1)
        out = model(whole[None], close_chunk=close, past_key_values=model.new_cache(), output_retrieval=True)
        at = len(ids) - len(question.prompt) + question.landmarks[0]
        read = [set(layer.indices[0, [at, at + 1]].flatten().tolist()) - {-1} for layer in out.retrieval]
        assert line["selected"] == [[sorted(layer) for layer in read]]
        assert line["retrieved"] == (set(line["gold_chunks"][0]) <= set().union(*read))
    assert result["tokens_read"] == task.chunks(LENGTH, S) * S


@pytest.mark.parametrize("name", ["drt", pytest.param("full", marks=pytest.mark.slow), "llama"])
def test_what_was_read_for_each_cell(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    settings = NeedleSettings(lengths=(250,), format="marks", depths=(0.0, 1.0), questions=2)
    results = run(subject, settings, TEXT, record_of(tmp_path, subject))
    count = {"drt": 2 * task_of(settings).chunks(250, S) * S, "llama": 2 * 249}
    count["full"], memory = count["drt"], None
    if name != "llama":
        model = subject.model
        whole = torch.from_numpy(TEXT[: count["drt"] // 2]).long()[None]
        cache = model.read(whole, model.new_cache(num_tokens=whole.shape[1]))
        memory = cache.memory_bytes() + cache.window_bytes()
    for result in results:
        assert result["tokens_read"] == count[name]
        assert result["haystacks"] == 2
        assert result["cells_read_for"] == (2 if name == "drt" else 1)
        assert result["memory_bytes"] == memory
        assert len(result.get("asked", [])) == (2 if name == "drt" else 0)
        assert result["train_length"] == 16 * S


@pytest.mark.parametrize("name", ["drt", "wide", "rpt"])
@torch.no_grad()
def test_needles_across_chunks_are_planted_exactly(name: str) -> None:
    """Against reading the changed text, for needles that touch 2, 3 and 1 chunks, some of them side by side."""
    model = subject_of(name).model
    haystack = Haystack(Filler(TEXT), 5, 20, S)
    count = 20 - model.chunks_in_sight(S)
    rng = np.random.default_rng(0)
    places = [(S - 3, 10), (3 * S - 1, S + 2), (5 * S + 1, 8), (count * S - 9, 9)]
    hidden = [Needle(start, rng.integers(3, 259, size=n), (0, n)) for start, n in places]
    assert [len(needle.chunks(S)) for needle in hidden] == [2, 3, 1, 1]
    question = torch.randint(259, (2, 2 * S + 3), generator=torch.Generator().manual_seed(1))
    asker, cost = MemoryAsker(model, S, lambda folder: model.new_cache()), ReadingCost()
    whole = haystack.holding(hidden)
    with (
        asker.reading(haystack, cost, lambda tokens: None) as read,
        asker.holding(read, haystack, hidden, cost, lambda tokens: None) as holding,
    ):
        answer = model(question, past_key_values=holding.branch(2), output_retrieval=True)
        ids = torch.cat([whole[0:20].view(1, -1).expand(2, -1), question], dim=1)
        exact = model(ids, output_retrieval=True)
        assert_same(answer.logits, exact.logits[:, 20 * S :])
        for ours, full in zip(answer.retrieval, exact.retrieval, strict=True):
            assert torch.equal(ours.indices, full.indices[:, 20:])


@pytest.mark.parametrize("make", [drt, partial(hils, reading="windows", far_position="window")])
def test_a_model_that_reads_no_chunk_says_nothing_of_chunks(make: Any, tmp_path: Path) -> None:
    model = make(chunk_size=S, sliding_window=30, num_retrieved_chunks=0, **SIZES)
    subject = Subject(Path("windows"), model, BYTES, {"data": {"chunk_size": S}})
    result, lines = measured(tmp_path, subject, sight="window", questions=1)
    assert result["questions"] == 1
    assert result["recall"] is result["mean_weight"] is None
    assert "retrieved" not in lines[0]


# --- what counts ----------------------------------------------------------------------------------------------


def saying(word: str) -> Subject:
    """A window model that writes one character whatever it reads."""
    subject = subject_of("window")
    model = window_model(tie_word_embeddings=False, **SIZES)
    token = int(tokenize([word], BYTES)[0])

    def constant(states: Tensor) -> Tensor:
        logits = states.new_zeros(*states.shape[:-1], 259)
        logits[..., token] = 1
        return logits

    model.lm_head.forward = constant  # type: ignore[method-assign]
    return Subject(Path("constant"), model, BYTES, subject.run)


@pytest.mark.parametrize(
    ("format", "value", "accuracy"),
    [
        ("marks", "77777", 1.0),
        ("marks", "77778", 0.0),
        ("sentences", "777777", 0.0),  # the model goes on with sevens: it does not end the answer
    ],
)
def test_an_answer_is_right_as_it_is_written(
    format: str, value: str, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in (Marks, Sentences):
        monkeypatch.setattr(made, "draw", _drawing(made.draw, value))
    result, lines = measured(tmp_path, saying("7"), format=format, questions=3)
    assert (result["accuracy"], result["correct"]) == (accuracy, 3 * accuracy)
    assert (result["accuracy_low"], result["accuracy_high"]) == wilson_interval(result["correct"], 3)
    assert {line["generated"] for line in lines} == {"77777" if format == "marks" else "7" * 11}
    assert result["recall"] is None
    assert result["mean_weight"] is None


def test_what_true_tokens_lead_to_is_not_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that after each true token says the one of the other value: both together, in the other order."""
    values = iter(["12345", "67890"] * 100)
    monkeypatch.setattr(Marks, "draw", lambda self, draws, key: _named("ABCD" if key else next(values)))
    model = window_model(**SIZES)
    subject, forward = Subject(Path("other"), model, BYTES, {"data": {"chunk_size": S}}), model.forward
    following = torch.zeros(259, dtype=torch.int64)
    for before, after in zip("=12345;6789", "67890;12345", strict=True):
        following[tokenize([before], BYTES)[0]] = int(tokenize([after], BYTES)[0])

    def other(ids: Tensor, **more: Any) -> Any:
        out = forward(ids, **more)
        if out.logits is not None:
            out.logits = torch.nn.functional.one_hot(following[ids[:, -out.logits.shape[1] :]], 259)
        return out

    monkeypatch.setattr(model, "forward", other)
    result, lines = measured(tmp_path, subject, kind="multi-value", needles=2, questions=4)
    # where this is expected each best token is of the other order
    assert "12345;67890" in {line["expected"] for line in lines}
    assert {line["generated"] for line in lines} == {"62840"}
    assert result["correct"] == 0


def _named(text: str) -> Name:
    return Name(tokenize([text], BYTES).astype(np.int64), text)


def test_what_comes_behind_the_end_of_a_text_is_not_said() -> None:
    answer, ended = (tokenize([text], BYTES).astype(np.int64) for text in (" 12, 13", " 13, 12"))
    question = Question(answer[:1], (0,), None, answer, ("12", "13"), "12, 13", ((0, 1),), False, True)
    more = tokenize(["the"], BYTES).tolist()
    assert judge(question, [*ended, BYTES.eos_token_id, *more], BYTES, {BYTES.eos_token_id}) == (
        True,
        " 13, 12",
    )
    assert judge(question, [*ended, *more], BYTES, {BYTES.eos_token_id}) == (False, " 13, 12the")


@torch.no_grad()
def test_a_model_writes_no_further_than_its_positions() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=40, n_embd=8, n_layer=1, n_head=1)).eval()
    asker = WholeTextAsker(model, BYTES)
    answer = tokenize([" 12345"], BYTES).astype(np.int64)
    question = Question(answer[:1], (0,), None, answer, ("12345",), "12345", ((0,),), False)
    model.generation_config.eos_token_id = None
    # the second is the longest text that is allowed, without its answer: all positions are taken
    for length, expected in ((20, len(answer) + 4), (40 - len(answer), question.needed)):
        held = torch.zeros(length - len(question.prompt), dtype=torch.int64)
        assert [len(row) for row in asker.generate(held, [question])] == [expected]


def _drawing(plain: Any, value: str) -> Any:
    def draw(self: Any, draws: Any, key: bool) -> Name:
        return plain(self, draws, key) if key else Name(tokenize([value], BYTES).astype(np.int64), value)

    return draw


@pytest.mark.parametrize(("kind", "landmarks"), [("single", 1), ("hops", 1), ("hops", 2)])
@torch.no_grad()
def test_the_papers_protocol_looks_at_one_token(kind: str, landmarks: int, tmp_path: Path) -> None:
    """All before it given: the first token of a passkey; the last of the path's second value."""
    subject = subject_of("drt")
    length = LENGTH if kind == "single" else 420
    asked_so: dict[str, Any] = {"lengths": (length,), "kind": kind, "landmarks": landmarks, "questions": 2}
    settings = NeedleSettings(**asked_so, protocol="paper-table-2")
    record = record_of(tmp_path, subject)
    (result,) = run(subject, settings, TEXT, record)
    lines = record.generations(result)
    needles = 1 if kind == "single" else 2
    asking_for = NeedleSettings(**asked_so, format="paper", needles=needles, phases="end")
    task = task_of(asking_for, 5)
    assert task.num_needles == (1 if kind == "single" else 4)
    expected = asked(subject, asking_for, task, subject.model.chunks_in_sight(S))
    model = subject.model
    for line, (ids, _, question) in zip(lines, expected, strict=True):
        cue = tokenize([" is"], BYTES).tolist()
        place, last = question.landmarks[0], len(question.prompt) - 1
        assert question.prompt[place + 1 :].tolist() == cue  # the landmark right before it
        assert question.landmarks[1:] == (last,) * (landmarks - 1)  # a second one right behind it
        assert line["phase"] == S  # of a full chunk
        at = 0 if kind == "single" else 10
        assert len(question.answer) == (5 if kind == "single" else 11)
        whole = torch.cat([ids, torch.from_numpy(question.answer[:at])])
        close = torch.cat([marks_of(ids, question), torch.zeros(1, at, dtype=torch.bool)], 1)
        best = int(model(whole[None], close_chunk=close).logits[0, -1].argmax())
        assert line["correct"] == (best == question.answer[at])
        assert len(line["retrieved_by_hop"]) == (1 if kind == "single" else 2)
    assert result["protocol"] == "paper-table-2"
    assert result["exact_accuracy"] <= result["accuracy"]


def test_one_right_token_is_enough_for_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paper, "draw", _drawing(Paper.draw, "71234"))
    subject = saying("7")
    settings = NeedleSettings(lengths=(600,), protocol="paper-table-2", questions=3)
    (result,) = run(subject, settings, TEXT, record_of(tmp_path, subject))
    assert (result["accuracy"], result["exact_accuracy"]) == (1.0, 0.0)


def test_two_landmarks_close_two_chunks(tmp_path: Path) -> None:
    subject, seen = subject_of("drt"), []
    model = subject.model
    hook = model.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args[0].shape[1], kwargs, out)), with_kwargs=True
    )
    _, lines = measured(tmp_path, subject, kind="hops", landmarks=2, questions=1, phases="end")
    hook.remove()
    assert [len(line["selected"]) for line in lines] == [2]
    close = seen[0][1]["close_chunk"][0]
    (first, second) = close.nonzero().flatten().tolist()[-2:]
    assert second == first + 1  # the cue alone fills the chunk between
    # the haystack's chunks, those of the filler and the question, that of the cue
    task = task_of(NeedleSettings(kind="hops", format="marks", landmarks=2, phases="end"))
    closed = seen[0][2].retrieval[0].indices.shape[1]
    assert int(seen[0][2].past_key_values.num_chunks[0]) == task.chunks(LENGTH, S) + closed
    assert closed >= 3
