"""A retriever that is set from texts alone: against rows put together by hand, and what it is not to say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trailmark.ops import score_parts
from trailmark.training.next_chunk import NextChunk

E, B, C = 6, 3, 40


def drawn(groups: int) -> tuple[Tensor, list[Tensor]]:
    """Summaries [B, C, E] and what asks [B, C, E] of each group; most of both is the same in all chunks."""
    generator = torch.Generator().manual_seed(groups)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = draw(B, C + 1, E)
    summaries = 5 * draw(E) + hidden[:, :-1] @ draw(E, E)
    asking = [7 * draw(E) + hidden[:, 1:] @ draw(E, E) + 0.1 * draw(B, C, E) for _ in range(groups)]
    return summaries, asking


def projections(groups: int) -> tuple[nn.Linear, list[nn.Linear]]:
    torch.manual_seed(0)
    made = [nn.Linear(E, E, bias=False, dtype=torch.float64) for _ in range(1 + groups)]
    return made[0], made[1:]


def solved(
    summaries: Tensor, asking: list[Tensor], there: Tensor, follows: Tensor
) -> tuple[nn.Linear, list[nn.Linear]]:
    landmark, queries = projections(len(asking))
    fit = NextChunk(landmark, queries)
    for row in range(len(summaries)):  # in several calls
        one = slice(row, row + 1)
        fit.add(summaries[one], [own[one] for own in asking], there[one], follows[one])
    fit.solve()
    return landmark, queries


def without_mean(x: Tensor) -> Tensor:
    unit = x.mean(0) / x.mean(0).norm()
    return x - (x @ unit)[:, None] * unit


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_whitened_least_squares_solution(groups: int) -> None:
    summaries, asking = drawn(groups)
    there = torch.ones(B, C, dtype=torch.bool)
    landmark, queries = solved(summaries, asking, there, there)
    before = projections(groups)
    x = without_mean(summaries.flatten(0, 1))
    u, s, v = torch.linalg.svd(x / len(x) ** 0.5, full_matrices=False)
    vectors = len(x) ** 0.5 * u @ torch.diag(s / (s.square() + s.square().sum() / E).sqrt()) @ v
    found = landmark(summaries).flatten(0, 1)
    torch.testing.assert_close(found / found.norm(), vectors / vectors.norm())
    after = vectors.view(B, C, E)[:, 1:].flatten(0, 1)
    for own, query, begun in zip(asking, queries, before[1], strict=True):
        h = without_mean(own[:, :-1].flatten(0, 1))
        ridge = h.square().sum(0).mean().sqrt() * torch.eye(E).double()
        rows = torch.cat([h, ridge]), torch.cat([after, torch.zeros(E, E).double()])
        wanted = h @ torch.linalg.lstsq(*rows).solution
        said = query(own[:, :-1]).flatten(0, 1)
        torch.testing.assert_close(said / said.norm(), wanted / wanted.norm())
        torch.testing.assert_close(query.weight.norm(), begun.weight.norm())
    torch.testing.assert_close(landmark.weight.norm(), before[0].weight.norm())


def test_it_asks_for_what_comes_next_and_chunks_are_less_popular() -> None:
    summaries, asking = drawn(1)
    there = torch.ones(B, C, dtype=torch.bool)
    later = torch.arange(C) >= torch.arange(C)[:, None]

    def scores(landmark: nn.Linear, queries: list[nn.Linear]) -> Tensor:  # [B, C, C]
        with torch.no_grad():
            q, k = (nn.functional.normalize(x, dim=-1) for x in (queries[0](asking[0]), landmark(summaries)))
        return q @ k.mT

    before, after = scores(*projections(1)), scores(*solved(summaries, asking, there, there))
    above = after[:, :-1] > after.diagonal(1, 1, 2)[..., None]
    assert above.double().mean() < 0.1  # half of them, if it knew nothing
    was, popular = (score_parts(x.masked_fill(later, -torch.inf)).popular for x in (before, after))
    assert was.min() > 0.5
    assert popular.max() < was.min() / 2


def test_other_documents_and_empty_chunks_have_no_part() -> None:
    summaries, asking = drawn(1)
    there, follows = torch.ones(B, C, dtype=torch.bool), torch.ones(B, C, dtype=torch.bool)
    there[1, 30:], follows[0, 20] = False, False
    expected = solved(summaries, asking, there, follows)
    summaries[1, 30:] = 99.0  # of nothing
    asking[0][0, 19] = -99.0  # what the last chunk of a document asks with
    found = solved(summaries, asking, there, follows)
    for a, b in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
        torch.testing.assert_close(a.weight, b.weight)


def test_texts_of_one_chunk_are_refused() -> None:
    summaries, asking = drawn(1)
    there = torch.ones(B, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^distil.fit_retriever: expected texts with two chunks in a row"):
        solved(summaries[:, :1], [asking[0][:, :1]], there, there)
