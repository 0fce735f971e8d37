"""The suite: every answer is that of the whole text, read and asked naively."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trailmark.evaluation.needle_cells import Suite
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models.tiny import assert_same, block_recurrent, draw_weights, drt, landmark, rpt, window_model
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.draws import Draws
from trailmark.data.haystacks import Filler, Haystack, Needle
from trailmark.data.needle_formats import Marks, Name, Paper, Sentences
from trailmark.data.needle_tasks import NeedleTask, Question, Trial, make_task
from trailmark.data.shards import Corpus
from trailmark.evaluation import asking, needle_cells, room
from trailmark.evaluation.asking import Asker, WholeTextAsker
from trailmark.evaluation.needles import NeedleSettings, run
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject
from trailmark.models import DRTForCausalLM, RPTForCausalLM
from trailmark.statistics import wilson_interval

S = 14
BYTES = load_tokenizer()
TEXT = tokenize(["the old boat sees a river and (sings) of 3 small things, of which none = it\n" * 30], BYTES)
SIZES: dict[str, Any] = {"vocab_size": 259}
LENGTH = 300


@cache
def subject_of(name: str, task: str | None = None) -> Subject:
    build: dict[str, Callable[[], Any]] = {
        "drt": lambda: drt(2, chunk_size=S, sliding_window=9, **SIZES),
        "chunks": lambda: drt(chunk_size=S, sliding_window=9, **SIZES),
        "wide": lambda: drt(chunk_size=S, sliding_window=30, window_position="rope", **SIZES),
        "rpt": lambda: rpt(chunk_size=S, **SIZES),
        "window": lambda: window_model(**SIZES),
        "full": lambda: window_model(sliding_window=None, **SIZES),
        "recurrent": lambda: block_recurrent(**SIZES),
        "landmark": lambda: landmark(chunk_size=S, local_length=3 * S, num_retrieved_chunks=2, **SIZES),
        "llama": llama,
    }
    data = {"chunk_size": S} | ({} if task is None else {"task": task})
    return Subject(Path(name), build[name](), BYTES, {"data": data})


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=400,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    draw_weights(model, 0)
    model.generation_config.repetition_penalty = 9.0  # as models of the hub come with; it is not asked for
    return model


def record_of(folder: Path, subject: Subject) -> Record:
    return Record(folder, "needles", {"name": subject.name})


def measured(folder: Path, subject: Subject, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one cell of an evaluation, and what was written."""
    record = record_of(folder, subject)
    settings = NeedleSettings(**({"lengths": (LENGTH,), "format": "marks", "questions": 2} | changes))
    (result,) = run(subject, settings, TEXT, record)
    return result, record.generations(result)


# --- what is measured is what a naive reading gives -----------------------------------------------------------


def task_of(settings: NeedleSettings, value_tokens: int | None = None) -> NeedleTask:
    return make_task(
        BYTES,
        settings.format or "marks",
        settings.kind,
        settings.needles,
        settings.hops,
        settings.distractors,
        settings.values,
        settings.landmarks,
        settings.phases == "any",
        settings.straddle,
        value_tokens,
    )


def asked(
    subject: Subject, settings: NeedleSettings, task: NeedleTask, sight: int
) -> list[tuple[Tensor, Trial, Question]]:
    """The whole texts [T] up to the answer of one cell with one haystack, in the order that they are asked in."""
    (length,), depth = settings.lengths, None if settings.depths is None else settings.depths[0]
    found = []
    filler = Filler(TEXT, task.format.replaced)
    trials = -(-settings.questions // task.questions_of(depth))
    for number in range(trials):  # of short texts: a haystack each
        start = Draws(settings.seed, 1, number).below(len(TEXT))
        haystack = Haystack(filler, start, task.chunks(length, S), S)
        last = haystack.chunks - sight
        (trial,) = task.lay(haystack, length, last, [depth], 1, settings.seed, 2, number)[depth]
        rows = haystack.holding(trial.needles)[0 : haystack.chunks].reshape(-1)
        found += [(torch.cat([rows, torch.from_numpy(q.prompt)]), trial, q) for q in trial.questions]
    return found


def marks_of(ids: Tensor, question: Question) -> Tensor:
    close = torch.zeros(1, len(ids), dtype=torch.bool)
    close[0, [len(ids) - len(question.prompt) + place for place in question.marks]] = True
    return close


@torch.no_grad()
def written(model: Any, ids: Tensor, question: Question, count: int) -> list[int]:
    """Greedy, the whole text anew for each token."""
    close = marks_of(ids, question)
    for _ in range(count):
        more: dict[str, Any] = {} if isinstance(model, LlamaForCausalLM) else {"close_chunk": close}
        best = model(ids[None], **more).logits[0, -1].argmax()
        ids, close = torch.cat([ids, best[None]]), torch.cat([close, torch.zeros(1, 1, dtype=torch.bool)], 1)
    return ids[-count:].tolist()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("drt", {"kind": "multi-key", "needles": 2, "distractors": 1}),
    ("drt", {"kind": "hops", "distractors": 1, "landmarks": 2, "phases": "end", "questions": 1}),
    ("wide", {"format": "sentences", "lengths": (700,), "landmarks": 2, "depths": (1.0,)}),
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
    ("llama", {"format": "sentences", "landmarks": 2, "questions": 1}),
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
def test_every_answer_is_that_of_the_whole_text(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Generated tokens, landmarks and what they selected: one reading, branches and planting change nothing."""
    subject = subject_of(name)
    result, lines = measured(tmp_path, subject, **changes)
    settings = NeedleSettings(**({"lengths": (LENGTH,), "format": "marks", "questions": 2} | changes))
    task, model = task_of(settings), subject.model
    sight = 0 if name in ("full", "llama") else model.chunks_in_sight(S)
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
            assert "selected" not in line
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


def _selections(retrieval: Any, chunk: int) -> list[tuple[list[int], list[float]]]:
    return [(group.indices[0, chunk].tolist(), group.weights[0, chunk].tolist()) for group in retrieval]


def test_what_landmark_attention_read(tmp_path: Path) -> None:
    subject = subject_of("landmark")
    result, lines = measured(tmp_path, subject, lengths=(300,), questions=1)
    settings = NeedleSettings(lengths=(300,), format="marks", questions=1)
    ((ids, _, question),) = asked(subject, settings, task_of(settings), subject.model.chunks_in_sight(S))
    model, (line,) = subject.model, lines
    whole = torch.cat([ids, torch.from_numpy(question.answer[:-1])])
    close = marks_of(ids, question)
    close = torch.cat([close, torch.zeros(1, len(question.answer) - 1, dtype=torch.bool)], 1)
    with torch.no_grad():
        out = model(whole[None], close_chunk=close, past_key_values=model.new_cache(), output_retrieval=True)
    at = len(ids) - len(question.prompt) + question.landmarks[0]
    read = [set(layer.indices[0, [at, at + 1]].flatten().tolist()) - {-1} for layer in out.retrieval]
    assert line["selected"] == [[sorted(layer) for layer in read]]
    assert line["retrieved"] == (set(line["gold_chunks"][0]) <= set().union(*read))
    assert result["tokens_read"] == len(ids) - len(question.prompt)


@pytest.mark.parametrize("name", ["drt", pytest.param("full", marks=pytest.mark.slow), "llama"])
def test_what_was_read_for_each_cell(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    settings = NeedleSettings(lengths=(250,), format="marks", depths=(0.0, 1.0), questions=2)
    results = run(subject, settings, TEXT, record_of(tmp_path, subject))
    count = {"drt": 2 * task_of(settings).chunks(250, S) * S, "llama": 2 * 249}
    count["full"] = count["drt"]
    for result in results:
        assert result["tokens_read"] == count[name]
        assert result["haystacks"] == 2
        assert result["cells_read_for"] == (2 if name == "drt" else 1)
        assert (result["memory_bytes"] is None) == (name == "llama")
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
    asker = Asker(model, lambda folder: model.new_cache())
    chunks, texts = haystack.changed(hidden)
    whole = haystack.holding(hidden)
    with (
        asker.haystack(haystack) as read,
        asker.holding(read, haystack, chunks, texts, whole) as holding,
    ):
        answer = model(question, past_key_values=holding.branch(2), output_retrieval=True)
        ids = torch.cat([whole[0:20].view(1, -1).expand(2, -1), question], dim=1)
        exact = model(ids, output_retrieval=True)
        assert_same(answer.logits, exact.logits[:, 20 * S :])
        for ours, full in zip(answer.retrieval, exact.retrieval, strict=True):
            assert torch.equal(ours.indices, full.indices[:, 20:])


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


def test_what_comes_behind_the_end_of_a_text_is_not_said(tmp_path: Path) -> None:
    subject = subject_of("window")
    settings = NeedleSettings(format="sentences", kind="multi-value", needles=2)
    suite = Suite(subject, settings, Filler(TEXT), task_of(settings), "sentences", print)
    answer, ended = (tokenize([text], BYTES).astype(np.int64) for text in (" 12, 13", " 13, 12"))
    question = Question(answer[:1], (0,), None, answer, ("12", "13"), "12, 13", ((0, 1),), False, True)
    more = tokenize(["the"], BYTES).tolist()
    assert suite._judge(question, [*ended, BYTES.eos_token_id, *more]) == (True, " 13, 12")
    assert suite._judge(question, [*ended, *more]) == (False, " 13, 12the")


@torch.no_grad()
def test_a_model_writes_no_further_than_its_positions() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=40, n_embd=8, n_layer=1, n_head=1)).eval()
    asker = WholeTextAsker(model, BYTES)
    answer = tokenize([" 12345"], BYTES).astype(np.int64)
    question = Question(answer[:1], (0,), None, answer, ("12345",), "12345", ((0,),), False)
    model.generation_config.eos_token_id = None
    assert len(asker.generate(torch.zeros(1, 20, dtype=torch.int64), question)) == len(answer) + 4
    # the longest text that is allowed, without its answer: all positions are taken
    assert (
        len(asker.generate(torch.zeros(1, 40 - len(answer), dtype=torch.int64), question)) == question.needed
    )


def _drawing(plain: Any, value: str) -> Any:
    def draw(self: Any, draws: Any, key: bool) -> Name:
        return plain(self, draws, key) if key else Name(tokenize([value], BYTES).astype(np.int64), value)

    return draw


@pytest.mark.parametrize("kind", ["single", "hops"])
@torch.no_grad()
def test_the_papers_protocol_looks_at_one_token(kind: str, tmp_path: Path) -> None:
    """All before it given: the first token of a passkey; the last of the path's second value."""
    subject = subject_of("drt")
    length = LENGTH if kind == "single" else 420
    settings = NeedleSettings(lengths=(length,), kind=kind, protocol="paper-table-2", questions=2)
    record = record_of(tmp_path, subject)
    (result,) = run(subject, settings, TEXT, record)
    lines = record.generations(result)
    asking_for = NeedleSettings(
        lengths=(length,),
        kind=kind,
        format="paper",
        needles=1 if kind == "single" else 2,
        questions=2,
        phases="end",
    )
    task = task_of(asking_for, 5)
    assert task.num_needles == (1 if kind == "single" else 4)
    expected = asked(subject, asking_for, task, subject.model.chunks_in_sight(S))
    model = subject.model
    for line, (ids, _, question) in zip(lines, expected, strict=True):
        cue = tokenize([" is"], BYTES).tolist()
        place = question.landmarks[0]
        assert question.prompt[place + 1 :].tolist() == cue  # the landmark right before it
        assert line["phase"] == S  # of a full chunk
        assert len(question.landmarks) == 1
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


# --- records, tiers, sizes -------------------------------------------------------------------------------------


FAST = [("drt", "device"), ("drt", "disk"), ("full", "host")]


class Stopped(Exception):
    pass


def without_times(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("seconds", "seconds_reading", "seconds_asking", "tokens_per_second")
    own = ("resident_bytes", "environment", "cells_read_for", *timed)
    return [{name: value for name, value in r.items() if name not in own} for r in results]


def test_a_second_run_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("drt")
    settings = NeedleSettings(lengths=(200, 220), format="marks", depths=(0.0, 1.0), questions=1)
    plain = run(subject, settings, TEXT, record_of(tmp_path / "plain", subject))
    assert [(r["length"], r["depth"]) for r in plain] == [(200, 0.0), (200, 1.0), (220, 0.0), (220, 1.0)]
    record, kept = record_of(tmp_path / "stopped", subject), []
    keep = record.measure

    def stop(*args: Any, **kwargs: Any) -> Any:
        if len(kept) == 3:
            raise Stopped
        kept.append(keep(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(record, "measure", stop)
    with pytest.raises(Stopped):
        run(subject, settings, TEXT, record)
    again, read = record_of(tmp_path / "stopped", subject), []
    assert len(again.results) == 3
    plain_read = subject.model.read
    monkeypatch.setattr(
        subject.model, "read", lambda ids, cache: (read.append(ids.shape[1]), plain_read(ids, cache))[1]
    )
    results = run(subject, settings, TEXT, again)
    assert without_times(results) == without_times(plain)
    whole = task_of(settings).chunks(220, S) * S
    assert read[1:] == [whole]  # after the probe: the haystack of the longer texts
    assert again.generations(results[3]) == record_of(tmp_path / "plain", subject).generations(plain[3])
    read.clear()
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: namedtuple("memory", "available")(0))
    assert run(subject, settings, TEXT, record_of(tmp_path / "stopped", subject)) == results
    assert not read  # and no room is needed for what is known


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_answers_do_not_depend_on_the_tier(tier: str, tmp_path: Path) -> None:
    subject = subject_of("drt")
    folder = tmp_path / "memory" if tier == "disk" else None
    _, lines = measured(tmp_path / "a", subject)
    result, others = measured(tmp_path / "b", subject, memory_tier=tier, memory_folder=folder)
    assert [line | {"id": 0} for line in others] == [line | {"id": 0} for line in lines]
    assert (result["memory_tier"], result["memory_dtype"]) == (tier, None)
    assert folder is None or not list(folder.iterdir())


def test_questions_are_asked_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, changes = subject_of("drt"), {"kind": "multi-key", "needles": 3, "questions": 3}
    _, lines = measured(tmp_path / "a", subject, **changes)
    sizes, forward = [], subject.model.forward
    monkeypatch.setattr(asking, "_TOGETHER", 2)
    monkeypatch.setattr(
        subject.model, "forward", lambda ids, **more: (sizes.append(len(ids)), forward(ids, **more))[1]
    )
    _, others = measured(tmp_path / "b", subject, **changes)
    assert [line["generated"] for line in others] == [line["generated"] for line in lines]
    assert [line["selected"] for line in others] == [line["selected"] for line in lines]
    assert len(lines) == 3
    assert set(sizes) == {1, 2}


def test_a_memory_in_another_precision(tmp_path: Path) -> None:
    subject = subject_of("drt")
    whole, half = (
        measured(tmp_path / str(dtype), subject, memory_dtype=dtype, questions=1)[0]
        for dtype in (None, "bfloat16")
    )
    chunks = whole["tokens_read"] // whole["haystacks"] // S
    assert whole["memory_bytes"] - half["memory_bytes"] == chunks * 2 * S * 2 * 4 * (8 - 2)
    assert half["memory_dtype"] == "bfloat16"


def test_a_stream_is_a_text(tmp_path: Path) -> None:
    subject = subject_of("window")
    settings = NeedleSettings(lengths=(300,), format="marks", questions=2)
    results = [
        run(subject, settings, text, record_of(tmp_path / str(n), subject))
        for n, text in enumerate((TEXT, Corpus.of_tokens(TEXT)))
    ]
    assert without_times(results[0]) == without_times(results[1])


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        pytest.param(name, tier, marks=[] if (name, tier) in FAST else pytest.mark.slow)
        for name in ("drt", "landmark", "full")
        for tier in ("device", "host", "disk")
    ],
)
def test_a_length_that_the_memory_cannot_hold(
    name: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed is what reading takes; one byte less that is free is refused before anything is read."""
    subject = subject_of(name)
    model, length = subject.model, 400
    task = task_of(NeedleSettings(lengths=(length,), format="marks"))
    count = task.chunks(length, S) * S
    ids = torch.from_numpy(TEXT[:count]).long()[None]
    need = room.memory_need(model, ids, count, tier, None)
    cached = model.new_cache(num_tokens=count)
    model.read(ids, cached)
    if name == "drt":
        assert sum(need) == cached.memory_bytes()
    else:  # Landmark Attention keeps its last cell elsewhere; full attention all in its windows
        assert sum(need) >= cached.memory_bytes()
        assert sum(need) > 0
    disk, host = need.disk, need.device + need.host
    memory = namedtuple("memory", "available")
    usage = namedtuple("usage", "free")
    if name == "full" and tier == "disk":
        assert disk == 0
    monkeypatch.setattr(room.shutil, "disk_usage", lambda place: usage(disk))
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: memory(host))
    room.expect_room(model, need, length, None)
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: memory(host - 1))
    settings = NeedleSettings(lengths=(150, length), format="marks", memory_tier=tier, questions=1)
    record = record_of(tmp_path, subject)
    with pytest.raises(ValueError, match=rf"length: expected a text whose memory fits, got {length} tokens"):
        run(subject, settings, TEXT, record)
    if disk:
        monkeypatch.setattr(room.psutil, "virtual_memory", lambda: memory(host))
        monkeypatch.setattr(room.shutil, "disk_usage", lambda place: usage(disk - 1))
        with pytest.raises(ValueError, match="disk space at"):
            run(subject, settings, TEXT, record)
    assert record.results == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("drt", {"lengths": (60,)}, r"length: expected at least \d+ tokens for 1 needles out of .*, got 60"),
        ("drt", {"kind": "multi-key", "needles": 30}, r"length: expected at least \d+ tokens for 30 needles"),
        ("llama", {"lengths": (300, 401)}, "length: expected at most the 400 tokens that 'llama' takes"),
        ("drt", {"values": "words"}, "values: expected 'numbers' in the format 'marks', got 'words'"),
        (
            "drt",
            {"format": "sentences", "values": "tokens"},
            "values: expected 'numbers' or 'words' in the format",
        ),
    ],
)
def test_evaluations_that_cannot_be(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        measured(tmp_path, subject_of(name), **changes)


def test_the_shortest_text(tmp_path: Path) -> None:
    subject = subject_of("drt")
    task = task_of(NeedleSettings(format="marks"))
    least = (task.least_chunks(S) + subject.model.chunks_in_sight(S) + 1) * S + task.sizes[1]
    _, lines = measured(tmp_path, subject, lengths=(least,))
    assert {chunk for line in lines for chunk in line["gold_chunks"][0]} == {0}
    with pytest.raises(ValueError, match=f"length: expected at least {least} tokens .*, got {least - 1}"):
        measured(tmp_path, subject, lengths=(least - 1,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "many"}, "kind: expected one of 'single', .*, got 'many'"),
        ({"format": "json"}, "format: expected one of 'marks', 'sentences', 'paper', got 'json'"),
        ({"landmarks": 3}, "landmarks: expected one of 1, 2, got 3"),
        ({"phases": "some"}, "phases: expected one of 'any', 'end', got 'some'"),
        ({"protocol": "paper"}, "protocol: expected one of 'paper-table-2', got 'paper'"),
        ({"memory_tier": "cloud"}, "memory_tier: expected one of"),
        ({"memory_dtype": "int8"}, "memory_dtype: expected one of"),
        ({"needles": 0, "kind": "hops"}, "needles: expected 1 or more, got 0"),
        ({"needles": 2}, "needles: expected 1 for kind 'single', got 2"),
        ({"distractors": -1}, "distractors: expected 0 or more"),
        ({"questions": 0}, "questions: expected 1 or more"),
        ({"lengths": (0,)}, "lengths: expected positive whole numbers of tokens, got 0"),
        ({"lengths": (1e3,)}, "lengths: expected positive whole numbers of tokens, got 1000.0"),
        ({"depths": (0.5, 1.5)}, "depths: expected numbers from 0 .* got 1.5"),
        ({"depths": ()}, "depths: expected at least one"),
        ({"memory_folder": Path("x")}, "memory_folder: expected none for memory_tier 'device'"),
        ({"protocol": "paper-table-2", "distractors": 4}, "distractors: expected 0 for protocol"),
        ({"protocol": "paper-table-2", "kind": "hops", "hops": 3}, "hops: expected 2 for protocol"),
        ({"protocol": "paper-table-2", "format": "marks"}, "format: expected 'paper' for protocol"),
        ({"protocol": "paper-table-2", "phases": "any"}, "phases: expected 'end' for protocol"),
        ({"protocol": "paper-table-2", "straddle": False}, "straddle: expected True for protocol"),
        (
            {"protocol": "paper-table-2", "kind": "multi-key"},
            "kind: expected 'single' or 'hops' for protocol",
        ),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeedleSettings(**changes)


@pytest.mark.parametrize(
    ("task", "protocol", "expected"),
    [
        ("needles", None, "marks"),
        ("niah", None, "paper"),
        ("text", None, "sentences"),
        (None, None, "sentences"),
        ("needles", "paper-table-2", "paper"),
    ],
)
def test_formats_that_models_know(
    task: str | None, protocol: str | None, expected: str, tmp_path: Path
) -> None:
    subject = subject_of("window", task)
    settings = NeedleSettings(lengths=(700,), questions=1, protocol=protocol)
    (result,) = run(subject, settings, TEXT, record_of(tmp_path, subject))
    assert result["format"] == expected
    cell = result["settings"]
    assert json.loads(json.dumps(cell)) == cell
    assert cell["text"] == Corpus.of_tokens(TEXT).fingerprint
    assert (cell["chunk_size"], cell["depth"], cell["straddle"]) == (S, None, expected != "marks")


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle_cells, "_PROGRESS_SECONDS", 0)
    monkeypatch.setattr(asking, "_PIECES", 1)
    subject, lines = subject_of("drt"), []
    settings = NeedleSettings(lengths=(9000,), format="marks", questions=1)
    run(subject, settings, TEXT, record_of(tmp_path, subject), lines.append)
    assert lines[0] == "9,000 tokens: haystack 1 of 1"
    shares = [line.split(": ")[-1] for line in lines if line.endswith("% read")]
    assert shares[:3] == ["46% read", "91% read", "100% read"]
    assert lines[-1] == "9,000 tokens: haystack 1 of 1: trial 1 of 1"


def test_wilson_covers() -> None:
    """Exactly, from the binomial distribution: on average over p in 95 of 100, at each p in more than 80."""
    for n in (10, 50, 100):
        intervals = [wilson_interval(k, n) for k in range(n + 1)]
        places = np.linspace(0, 1, 1001)[1:-1]
        covered = [
            sum(
                comb(n, k) * p**k * (1 - p) ** (n - k)
                for k, (low, high) in enumerate(intervals)
                if low <= p <= high
            )
            for p in places.tolist()
        ]
        assert min(covered) > 0.8
        assert 0.95 <= np.mean(covered) < 0.96
