"""What each token of a text costs a model: its negative log-likelihood, read cold and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.models import is_ours
from trailmark.statistics import Floats
from trailmark.trace.losses import piece_losses

_PIECE = 4096  # tokens that are read at once


class TokenLosses(NamedTuple):
    losses: Floats  # [B, T - 1] nats of each token but the first
    gate: Any  # [2] retrievals that were asked for, and those of them that a retrieval gate skipped


@torch.no_grad()
def token_losses(
    model: Any,
    ids: Tokens,
    memory_tier: str = "device",
    progress: Callable[[int], None] = lambda tokens: None,
    begin: Sequence[int] = (),
) -> TokenLosses:
    """Negative log-likelihood of texts that are read cold, in pieces of constant memory.

    Args:
        model: one of ours, or any causal language model of transformers (whose own cache grows), in eval mode.
        ids: [B, T], T at least 2; full rows.
        progress: is told how many tokens of each row are read.
        begin: tokens in front of each row, which are read and not scored: see :func:`trailmark.data.chat.beginning`.

    Raises:
        ValueError: a token outside the vocabulary; losses that are not finite; more than a piece for a model of
            transformers without a cache.
    """
    ours = is_ours(model)
    rows = torch.from_numpy(np.ascontiguousarray(ids)).long()
    if begin:
        rows = torch.cat([torch.tensor(begin).expand(len(rows), -1), rows], dim=1)
    B, T = rows.shape
    if not ours and int(rows.max()) >= (known := model.get_input_embeddings().weight.shape[0]):
        raise ValueError(
            f"text: expected tokens below the model's {known}, got {int(rows.max())}. Use the tokenizer that the model "
            "was trained with."
        )
    size = max(1, _PIECE // B)
    if ours:
        size = model.reading_piece(size)  # whole cells, for models that look at all of one
    cache = model.new_cache(memory_tier, num_tokens=T) if ours else None
    losses = np.empty((B, T))
    last: Tensor | None = None
    for first in range(0, T, size):
        piece = rows[:, first : first + size].to(model.device)
        if ours:
            logits = model(piece, past_key_values=cache).logits
        else:
            found = model(piece, past_key_values=cache, use_cache=size < T)
            logits, cache = found.logits, getattr(found, "past_key_values", None)
            if cache is None and size < T:
                raise ValueError(
                    f"lengths: expected at most {size:,} tokens for {type(model).__name__}, which keeps no cache, got "
                    f"{T:,}. Choose shorter windows."
                )
        losses[:, first : first + size], last = piece_losses(logits, last, piece)
        progress(min(T, first + size))
    gate = np.zeros(2, np.int64)
    if is_gated(model) and cache is not None and (cell := cache.begun(B).cell) is not None:
        gate += cell.retrievals
    return TokenLosses(losses[:, len(begin) + 1 :], gate)


def longest_text(model: Any) -> int | None:
    """Tokens that a model of transformers can tell the places of; None: nothing says so."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def is_gated(model: Any) -> bool:
    """Whether a retrieval gate may skip what is asked of the memory."""
    return bool(getattr(model.config, "gate_cutoff", 0))


def rows_at_once(length: int) -> int:
    """Texts of ``length`` tokens that make a piece together."""
    return max(1, _PIECE // length)
