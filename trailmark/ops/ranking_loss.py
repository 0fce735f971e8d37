"""A pairwise ranking loss: scores learn the order of target scores (RPT's retriever)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype, require, require_shape, without_autocast


@without_autocast
def ranking_loss(
    scores: Tensor,
    targets: Tensor,
    candidates: Tensor,
    margin: float = 1.0,
    threshold: float = 0.0,
) -> Tensor:
    r"""LambdaRank's hinge over pairs of candidates, of each row of a batch.

    .. math::
        \ell_b = \frac{1}{|P_b|} \sum_{(n, i, j) \in P_b}
                 \lambda_{nij} \max(0,\; \tau - (s_{ni} - s_{nj})), \qquad
        \lambda_{nij} = \frac{\left|(2^{y_{ni}} - 2^{y_{nj}})\,
                        (\log_2(1 + r_{ni}) - \log_2(1 + r_{nj}))\right|}{\mathrm{IDCG}_n}

    over the pairs :math:`P_b` of candidates of one query with :math:`y_{ni} > y_{nj}` and :math:`y_{ni}` above the
    threshold; r is the rank by score (1 is the best; of equals the first), and :math:`\mathrm{IDCG}_n = \sum_r
    (2^{y} - 1) / \log_2(1 + r)` of the candidates in the targets' order, a target below 0 counting as 0. Source: RPT
    (Rubin and Berant, 2024) as its published code has it: the differences of NDCG are those of the discounts'
    denominators, not of their inverses as LambdaRank's are. No gradient passes through ranks, targets and lambda.

    Targets of any size are computed without overflow, and small ones without cancellation: gains in log-likelihood of a
    chunk reach hundreds, of a token they are thousandths.

    Args:
        scores: [B, N, n] of n candidates of each of N queries.
        targets: [B, N, n], y: how much each candidate is worth.
        candidates: bool [B, N, n]; what is none has no effect, not even as NaN.
        margin: tau. threshold: 0 or more.

    Returns:
        [B], in the dtype of the scores, float32 or wider; 0 for a row without a pair.

    Raises:
        ValueError: for shapes that do not fit together, candidates that are not bool, or a threshold below 0.
    """
    require(scores.dim() == 3, "scores", tuple(scores.shape), "shape [B, N, n]")
    for name, x in (("targets", targets), ("candidates", candidates)):
        require_shape(name, x, tuple(scores.shape), "of scores [B, N, n]")
    require(candidates.dtype == torch.bool, "candidates", candidates.dtype, "bool")
    require(threshold >= 0, "threshold", threshold, "0 or more", "A gain of 0 or less is none.")
    dtype = arithmetic_dtype(scores)
    s = scores.to(dtype).masked_fill(~candidates, 0)
    with torch.no_grad():
        y = targets.to(arithmetic_dtype(scores, targets)).masked_fill(~candidates, -torch.inf)
        weights, pairs = _lambdas(s, y, candidates, threshold)
    hinge = (margin - (s[..., :, None] - s[..., None, :])).clamp(min=0)
    total = (hinge * weights.to(dtype)).masked_fill(~pairs, 0).flatten(1).sum(1)
    return total / pairs.flatten(1).sum(1).clamp(min=1)


def _lambdas(s: Tensor, y: Tensor, candidates: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The lambda of each pair [B, N, n, n], and which pairs count; y is -inf where there is no candidate."""
    place = torch.arange(1, s.shape[-1] + 1, device=s.device)
    discount = torch.log2(1 + place.to(y.dtype))
    order = s.masked_fill(~candidates, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(dim=-1)  # from 0
    # gains 2^y - 1, all divided by 2^top, which leaves lambda as it is; small ones keep their digits
    top = y.amax(-1, keepdim=True).clamp(min=0) if s.shape[-1] else y
    gain = y.sign() * torch.exp2(y.clamp(min=0) - top) * -torch.expm1(-math.log(2) * y.abs())
    best_first = gain.clamp(min=0).sort(dim=-1, descending=True).values
    ideal = (best_first / discount).sum(-1)[..., None, None]
    pairs = (y[..., :, None] > y[..., None, :]) & (y > threshold)[..., None]
    pairs = pairs & candidates[..., None, :] & candidates[..., :, None]
    at = discount[rank]
    change = (gain[..., :, None] - gain[..., None, :]) * (at[..., :, None] - at[..., None, :])
    return change.abs() / ideal.masked_fill(ideal == 0, 1), pairs
