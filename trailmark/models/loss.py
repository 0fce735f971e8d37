"""The language-modelling loss: token t predicts token t + 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross entropy of token t + 1 at token t in float32 or wider: mean, or sum / ``num_items``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # the labels are shifted, not the logits: a slice of those would be copied back and forth
    flat, targets = logits.to(dtype).flatten(0, 1), shift_labels(labels).flatten().long()
    if num_items is None:
        count = (targets != -100).sum()
    else:
        count = torch.as_tensor(num_items, device=logits.device)
    count = count.clamp(min=1)  # no token, no loss
    return F.cross_entropy(flat, targets, ignore_index=-100, reduction="sum") / count


def mean_at(values: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """The values [B, T] where there is a label to predict, divided as ``causal_loss`` divides."""
    counted = shift_labels(labels) != -100
    count = counted.sum() if num_items is None else torch.as_tensor(num_items, device=values.device)
    return values.masked_fill(~counted, 0).sum() / count.clamp(min=1)


def shift_labels(labels: Tensor, fill: int = -100) -> Tensor:
    """[B, T]: at t the label of t + 1; ``fill`` at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=fill)
