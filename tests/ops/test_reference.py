"""The oracles against torch's own functions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.budgets import assert_same_in_float64
from trailmark.ops import grouped_cross_attention, reference, select_chunks, sliding_window_attention

normal = partial(torch.randn, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **rest: object) -> Tensor:
    """torch's attention, positions first: [B, T, H, D]."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **rest).transpose(-3, -2)


def test_full_window_is_causal_attention() -> None:
    q, k, v = normal(2, 6, 4, 3), normal(2, 6, 2, 3), normal(2, 6, 2, 3)
    ours = sliding_window_attention(q, k, v, None, implementation="reference")
    assert_same_in_float64(ours, sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize("carried", [0, 3])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_window_is_a_band(window: int, carried: int) -> None:
    q, k, v = normal(2, 6, 4, 3), normal(2, 6 + carried, 2, 3), normal(2, 6 + carried, 2, 3)
    seen = torch.ones(6, 6 + carried, dtype=torch.bool).tril(carried).triu(carried - window + 1)
    ours = sliding_window_attention(q, k, v, window, scale=0.3, implementation="reference")
    assert_same_in_float64(ours, sdpa(q, k, v, attn_mask=seen, scale=0.3))


def test_documents_and_alibi_are_a_mask() -> None:
    q, k, v = normal(1, 6, 2, 3), normal(1, 6, 2, 3), normal(1, 6, 2, 3)
    ids, slopes = torch.tensor([[0, 0, 0, 1, 1, 2]]), torch.tensor([0.5, 0.25], dtype=torch.float64)
    at = torch.arange(6.0, dtype=torch.float64)
    bias = -slopes[:, None, None] * (at[:, None] - at)
    seen = (ids[0][:, None] == ids[0]) & (at[:, None] >= at)
    ours = sliding_window_attention(
        q, k, v, None, document_ids=ids, alibi_slopes=slopes, implementation="reference"
    )
    assert_same_in_float64(ours, sdpa(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf)))


def test_positions_are_an_order() -> None:
    """Shuffled keys with their positions are the same keys; an absent one is no key."""
    q, k, v = normal(1, 5, 2, 3), normal(1, 5, 2, 3), normal(1, 5, 2, 3)
    order, at = torch.tensor([3, 0, 4, 1, 2]), torch.arange(5)[None]
    ours = sliding_window_attention(
        q, k[:, order], v[:, order], None, (at, order[None]), implementation="reference"
    )
    assert_same_in_float64(ours, sdpa(q, k, v, is_causal=True))
    absent = order.masked_fill(order == 0, -1)
    ours = sliding_window_attention(
        q, k[:, order], v[:, order], None, (at, absent[None]), implementation="reference"
    )
    assert_same_in_float64(ours[:, 1:], sdpa(q[:, 1:], k[:, 1:], v[:, 1:], is_causal=True))


@pytest.mark.parametrize("off_by_one", [True, False])
def test_grouped_cross_attention_is_a_weighted_sum_of_attentions(off_by_one: bool) -> None:
    q, k, v = normal(1, 2, 3, 4, 5), normal(1, 3, 6, 2, 5), normal(1, 3, 6, 2, 5)
    indices, weights = torch.tensor([[[0, 2], [1, -1]]]), torch.rand(1, 2, 2, dtype=torch.float64)
    ours = grouped_cross_attention(
        q, k, v, indices, weights, softmax_off_by_one=off_by_one, implementation="reference"
    )
    if off_by_one:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
    for n, chunks in enumerate([(0, 2), (1,)]):
        parts = [weights[0, n, j] * sdpa(q[0, n], k[0, m], v[0, m]) for j, m in enumerate(chunks)]
        assert_same_in_float64(ours[0, n], sum(parts))


def test_select_chunks_is_topk() -> None:
    query, landmarks = normal(2, 4, 8), normal(2, 9, 8)
    ours = select_chunks(query, landmarks, 3, torch.full((4,), 9), implementation="reference")
    scores = query @ landmarks.transpose(1, 2) / 8**0.5
    indices = scores.topk(3).indices.sort().values
    assert torch.equal(ours.indices, indices)
    assert_same_in_float64(ours.scores, scores.gather(-1, indices))
    assert_same_in_float64(ours.weights, scores.gather(-1, indices).softmax(-1))


@pytest.mark.parametrize("at", ["its query", "0"])
def test_a_chunks_summary_is_the_tangent_of_its_log_mass(at: str) -> None:
    k, lengths = normal(2, 4, 3, 2, 5), torch.tensor([[3, 1, 2, 3], [2, 3, 3, 1]])
    mu = normal(2, 4, 4, 5) if at == "its query" else torch.zeros(2, 4, 2, 5, dtype=torch.float64)
    table = reference.summarize_chunks(k, mu if at == "its query" else None, lengths, 0.3)
    for b in range(2):
        for m in range(4):
            for h in range(mu.shape[2]):
                own = k[b, m, : lengths[b, m], h // (mu.shape[2] // 2)]
                point = mu[b, m, h].clone().requires_grad_()
                mass = (own @ point * 0.3).logsumexp(0)
                (slope,) = torch.autograd.grad(mass, point)  # 0.3 k'
                assert_same_in_float64(0.3 * table[b, m, h, :5], slope)
                assert_same_in_float64(table[b, m, h, 5], (mass - slope @ point).detach())


@pytest.mark.parametrize("scored", ["by keys", "by a summary for each key"])
def test_shares_are_those_of_one_softmax_over_all_keys_and_the_window(scored: str) -> None:
    q, k, near = normal(1, 6, 4, 3), normal(1, 5, 2, 2, 3), normal(1, 3, 2, 3)
    ends, every = torch.tensor([[0, 1, 2, 3, 4, 5]]), torch.arange(5).expand(1, 6, 2, 5)
    beside = torch.einsum("bthd,bshd->bths", q, near.repeat_interleave(2, 2)).logsumexp(-1)
    scores = reference.chunk_log_mass(q, k, torch.full((1, 5), 2), 1.0)
    if scored != "by keys":
        landmarks = F.pad(k, (0, 1))
        scores = reference.score_for_tokens(q, landmarks, every, 1.0)
    chosen, shares = reference.select_for_tokens(scores, beside, 2, ends, ends.new_zeros(1, 6), 2)
    for t in range(6):
        keys = torch.cat([near[0], k[0, :t].flatten(0, 1)])  # [3 + 2 t, J, D]
        weights = torch.stack([(keys[:, h // 2] @ q[0, t, h]).softmax(0)[3:] for h in range(4)])
        of_chunks = weights.unflatten(1, (t, 2)).sum(2).unflatten(0, (2, 2)).amax(1)  # [J, t]
        assert_same_in_float64(shares[0, t, :, :t].exp(), of_chunks)
        best = of_chunks.topk(min(2, t)).indices.sort().values
        assert torch.equal(chosen[0, t, :, : min(2, t)], best)
        assert (chosen[0, t, :, min(2, t) :] == -1).all()
