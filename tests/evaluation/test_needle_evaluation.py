"""Needles planted in memory answer as if the changed text had been read in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.tiny import assert_same, drt, logits_of, tokens, window_model
from trailmark.data.needles import NeedleFormat, needle_trials
from trailmark.evaluation.needles import evaluate_needles, planted, wilson_interval
from trailmark.memory import ChunkCache
from trailmark.models import DRTForCausalLM, TrailmarkForCausalLM

S, N = 4, 26  # chunks of the haystack


def memory_of(cache: ChunkCache) -> list[Tensor]:
    return [x.clone() for x in cache.memory.tables()]


MODELS: dict[str, dict[str, Any]] = {
    "1 group": {},
    "2 groups": {"groups": 2},
    "3 lower layers": {"num_hidden_layers": 5, "num_lower_layers": 3},
    "no lower layer": {"num_hidden_layers": 2, "num_lower_layers": 0},
    "wide window": {"sliding_window": 11, "window_position": "rope", "exclude_visible_chunks": True},
}
PLACES = [[0], [5], [4, 5], [3, 5], [0, 1, 2, 7], [7, 2]]


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("places", PLACES, ids=str)
@torch.no_grad()
def test_planting_is_reading_the_changed_text(options: dict[str, Any], places: list[int]) -> None:
    model = drt(**options)
    ids, chunks = tokens(N * S)[0].view(N, S), torch.tensor(places)
    needles, question = tokens(len(places) * S, seed=1)[0].view(-1, S), tokens(11, seed=2)
    changed = ids.clone()
    changed[chunks] = needles
    tail = model.reading_tail(S)
    assert max(places) < N - tail - model.encoding_reach()
    cache, exact = model.new_cache(), model.new_cache()
    model.read(ids[: N - tail].view(1, -1), cache)
    model.read(changed[: N - tail].view(1, -1), exact)
    before = memory_of(cache)
    mark = cache.mark()
    with planted(model, cache, ids, chunks, needles):
        for ours, read in zip(cache.memory.tables()[:3], exact.memory.tables()[:3], strict=True):
            assert_same(ours, read)
        model.read(ids[N - tail :].view(1, -1), cache)
        answer = model(question, past_key_values=cache, output_retrieval=True)
        cache.rewind(mark)
    whole = model(torch.cat([changed.view(1, -1), question], dim=1), output_retrieval=True)
    assert_same(answer.logits, whole.logits[:, N * S :])
    for ours, full in zip(answer.retrieval, whole.retrieval, strict=True):
        assert torch.equal(ours.indices, full.indices[:, N:])
    assert all(torch.equal(a, b) for a, b in zip(cache.memory.tables(), before, strict=True))
    unplanted = logits_of(model, torch.cat([ids.view(1, -1), question], dim=1))
    assert not torch.equal(unplanted[:, N * S :], answer.logits)


@torch.no_grad()
def test_memory_is_restored_after_an_error() -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)
    cache = model.new_cache()
    model.read(ids.view(1, -1), cache)
    before = memory_of(cache)
    with pytest.raises(KeyError), planted(model, cache, ids, torch.tensor([1, 2]), ids[5:7]):
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(cache.memory.tables(), before, strict=True))


@pytest.mark.parametrize("place", [-1, N - 2, N - 1, N])
@torch.no_grad()
def test_planting_where_the_window_still_looks_is_refused(place: int) -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)
    cache = model.new_cache()
    model.read(ids.view(1, -1), cache)
    before = memory_of(cache)
    with (
        pytest.raises(ValueError, match=f"chunks: expected numbers from 0 to {N - 3}, got {place}"),
        planted(model, cache, ids, torch.tensor([0, place]), ids[:2]),
    ):
        pass
    assert all(torch.equal(a, b) for a, b in zip(cache.memory.tables(), before, strict=True))


# --- whole evaluations -----------------------------------------------------------------------------------

# 26 letters, 10 digits, $ ~ = ; and blank of 50 tokens; a needle has 12
FORMAT = NeedleFormat(np.arange(26, dtype=np.int32), np.arange(26, 36, dtype=np.int32), 36, 37, 38, 39, 40)
LONG, CHUNKS = 12, 24
TEXT = tokens(1000)[0].numpy().astype(np.int32)
SUBJECTS: dict[str, tuple[TrailmarkForCausalLM, int]] = {
    # and chunks that end before the first question out of the needles' reach
    "1 group": (drt(chunk_size=LONG), 23 - 4 - 1),
    "2 groups": (drt(2, chunk_size=LONG), 23 - 7 - 1),
    "window": (window_model(), 23 - 2),
}


def trials(last: int, haystacks: int, each: int, needles: int, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """The haystacks and questions of an evaluation: (changed text, place, question, answer)."""
    text = FORMAT.clean(TEXT)
    for number in range(haystacks):
        start = int(np.random.default_rng([seed, 1, number]).integers(len(text)))
        haystack = np.take(text, np.arange(start, start + (CHUNKS - 1) * LONG), mode="wrap")
        source = needle_trials(FORMAT, haystack, LONG, last, needles, seed=seed * 1000 + number)
        for _, trial in zip(range(each), source, strict=False):
            changed = torch.from_numpy(haystack).long().view(-1, LONG)
            changed[trial.chunks] = trial.texts
            for place, question, answer in zip(
                trial.chunks.tolist(), trial.questions, trial.answers, strict=True
            ):
                yield changed.view(1, -1), place, question, answer


@pytest.mark.parametrize(("model", "last"), SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("needles", [1, 3])
@torch.no_grad()
def test_every_answer_is_that_of_the_whole_text(model: TrailmarkForCausalLM, last: int, needles: int) -> None:
    answers: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, inputs, out: answers.append(out.logits))
    result = evaluate_needles(model, FORMAT, TEXT, CHUNKS * LONG, 20 * needles, needles, chunk_size=LONG)
    hook.remove()
    assert result.questions == len(result.asked) == len(answers) == 20 * needles
    assert result.haystacks == 10
    expected = trials(last, 10, 2, needles)
    places = set()
    for logits, record, (text, place, question, answer) in zip(answers, result.asked, expected, strict=True):
        places.add(place)
        out = model(torch.cat([text, torch.cat([question, answer[:-1]])[None]], dim=1), output_retrieval=True)
        assert_same(logits, out.logits[:, -5:])
        assert record["needle"] == place
        assert record["correct"] == (out.logits[0, -5:].argmax(-1).tolist() == answer[1:].tolist())
        if isinstance(model, DRTForCausalLM):
            selected = [
                [m for m in group.indices[0, CHUNKS - 1].tolist() if m >= 0] for group in out.retrieval
            ]
            best = int(out.retrieval[0].weights[0, CHUNKS - 1].argmax())
            assert record["selected"] == selected
            assert record["retrieved"] == any(place in group for group in selected)
            assert record["first"] == (selected[0][best] == place)
            assert sum(record["weights"]) == pytest.approx(1, abs=1e-3)
        else:
            assert "selected" not in record
    assert places <= set(range(last))
    if needles == 3:  # from the first chunk to the last that the window cannot see
        assert {0, last - 1} <= places
    assert result.retrieved == (
        sum(record["retrieved"] for record in result.asked) if isinstance(model, DRTForCausalLM) else None
    )


def test_what_reading_a_haystack_cost() -> None:
    model, _ = SUBJECTS["2 groups"]
    result = evaluate_needles(model, FORMAT, TEXT, CHUNKS * LONG, 4, 2)
    assert result.haystacks == 2
    assert result.tokens_read == 2 * (23 - 7) * LONG
    entries = 16 * ((2 * LONG * 2 * 4 + 16) * 8 + 8)
    assert result.memory_bytes == entries + 5 * 2 * 6 * 2 * 4 * 8
    summary = result.summary()
    assert summary["tokens_per_second"] > 0
    assert summary["recall"] == result.retrieved / 4
    assert summary["accuracy"] == result.correct / 4
    assert (summary["accuracy_low"], summary["accuracy_high"]) == wilson_interval(result.correct, 4)


def test_an_answer_is_correct_if_all_its_digits_are() -> None:
    """A model that always says token 0, and digits of which one is not."""
    model = drt(chunk_size=LONG, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    digits = np.array([0] * 9 + [1], np.int32)
    form = NeedleFormat(FORMAT.letters, digits, 36, 37, 38, 39, 40)
    answers = []
    hook = model.register_forward_pre_hook(lambda _, inputs: answers.append(inputs[0][0, -4:]))
    result = evaluate_needles(model, form, TEXT, CHUNKS * LONG, 40)
    hook.remove()
    # the last digit is asked for but never passed in: look at those that were, and at the sum
    for record, seen in zip(result.asked, answers, strict=True):
        assert not (record["correct"] and seen.any())
    assert 10 <= result.correct <= 30  # one of five places out of ten: half of them
    assert result.accuracy == result.correct / 40


def test_an_evaluation_is_a_function_of_its_seed() -> None:
    model, _ = SUBJECTS["1 group"]
    runs = [evaluate_needles(model, FORMAT, TEXT, CHUNKS * LONG, 6, seed=seed).asked for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": CHUNKS * LONG + 1}, "length: expected a multiple of the chunk size 12, got 289"),
        ({"length": 6 * LONG}, "length: expected at least 84 tokens for 1 needles .*got 72"),
        ({"length": 8 * LONG, "needles": 3}, "length: expected at least 108 tokens for 3 needles .*got 96"),
        ({"text": TEXT[:40]}, "text: expected at least 48 tokens"),
        ({"model": window_model()}, "chunk_size: expected the chunk size of the task"),
        (
            {"model": window_model(sliding_window=None), "chunk_size": LONG},
            "sliding_window: expected a number",
        ),
        ({"chunk_size": 2 * LONG}, "chunk_size: expected the model's own 12, got 24"),
    ],
    ids=[
        "not whole chunks",
        "too short",
        "too many",
        "little text",
        "no chunks",
        "full attention",
        "other chunks",
    ],
)
def test_evaluations_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": drt(chunk_size=LONG), "format": FORMAT, "text": TEXT, "length": CHUNKS * LONG}
    with pytest.raises(ValueError, match=message):
        evaluate_needles(**(arguments | {"questions": 2} | changes))


@pytest.mark.parametrize("length", [7 * LONG, 9 * LONG])
def test_the_shortest_text_that_is_not_refused(length: int) -> None:
    needles = length // LONG - 6
    result = evaluate_needles(drt(chunk_size=LONG), FORMAT, TEXT, length, needles, needles)
    assert {record["needle"] for record in result.asked} == set(range(needles))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (0, 10, 0.0, 0.27753279),
        (10, 10, 0.72246721, 1.0),
        (5, 10, 0.23659309, 0.76340691),
        (
            81,
            263,
            0.25528904,
            0.36621008,
        ),  # Newcombe (1998), Statistics in Medicine 17, 857-872: .2553, .3662
        (1, 29, 0.00611, 0.17174),  # the same: .0061, .1718
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)
