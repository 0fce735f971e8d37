"""From tokens to positions and chunks, each row on its own grid (guarantees 1 and 5).

The positions of a row are its tokens with a landmark after each chunk that is closed: when it is full, or
early. Rows may begin in the middle of a chunk, hold different numbers of tokens and close chunks anywhere:
ragged batches, padding and early landmarks are this one mechanism. Absent positions stand at a row's end.
Models without landmarks have chunks too: positions are then the tokens, and the last token of a chunk closes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trailmark.memory.tables import Booleans, Integers
from trailmark.models.layout import Grid
from trailmark.models.takes import Take, constant

__all__ = ["Booleans", "Grid", "Integers", "Layouts", "Take", "join", "keep", "lay_out", "tail"]


def lay_out(
    tokens: int,
    chunk_size: int | None,
    phases: Integers | None = None,
    counts: Integers | None = None,
    close_chunk: bool | Booleans = False,
    documents: Integers | None = None,
    landmarks: bool = True,
    counts_landmarks: bool = True,
) -> Grid:
    """The grid of one call.

    Args:
        tokens: T, the width of the batch; each row's tokens stand at its beginning.
        chunk_size: S; None: no chunks and no landmarks.
        phases: [B] tokens of the open chunk before the call, each below S. None: 0.
        counts: [B] tokens of each row. None: T.
        close_chunk: True: a landmark after each row's last token, even if its chunk is not full. [B, T]: after
            each token so marked.
        documents: [B, T] the document of each token, counted from its row's first; each ends with a landmark, but
            for the row's last where nothing closes it. Phases are those of the row's first document. None: one a row.
        landmarks: False: chunks end with a token instead of a landmark.
        counts_landmarks: see :class:`Grid`.
    """
    if phases is None and counts is None and documents is None and isinstance(close_chunk, bool):
        return _laid_out_alike(tokens, chunk_size, 0, close_chunk, landmarks, counts_landmarks)
    phases = np.zeros(1, np.int64) if phases is None else phases
    counts = np.full(1, tokens) if counts is None else counts
    alike = (phases == phases[0]).all() and (counts == counts[0]).all()
    if alike and documents is None and isinstance(close_chunk, bool) and counts[0] == tokens:
        return _laid_out_alike(tokens, chunk_size, int(phases[0]), close_chunk, landmarks, counts_landmarks)
    rows = max(len(phases), len(counts), 1 if isinstance(close_chunk, bool) else len(close_chunk))
    rows = max(rows, 1 if documents is None else len(documents))
    phases, counts = np.broadcast_to(phases, rows), np.broadcast_to(counts, rows)
    return _build(tokens, chunk_size, phases, counts, close_chunk, documents, landmarks, counts_landmarks)


def _uniform(
    tokens: int,
    chunk_size: int | None,
    phase: int,
    close_chunk: bool,
    landmarks: bool,
    counts_landmarks: bool,
) -> Grid:
    phases, counts = np.array([phase]), np.array([tokens])
    return _build(tokens, chunk_size, phases, counts, close_chunk, None, landmarks, counts_landmarks)


# Decoding and training ask for few layouts again and again; long ones take hundreds of KiB each.
_SMALL = 64
_small, _large = lru_cache(maxsize=512)(_uniform), lru_cache(maxsize=16)(_uniform)


def _laid_out_alike(
    tokens: int,
    chunk_size: int | None,
    phase: int,
    close_chunk: bool,
    landmarks: bool,
    counts_landmarks: bool,
) -> Grid:
    """The grid of a call whose rows are all laid out alike."""
    known = _small if tokens <= _SMALL else _large
    return known(tokens, chunk_size, phase, close_chunk, landmarks, counts_landmarks)


class Layouts:
    """The layouts of a model's calls.

    Those of plain calls, whole texts of one length, are where ``torch.compile`` finds them: they are made before its
    graph, and not part of it.
    """

    def __init__(self, chunk_size: int | None, landmarks: bool, counts_landmarks: bool = True) -> None:
        self.chunk_size, self.landmarks, self.counts_landmarks = chunk_size, landmarks, counts_landmarks
        self._in_graphs: dict[str, Grid] = {}

    def lay_out(
        self,
        tokens: int,
        phases: Integers | None = None,
        counts: Integers | None = None,
        close_chunk: bool | Booleans = False,
        documents: Integers | None = None,
    ) -> Grid:
        """The layout of one call; the arguments are those of :func:`lay_out`."""
        if phases is None and counts is None and documents is None and isinstance(close_chunk, bool):
            return self.of(tokens, close_chunk)  # in a graph it is known there alone
        own = self.landmarks, self.counts_landmarks
        return lay_out(tokens, self.chunk_size, phases, counts, close_chunk, documents, *own)

    def of(self, tokens: int, close_chunk: bool) -> Grid:
        """That of a whole text of T tokens in each row."""
        if torch.compiler.is_compiling():
            length = len(range(tokens))  # a constant of the graph, though another length came before
            return self._in_graphs[self._named(length, close_chunk)]
        return _laid_out_alike(tokens, self.chunk_size, 0, close_chunk, self.landmarks, self.counts_landmarks)

    @constant
    def _named(self, tokens: int, close_chunk: bool) -> str:
        # constants of a graph may be tensors and texts, not objects: so a name, and the object by it
        name = f"{tokens} {close_chunk}"
        if name not in self._in_graphs:
            made = _uniform(tokens, self.chunk_size, 0, close_chunk, self.landmarks, self.counts_landmarks)
            self._in_graphs[name] = made.prepared()
        return name


def _build(
    tokens: int,
    S: int | None,
    phases: Integers,
    counts: Integers,
    close_chunk: bool | Booleans,
    documents: Integers | None = None,
    landmarks: bool = True,
    counts_landmarks: bool = True,
) -> Grid:
    rows = len(phases)
    token = np.arange(tokens)
    present = token < counts[:, None]  # [rows, T]
    if S is None:
        where = np.where(present, token, -1)
        document = None if documents is None else np.where(present, documents, -1)
        return Grid(np.where(present, 0, -1), np.zeros_like(present), where, None, phases, document)
    if isinstance(close_chunk, bool):
        early = present & (token == counts[:, None] - 1) & close_chunk
    else:
        early = present & close_chunk
    if documents is not None:  # a document's last token; the row's is followed by none
        ends = documents[:, 1:] != documents[:, :-1]
        early[:, :-1] |= present[:, 1:] & ends
    # an early landmark begins a new count of S
    begins = np.zeros((rows, tokens), np.int64)
    begins[:, 1:] = np.maximum.accumulate(np.where(early, token + 1, 0), axis=1)[:, :-1]
    slot = token - begins + np.where(begins == 0, phases[:, None], 0)
    closes = present & (early | (slot % S == S - 1))
    before = closes.cumsum(1) - closes
    if not landmarks:
        chunk = np.where(present, before, -1)
        document = None if documents is None else np.where(present, documents, -1)
        return Grid(chunk, closes, np.where(present, token, -1), S, phases, document, landmarks=False)
    positions = int((counts + closes.sum(1)).max(initial=0))
    chunk, where = np.full((2, rows, positions), -1)
    landmark = np.zeros((rows, positions), bool)
    row, t = np.nonzero(present)
    place = t + before[row, t]
    chunk[row, place], where[row, place] = before[row, t], t
    row, t = np.nonzero(closes)
    place = t + before[row, t] + 1
    chunk[row, place], landmark[row, place] = before[row, t], True
    if documents is None:
        return Grid(chunk, landmark, where, S, phases, counts_landmarks=counts_landmarks)
    # a landmark is of the document of the token before it
    document = np.full((rows, positions), -1)
    document[row, place] = documents[row, t]
    row, t = np.nonzero(present)
    document[row, t + before[row, t]] = documents[row, t]
    return Grid(chunk, landmark, where, S, phases, document, counts_landmarks=counts_landmarks)


# --- several calls ---------------------------------------------------------------------------------------


def join(earlier: Grid, grid: Grid) -> tuple[Take, Grid]:
    """The positions of an earlier call followed by those of ``grid``: how to take them, and their layout.

    Takes [B, P' + P, E], both side by side.
    """
    first, second = _alike(earlier.chunk, grid.chunk)
    assert earlier.document is None
    assert grid.document is None
    flags = _alike(earlier.is_landmark, grid.is_landmark, rows=len(first))
    tokens = _alike(np.full_like(earlier.token, -1), grid.token, rows=len(first))
    second = np.where(second >= 0, second + earlier.next_chunk[:, None], -1)
    chunk = np.concatenate([first, second], axis=1)
    phases, begun = (np.broadcast_to(x, len(first)) for x in (earlier.phases, earlier.begun))
    joined = Grid(
        chunk,
        np.concatenate(flags, axis=1),
        np.concatenate(tokens, axis=1),
        grid.chunk_size,
        phases,
        landmarks=grid.has_landmarks,
        begun=begun,
        counts_landmarks=grid.counts_landmarks,
    )
    return keep(joined, chunk >= 0)


def _alike(first: Any, second: Any, rows: int = 0) -> tuple[Any, Any]:
    rows = rows or max(len(first), len(second))
    return np.broadcast_to(first, (rows, first.shape[1])), np.broadcast_to(second, (rows, second.shape[1]))


def tail(grid: Grid, reach: int, keep_tokens: int | None) -> tuple[Take, Grid, Integers]:
    """Of each row, what its last tokens depend on: ``reach`` positions before the first of the last ``keep_tokens``.

    They are counted as windows count them. Also the chunks [b] that are gone. ``keep_tokens`` None: all tokens of this
    call.
    """
    key = reach, keep_tokens
    if key not in grid.tails:
        grid.tails[key] = _tail(grid, reach, keep_tokens)
    return grid.tails[key]


def _tail(grid: Grid, reach: int, keep_tokens: int | None) -> tuple[Take, Grid, Integers]:
    if keep_tokens is None:
        keep_tokens = int((grid.token >= 0).sum(1).max(initial=0))
    own = grid.token >= 0
    remaining = np.flip(np.cumsum(np.flip(own, 1), 1), 1)  # tokens from here on
    kept = own & (remaining <= keep_tokens)
    first = np.where(kept.any(1), kept.argmax(1), grid.counts) if keep_tokens else grid.counts
    row = np.arange(len(first))
    # of the first that is wanted, or of what would follow all
    numbers = np.concatenate([grid.numbers, grid.counted[:, None]], axis=1)
    number = numbers[row, np.where(first < grid.counts, first, -1)]
    start = ((grid.chunk >= 0) & (grid.numbers < (number - reach)[:, None])).sum(1)
    inside = start < grid.counts
    gone = np.where(inside, grid.chunk[row, np.where(inside, start, 0)], grid.next_chunk)
    if not start.any():
        return Take(np.arange(grid.num_positions)[None], grid.num_positions), grid, gone
    take, kept_grid = keep(grid, np.arange(grid.num_positions) >= start[:, None])
    return take, kept_grid, gone


def keep(grid: Grid, kept: Booleans) -> tuple[Take, Grid]:
    """Some of the positions [b or B, P], in their order: how to take them, and their layout."""
    assert grid.document is None  # only with a cache, which holds one text per row
    kept = kept & (grid.chunk >= 0)
    counts = kept.sum(1)
    width = int(counts.max(initial=0))
    index = np.full((len(kept), width), -1)
    row, place = np.nonzero(kept)
    at = (kept.cumsum(1) - 1)[row, place]
    index[row, at] = place
    here = np.arange(len(kept))[:, None] if len(grid.chunk) > 1 else 0
    absent = index < 0
    chunk = np.where(absent, -1, grid.chunk[here, index.clip(0)])
    first = chunk[:, 0] if width else np.zeros(len(kept), np.int64)
    phases = np.where(first > 0, 0, grid.phases)  # its slots are counted from what is here
    begun = np.zeros(len(kept), np.int64) + grid.open_positions
    if width:
        begun = np.where(counts > 0, grid.chunk_slots[here, index.clip(0)][:, 0], begun)
    made = Grid(
        np.where(absent, -1, chunk - first[:, None]),
        np.where(absent, False, grid.is_landmark[here, index.clip(0)]),
        np.where(absent, -1, grid.token[here, index.clip(0)]),
        grid.chunk_size,
        phases,
        landmarks=grid.has_landmarks,
        begun=begun,
        counts_landmarks=grid.counts_landmarks,
    )
    return Take(index, grid.num_positions), made
