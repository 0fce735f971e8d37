"""What each token of a text costs a model that reads it a piece at a time: its negative log-likelihood in nats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

_LOGITS = 1 << 27  # numbers that are made wide at once: a vocabulary of 128K takes a piece in four
Losses = npt.NDArray[np.floating[Any]]


def nats(logits: Tensor, targets: Tensor) -> Losses:
    """What targets [B, t] cost where logits [B, t, V] predict them: [B, t], in float32 or wider."""
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    wide = torch.promote_types(logits.dtype, torch.float32)
    size = max(1, _LOGITS // rows.shape[1])
    parts = zip(rows.split(size), wanted.split(size), strict=True)
    losses = [F.cross_entropy(part.to(wide), own, reduction="none").cpu() for part, own in parts]
    return torch.cat(losses).view(targets.shape).numpy()


def piece_losses(logits: Tensor, before: Tensor | None, ids: Tensor) -> tuple[Losses, Tensor]:
    """The losses of one piece of a text.

    Args:
        logits: [B, n, V] of the piece.
        before: [B, 1, V], which predict its first token; None: the text begins with it, and nothing predicts it.
        ids: [B, n].

    Returns:
        What the tokens cost, [B, n] in float32 or wider, NaN where nothing predicts; and the logits [B, 1, V] that
        predict the first token of the next piece.

    Raises:
        ValueError: losses that are not finite.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    kind = np.float32 if wide == torch.float32 else np.float64
    losses: Losses = np.full(ids.shape, np.nan, kind)
    if before is not None:
        losses[:, :1] = nats(before, ids[:, :1])
    if ids.shape[1] > 1:
        losses[:, 1:] = nats(logits[:, :-1], ids[:, 1:])
    predicted = losses[:, 1:] if before is None else losses
    wrong = ~np.isfinite(predicted)
    if wrong.any():
        raise ValueError(
            f"model: expected finite losses, got {predicted[wrong][0]} for {int(wrong.sum()):,} of {wrong.size:,} "
            "tokens. Its weights are damaged, or need a wider type."
        )
    return losses, logits[:, -1:].clone()
