"""A question's focus: of all chunks of a long memory the few that it and its answer choose from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trailmark.memory import Focus
from trailmark.models.grid import Integers
from trailmark.ops import ChunkSelection

_NONE = 1 << 60
"""In place of a chunk that is not there: behind all that are."""
_LEAST = 1 / 3
"""Of the best chunk's sum: where one fact was asked for, the second best mostly had less (docs/convert.md)."""


def focus_of(
    retrieval: Sequence[ChunkSelection], num_chunks: Integers, count: int
) -> tuple[Focus | None, ...]:
    """Of each row the chunks at which its tokens look sharply, ``count`` at most, and those right beside them.

    Shares of attention are squared before they are added up, so that the few heads and tokens that look at one chunk
    decide, and not the many whose attention is spread over chunks that merely look alike. A chunk that gets less than a
    third of what the best one got stays out. What is asked for often begins in one chunk and ends in the next.

    Args:
        retrieval: of layers, and of pieces of the question, what tokens chose, [B, T, J, K]; its scores are logarithms
            of shares of attention.
        num_chunks: [B] of the memory.

    Returns:
        None: nothing of the memory was chosen, and nothing is left out.
    """
    rows: list[Focus | None] = []
    for row, most in enumerate(num_chunks.tolist()):
        sums = torch.zeros(most, dtype=torch.float64)
        for layer in retrieval:
            chosen = layer.indices[row] >= 0
            squares = (2 * layer.scores[row][chosen].double()).exp()
            sums.index_add_(0, layer.indices[row][chosen].cpu(), squares.cpu())
        best = torch.argsort(sums, descending=True, stable=True)[:count]
        best = best[(sums[best] > 0) & (sums[best] >= _LEAST * sums[best[:1]])]
        near = (best[:, None] + torch.arange(-1, 2)).flatten().numpy()
        near = np.unique(near[(near >= 0) & (near < most)])
        rows.append(Focus(near, most) if len(near) else None)
    return tuple(rows)


def in_focus(focuses: Sequence[Focus | None], num_chunks: Integers, count: int) -> Integers:
    """[B, n] of each row the chunks that may be chosen of its first ``num_chunks`` [B], ascending.

    They are those of its focus, and all that closed since; a row without a focus has none here, and looks among all.
    With focuses of ``count`` chunks and those beside them n depends on nothing that a question found.
    """
    size = 0
    pairs = [(own, most) for own, most in zip(focuses, num_chunks.tolist(), strict=True) if own is not None]
    if pairs:  # a focus of another count may be larger
        size = max(3 * count, *(len(own.chunks) for own, _ in pairs)) + max(
            most - own.known for own, most in pairs
        )
    kept = np.full((len(focuses), size), _NONE)
    for row, own, most in zip(kept, focuses, num_chunks.tolist(), strict=True):
        if own is not None:
            chunks = np.concatenate([own.chunks, np.arange(own.known, most)])
            row[: len(chunks)] = chunks
    return kept
