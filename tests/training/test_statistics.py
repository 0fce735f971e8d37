"""Retrieval statistics against a plain loop over chunks, for any selection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import drt, tokens
from trailmark.ops import ChunkSelection, score_parts
from trailmark.training.statistics import RetrievalStatistics

# An addition in float64 rounds by at most half an epsilon of what it gives. No sum here has more than 3 batches x 3
# groups x 3 texts x 11 chunks x 4 selections terms, each of at most 11 chunks of age and of some operations.
TERMS, LARGEST, OPERATIONS = 3 * 3 * 3 * 11 * 4, 11, 8
ROUNDING = (
    torch.finfo(torch.float64).eps / 2 * (TERMS + OPERATIONS) * LARGEST
)  # 1e-12; of a mean of such terms


def naive(batches: list[Any], group: int | None) -> dict[str, float]:
    """Of one group, or of all: every asker, every chunk, one by one."""
    ages, entropies, evenness, readable, unread = [], [], [], 0, 0
    for retrieval, end in batches:
        chosen_groups = range(len(retrieval)) if group is None else [group]
        B, N = retrieval[0].indices.shape[:2]
        for b in range(B):
            opened, read = set(), set()
            for g in chosen_groups:
                indices, weights = retrieval[g].indices[b].tolist(), retrieval[g].weights[b].tolist()
                for n in range(N):
                    pairs = [(i, w) for i, w in zip(indices[n], weights[n], strict=True) if i >= 0]
                    if not pairs:
                        continue
                    opened |= set(range(int(end[b, n])))
                    read |= {i for i, _ in pairs}
                    ages.append(sum((n - i) * w for i, w in pairs))
                    entropies.append(-sum(w * math.log(w) for _, w in pairs if w > 0))
                    if len(pairs) > 1:
                        evenness.append(entropies[-1] / math.log(len(pairs)))
            readable += len(opened)
            unread += len(opened - read)
    found = {}
    for name, values in (("age", ages), ("entropy", entropies), ("evenness", evenness)):
        if values:
            found[name] = math.fsum(values) / len(values)
    if readable:
        found["never_read"] = unread / readable
    return found


def expected(batches: list[Any], groups: int) -> dict[str, float]:
    found = naive(batches, None)
    for group in range(groups if groups > 1 else 0):
        found |= {f"group_{group}/{name}": x for name, x in naive(batches, group).items()}
    return found


def assert_close(ours: dict[str, float], exact: dict[str, float]) -> None:
    assert set(ours) == set(exact)
    for name in ours:
        assert abs(ours[name] - exact[name]) < ROUNDING, name


@st.composite
def batch(draw: st.DrawFn, groups: int, bounded: bool) -> Any:
    """Selections among the candidates of each chunk; rows may end early; weights may be 0."""
    B, N, K = draw(st.integers(1, 3)), draw(st.integers(0, 7)), draw(st.integers(1, 4))
    end = torch.arange(N).repeat(B, 1)
    if bounded:
        for b in range(B):
            for n in range(N):
                end[b, n] = draw(st.integers(0, n))
    closed = [draw(st.integers(0, N)) for _ in range(B)]
    retrieval = []
    for _ in range(groups):
        indices = torch.full((B, N, K), -1)
        weights = torch.zeros(B, N, K)
        for b in range(B):
            for n in range(closed[b]):
                candidates = list(range(int(end[b, n])))
                some = draw(st.permutations(candidates))[: draw(st.integers(0, K))]
                for k, chunk in enumerate(sorted(some)):
                    indices[b, n, k] = chunk
                    weights[b, n, k] = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
                if weights[b, n].sum():
                    weights[b, n] /= weights[b, n].sum()
        retrieval.append(ChunkSelection(indices, weights.double(), weights))
    return retrieval, end


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_statistics_are_those_of_a_plain_loop(data: st.DataObject) -> None:
    groups, bounded = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    batches = data.draw(st.lists(batch(groups, bounded), min_size=1, max_size=3))
    statistics = RetrievalStatistics()
    for retrieval, end in batches:
        if bounded:
            statistics.add(retrieval, end)
        else:
            statistics.add(retrieval)
    assert_close(statistics.means(), expected(batches, groups))
    assert statistics.means() == {}


def test_statistics_of_a_model(subtests: Any) -> None:
    model = drt(2)
    ids = tokens(47, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 20:] = False  # this text closes fewer chunks
    for name, options in (("even", {}), ("ragged", {"attention_mask": mask})):
        with subtests.test(name), torch.no_grad():
            retrieval = model(input_ids=ids, output_retrieval=True, **options).retrieval
            B, N = retrieval[0].indices.shape[:2]
            end = torch.arange(N).expand(B, N)
            statistics = RetrievalStatistics()
            statistics.add(retrieval)
            found = statistics.means()
            assert_close(found, expected([(retrieval, end)], 2))
            assert 1 <= found["age"] < N
            assert 0 < found["evenness"] <= 1 + ROUNDING
            assert 0 <= found["never_read"] <= min(found["group_0/never_read"], found["group_1/never_read"])


def test_popularity_is_a_mean_over_texts_and_groups() -> None:
    model = drt(2)
    statistics, every = RetrievalStatistics(), []
    for seed in (0, 1):
        with torch.no_grad():
            out = model(tokens(47, 2, seed=seed), output_retrieval=True, output_retrieval_scores=True)
        statistics.add(out.retrieval)
        statistics.add_scores(out.retrieval_scores.scores, 0.5)
        every.append(torch.stack([score_parts(own, 0.5).popular for own in out.retrieval_scores.scores]))
    statistics.add_scores([torch.full((3, 9, 9), -torch.inf)] * 2, 0.5)  # texts that say nothing
    popular = torch.cat(every, dim=1)  # [G, texts]
    found = statistics.means()
    assert {"age", "group_1/never_read"} <= found.keys()
    assert found["popular"] == pytest.approx(float(popular.mean()))
    for group in (0, 1):
        assert found[f"group_{group}/popular"] == pytest.approx(float(popular[group].mean()))


def test_what_each_number_means() -> None:
    """Four chunks; chunk 1 selects 0, chunk 2 selects 0 and 1 evenly, chunk 3 selects 0 and 1, 3 to 1."""
    indices = torch.tensor([[[-1, -1], [0, -1], [0, 1], [0, 1]]])
    weights = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.75, 0.25]]], requires_grad=True)
    statistics = RetrievalStatistics()
    statistics.add([ChunkSelection(indices, weights, weights)])
    found = statistics.means()
    uneven = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert_close(
        found,
        {
            "age": (1 + 1.5 + 2.75) / 3,
            "entropy": (0 + math.log(2) + uneven) / 3,
            "evenness": (1 + uneven / math.log(2)) / 2,
            "never_read": 1 / 3,  # chunk 2 could have been read by chunk 3; chunk 3 by none
        },
    )


def test_heads_that_select_for_themselves_are_averaged() -> None:
    indices = torch.tensor([[[[-1], [-1]], [[0], [0]], [[0], [1]]]])  # [1, 3, 2, 1]
    weights = (indices >= 0).double()
    statistics = RetrievalStatistics()
    statistics.add([ChunkSelection(indices, weights, weights)])
    assert_close(statistics.means(), {"age": 1.25, "entropy": 0.0, "never_read": 0.0})


@pytest.mark.parametrize("shape", [(2, 0, 3), (1, 1, 2), (2, 5, 2)])
def test_nothing_selected_has_no_means(shape: tuple[int, ...]) -> None:
    nothing = ChunkSelection(torch.full(shape, -1), torch.zeros(shape), torch.full(shape, -math.inf))
    statistics = RetrievalStatistics()
    statistics.add([])
    statistics.add([nothing, nothing])
    assert statistics.means() == {}


def test_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.tensor([[[-1], [0], [0]]])
    weights = (indices >= 0).double()
    selection = ChunkSelection(indices, weights, weights)
    alone, shared = RetrievalStatistics(), RetrievalStatistics()
    for _ in range(3):
        alone.add([selection])
    shared.add([selection])
    expected = alone.means()
    monkeypatch.setattr("trailmark.training.statistics.all_reduced", lambda sums: sums * 3)
    assert_close(shared.means(), expected)


def test_adding_does_not_wait_for_the_device() -> None:
    """On the meta device there is nothing to wait for: whatever asked for a value would fail."""
    indices = torch.zeros(2, 6, 3, dtype=torch.int64, device="meta")
    weights = torch.zeros(2, 6, 3, device="meta")
    statistics = RetrievalStatistics()
    for _ in range(2):
        statistics.add([ChunkSelection(indices, weights, weights)] * 2)
    with pytest.raises((NotImplementedError, RuntimeError)):
        statistics.means()
