"""How much of scores is popular: of parts that are known."""

from __future__ import annotations

import pytest
import torch

from trailmark.ops import score_chunks, score_parts


def test_scores_of_known_parts_are_taken_apart() -> None:
    """Of the pairs that may be read, whatever is added to all scores of a chunk that asks."""
    torch.manual_seed(0)
    C = 400
    column, pair, row = torch.randn(C), torch.randn(C, C), torch.randn(C, 1)
    later = torch.full((C, C), -torch.inf).triu()  # no candidates
    texts = torch.stack([column + 9 * row + later, 3 * column + pair + row + later, pair + later])
    deviation, popular = score_parts(texts)
    assert popular[0] == pytest.approx(1)
    wanted = 9 * float(column[: C // 2].var(correction=0))
    assert popular[1] == pytest.approx(wanted / (wanted + 1), abs=0.01)
    assert deviation[1] == pytest.approx((wanted + 1) ** 0.5, rel=0.02)
    assert abs(popular[2]) < 0.001
    assert abs(score_parts(torch.randn(2000, 8, 8)).popular.mean()) < 0.01


@pytest.mark.parametrize("C", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("value", [1.0, 0.1, -torch.inf])
def test_scores_that_are_all_alike_have_no_parts(C: int, value: float) -> None:
    for found in score_parts(torch.full((2, C, C), value)):
        assert found.tolist() == [0, 0]


def test_pairs_that_may_not_be_read_are_left_out() -> None:
    """Against a loop over those that may."""
    torch.manual_seed(0)
    scores = torch.randn(12, 12).double()
    scores[6, 2:] = scores[7, 4:] = scores[9, :] = -torch.inf
    rows = {t: [m for m in range(6) if scores[t, m] > -torch.inf] for t in range(6, 12)}
    centred = {(t, m): scores[t, m] - scores[t, own].mean() for t, own in rows.items() for m in own}
    total = sum(x**2 for x in centred.values())
    of_columns = 0.0
    for m in range(6):
        column = [x for (_, other), x in centred.items() if other == m]
        of_columns += len(column) * (sum(column) / len(column)) ** 2
    chance = 6 / len(centred)
    deviation, popular = score_parts(scores)
    assert float(deviation) == pytest.approx(float((total / len(centred)) ** 0.5))
    assert float(popular) == pytest.approx(float((of_columns / total - chance) / (1 - chance)))


def test_what_a_text_is_padded_to_changes_nothing() -> None:
    torch.manual_seed(0)
    before = torch.ones(12, 12).tril(-1) > 0
    scores = torch.randn(12).add(torch.randn(12, 12) / 4).double().where(before, -torch.inf)
    padded = torch.full((2, 20, 20), -torch.inf, dtype=torch.float64)
    padded[0, :12, :12] = scores
    for own, of_both in zip(score_parts(scores), score_parts(padded), strict=True):
        assert of_both.tolist() == [pytest.approx(float(own)), 0]
        assert own > 0


@pytest.mark.parametrize("hidden", [0, 9])
def test_what_chunks_lose_with_their_age_is_no_popularity(hidden: int) -> None:
    """As select_chunks takes it off: the last candidate has age 1."""
    torch.manual_seed(0)
    C = 60
    ends = (torch.arange(C) - hidden).clamp(min=0)
    pair = torch.randn(C, C)
    for own in (torch.zeros(C, C), pair):
        query, keys = torch.eye(C)[None].double(), own.T[None].double()
        aged = score_chunks(query, keys, ends, recency=1.5)
        plain = score_chunks(query, keys, ends)
        assert score_parts(aged).popular > 0.1
        for found, wanted in zip(score_parts(aged, 1.5), score_parts(plain), strict=True):
            assert float(found) == pytest.approx(float(wanted), abs=1e-12)


def test_differences_within_rounding_are_none() -> None:
    torch.manual_seed(0)
    scores = 7 + 4e-7 * torch.randn(20, 20)
    assert scores.unique().numel() > 1
    assert [x.item() for x in score_parts(scores)] == [0, 0]
    assert score_parts(scores.double()).deviation > 0
