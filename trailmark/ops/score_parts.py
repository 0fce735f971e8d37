"""How much of what chunks score belongs to the past chunk, whoever asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreParts(NamedTuple):
    """Of the scores of one text."""

    deviation: Tensor  # [...] how far the scores of one chunk that asks lie apart
    popular: Tensor  # [...] the share of their variance that is the past chunk's own


def score_parts(scores: Tensor) -> ScoreParts:
    r"""Take the scores of a text's chunks for each other apart.

    .. math::
        s_{tm} = r_{tm} - \mathrm{mean}_{m'} r_{tm'}, \qquad
        \mathrm{popular} = \frac{\mathrm{mean}_m (\mathrm{mean}_t s_{tm})^2}{\mathrm{mean}_{tm} s_{tm}^2}

    for the later half of the chunks t, which ask, and the earlier half m, which is scored: there every pair may be
    read, but for a few in the middle that the window shows, which count as the mean. What a row adds to all its scores
    changes no choice and no weight, so its mean is taken off. Where nothing is popular and rows are independent, the
    means of columns of R scores still have 1 / R of the variance; that is taken off too, and what is left is a share of
    1 - 1 / R. Rows that follow each other are alike, which adds to the share: it is an upper bound.

    Args:
        scores: [..., C, C], -inf where chunk m is no candidate of chunk t.

    Returns:
        Deviation and share, float64; 0 and 0 where scores are all alike, or C is below 4.
    """
    C = scores.shape[-1]
    block, R = scores[..., C // 2 :, : C // 2].detach().double(), C - C // 2
    if C < 4:
        nothing = block.new_zeros(scores.shape[:-2])
        return ScoreParts(nothing, nothing)
    present = block.isfinite()
    block = block.masked_fill(~present, 0)
    mean = block.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)
    block = (block - mean).masked_fill(~present, 0)
    variance = block.square().mean((-2, -1))
    share = block.mean(-2).square().mean(-1) / variance
    popular = torch.where(variance > 0, (share - 1 / R) / (1 - 1 / R), 0.0)
    return ScoreParts(variance.sqrt(), popular)
