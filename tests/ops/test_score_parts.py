"""How much of scores is popular: of parts that are known."""

from __future__ import annotations

import pytest
import torch

from trailmark.ops import score_parts


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
def test_scores_that_are_all_alike_have_no_parts(C: int) -> None:
    for found in score_parts(torch.ones(2, C, C)):
        assert found.tolist() == [0, 0]


def test_pairs_that_may_not_be_read_count_as_the_mean() -> None:
    torch.manual_seed(0)
    scores = torch.randn(8, 8).double()
    hidden = scores.clone()
    hidden[4, 3] = -torch.inf
    scores[4, 3] = scores[4, :3].mean()
    for own, other in zip(score_parts(hidden), score_parts(scores), strict=True):
        assert float(own) == pytest.approx(float(other))
