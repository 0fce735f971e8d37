"""How an RPT learns to rank chunks: from candidates that come with scores of how much reading each helps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.models.embedding import Given
from trailmark.models.rpt.config import RPTConfig
from trailmark.ops import fold_seed, ranking_loss
from trailmark.ops.arguments import values_are_checked


@dataclass(frozen=True)
class Ranking:
    """The ranking loss and what is read beside it; ``progress``: how far training is, 0 to 1."""

    config: RPTConfig
    progress: float

    def loss(self, scores: Tensor, given: Given) -> Tensor:
        """[B]: the ranking loss of candidates' scores [B, C, n] with its weight.

        With ``progress`` the weight goes from 0 to ``ranking_weight`` and the margin from 1 to ``ranking_margin``,
        evenly.
        """
        config, progress = self.config, self.progress
        assert given.scores is not None
        margin = 1 + (config.ranking_margin - 1) * progress
        loss = ranking_loss(scores, given.scores, given.indices >= 0, margin, config.ranking_threshold)
        return config.ranking_weight * progress * loss

    def reads_gold(self, noise_seed: Tensor) -> Tensor:
        """[B] bool, drawn from each row's seed: whether it reads the chunks with the best target scores.

        Their share goes with ``progress`` p from the first to the last probability as (1 - cos(pi p)) / 2.
        """
        config = self.config
        first, last = config.first_gold_probability, config.gold_probability
        share = first + (last - first) * (1 - math.cos(math.pi * self.progress)) / 2
        return (fold_seed(noise_seed, 0).double() + 0.5) * 2.0**-32 < share


def expect_targets(given: Given) -> None:
    """That candidates are different chunks, since each is read once, with scores that can be compared."""
    assert given.scores is not None
    if not values_are_checked(given.indices):
        return
    ordered = given.indices.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        b, c, _ = twice.nonzero()[0].tolist()
        raise ValueError(
            f"neighbours: expected different candidates for a chunk, got {given.indices[b, c].tolist()} for chunk {c} "
            f"of row {b}. Leave each in once, and put -1 for the rest."
        )
    wrong = ~(given.scores.isfinite() | (given.indices < 0).to(given.scores.device))
    if bool(wrong.any()):
        b, c, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"neighbour_scores: expected finite numbers where neighbours has a chunk, got "
            f"{float(given.scores[b, c, n])} for chunk {c} of row {b}. Put -1 in neighbours where there is no score."
        )


def best_candidates(given: Given, num_retrieved: int) -> Tensor:
    """The candidates with the best target scores, [B, C, K] ascending, -1 last; of equals the first."""
    assert given.scores is not None
    indices, missing = given.indices, given.indices < 0
    order = given.scores.masked_fill(missing, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    beyond = torch.iinfo(torch.int64).max
    chosen = indices.gather(-1, order)[..., :num_retrieved]
    chosen = chosen.masked_fill(chosen < 0, beyond).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == beyond, -1)
    return F.pad(chosen, (0, num_retrieved - chosen.shape[-1]), value=-1)
