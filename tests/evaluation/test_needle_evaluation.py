"""Needles planted in memory answer as if the changed text had been read in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.tiny import (
    TokenCounter,
    assert_same,
    block_recurrent,
    drt,
    landmark,
    logits_of,
    rpt,
    tokens,
    window_model,
)
from trailmark.data.needles import NeedleFormat
from trailmark.statistics import wilson_interval
from trailmark.data.trials import needle_trials
from trailmark.evaluation.needles import evaluate_needles
from trailmark.evaluation.planting import planted
from trailmark.memory import ChunkCache
from trailmark.models import DRTForCausalLM, RPTForCausalLM, TrailmarkForCausalLM

S, N = 4, 26  # chunks of the haystack


def memory_of(cache: ChunkCache) -> list[Tensor]:
    """Keys, values, landmarks and lengths of every chunk of the one row."""
    count = int(cache.num_chunks[0])
    records, lengths = cache.memory.gather(np.arange(count)[None])
    landmarks = torch.cat(cache.memory.blocks(count, 1), dim=1)
    return [records.clone(), landmarks.clone(), torch.from_numpy(lengths.copy())]


def drt_of_encoder() -> DRTForCausalLM:
    model = drt(retriever="encoder")
    model.embedder = TokenCounter()
    return model


MODELS: dict[str, Any] = {
    "1 group": drt,
    "2 groups": lambda: drt(groups=2),
    "3 lower layers": lambda: drt(num_hidden_layers=5, num_lower_layers=3),
    "no lower layer": lambda: drt(groups=2, num_hidden_layers=4, num_lower_layers=0),
    "wide window": lambda: drt(sliding_window=11, window_position="rope", exclude_visible_chunks=True),
    "encoder": drt_of_encoder,
    "rpt": lambda: rpt(num_hidden_layers=4, num_lower_layers=2),
    "rpt, encoder": lambda: rpt(retriever="encoder", continuation=True, neighbour_augmentation=True),
}
PLACES = [[0], [5], [4, 5], [3, 5], [0, 1, 2, 7], [7, 2], [-1], [-1, -2, 0]]  # -1: the last one possible
TIERS = ("device", "host", "disk")


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("places", PLACES, ids=str)
@torch.no_grad()
def test_planting_is_reading_the_changed_text(build: Any, places: list[int]) -> None:
    model = build()
    count = N - model.chunks_in_sight(S)
    ids, chunks = tokens(N * S)[0].view(N, S), torch.tensor(places) % count
    needles, question = tokens(len(places) * S, seed=1)[0].view(-1, S), tokens(23, batch=2, seed=2)
    changed = ids.clone()
    changed[chunks] = needles
    cache, exact = model.new_cache(TIERS[len(places) % 3]), model.new_cache()
    model.read(ids.view(1, -1), cache)
    model.read(changed.view(1, -1), exact)
    before = memory_of(cache)
    with planted(model, cache, ids, chunks, needles):
        (records, landmarks, lengths), read = memory_of(cache), memory_of(exact)
        assert_same(records, read[0])
        assert_same(landmarks, read[1])
        assert torch.equal(lengths, read[2])
        answer = model(question, past_key_values=cache.branch(2), output_retrieval=True)
    whole = model(torch.cat([changed.view(1, -1).expand(2, -1), question], dim=1), output_retrieval=True)
    assert_same(answer.logits, whole.logits[:, N * S :])
    for ours, full in zip(answer.retrieval, whole.retrieval, strict=True):
        assert torch.equal(ours.indices, full.indices[:, N:])
    assert all(torch.equal(a, b) for a, b in zip(memory_of(cache), before, strict=True))
    unplanted = logits_of(model, question, past_key_values=cache.branch(2))
    assert not torch.equal(unplanted, answer.logits)


@torch.no_grad()
def test_memory_is_restored_after_an_error() -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)
    cache = model.new_cache()
    model.read(ids.view(1, -1), cache)
    before = memory_of(cache)
    with pytest.raises(KeyError), planted(model, cache, ids, torch.tensor([1, 2]), ids[5:7]):
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(memory_of(cache), before, strict=True))


# 7 positions of window, 5 of a chunk: the lower layer reaches 2 chunks, the two upper ones 12 positions
SIGHT = 2 + 3


@pytest.mark.parametrize("place", [-1, N - SIGHT, N - 1, N])
@torch.no_grad()
def test_planting_where_the_window_still_looks_is_refused(place: int) -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)
    cache = model.new_cache()
    model.read(ids.view(1, -1), cache)
    before = memory_of(cache)
    with (
        pytest.raises(ValueError, match=f"chunks: expected numbers from 0 to {N - SIGHT - 1}, got {place}"),
        planted(model, cache, ids, torch.tensor([0, place]), ids[:2]),
    ):
        pass
    assert all(torch.equal(a, b) for a, b in zip(memory_of(cache), before, strict=True))


@torch.no_grad()
def test_planting_where_it_would_not_be_exact_is_refused() -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)

    def plant(cache: ChunkCache) -> None:
        with planted(model, cache, ids, torch.tensor([0]), ids[1:2]):
            pass

    cache = model.new_cache()
    with pytest.raises(ValueError, match="cache: expected one row that has read a text, got 0"):
        plant(cache)
    with pytest.raises(ValueError, match="cache: expected one row that has read a text, got 2"):
        plant(model.read(ids.view(1, -1).expand(2, -1)))
    with pytest.raises(ValueError, match="first: expected 3 chunks that this memory owns"):
        plant(model.read(ids.view(1, -1)).branch())
    model.read(ids.view(1, -1), cache)
    model(ids[:1], past_key_values=cache)  # what it finds is found
    with pytest.raises(ValueError, match="cache: expected a text whose end was only read"):
        plant(cache)
    model.read(ids[:2].view(1, -1), cache)  # 10 positions, of 12
    with pytest.raises(ValueError, match="cache: expected a text whose end was only read"):
        plant(cache)
    early = model.new_cache()
    model(ids[:1, :3], past_key_values=early, close_chunk=True)
    model.read(ids.view(1, -1), early)
    with pytest.raises(ValueError, match="cache: expected full chunks, got early landmarks"):
        plant(early)


@torch.no_grad()
def test_planting_after_enough_was_read_on_is_exact() -> None:
    model, ids = drt(), tokens(N * S)[0].view(N, S)
    changed, question = ids.clone(), tokens(9, seed=2)
    changed[[0, 12]] = ids[[3, 4]]
    cache = model.new_cache()
    model(ids[:10].view(1, -1), past_key_values=cache)
    model.read(ids[10:].view(1, -1)[:, :-1], cache)  # and some open chunk
    with planted(model, cache, ids, torch.tensor([0, 12]), ids[[3, 4]]):
        answer = logits_of(model, question, past_key_values=cache.branch())
    whole = logits_of(model, torch.cat([changed.view(1, -1)[:, :-1], question], dim=1))
    assert_same(answer, whole[:, N * S - 1 :])


# --- whole evaluations -----------------------------------------------------------------------------------

# 26 letters, 10 digits, $ ~ = ; and blank of 50 tokens; a needle has 12
FORMAT = NeedleFormat(np.arange(26, dtype=np.int32), np.arange(26, 36, dtype=np.int32), 36, 37, 38, 39, 40)
LONG, CHUNKS = 12, 24
TEXT = tokens(1000)[0].numpy().astype(np.int32)
SUBJECTS: dict[str, tuple[TrailmarkForCausalLM, int]] = {
    # and the last chunks that the first question sees other than through the memory
    "1 group": (drt(chunk_size=LONG), 2 + 1),
    "2 groups": (drt(2, chunk_size=LONG), 3 + 1),
    "window": (window_model(), 2),
    "rpt": (rpt(chunk_size=LONG), 2 + 1),
    "block recurrent": (block_recurrent(), 2),
}
ASKS: dict[Any, int] = {"end": 1, "any": 2}  # chunks that a question takes


def trials(
    sight: int, haystacks: int, each: int, needles: int, phases: Any = "end", seed: int = 0
) -> Iterator[tuple[Any, ...]]:
    """The haystacks and questions of an evaluation: (changed text, place, question, answer)."""
    text, chunks = FORMAT.clean(TEXT), CHUNKS - ASKS[phases]
    for number in range(haystacks):
        start = int(np.random.default_rng([seed, 1, number]).integers(len(text)))
        haystack = np.take(text, np.arange(start, start + chunks * LONG), mode="wrap")
        seeds = {"seed": seed * 1000 + number, "phases": phases}
        source = needle_trials(FORMAT, haystack, LONG, chunks - sight, needles, **seeds)
        for _, trial in zip(range(each), source, strict=False):
            changed = torch.from_numpy(haystack).long().view(-1, LONG)
            changed[trial.chunks] = trial.texts
            for i, place in enumerate(trial.chunks.tolist()):
                question = trial.questions[i][trial.attention_mask[i]]
                yield changed.view(1, -1), place, question, trial.answers[i]


@pytest.mark.parametrize(
    ("model", "sight"),
    [
        # each text is read anew
        pytest.param(*subject, id=name, marks=[pytest.mark.slow] if name == "block recurrent" else [])
        for name, subject in SUBJECTS.items()
    ],
)
@pytest.mark.parametrize("needles", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phases", ASKS)
@torch.no_grad()
def test_every_answer_is_that_of_the_whole_text(
    model: TrailmarkForCausalLM, sight: int, needles: int, phases: Any
) -> None:
    """Each question alone behind its text, without a cache, its landmark where it ends."""
    answers: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, inputs, out: answers.extend(out.logits))
    result = evaluate_needles(
        model, FORMAT, TEXT, CHUNKS * LONG, 20 * needles, needles, chunk_size=LONG, phases=phases
    )
    hook.remove()
    assert result.questions == len(result.asked) == len(answers) == 20 * needles
    assert result.haystacks == 10
    assert result.phases == phases
    expected = trials(sight, 10, 2, needles, phases)
    places, ends = set(), set()
    for logits, record, (text, place, question, answer) in zip(answers, result.asked, expected, strict=True):
        places.add(place)
        ends.add(record["phase"])
        assert len(question) == (ASKS[phases] - 1) * LONG + record["phase"]
        whole = torch.cat([text, torch.cat([question, answer[:-1]])[None]], dim=1)
        close = torch.zeros_like(whole, dtype=torch.bool)
        close[0, text.shape[1] + len(question) - 1] = True
        out = model(whole, close_chunk=close, output_retrieval=True)
        assert_same(logits, out.logits[0, -5:])
        assert record["needle"] == place
        assert record["correct"] == (out.logits[0, -5:].argmax(-1).tolist() == answer[1:].tolist())
        if isinstance(model, DRTForCausalLM | RPTForCausalLM):
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
    last = CHUNKS - ASKS[phases] - sight
    assert places <= set(range(last))
    assert ends == {LONG} if phases == "end" else len(ends) > 6
    if needles == 3:  # from the first chunk to the last that the window cannot see
        assert {0, last - 1} <= places
    assert result.retrieved == (
        sum(record["retrieved"] for record in result.asked)
        if isinstance(model, DRTForCausalLM | RPTForCausalLM)
        else None
    )


@pytest.mark.parametrize("phases", ASKS)
@torch.no_grad()
def test_what_landmark_attention_read_for_an_answer(phases: Any) -> None:
    """In every layer, of the question's last token and the cue, as if each were asked behind its own text."""
    model = landmark(chunk_size=LONG, local_length=6 * LONG, num_retrieved_chunks=1)
    result = evaluate_needles(model, FORMAT, TEXT, CHUNKS * LONG, 12, 3, phases=phases)
    assert (result.haystacks, result.tokens_read) == (4, 4 * (CHUNKS - ASKS[phases]) * LONG)
    expected = trials(6, 4, 1, 3, phases)
    for record, (text, place, question, answer) in zip(result.asked, expected, strict=True):
        whole = torch.cat([text, torch.cat([question, answer[:-1]])[None]], dim=1)
        close = torch.zeros_like(whole, dtype=torch.bool)
        close[0, -6] = True
        out = model(whole, close_chunk=close, past_key_values=model.new_cache(), output_retrieval=True)
        read = [set(layer.indices[0, [-6, -5]].flatten().tolist()) - {-1} for layer in out.retrieval]
        assert record["selected"] == [sorted(layer) for layer in read]
        assert record["retrieved"] == any(place in layer for layer in read)
        assert record["correct"] == (out.logits[0, -5:].argmax(-1).tolist() == answer[1:].tolist())
    assert result.retrieved == sum(record["retrieved"] for record in result.asked)
    assert result.retrieved in range(1, 12)


def test_what_reading_for_every_trial_cost(tmp_path: Path) -> None:
    model = landmark(chunk_size=LONG, local_length=6 * LONG)
    ask = (model, FORMAT, TEXT, CHUNKS * LONG, 4, 2)
    result = evaluate_needles(*ask)
    assert (result.haystacks, result.tokens_read) == (2, 2 * (CHUNKS - 1) * LONG)
    text = torch.from_numpy(FORMAT.clean(TEXT)[: (CHUNKS - 1) * LONG]).long()[None]
    cache = model.read(text, model.new_cache(num_tokens=text.shape[1]))
    assert result.memory_bytes == cache.memory_bytes() + cache.window_bytes()
    on_disk = evaluate_needles(*ask, memory_tier="disk", memory_folder=tmp_path)
    assert on_disk.asked == result.asked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("build", [landmark, block_recurrent])
def test_what_depends_on_all_that_was_read_is_not_planted_in(build: Any) -> None:
    """Every layer's memory, the states."""
    model, ids = build(), tokens(N * S)[0].view(N, S)
    cache = model.read(ids.view(1, -1))
    with (
        pytest.raises(
            ValueError, match=r"model: expected one whose memory .* Read the text with the needles"
        ),
        planted(model, cache, ids, torch.tensor([0]), ids[:1]),
    ):
        pass


@pytest.mark.parametrize("tier", TIERS)
def test_answers_do_not_depend_on_the_tier(tier: str, tmp_path: Path) -> None:
    model, _ = SUBJECTS["2 groups"]
    folder = tmp_path / "new" if tier == "disk" else None
    ask = (model, FORMAT, TEXT, CHUNKS * LONG, 12, 3)
    result = evaluate_needles(*ask, phases="any", memory_tier=tier, memory_folder=folder)
    assert result.asked == evaluate_needles(*ask, phases="any").asked
    assert result.haystacks == 4
    assert result.summary()["memory_tier"] == tier
    assert folder is None or not list(folder.iterdir())  # as it was found


def test_a_memory_of_another_type(tmp_path: Path) -> None:
    model, _ = SUBJECTS["2 groups"]
    ask = (model, FORMAT, TEXT, CHUNKS * LONG, 4, 2)
    whole, half = (evaluate_needles(*ask, memory_dtype=dtype) for dtype in (None, torch.bfloat16))
    assert (whole.memory_dtype, half.memory_dtype) == (None, "bfloat16")
    chunks, numbers = CHUNKS - 1, 2 * LONG * 2 * 4
    assert whole.memory_bytes - half.memory_bytes == chunks * numbers * (8 - 2)


def test_what_reading_a_haystack_cost() -> None:
    model, _ = SUBJECTS["2 groups"]
    result = evaluate_needles(model, FORMAT, TEXT, CHUNKS * LONG, 4, 2)
    assert result.haystacks == 2
    assert result.tokens_read == 2 * (CHUNKS - 1) * LONG
    text = torch.from_numpy(FORMAT.clean(TEXT)[: (CHUNKS - 1) * LONG]).long()[None]
    cache = model.read(text, model.new_cache(num_tokens=text.shape[1]))
    assert result.memory_bytes == cache.memory_bytes() + cache.window_bytes()
    entries = (CHUNKS - 1) * ((2 * LONG * 2 * 4 + 16) * 8 + 24)
    assert cache.memory_bytes() == entries
    summary = result.summary()
    assert summary["tokens_per_second"] > 0
    assert summary["recall"] * 4 == result.retrieved
    assert summary["accuracy"] == result.correct / 4
    assert summary["phases"] == "end"
    assert (summary["accuracy_low"], summary["accuracy_high"]) == wilson_interval(result.correct, 4)


def test_an_answer_is_correct_if_all_its_digits_are() -> None:
    """A model that always says token 0, and digits of which one is not."""
    model = drt(chunk_size=LONG, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    digits = np.array([0] * 9 + [1], np.int32)
    form = NeedleFormat(FORMAT.letters, digits, 36, 37, 38, 39, 40)
    answers: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: answers.extend(inputs[0][:, -4:]))
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
        ({"length": 4 * LONG}, "length: expected at least 60 tokens for 1 needles .*got 48"),
        ({"length": 5 * LONG, "phases": "any"}, "length: expected at least 72 tokens for 1 needles .*got 60"),
        ({"length": 6 * LONG, "needles": 3}, "length: expected at least 84 tokens for 3 needles .*got 72"),
        ({"phases": "some"}, "phases: expected 'end' or 'any', got 'some'"),
        ({"memory_tier": "cloud"}, "memory_tier: expected"),
        ({"memory_tier": "host", "memory_folder": "somewhere"}, "memory_folder: expected"),
        ({"text": TEXT[:40]}, "text: expected at least 48 tokens"),
        ({"model": window_model()}, "chunk_size: expected the chunk size of the task"),
        (
            {"model": window_model(sliding_window=None), "chunk_size": LONG},
            "sliding_window: expected a number",
        ),
        ({"chunk_size": 2 * LONG}, "chunk_size: expected the model's own 12, got 24"),
        (
            {"model": landmark(chunk_size=LONG, local_length=60), "length": 6 * LONG},
            "length: expected at least 84 tokens for 1 needles .*got 72",
        ),
    ],
    ids=[
        "not whole chunks",
        "too short",
        "too short for any phase",
        "too many",
        "other phases",
        "other tier",
        "folder without disk",
        "little text",
        "no chunks",
        "full attention",
        "other chunks",
        "in the cell",
    ],
)
def test_evaluations_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "model": drt(chunk_size=LONG),
        "format": FORMAT,
        "text": TEXT,
        "length": CHUNKS * LONG,
    }
    with pytest.raises(ValueError, match=message):
        evaluate_needles(**(arguments | {"questions": 2} | changes))


@pytest.mark.parametrize("length", [5 * LONG, 7 * LONG])
def test_the_shortest_text_that_is_not_refused(length: int) -> None:
    needles = length // LONG - 4
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
