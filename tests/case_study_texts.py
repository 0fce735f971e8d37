"""The names of the case study's scripts, and made-up texts whose tokens are pieces of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trailmark.trace.lines import Read, TracedChunk

NAMES = [
    f"case_study.{name}"
    for name in ("study", "references", "scores", "baselines", "measure", "numbers", "cases", "document")
]
WIDTH = 4  # characters of a made-up token
SIZE = 5  # tokens of a made-up chunk


def chunks_of(
    text: str, reads: dict[int, Sequence[Sequence[int]]] | None = None, groups: int = 2
) -> list[TracedChunk]:
    """A text of tokens of WIDTH characters: what each chunk reads, with equal weights; a gain of 1/4 a token."""
    tokens = [text[n : n + WIDTH] for n in range(0, len(text), WIDTH)]
    known = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    found = []
    for number, first in enumerate(range(0, len(tokens), SIZE)):
        own = tokens[first : first + SIZE]
        chosen = (reads or {}).get(number, [[]] * groups)
        found.append(
            TracedChunk(
                number,
                first,
                len(own) == SIZE,
                np.array([known[token] for token in own]),
                "".join(own),
                np.arange(len(own)) * WIDTH,
                tuple(Read(np.array(m, np.int64), np.full(len(m), 1 / max(1, len(m)))) for m in chosen),
                np.where(np.arange(len(own)) + first, 2.0, np.nan),
                np.where(np.arange(len(own)) + first, 2.25, np.nan),
            )
        )
    return found


def tokens_of(chunks: Sequence[TracedChunk]) -> tuple[Any, Any]:
    return np.stack([chunk.ids for chunk in chunks]), np.full(len(chunks), SIZE)
