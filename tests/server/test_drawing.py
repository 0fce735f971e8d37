"""How tokens are drawn: by the probabilities of the model, each row by its own sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trailmark.server.drawing import Draw, Sampling, draw

ROWS = 4000


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, 2.0), Sampling(1, 0.5, 0.6)], ids=str)
def test_tokens_come_as_often_as_they_are_probable(sampling: Sampling) -> None:
    """Within 5 standard deviations."""
    one = logits(12)
    shares, order = (one / sampling.temperature).softmax(-1).sort(descending=True)
    kept = int((shares.cumsum(-1) < sampling.top_p).sum()) + 1
    expected = torch.zeros(12, dtype=torch.float64)
    expected[order[:kept]] = shares[:kept] / shares[:kept].sum()
    drawn = draw(one.expand(ROWS, -1), [Draw(sampling, number) for number in range(ROWS)])
    found = torch.bincount(torch.tensor([row.token for row in drawn]), minlength=12) / ROWS
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / ROWS).sqrt() + 1e-12).all()


def test_each_row_is_drawn_by_its_own() -> None:
    """The same draws beside others and alone, of one sequence for each seed."""
    samplings = [
        Sampling(9, 0.0, top_logprobs=3),
        Sampling(9, 1.0, seed=1),
        Sampling(9, 0.7, 0.8, seed=2),
        Sampling(9, 1.5, 0.8, seed=3, top_logprobs=20),
        Sampling(9, 1.0, 0.1, seed=4),
    ]
    steps = [logits(len(samplings), 12, seed=step) for step in range(9)]
    together = [Draw(sampling, 0) for sampling in samplings]
    alone = [Draw(sampling, 0) for sampling in samplings]
    for step in steps:
        found = draw(step, together)
        for b, own in enumerate(alone):
            assert found[b] == draw(step[b : b + 1], [own])[0]
        logs = step.log_softmax(-1)
        assert [row.token for row in found][::4] == step.argmax(-1)[
            ::4
        ].tolist()  # the last one's nucleus is one
        assert [row.logprob for row in found] == [logs[b, row.token].item() for b, row in enumerate(found)]
        assert [len(row.top) for row in found] == [3, 0, 0, 12, 0]
    again = [draw(step[1:2], [second])[0].token for second in [Draw(samplings[1], 0)] for step in steps]
    other = [draw(step[1:2], [second])[0].token for second in [Draw(samplings[1], 1)] for step in steps]
    next_seed = [
        draw(step[1:2], [second])[0].token for second in [Draw(Sampling(9, seed=2), 0)] for step in steps
    ]
    assert again != other
    assert other == next_seed


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told_row_by_row(wrong: float) -> None:
    two = logits(2, 12)
    two[1, 3] = wrong
    good, bad = draw(two, [Draw(Sampling(1, 0.0), 0), Draw(Sampling(1), 0)])
    assert good.token == two[0].argmax()
    assert bad.token == -1


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_logprobs": -1}],
    ids=str,
)
def test_samplings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        Sampling(**({"max_tokens": 3} | wrong))
