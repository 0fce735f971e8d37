"""What the chunks that were selected weigh, by their scores and how recent they are: HSA (arXiv 2504.16795)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.arguments import require, require_shape, without_autocast

KINDS = ("softmax", "stick_breaking")


@without_autocast
def weigh_chunks(scores: Tensor, kind: str = "softmax", decay: Tensor | None = None) -> Tensor:
    r"""Weights of selected chunks, of which the last is the most recent.

    With k = 0 for the most recent chunk, 1 for the one before it and so on,

    .. math::
        \text{softmax:} \quad w_k = \frac{\exp(r_k + \beta k)}{\sum_{k'} \exp(r_{k'} + \beta k')}, \qquad
        \text{stick-breaking:} \quad w_k = \sigma(r_k) \prod_{k' < k} \bigl(1 - \sigma(r_{k'})\bigr)

    Stick-breaking lets each chunk take its part of what more recent ones left; the weights sum to at most 1, so that a
    token may read little of anything. Source: arXiv 2504.16795 and 2511.23319.

    Args:
        scores: [..., K] as :class:`trailmark.ops.ChunkSelection` has them: in the order of the chunks, -inf last where
            nothing was selected.
        kind: "softmax" or "stick_breaking".
        decay: :math:`\beta`, [1], for the softmax; None: 0.

    Returns:
        [..., K], float32 or wider; 0, with a gradient of 0, where nothing was selected.

    Raises:
        ValueError: for another kind, a decay of another shape, or one beside stick-breaking.
    """
    require(kind in KINDS, "kind", kind, " or ".join(map(repr, KINDS)))
    require(kind == "softmax" or decay is None, "decay", "a number", "None with stick-breaking")
    missing = scores == -torch.inf
    r = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(missing, 0)
    if kind == "stick_breaking":
        left = F.logsigmoid(-r).masked_fill(missing, 0)  # what each leaves of the stick, as a logarithm
        # of all more recent ones, summed without its own: a difference of sums would cancel
        after = F.pad(left[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        return (F.logsigmoid(r) + after).exp().masked_fill(missing, 0)
    if decay is not None:
        require_shape("decay", decay, (1,), "[1]")
        count = (~missing).sum(-1, keepdim=True)
        # what is added to large scores would be rounded as they are
        r = r - r.masked_fill(missing & (count > 0), -torch.inf).detach().amax(-1, keepdim=True)
        age = count - 1 - torch.arange(scores.shape[-1], device=scores.device)
        r = r + decay.to(r.dtype) * age
    nothing = missing.all(-1, keepdim=True)
    return r.masked_fill(missing & ~nothing, -torch.inf).softmax(-1).masked_fill(missing, 0)
