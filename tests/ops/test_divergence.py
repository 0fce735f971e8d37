"""Divergences and attention mass against their definitions, element by element in float64, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trailmark.ops import (
    attention_mass,
    score_chunks,
    select_chunks,
    selection_divergence,
    token_divergence,
)
from trailmark.ops import divergence as divergences
from trailmark.ops import mass as masses

ROUNDING = 1e-10


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- tokens ------------------------------------------------------------------------------------------------------


def test_the_divergence_of_tokens_is_its_definition() -> None:
    teacher, student = 3 * drawn(2, 3, 7), drawn(2, 3, 7, seed=1)
    found = token_divergence(teacher, student)
    for b in range(2):
        for t in range(3):
            p, q = teacher[b, t].softmax(0), student[b, t].softmax(0)
            expected = sum(float(p[v]) * math.log(float(p[v]) / float(q[v])) for v in range(7))
            assert abs(float(found[b, t]) - expected) < ROUNDING


def test_equal_predictions_have_no_divergence() -> None:
    logits = drawn(4, 9)
    assert float(token_divergence(logits, logits + 5).abs().max()) < ROUNDING


def test_what_a_teacher_rules_out_counts_for_nothing() -> None:
    teacher = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    student = torch.tensor([[0.0, 0.0, 3.0, -torch.inf]], requires_grad=True)
    found = token_divergence(teacher, student)
    p = teacher.softmax(-1)[0, :2]
    assert float(found) == pytest.approx(
        float((p * (p.log() - student.log_softmax(-1)[0, :2])).sum()), rel=1e-5
    )
    found.sum().backward()
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("slab", [1, 1 << 24])
def test_gradcheck_of_tokens(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slabs of one row, and of all."""
    monkeypatch.setattr(divergences, "_SLAB_ELEMENTS", slab)
    teacher, student = drawn(2, 3, 5), drawn(2, 3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_divergence(teacher, x), (student,))


def test_half_precision_is_computed_wider() -> None:
    teacher, student = drawn(6, 11).bfloat16(), drawn(6, 11, seed=1).bfloat16().requires_grad_()
    found = token_divergence(teacher, student)
    assert found.dtype == torch.float32
    assert torch.equal(found, token_divergence(teacher.float(), student.float()))
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_logits_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^student: expected shape of teacher .* = \(2, 5\)"):
        token_divergence(drawn(2, 5), drawn(2, 6))


# --- chunks ------------------------------------------------------------------------------------------------------


def scores_with(candidates: list[int], size: int, seed: int = 0) -> Tensor:
    """[1, N, M] of landmarks that may select so many first chunks."""
    scores = drawn(1, len(candidates), size, seed=seed)
    chunk = torch.arange(size)
    return scores.masked_fill(chunk >= torch.tensor(candidates)[:, None], -torch.inf)


def test_the_divergence_of_a_selection_is_its_definition() -> None:
    scores, targets = scores_with([0, 1, 3, 4], 5), drawn(1, 4, 5, seed=1).abs()
    targets[0, 2] = 0  # the teacher looked nowhere: nothing to learn
    found = selection_divergence(scores, targets)
    terms = []
    for n, count in ((1, 1), (3, 4)):
        p = targets[0, n, :count] / targets[0, n, :count].sum()
        q = scores[0, n, :count].softmax(0)
        terms.append(sum(float(p[m]) * math.log(float(p[m]) / float(q[m])) for m in range(count)))
    assert abs(float(found) - sum(terms) / 2) < ROUNDING


def test_gradcheck_of_a_selection() -> None:
    """Landmarks without candidates, targets of 0, targets where nothing may be selected."""
    scores, targets = drawn(2, 3, 4).requires_grad_(), drawn(2, 3, 4, seed=1).clamp(min=0)
    hidden = torch.arange(4) >= torch.tensor([0, 2, 4])[:, None]

    def found(x: Tensor) -> Tensor:
        return selection_divergence(x.masked_fill(hidden, -torch.inf), targets)

    assert torch.autograd.gradcheck(found, (scores,))


def test_a_row_without_targets_is_zero_with_a_gradient_of_zeros() -> None:
    scores = drawn(1, 2, 3).requires_grad_()
    found = selection_divergence(
        scores.masked_fill(torch.ones(2, 3, dtype=torch.bool), -torch.inf), scores.new_ones(1, 2, 3)
    )
    found.sum().backward()
    assert float(found) == 0
    assert scores.grad is not None
    assert float(scores.grad.abs().max()) == 0


def test_bounds_of_scores_are_checked() -> None:
    query, landmarks = drawn(2, 3, 8), drawn(2, 5, 8, seed=1)
    whole = score_chunks(query, landmarks, 4, 1)
    assert torch.equal(
        whole, score_chunks(query, landmarks, torch.full((2, 3), 4), torch.ones(3, dtype=torch.int64))
    )
    for wrong in (
        torch.ones(1, dtype=torch.int64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, 1).long(),
    ):
        with pytest.raises(ValueError, match=r"^num_candidates: expected shape"):
            score_chunks(query, landmarks, wrong)
    with pytest.raises(ValueError, match=r"^first_candidate: "):
        score_chunks(query, landmarks, 4, torch.ones(3))


@pytest.mark.parametrize("recency", [0.0, 1.5])
def test_all_scores_are_those_that_a_selection_gives(recency: float) -> None:
    """With a document's first chunk, and limits of each row."""
    query, landmarks = drawn(2, 6, 8), drawn(2, 6, 8, seed=1)
    ends, first = torch.arange(6).expand(2, 6), torch.tensor([[0, 0, 0, 2, 2, 2], [0] * 6])
    found = score_chunks(query, landmarks, ends, first, scale=0.3, recency=recency)
    chosen = select_chunks(query, landmarks, 6, ends, first, scale=0.3, recency=recency)
    for b in range(2):
        for n in range(6):
            of = {
                int(m): float(s)
                for m, s in zip(chosen.indices[b, n], chosen.scores[b, n], strict=True)
                if m >= 0
            }
            assert {m for m in range(6) if found[b, n, m] > -torch.inf} == of.keys()
            assert all(abs(float(found[b, n, m]) - s) < ROUNDING for m, s in of.items())


# --- attention ---------------------------------------------------------------------------------------------------


def naive_mass(q: Tensor, k: Tensor, chunks: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    (B, T, H, D), J = q.shape, k.shape[2]
    N = int(chunks.max()) + 1
    mass = torch.zeros(B, N, N, dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                seen = [
                    j
                    for j in range(i + 1)
                    if (window is None or i - j < window)
                    and chunks[b, j] >= 0
                    and (documents is None or documents[b, i] == documents[b, j])
                ]
                if chunks[b, i] < 0:
                    continue
                scores = torch.stack([q[b, i, h] @ k[b, j, h // (H // J)] for j in seen]) * D**-0.5
                for j, weight in zip(seen, scores.softmax(0), strict=True):
                    mass[b, chunks[b, i], chunks[b, j]] += weight
    return mass


@pytest.mark.parametrize("slab", [1, 1 << 24])
@pytest.mark.parametrize(("window", "apart"), [(None, False), (4, False), (None, True)])
def test_attention_mass_is_its_definition(
    window: int | None, apart: bool, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masses, "_SLAB_ELEMENTS", slab)
    q, k = 2 * drawn(2, 9, 4, 6), drawn(2, 9, 2, 6, seed=1)
    chunks = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3], [0, 0, 1, 1, 1, 2, 2, -1, -1]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]] * 2) if apart else None
    found = attention_mass(q, k, chunks, window, documents)
    assert float((found - naive_mass(q, k, chunks, window, documents)).abs().max()) < ROUNDING
    on_tokens = attention_mass(q, k, chunks, window, documents, on_tokens=True)
    of_chunks = torch.nn.functional.one_hot(chunks + 1).double()[..., 1:]
    assert float((on_tokens @ of_chunks - found).abs().max()) < ROUNDING
    assert on_tokens[1, :, 7:].eq(0).all()  # padding
    if window is None and not apart:  # each token's attention is one whole of each head
        tokens = torch.tensor([[3, 2, 3, 1], [2, 3, 2, 0]])
        assert float((found.sum(-1) - 4 * tokens).abs().max()) < ROUNDING


def test_keys_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^k: expected shape \[1, 5, J, 4\], J a divisor of H = 3"):
        attention_mass(drawn(1, 5, 3, 4), drawn(1, 5, 2, 4), torch.zeros(1, 5, dtype=torch.int64))
