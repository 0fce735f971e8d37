"""Perplexity by length: windows of a text, each read cold, with constant memory for the window."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trailmark.data.corpus import Tokens
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.causal_lm import causal_loss

_PIECE = 4096  # tokens whose logits are held at once


@dataclass
class PerplexityResult:
    """Over all tokens of the windows but the first of each (arXiv 2410.01651, Sec. 4.1)."""

    length: int
    windows: int
    tokens: int
    loss: float  # mean negative log-likelihood, nats per token
    retrievals: int | None = None  # asked for, where a retrieval gate may skip them
    skipped: int | None = None  # of these

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def summary(self) -> dict[str, Any]:
        gate = {} if not self.retrievals else {"skipped_share": (self.skipped or 0) / self.retrievals}
        return asdict(self) | {"perplexity": self.perplexity} | gate


@torch.no_grad()
def evaluate_perplexity(
    model: TrailmarkForCausalLM, text: Tokens, length: int, max_tokens: int = 1 << 16
) -> PerplexityResult:
    """Mean loss over disjoint windows of ``length`` tokens, as many as ``max_tokens`` hold (at least one).

    Raises:
        ValueError: a text shorter than one window, or windows of fewer than 2 tokens.
    """
    if length < 2:
        raise ValueError(f"length: expected at least 2 tokens, got {length}.")
    if len(text) < length:
        raise ValueError(f"length: expected at most the text's {len(text)} tokens, got {length}.")
    windows = max(1, min(len(text), max_tokens) // length)
    total, count = 0.0, 0
    size = model.reading_piece(_PIECE)  # whole cells, for models that look at all of one
    gated = bool(getattr(model.config, "gate_cutoff", 0))
    retrievals = np.zeros(2, np.int64)
    for number in range(windows):
        ids = torch.from_numpy(text[number * length : (number + 1) * length]).long()[None]
        cache = model.new_cache(num_tokens=length)
        for first in range(0, length, size):
            piece = ids[:, first : first + size]
            logits = model(piece, past_key_values=cache).logits
            following = ids[:, first + 1 : first + size + 1]
            # causal_loss shifts its labels back: put the token that follows each position one further
            labels = torch.cat([piece[:, :1], following], dim=1)[:, : piece.shape[1] + 1]
            predicted = following.shape[1]
            padded = torch.cat([logits[:, :predicted], logits[:, :1]], dim=1)
            total += float(causal_loss(padded, labels, num_items=1))
            count += predicted
        if gated and (cell := cache.begun(1).cell) is not None:
            retrievals += cell.retrievals
    asked = tuple(map(int, retrievals)) if gated else (None, None)
    return PerplexityResult(length, windows, count, total / count, *asked)
