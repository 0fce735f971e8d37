"""How much of what chunks score belongs to the past chunk, whoever asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops.selection.call import less_for_age


class ScoreParts(NamedTuple):
    """Of the scores of one text."""

    deviation: Tensor  # [...] how far the scores of one chunk that asks lie apart
    popular: Tensor  # [...] the share of their variance that is the past chunk's own


def score_parts(scores: Tensor, recency: float = 0.0) -> ScoreParts:
    r"""Take the scores of a text's chunks for each other apart.

    .. math::
        s_{tm} = r_{tm} - \mathrm{mean}_{m'} r_{tm'}, \qquad
        x = \frac{\sum_m n_m (\mathrm{mean}_t s_{tm})^2}{\sum_{tm} s_{tm}^2}, \qquad
        \mathrm{popular} = \frac{x - x_0}{1 - x_0}

    for the later half of the chunks t, which ask, and the earlier half m, which is scored: there nearly every pair may
    be read, and those that may not are left out. n_m chunks may read m. What a row adds to all its scores changes no
    choice and no weight, so its mean is taken off. Where nothing is popular and rows are independent, the means of
    columns still have a share x_0 of the variance, one for each column over one for each pair; that is taken off, so
    chance gives 0, and less than 0 as often as more. Rows that follow each other are alike, which adds to the share: it
    is an upper bound.

    Args:
        scores: [..., C, C], -inf where chunk m is no candidate of chunk t; the last one that is has age 1.
        recency: what the scores lost with the logarithm of a chunk's age (:func:`select_chunks`), which is given back:
            it is nearly the same for all that ask, and no popularity.

    Returns:
        Deviation and share, float64; 0 and 0 where there are no scores that differ, beyond rounding.
    """
    block = without_recency(scores.detach(), recency)
    chunk = torch.arange(scores.shape[-1], device=scores.device)
    rounding = 8 * torch.finfo(scores.dtype).eps
    present = block.isfinite()
    # of the text's own chunks, whatever it was padded to: the last of them asks
    half = (chunk + 1).mul(present.any(-1)).amax(-1, keepdim=True) // 2 if len(chunk) else chunk
    later = chunk >= half
    present &= later[..., :, None] & ~later[..., None, :]
    block = block.masked_fill(~present, 0)
    in_row, in_column = present.sum(-1, keepdim=True), present.sum(-2)
    pairs, columns = in_column.sum(-1), (in_column > 0).sum(-1)
    largest = block.abs().amax((-2, -1)) if len(chunk) else block.new_zeros(block.shape[:-2])
    block = (block - block.sum(-1, keepdim=True) / in_row.clamp(min=1)).masked_fill(~present, 0)
    squares = block.square().sum((-2, -1))
    deviation = (squares / pairs.clamp(min=1)).sqrt()
    differ = deviation > rounding * largest
    found = (block.sum(-2).square() / in_column.clamp(min=1)).sum(-1) / squares
    chance = columns / pairs.clamp(min=1)
    popular = torch.where(differ & (chance < 1), (found - chance) / (1 - chance), 0.0)
    return ScoreParts(torch.where(differ, deviation, 0.0), popular)


def without_recency(scores: Tensor, recency: float) -> Tensor:
    """Scores [..., C, C] of :func:`score_parts` before they lost something with age, float64."""
    chunk, known = torch.arange(scores.shape[-1], device=scores.device), scores.isfinite()
    end = torch.where(known, chunk + 1, 0).amax(-1, keepdim=True) if len(chunk) else scores.new_zeros(())
    return torch.where(
        known, scores.double() + less_for_age(recency, end, chunk, torch.float64), scores.double()
    )
