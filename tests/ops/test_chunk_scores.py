"""What tokens score chunks by, and which they select: against loops, and the bound that the expansion is."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.ops import chunk_log_mass, chunk_scores, score_for_tokens, select_for_tokens, summarize_chunks

B, T, M, S, J, G, D = 2, 5, 4, 3, 2, 2, 4
normal = partial(torch.randn, dtype=torch.float64)
EXACT = 1e-12


def drawn(seed: int = 0, lengths: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    make = partial(normal, generator=generator)
    given_lengths = torch.randint(0, S + 1, (B, M), generator=generator)
    return {
        "q": 2 * make(B, T, J * G, D),
        "k": 2 * make(B, M, S, J, D),
        "mu": 2 * make(B, M, J * G, D),
        "lengths": given_lengths if lengths else None,
        "beside": make(B, T, J * G),
    }


def keys_of(case: dict[str, Any], b: int, m: int, h: int) -> Tensor:
    """[n, D] those that exist."""
    n = S if case["lengths"] is None else int(case["lengths"][b, m])
    return case["k"][b, m, :n, h // G]


def score_by_hand(case: dict[str, Any], kind: str, b: int, t: int, h: int, m: int) -> float:
    keys, q, scale = keys_of(case, b, m, h), case["q"][b, t, h], D**-0.5
    if not len(keys):
        return -math.inf
    if kind == "mass":
        return float((keys @ q * scale).logsumexp(0))
    if kind == "mean":
        return float(keys.mean(0) @ q * scale) + math.log(len(keys))
    p = (keys @ case["mu"][b, m, h] * scale).softmax(0)
    return float((p @ keys) @ q * scale - (p * p.log()).sum())


def summaries(case: dict[str, Any], kind: str) -> Tensor:
    """[B, M, 1, H or J, D + 1]"""
    return summarize_chunks(case["k"], None if kind == "mean" else case["mu"], case["lengths"])[:, :, None]


def select(case: dict[str, Any], kind: str, K: int, ends: Tensor, first: Any = 0) -> Any:
    found = {"keys": (case["k"], case["lengths"])} if kind == "mass" else {}
    if kind != "mass":
        table = summaries(case, kind)
        found = {"landmarks": [table[:, :1], table[:, 1:]]}  # as a memory that grew
    return select_for_tokens(case["q"], case["beside"], K, ends, J, first_candidate=first, **found)


@pytest.mark.parametrize("kind", ["expansion", "mean", "mass"])
@settings(max_examples=15)
@given(st.integers(0, 999), st.integers(1, 5), st.booleans())
def test_selection_is_the_equations(kind: str, seed: int, K: int, lengths: bool) -> None:
    case = drawn(seed, lengths)
    draw = torch.Generator().manual_seed(seed + 1)
    ends = torch.randint(0, M + 1, (B, T), generator=draw)
    first = torch.randint(0, 2, (B, T), generator=draw)
    chosen, scores = select(case, kind, K, ends, first)
    for b in range(B):
        for t in range(T):
            candidates = range(int(first[b, t]), int(ends[b, t]))
            each = {h: {m: score_by_hand(case, kind, b, t, h, m) for m in candidates} for h in range(J * G)}
            for j in range(J):
                heads = [h for h in each if h // G == j]
                seen = {
                    h: math.log(
                        math.exp(float(case["beside"][b, t, h])) + sum(map(math.exp, each[h].values()))
                    )
                    for h in heads
                }
                share = {m: max(each[h][m] - seen[h] for h in heads) for m in candidates}
                ranked = sorted((m for m in share if share[m] > -math.inf), key=lambda m: (-share[m], m))
                best = sorted(ranked[:K])
                assert [m for m in chosen.indices[b, t, j].tolist() if m >= 0] == best
                wanted = torch.tensor([share[m] for m in best], dtype=torch.float64)
                torch.testing.assert_close(
                    chosen.scores[b, t, j, : len(best)], wanted, atol=EXACT, rtol=EXACT
                )
                torch.testing.assert_close(
                    chosen.weights[b, t, j, : len(best)], wanted.softmax(0), atol=EXACT, rtol=EXACT
                )
                for h in heads:
                    own = torch.tensor([each[h][m] for m in best], dtype=torch.float64)
                    torch.testing.assert_close(scores[b, t, h, : len(best)], own, atol=EXACT, rtol=EXACT)
                assert (scores[b, t, heads][:, len(best) :] == -math.inf).all()


@settings(max_examples=30)
@given(st.integers(0, 999))
def test_the_expansion_is_below_the_mass_and_meets_it_at_its_query(seed: int) -> None:
    case = drawn(seed)
    case["lengths"] = case["lengths"].clamp(min=1)
    mass = chunk_log_mass(case["q"], case["k"], case["lengths"])
    every = torch.arange(M).expand(B, T, J, M)
    for kind in ("expansion", "mean"):
        assert (score_for_tokens(case["q"], summaries(case, kind), every) <= mass + EXACT).all()
    at_its_own = chunk_log_mass(case["mu"], case["k"], case["lengths"]).diagonal(dim1=1, dim2=3)  # [B, H, M]
    own = score_for_tokens(case["mu"], summaries(case, "expansion"), torch.arange(M).expand(B, M, J, M))
    torch.testing.assert_close(own.diagonal(dim1=1, dim2=3), at_its_own, atol=EXACT, rtol=EXACT)


def test_several_summaries_add_up_as_masses_and_one_a_key_is_the_mass() -> None:
    case = drawn(lengths=False)
    parts = case["k"].view(B, M * S, 1, J, D)
    table = summarize_chunks(parts).view(B, M, S, J, D + 1)
    found = score_for_tokens(case["q"], table, torch.arange(M).expand(B, T, J, M))
    torch.testing.assert_close(found, chunk_log_mass(case["q"], case["k"]), atol=EXACT, rtol=EXACT)
    ends = torch.full((1, T), M)
    chosen, scores = select_for_tokens(case["q"], case["beside"], 2, ends, J, landmarks=[table])
    exact, masses = select(case, "mass", 2, ends)
    assert torch.equal(chosen.indices, exact.indices)
    torch.testing.assert_close(scores, masses, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("kind", ["expansion", "mean"])
def test_gradcheck(kind: str) -> None:
    case = drawn(3)
    indices = select(case, kind, 2, torch.full((1, T), M))[0].indices

    def scores(q: Tensor, k: Tensor, mu: Tensor) -> Tensor:
        found = score_for_tokens(q, summaries(case | {"q": q, "k": k, "mu": mu}, kind), indices)
        return found.masked_fill(found == -math.inf, 0)

    torch.autograd.gradcheck(scores, [case[name].requires_grad_() for name in ("q", "k", "mu")])


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, ends = drawn(), torch.full((B, T), M)
    whole = select(case, "expansion", 2, ends)
    monkeypatch.setattr(chunk_scores, "_SLAB_SCORES", 1)
    again = select(case, "expansion", 2, ends)
    assert torch.equal(whole[0].indices, again[0].indices)
    torch.testing.assert_close(whole[1], again[1], atol=EXACT, rtol=EXACT)


def test_equal_chunks_select_the_earlier_one() -> None:
    case = drawn(lengths=False)
    case["k"] = case["k"][:, :1].expand(B, M, S, J, D)
    for kind in ("mean", "mass"):
        chosen, _ = select(case, kind, 2, torch.full((1, T), M))
        assert (chosen.indices == torch.tensor([0, 1])).all()


def test_where_nothing_may_be_selected() -> None:
    chosen, scores = select(drawn(), "mean", 2, torch.zeros(1, T, dtype=torch.int64))
    assert (chosen.indices == -1).all()
    assert (chosen.weights == 0).all()
    assert (scores == -math.inf).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beside": torch.zeros(B, T, 1)}, r"^beside: "),
        ({"num_retrieved": 0}, r"^num_retrieved: expected at least 1"),
        ({"landmarks": None}, r"^landmarks, keys: expected one of them"),
        ({"num_key_value_heads": 3}, r"4 query heads for 3 key/value heads"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    case = drawn()
    right = {
        "query": case["q"],
        "beside": case["beside"],
        "num_retrieved": 2,
        "num_candidates": torch.full((1, T), M),
        "num_key_value_heads": J,
        "landmarks": [summaries(case, "mean")],
    }
    select_for_tokens(**right)
    with pytest.raises(ValueError, match=message):
        select_for_tokens(**(right | changes))
