"""Needles planted in memory answer as if the changed text had been read in full."""

from __future__ import annotations

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
    hils,
    hsa,
    landmark,
    logits_of,
    rpt,
    tokens,
)
from trailmark.evaluation.needles import planting
from trailmark.evaluation.needles.planting import planted
from trailmark.memory import ChunkCache
from trailmark.models import DRTForCausalLM

S, N = 4, 26  # chunks of the haystack


def memory_of(cache: ChunkCache) -> list[Tensor]:
    """Keys, values, landmarks and lengths of every chunk of the one row."""
    count, memory = int(cache.num_chunks[0]), cache.memory
    number = np.arange(count)[None]
    found = [memory.gather(number, np.full_like(number, plane)) for plane in range(memory.planes)]
    records, lengths = torch.cat([x for x, _ in found]), found[0][1]
    landmarks = torch.cat(memory.blocks(count, 1), dim=1)
    return [records, landmarks.clone(), torch.from_numpy(lengths.copy())]


def assert_same_memory(cache: ChunkCache, exact: ChunkCache) -> None:
    (records, landmarks, lengths), read = memory_of(cache), memory_of(exact)
    assert_same(records, read[0])
    assert_same(landmarks, read[1])
    assert torch.equal(lengths, read[2])


def with_needles(model: Any, places: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A text [N, S], the chunks [n] at ``places`` behind its sinks, and the text where these are others."""
    sinks = model.config.num_sinks
    ids, first = tokens(N * S)[0].view(N, S), sinks // S
    chunks = first + torch.tensor(places) % (N - model.chunks_in_sight(S) - first)
    changed = ids.clone()
    changed[chunks] = tokens(len(places) * S, seed=1)[0].view(-1, S)
    changed.view(-1)[:sinks] = ids.view(-1)[:sinks]
    return ids, chunks, changed


def drt_of_encoder(**options: Any) -> DRTForCausalLM:
    model = drt(retriever="encoder", **options)
    model.embedder = TokenCounter()
    return model


ROPE: dict[str, Any] = {"window_position": "rope"}
HIDDEN: dict[str, Any] = ROPE | {"landmarks_as_keys": False}
# of 130 positions some or all stand nearer to the sinks than this
BEYOND, WITHIN = ({"num_sinks": 3, "max_sink_distance": most} for most in (30, 200))
MODELS: dict[str, Any] = {
    "1 group": drt,
    "2 groups": lambda: drt(groups=2),
    "3 lower layers": lambda: drt(num_hidden_layers=5, num_lower_layers=3),
    "no lower layer": lambda: drt(groups=2, num_hidden_layers=4, num_lower_layers=0),
    "wide window": lambda: drt(sliding_window=11, window_position="rope", exclude_visible_chunks=True),
    "encoder": drt_of_encoder,
    "hsa": hsa,
    "hsa, sinks": lambda: hsa(num_sinks=6, max_sink_distance=20),
    "rpt": lambda: rpt(num_hidden_layers=4, num_lower_layers=2),
    "rpt, encoder": lambda: rpt(retriever="encoder", continuation=True, neighbour_augmentation=True),
    "hidden": lambda: drt(landmarks_as_keys=False),
    "sinks": lambda: drt(num_sinks=3),
    "sinks, beyond": lambda: drt(groups=2, **ROPE, **BEYOND, memory_kv="group"),
    "sinks, within": lambda: drt(groups=3, **ROPE, **WITHIN),
    "sinks, hidden": lambda: drt(num_sinks=2, landmarks_as_keys=False),
    "sinks, hidden, beyond": lambda: drt(groups=3, **HIDDEN, **BEYOND, memory_kv="layer"),
    "sinks, hidden, within": lambda: drt(groups=2, **HIDDEN, **WITHIN, memory_kv="group"),
    "sinks of two chunks": lambda: drt(groups=3, **ROPE, num_sinks=6, max_sink_distance=20),
    "sinks of two chunks, hidden": lambda: drt(groups=3, **HIDDEN, num_sinks=6, max_sink_distance=20),
    "sinks, encoder": lambda: drt_of_encoder(**HIDDEN, **BEYOND),
    "sinks, no lower layer": lambda: drt(
        groups=2, num_hidden_layers=4, num_lower_layers=0, **HIDDEN, **BEYOND
    ),
    "sinks, rpt": lambda: rpt(num_hidden_layers=4, num_lower_layers=2, **ROPE, **BEYOND),
}
LAST = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
MODELS |= {
    "hils": lambda: hils(**LAST, far_position="window", calibration_rank=2, summary_tokens=2),
    "hils, one layer": lambda: hils(num_hidden_layers=1, far_position="window", qk_norm="head"),
    "moba": lambda: hils(**LAST, far_position="window", chunk_score="mean", chunk_weights="keys"),
    "block-sparse": lambda: hils(**LAST, far_position="window", chunk_score="mass", chunk_weights="keys"),
}
READ_WITH_WINDOWS: dict[str, Any] = {
    name: lambda options=options: hils(**{"far_position": "window"} | options, reading="windows")
    for name, options in {
        "the last": LAST | {"num_sinks": 2},
        "the last, true positions": LAST | {"far_position": "true"},
        "all layers choose": {"sliding_window": 5},
        "all layers choose, true positions": {"sliding_window": 5, "far_position": "true"},
        "the first and the second": {"layer_types": [*["full_attention"] * 2, "sliding_attention"]},
        "the second, sinks": {
            "layer_types": [*["sliding_attention", "full_attention"] * 2][:3],
            "num_sinks": 6,
        },
    }.items()
}
PLACES = [[0], [5], [4, 5], [3, 5], [0, 1, 2, 7], [7, 2], [-1], [-1, -2, 0]]  # -1: the last one possible
TIERS = ("device", "tokens", "disk")  # in RAM "host" is "device"


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("places", PLACES, ids=str)
@torch.no_grad()
@pytest.mark.sampled(35)
def test_planting_is_reading_the_changed_text(build: Any, places: list[int]) -> None:
    model, question = build(), tokens(23, batch=2, seed=2)
    ids, chunks, changed = with_needles(model, places)
    needles = changed[chunks]
    cache, exact = model.new_cache(TIERS[len(places) % 3]), model.new_cache()
    model.read(ids.view(1, -1), cache)
    model.read(changed.view(1, -1), exact)
    before = memory_of(cache)
    with planted(model, cache, ids, chunks, needles):
        assert_same_memory(cache, exact)
        answer = model(question, past_key_values=cache.branch(2), output_retrieval=True)
    whole = model(torch.cat([changed.view(1, -1).expand(2, -1), question], dim=1), output_retrieval=True)
    assert_same(answer.logits, whole.logits[:, N * S :])
    for ours, full in zip(answer.retrieval, whole.retrieval, strict=True):
        assert torch.equal(ours.indices, full.indices[:, -ours.indices.shape[1] :])
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


@pytest.mark.parametrize(("sinks", "place"), [(1, 0), (S, 0), (S + 1, 0), (S + 1, 1)])
@torch.no_grad()
def test_planting_in_the_sinks_is_refused(sinks: int, place: int) -> None:
    model, ids = drt(num_sinks=sinks), tokens(N * S)[0].view(N, S)
    cache, needles = model.read(ids.view(1, -1)), ids[[place, 7]]
    before = memory_of(cache)
    needles[0, 0] = (needles[0, 0] + 1) % 50
    with (
        pytest.raises(
            ValueError, match=f"texts: expected the text's own first {sinks} tokens.* chunk {place}:"
        ),
        planted(model, cache, ids, torch.tensor([place, 7]), needles),
    ):
        pass
    assert all(torch.equal(a, b) for a, b in zip(memory_of(cache), before, strict=True))


@torch.no_grad()
def test_hidden_landmarks_do_not_wait_in_a_tokens_place() -> None:
    """The upper layers reach 12 tokens: 10 of them, and the 2 landmarks between them, are not enough."""
    model, ids = drt(landmarks_as_keys=False, num_sinks=2), tokens(N * S)[0].view(N, S)
    text, question = ids.view(1, -1), tokens(9, seed=2)
    for count in (10, 11):
        cache = model.new_cache()
        model(text[:, :-count], past_key_values=cache)
        with (
            pytest.raises(ValueError, match="cache: expected a text whose end was only read"),
            planted(model, model.read(text[:, -count:], cache), ids, torch.tensor([3]), ids[1:2]),
        ):
            pass
    cache, changed = model.new_cache(), ids.clone()
    changed[3] = ids[1]
    model(text[:, :-12], past_key_values=cache)
    with planted(model, model.read(text[:, -12:], cache), ids, torch.tensor([3]), ids[1:2]):
        answer = logits_of(model, question, past_key_values=cache.branch())
    whole = logits_of(model, torch.cat([changed.view(1, -1), question], dim=1))
    assert_same(answer, whole[:, N * S :])


@pytest.mark.parametrize("build", READ_WITH_WINDOWS.values(), ids=READ_WITH_WINDOWS)
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(("together", "tier"), [(4, "device"), (1 << 14, "disk"), (24, "host")])
@torch.no_grad()
@pytest.mark.sampled(21)
def test_planting_in_what_was_read_with_windows(
    build: Any, places: list[int], together: int, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planting, "_TOGETHER", together)
    model, question = build(), tokens(23, batch=2, seed=2)
    ids, chunks, changed = with_needles(model, places)
    cache, exact = (model.read(x.view(1, -1), model.new_cache(tier)) for x in (ids, changed))
    before = memory_of(cache)
    with planted(model, cache, ids, chunks, changed[chunks]):
        assert_same_memory(cache, exact)
        answers = [logits_of(model, question, past_key_values=x.branch(2)) for x in (cache, exact)]
        assert_same(*answers)
    assert all(torch.equal(a, b) for a, b in zip(memory_of(cache), before, strict=True))


@torch.no_grad()
def test_where_windows_see_all_no_place_is_left() -> None:
    model, ids = hils(reading="windows"), tokens(3 * S)[0].view(3, S)
    cache = model.read(ids.view(1, -1))
    with (
        pytest.raises(
            ValueError, match=r"^chunks: expected none, got 0: of the 3 .* the last 3\. Read on before"
        ),
        planted(model, cache, ids, torch.tensor([0]), ids[:1]),
    ):
        pass


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


@pytest.mark.parametrize(
    "build",
    [
        landmark,
        block_recurrent,
        hils,
        lambda: hils(far_position="window"),
    ],
    ids=["landmark", "block-recurrent", "hils", "hils, far in the window"],
)
def test_what_depends_on_all_that_was_read_is_not_planted_in(build: Any) -> None:
    """Every layer's memory, the states; a HiLS' where more than the last layer chooses while it reads."""
    model, ids = build(), tokens(N * S)[0].view(N, S)
    cache = model.read(ids.view(1, -1))
    with (
        pytest.raises(
            ValueError, match=r"model: expected one whose memory .* Read the text with the needles"
        ),
        planted(model, cache, ids, torch.tensor([0]), ids[:1]),
    ):
        pass
