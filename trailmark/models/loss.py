"""The language-modelling loss, one for calls with labels and for training: token t predicts token t + 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def text_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    total: Tensor | int | None = None,
    landmark_loss: Tensor | None = None,
    ranking_loss: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """The weighted sum of the tokens' cross entropies in float32 or wider, over ``total``.

    Args:
        logits: [B, T, V] where they predict the next token.
        labels: int64 [B, T] of :func:`shift_labels`; -100 bears no loss.
        weights: [B, T] of the labels; None: 1 each.
        total: what the sum is divided by; None: the sum of the weights, so that the loss is a mean.
        landmark_loss: [B, T] what is added to each token's, weighted as it is.
        ranking_loss: [B] what is added for each row.
        rows: over how many rows rankings are averaged; None: a row's counts for each of its tokens, as theirs does.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # the labels are shifted, not the logits: a slice of those would be copied back and forth
    losses = F.cross_entropy(
        logits.to(dtype).flatten(0, 1), labels.flatten().long(), ignore_index=-100, reduction="none"
    )
    if landmark_loss is not None:
        losses = losses + landmark_loss.flatten()
    if ranking_loss is not None and rows is None:
        losses = losses + ranking_loss[:, None].expand(labels.shape).flatten()
    counted = labels.flatten() != -100
    losses = losses.masked_fill(~counted, 0)  # what was added there may be no number
    if weights is None:
        own, least = counted.sum(), 1.0
    else:
        losses, own, least = losses * weights.flatten(), weights.double().sum(), 1e-9
    count = torch.as_tensor(own if total is None else total, device=losses.device).to(losses.dtype)
    loss = losses.sum() / count.clamp(min=least)  # no token, no loss
    if ranking_loss is not None and rows is not None:
        loss = loss + ranking_loss.sum() / rows
    return loss


class BearingTokens(NamedTuple):
    """What a call's tokens are to predict, for their loss without all of their logits (``forward``'s ``bearing``)."""

    labels: Tensor
    """int64 [B, n] of :func:`shift_labels`, of the tokens whose logits would be returned; -100 bears no loss."""
    weights: Tensor
    """[B, n] of the labels."""
    total: Tensor
    """What the sum of the weighted losses is divided by."""
    slab: int
    """Tokens whose logits are there at a time, at least 1."""

    def loss(self, head: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """:func:`text_loss` of states [B, n, E], each slab's logits computed by ``head``, and again in the backward."""

        def of_slab(own: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            return text_loss(head(own), labels, weights=weights, total=self.total)

        parts = (states.flatten(0, 1), self.labels.flatten(), self.weights.flatten())
        slabs = zip(*(part[None].split(self.slab, dim=1) for part in parts), strict=True)
        losses = [checkpoint(of_slab, *slab, use_reentrant=False, preserve_rng_state=False) for slab in slabs]
        return torch.stack(losses).sum()


def shift_labels(labels: Tensor) -> Tensor:
    """[B, T]: at t the label of t + 1; -100, which bears no loss, at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)
