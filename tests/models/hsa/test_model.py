"""Hierarchical sparse attention: against the model written naively, and the defects of its public code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hils.naive import read_in
from tests.models.hsa.naive import NaiveHSA
from tests.models.tiny import (
    EXACT,
    LAYERS,
    PRETRAINED,
    assert_same,
    early,
    hsa,
    logits_of,
    name_of,
    split,
    tokens,
)
from tests.pairwise import pairwise
from trailmark.memory import FaissSearch, MemoryEntries
from trailmark.models import HSAForCausalLM
from trailmark.models.grid import Integers
from trailmark.models.hsa import chunks
from trailmark.models.step import Step

LENGTH = 61


# Every pair of values of two options occurs in some case.
CASES = pairwise(
    {
        "groups": [1, 2, 3],
        "weights": ["softmax", "decay", "stick_breaking"],
        "heads": [(1, 1), (2, 1), (2, 2), (4, 4)],  # of the memory, and of those that choose
        "chunk_summary": ["landmark", "mean"],
        "softmax_off_by_one": [False, True],
        "residual_gca": [False, True],
        "retrieval_normalization": [False, True],
        "num_retrieved_chunks": [0, 1, 3],
        "num_sinks": [0, 3],
        "early": [False, True],
        "model": ["rope", "alibi", "pretrained", "all norms"],
        "sizes": [(4, 7), (5, 3), (3, 12)],  # S, W
    }
)
MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "alibi": {"window_position": "alibi"},
    "pretrained": PRETRAINED,
    "all norms": {"qk_norm": "all"},
}


def options_of(case: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Fields of the configuration, and where chunks end early [1, T]."""
    options = dict(case)
    options["chunk_size"], options["sliding_window"] = options.pop("sizes")
    options["num_memory_heads"], options["num_retrieval_heads"] = options.pop("heads")
    weights = options.pop("weights")
    options["chunk_weights"] = "stick_breaking" if weights == "stick_breaking" else "softmax"
    options["recency_decay"] = weights == "decay"
    marks = early(LENGTH) if options.pop("early") else torch.zeros(1, LENGTH, dtype=torch.bool)
    return options | MODELS[options.pop("model")], marks


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_it_is_the_equations(case: dict[str, Any]) -> None:
    options, marks = options_of(case)
    model, ids = hsa(**options), tokens(LENGTH)
    exact = NaiveHSA(model, ids[0], marks[0].tolist())
    whole = model(ids, close_chunk=marks, output_retrieval=True)
    assert_same(whole.logits[0], exact.logits)
    assert read_in(whole.retrieval, 0) == exact.retrieval
    for found, weights in zip(whole.retrieval, exact.weights, strict=True):
        for t, of_heads in enumerate(weights):
            for head, own in enumerate(of_heads):
                assert_same(found.weights[0, t, head, : len(own)], torch.tensor(own, dtype=torch.float64))


@pytest.mark.parametrize("groups", [1, 2, 3])
@torch.no_grad()
def test_upper_layers_need_no_more_than_their_reach(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one position less a logit after reading differs, so what is said is the least."""
    model, ids = hsa(groups), tokens(120)
    whole = logits_of(model, ids)[:, -1:]
    reach = model.reach()
    assert reach == LAYERS[groups][1] * 6
    assert_same(
        logits_of(model, ids[:, -1:], past_key_values=model.read(ids[:, :-1]), logits_to_keep=1), whole
    )
    monkeypatch.setattr(HSAForCausalLM, "reach", lambda self: reach - 1)
    short = logits_of(model, ids[:, -1:], past_key_values=model.read(ids[:, :-1]), logits_to_keep=1)
    assert (short - whole).abs().max() > 100 * EXACT


def test_an_index_finds_what_a_search_of_all_finds() -> None:
    pytest.importorskip("faiss")
    model, ids = hsa().float(), tokens(600)
    exact = model.read(ids[:, :-9])
    index = FaissSearch(min_chunks=8, batch_chunks=64, num_lists=2, num_probes=2)
    found = model.read(ids[:, :-9], model.new_cache(search=index))
    outs = [model(ids[:, -9:], past_key_values=cache, output_retrieval=True) for cache in (exact, found)]
    assert index.num_indexed
    for one, other in zip(outs[0].retrieval, outs[1].retrieval, strict=True):
        assert torch.equal(one.indices, other.indices)


def test_an_index_is_refused_where_heads_choose_by_themselves() -> None:
    pytest.importorskip("faiss")
    with pytest.raises(
        ValueError, match="search: expected None with num_retrieval_heads 2, got a FaissSearch"
    ):
        hsa(num_memory_heads=2, num_retrieval_heads=2).new_cache(search=FaissSearch())


# --- defects of the public code that must not come back --------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_fetched_from_another_tier_is_what_is_read(tier: str, tmp_path: Path) -> None:
    """There chunks are fetched from the host and then dropped."""
    model, ids = hsa(), tokens(LENGTH)
    folder = tmp_path / "memory" if tier == "disk" else None
    near, far = model.new_cache(), model.new_cache(memory_tier=tier, memory_folder=folder)
    logits = [
        torch.cat([logits_of(model, x, past_key_values=cache) for x in split(ids, [30, 1, 8])], 1)
        for cache in (near, far)
    ]
    assert torch.equal(*logits)
    assert far.memory.fetched == near.memory.fetched > 0


def test_decoding_takes_no_more_of_the_memory_than_it_chose() -> None:
    """There all of it is arranged anew for each token."""
    model, fetched = hsa(), []
    for length in (80, 800):
        cache = model.read(tokens(length))
        logits_of(model, tokens(1), past_key_values=cache)
        before = cache.memory.fetched
        logits_of(model, tokens(1), past_key_values=cache)
        fetched.append(cache.memory.fetched - before)
    assert fetched[0] == fetched[1] <= 2 * 3  # two groups, three chunks each


@pytest.mark.parametrize("heads", [1, 2])
def test_a_long_call_on_a_memory_fetches_no_more_than_a_slab_reads(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of the memory at once, as soon as a call's tokens chose all of it."""
    model = hsa(num_memory_heads=2, num_retrieval_heads=heads)
    ids = tokens(LENGTH, batch=2)
    whole = logits_of(model, ids[:, 40:], past_key_values=model.read(ids[:, :40]))
    fetched, fetch = list[int](), Step.fetch

    def counted(step: Step, wanted: Integers, *rest: Any) -> Any:
        fetched.append(wanted.shape[1])
        return fetch(step, wanted, *rest)

    monkeypatch.setattr(Step, "fetch", counted)
    record = 2 * 2 * model.config.chunk_size * model.config.head_dim
    monkeypatch.setattr(chunks, "_FETCHED", 2 * 2 * heads * 3 * record)  # two tokens of each row
    assert_same(logits_of(model, ids[:, 40:], past_key_values=model.read(ids[:, :40])), whole)
    assert len(fetched) >= 2 * -(-(LENGTH - 40) // 2)  # of each group, and positions that had waited
    assert max(fetched) <= 2 * heads * 3


def test_slots_without_a_candidate_hold_nothing() -> None:
    """There they hold any chunk, even a future one, which is read with a weight of 0."""
    model, ids = hsa(), tokens(LENGTH)
    exact = logits_of(model, ids)

    def spoil(module: Any, given: Any, entries: MemoryEntries) -> MemoryEntries:
        late = (torch.arange(entries.lengths.shape[1]) >= 3)[None, :, None]
        spoilt = [torch.where(late.view(1, -1, *[1] * (x.dim() - 2)), 9 - 7 * x, x) for x in entries[:3]]
        return MemoryEntries(*spoilt, entries.lengths)

    model.encoder.register_forward_hook(spoil)
    out = model(ids, output_retrieval=True)
    assert (out.retrieval[0].indices[0, :4] == -1).all()
    assert torch.equal(out.logits[:, :16], exact[:, :16])
    assert not torch.equal(out.logits[:, 16:], exact[:, 16:])


def test_a_window_shows_as_many_positions_as_it_says() -> None:
    """There it shows one more."""
    model, ids = hsa(1, num_retrieved_chunks=0, num_hidden_layers=2, num_lower_layers=1), tokens(LENGTH)
    other = ids.clone()
    other[0, -2 * 7 + 1] = (
        ids[0, -2 * 7 + 1] + 1
    ) % 50  # two layers see 2 (7 - 1) positions back: to the 13th last
    further = ids.clone()
    further[0, -2 * 7] = (ids[0, -2 * 7] + 1) % 50
    last, changed, same = (logits_of(model, x)[0, -1] for x in (ids, other, further))
    assert not torch.equal(last, changed)
    assert torch.equal(last, same)


def test_noise_is_the_same_again_and_another_with_another_seed() -> None:
    """There it comes from a global generator, so that a checkpointed layer draws other noise in its backward."""
    model, ids = hsa().train(), tokens(200)
    chosen = [
        model(ids, noise_seed=torch.tensor([seed]), output_retrieval=True).retrieval for seed in (3, 3, 4)
    ]
    for one, again, other in zip(*chosen, strict=True):
        assert torch.equal(one.indices, again.indices)
        assert not torch.equal(one.indices, other.indices)
    drawn, plain = chosen[0], model.eval()(ids, output_retrieval=True).retrieval
    assert not torch.equal(drawn[0].indices, plain[0].indices)


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("length", [1, 9, 41])
def test_multiply_adds_are_counted(length: int, sinks: int) -> None:
    W, S, K, width, groups, layers = 7, 4, 3, 16, 2, 5
    window = retrieved = selection = 0
    for t in range(length):
        start = max(0, t - W + 1)
        window += t + 1 - start + min(sinks, start)
        retrieved += S * min(K, t // S)
        selection += t // S
    assert hsa(num_sinks=sinks).attention_multiply_adds(length) == {
        "window": 2 * width * layers * window,
        "retrieved": 2 * width * groups * retrieved,
        "selection": 12 * groups * selection,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": None}, "sliding_window: expected a number of positions"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"num_retrieved_chunks": -1}, "num_retrieved_chunks: expected 0"),
        ({"num_memory_heads": 3}, "num_memory_heads: expected a divisor of num_attention_heads = 4"),
        ({"num_retrieval_heads": 2}, "num_retrieval_heads: expected 1, or num_memory_heads = 1"),
        (
            {"num_memory_heads": 2, "num_retrieval_heads": 2, "retrieval_size": 7},
            "retrieval_size: expected a multiple of num_retrieval_heads = 2",
        ),
        ({"chunk_weights": "stick_breaking", "recency_decay": True}, "recency_decay: expected false or None"),
        ({"chunk_weights": "sum"}, "chunk_weights"),
        ({"num_lower_layers": 5}, "num_lower_layers: expected 0 to 4"),
        ({"num_retrieval_groups": 3}, "num_retrieval_groups: expected a divisor of the 4 upper layers"),
    ],
)
def test_fields_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hsa(**options)


def test_one_chunk_with_softmax_weights_is_refused_in_training() -> None:
    ids = tokens(20)
    with pytest.raises(ValueError, match="num_retrieved_chunks: expected at least 2 in training"):
        hsa(num_retrieved_chunks=1).train()(ids)
    hsa(num_retrieved_chunks=1, chunk_weights="stick_breaking", recency_decay=False).train()(ids)
