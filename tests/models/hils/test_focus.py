"""A question's focus: of all chunks of a memory the few that it and its answer choose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.hils.naive import NaiveHiLS, read_in
from tests.models.tiny import PRETRAINED, assert_same, hils, logits_of, padded, tokens
from trailmark.memory import ChunkCache, Focus
from trailmark.models.hils.focus import focus_of
from trailmark.ops import ChunkSelection

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"chunk_score": "mean", "chunk_weights": "keys", "far_position": "window", "summary_tokens": 1}),
    (
        2,
        {
            "num_sinks": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            **PRETRAINED,
        },
    ),
    (2, {"calibration_rank": 2, "far_position": "window", "far_distance": 11}),
]
READ, ASKED, LENGTH = 48, 5, 61


def focused(count: int, **options: Any) -> Any:
    return hils(reading="windows", num_retrieved_chunks=2, num_focus_chunks=count, **options)


def chunks_of(cache: ChunkCache, row: int = 0) -> list[int]:
    """In the focus of one row."""
    assert cache.state is not None
    focus = cache.state.focus[row]
    assert focus is not None
    chunks: list[int] = focus.chunks.tolist()
    return chunks


def focus_in_words(exact: NaiveHiLS, asked: range, count: int, read: int = READ) -> set[int]:
    """Written as it is said: sums of squared shares, a third of the best, and the chunks beside."""
    sums = Counter[int]()
    for layer in exact.shares:
        for t in asked:
            for head in layer[t]:
                sums.update({m: share**2 for m, share in head.items()})
    best = sorted(sums, key=lambda m: (-sums[m], m))[:count]
    best = [m for m in best if sums[m] >= sums[best[0]] / 3]
    closed = read // exact.config.chunk_size
    near = {m + side for m in best for side in (-1, 0, 1)}
    return {m for m in near if 0 <= m < closed}


@pytest.mark.parametrize(("count", "options"), CASES, ids=str)
def test_a_question_and_its_answer_choose_what_the_question_looked_at_most(
    count: int, options: dict[str, Any]
) -> None:
    model, ids = focused(count, **options), tokens(LENGTH)
    question = ids[:, READ : READ + ASKED]
    free = NaiveHiLS(model, ids[0], read=READ)
    looks = NaiveHiLS(model, ids[0, : READ + ASKED], read=READ, known=READ // model.config.chunk_size)
    focus = focus_in_words(looks, range(READ, READ + ASKED), count)
    exact = NaiveHiLS(model, ids[0], read=READ, focus=focus)
    assert (exact.logits[READ:] - free.logits[READ:]).abs().max() > 1e-3  # some wanted others
    cache = model.read(ids[:, :READ])
    model.focus(question, cache)
    asked = model(question, past_key_values=cache, output_retrieval=True)
    assert_same(asked.logits[0], exact.logits[READ : READ + ASKED])
    for t in range(READ + ASKED, LENGTH):
        answer = model(ids[:, t : t + 1], past_key_values=cache, output_retrieval=True)
        assert_same(answer.logits[0], exact.logits[t : t + 1])
        assert read_in(answer.retrieval, 0) == [layer[t : t + 1] for layer in exact.retrieval]


def test_with_all_chunks_in_focus_nothing_changes_a_bit() -> None:
    """Nor of what it learns."""
    ids = tokens(LENGTH)
    with_focus, without = focused(99), hils(reading="windows", num_retrieved_chunks=2)
    caches = [model.read(ids[:, :READ]) for model in (with_focus, without)]
    count = READ // with_focus.config.chunk_size
    everything = (Focus(np.arange(count), count),)
    assert caches[0].state is not None
    caches[0].state = replace(caches[0].state, focus=everything)
    answers, gradients = [], []
    for model, cache in zip((with_focus, without), caches, strict=True):
        logits = model(ids[:, READ:], past_key_values=cache).logits
        logits.square().sum().backward()
        answers.append(logits.detach())
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert torch.equal(*answers)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_same(gradient, gradients[1][name])


def asked(cache: ChunkCache, model: Any, ids: Tensor) -> Iterator[Tensor]:
    """Logits of what stands behind a focus, token by token."""
    for t in range(ids.shape[1]):
        yield model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]


def test_rows_have_a_focus_each_whatever_company_they_keep() -> None:
    """Joined, parted, branched and in a batch with padding: the answers are those of each alone."""
    model = focused(1, num_sinks=2)
    texts, questions = [tokens(n, seed=n) for n in (48, 31, 40)], [tokens(n, seed=90 + n) for n in (5, 2, 4)]
    answer = tokens(6, seed=7)
    alone = []
    for text, question in zip(texts, questions, strict=True):
        cache = model.read(text)
        model.focus(question, cache)
        model(question, past_key_values=cache)
        alone.append(torch.cat(list(asked(cache, model, answer))))
    caches = [model.read(text) for text in texts]
    joined = ChunkCache.join(caches[:2])
    ids, mask = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    ids[0], ids[1, 3:], mask[1, :3] = questions[0], questions[1], False
    model.focus(ids, joined, mask)
    model(ids, attention_mask=mask, past_key_values=joined)
    model.focus(questions[2], caches[2])
    model(questions[2], past_key_values=caches[2])
    every = ChunkCache.join([joined, caches[2]])
    every.reorder_cache(torch.tensor([2, 0, 1]))
    found = torch.stack(list(asked(every, model, answer.expand(3, -1))), 1)
    for row, number in enumerate((2, 0, 1)):
        assert_same(found[row], alone[number])


def test_a_row_without_a_focus_looks_among_all_beside_one_that_has_it() -> None:
    model, ids = focused(1), tokens(LENGTH)
    plain, other = model.read(ids[:, :READ]), model.read(ids[:, :READ])
    without = torch.cat(list(asked(plain.branch(), model, ids[:, READ:])))
    model.focus(ids[:, READ:], other)
    both = ChunkCache.join([plain, other])
    found = torch.stack(list(asked(both, model, ids[:, READ:].expand(2, -1))), 1)
    assert_same(found[0], without)
    assert (found[1] - without).abs().max() > 1e-3


def test_to_focus_reads_nothing_and_a_branch_and_padding_change_nothing(tmp_path: Path) -> None:
    model, ids = focused(1), tokens(LENGTH)
    cache = model.read(ids[:, :READ])
    state = cache.state
    batch = cache.branch(2)
    left, mask = padded([ASKED, ASKED - 2], "left")
    model.focus(left, batch, mask)
    right = cache.branch(2)
    ids_right, mask_right = padded([ASKED, ASKED - 2], "right")
    model.focus(ids_right, right, mask_right)
    assert cache.state is state
    assert state is not None
    assert batch.state is not None
    assert not state.focus
    assert batch.num_tokens.tolist() == [READ, READ]
    assert right.state is not None
    for row, question in enumerate((left[:1], left[1:, 2:])):
        branch = cache.branch()
        model.focus(question, branch)
        assert branch.state is not None
        assert chunks_of(branch) == chunks_of(batch, row) == chunks_of(right, row)
    model.focus(ids[:, READ:], cache)
    assert cache.state is not None
    assert cache.state.focus
    cache.save(tmp_path)
    loaded = model.load_cache(tmp_path).state
    assert loaded is not None
    assert not loaded.focus


def test_another_text_ends_it_and_another_question_replaces_it() -> None:
    model, ids = focused(1), tokens(LENGTH)
    cache = model.read(ids[:, :READ])
    model.focus(ids[:, READ : READ + 1], cache)
    fresh, again = cache.branch(), cache.branch()
    model.focus(ids[:, READ + 1 :], again)
    other = model.read(ids[:, :READ])
    model.focus(ids[:, READ + 1 :], other)
    assert again.state is not None
    assert other.state is not None
    assert chunks_of(again) == chunks_of(other)
    model.read(ids[:, READ:], fresh, prompt=True)
    assert fresh.state is not None
    assert fresh.state.focus
    model.read(ids[:, READ:], fresh)
    assert fresh.state is not None
    assert not fresh.state.focus


def test_where_nothing_was_read_or_nothing_is_to_be_left_out_it_does_nothing() -> None:
    model, cache = focused(1), focused(1).new_cache()
    model.focus(tokens(3), cache)
    assert cache.state is None
    plain = hils(reading="windows")
    cache = plain.read(tokens(20))
    state = cache.state
    plain.focus(tokens(3), cache)
    assert cache.state is state
    short = model.read(tokens(2))
    model.focus(tokens(3), short)  # no chunk was closed
    assert short.state is not None
    assert not short.state.focus
    assert_same(
        logits_of(model, tokens(3), past_key_values=short),
        model(torch.cat([tokens(2), tokens(3)], 1)).logits[:, 2:],
    )


def test_what_the_window_shows_is_looked_at_as_all_else() -> None:
    """Here it shows all that was read; once the answer is longer, what the question looked at is not lost."""
    model, ids = focused(1, sliding_window=40), tokens(70)
    known = 24 // model.config.chunk_size
    looks = NaiveHiLS(model, ids[0, :27], read=24, known=known)
    focus = focus_in_words(looks, range(24, 27), 1, read=24)
    cache = model.read(ids[:, :24])
    model.focus(ids[:, 24:27], cache)
    assert cache.state is not None
    assert set(chunks_of(cache)) == focus < set(range(known))
    exact = NaiveHiLS(model, ids[0], read=24, focus=focus)
    assert_same(logits_of(model, ids[:, 24:], past_key_values=cache)[0], exact.logits[24:])
    late = [chunk for layer in exact.retrieval for token in layer[64:] for head in token for chunk in head]
    assert set(late) & focus  # which no window shows any more


@torch.no_grad()
def test_of_a_long_question_the_end_is_looked_at() -> None:
    model, ids = focused(1), tokens(LENGTH)
    last = model.config.sliding_window
    caches = [model.read(ids[:, :40]) for _ in range(2)]
    model.focus(ids[:, 40:], caches[0])
    model.focus(ids[:, -last:], caches[1])
    assert ids[:, 40:].shape[1] > last
    assert chunks_of(caches[0]) == chunks_of(caches[1])
    batch, (padded_ids, mask) = model.read(ids[:, :40]).branch(2), padded([21, 3], "right")
    model.focus(padded_ids, batch, mask)
    for row, question in enumerate((padded_ids[:1, -last:], padded_ids[1:, :3])):
        alone = model.read(ids[:, :40])
        model.focus(question, alone)
        assert chunks_of(alone) == chunks_of(batch, row)


@torch.no_grad()
def test_a_focus_goes_on_with_a_model_of_another_count() -> None:
    large, small, ids = focused(3), focused(1), tokens(LENGTH)
    answers = []
    for model in (large, small, hils(reading="windows", num_retrieved_chunks=2)):
        cache = model.read(ids[:, :READ])
        large.focus(ids[:, READ:], cache)
        answers.append(logits_of(model, ids[:, READ:], past_key_values=cache))
    assert_same(answers[0], answers[1])
    assert_same(answers[0], answers[2])


def test_a_focus_that_is_stopped_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = focused(1), tokens(LENGTH)
    cache, other = (model.read(ids[:, :READ]) for _ in range(2))
    for each in (cache, other):
        model.focus(ids[:, READ : READ + 2], each)
    state, layer = cache.state, model.layers[-1]

    def stopped(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            model.focus(ids[:, READ + 2 :], cache)
    assert cache.state is state
    assert torch.equal(*(logits_of(model, ids[:, READ:], past_key_values=each) for each in (cache, other)))


def test_any_memory_of_windows_is_asked_with_a_focus(tmp_path: Path) -> None:
    """One that was read without, on any tier."""
    model, plain, ids = focused(1), hils(reading="windows", num_retrieved_chunks=2), tokens(LENGTH)
    plain.read(ids[:, :READ]).save(tmp_path)
    wanted = model.read(ids[:, :READ])
    model.focus(ids[:, READ:], wanted)
    answer = logits_of(model, ids[:, READ:], past_key_values=wanted)
    for tier in ("device", "host", "disk"):
        cache = model.load_cache(tmp_path, tier).branch()
        model.focus(ids[:, READ:], cache)
        assert torch.equal(logits_of(model, ids[:, READ:], past_key_values=cache), answer)


def test_shares_are_squared_and_added_up_over_tokens_layers_and_heads() -> None:
    """By hand: 7 has .5², 3 has .3² + .3², 10 .35², 0 less than a third of .5²."""
    layers = [
        ChunkSelection(indices, shares, shares.log())  # [B, T, J, K]
        for indices, shares in (
            (torch.tensor([[[[3, -1]], [[0, -1]]]]), torch.tensor([[[[0.3, 0.0]], [[0.28, 0.0]]]])),
            (torch.tensor([[[[3, 7]], [[10, -1]]]]), torch.tensor([[[[0.3, 0.5]], [[0.35, 0.0]]]])),
        )
    ]

    def found(count: int, num_chunks: int = 12) -> list[int]:
        (focus,) = focus_of(layers, np.array([num_chunks]), count)
        assert focus is not None
        assert focus.known == num_chunks
        return focus.chunks.tolist()

    assert found(1) == [6, 7, 8]
    assert found(2) == [2, 3, 4, 6, 7, 8]
    assert found(9) == found(3) == [2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert found(9, 11) == [2, 3, 4, 6, 7, 8, 9, 10]
    nothing = ChunkSelection(*(torch.full_like(x, -1) for x in layers[0]))
    assert focus_of([nothing], np.array([12]), 9) == (None,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_focus_chunks": 0}, "num_focus_chunks: expected None or at least 1, got 0"),
        (
            {"num_focus_chunks": 4, "chunk_score": "mass", "chunk_weights": "keys"},
            "num_focus_chunks: expected None with chunk_score 'mass'",
        ),
    ],
)
def test_a_focus_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hils(**options)
