"""From tokens to positions and chunks, each row on its own grid (design, semantics 1 and 5).

The positions of a row are its tokens with a landmark after each chunk that is closed: when it is full, or
early. Rows may begin in the middle of a chunk, hold different numbers of tokens and close chunks anywhere:
ragged batches, padding and early landmarks are this one mechanism. Absent positions stand at a row's end.
Models without landmarks have chunks too: positions are then the tokens, and the last token of a chunk closes it.

``torch.compile`` looks into nothing here: what a layout says is a constant of the graph (``takes.constant``).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.models.takes import Booleans, Integers, Take, constant


class Grid:
    """The layout of one call. All arrays have one row if every row of the batch is laid out alike, else B.

    Args:
        chunk: [b, P] the chunk of each position, counted from the call's first; -1: absent.
        is_landmark: [b, P]; without landmarks, the token that closes its chunk.
        token: [b, P] the token of this call that stands there; -1: a landmark, an earlier call's, or absent.
        chunk_size: S; None: no chunks.
        phases: [b] tokens that the first chunk held before the call.
        document: [b, P] the document of each position, counted from the row's first; -1: absent. None: one a row.
        landmarks: whether chunks end with a landmark, a position of its own.
        begun: [b] positions of the first chunk that stand before what is laid out here; None: ``phases``. More where
            only the end of a call is laid out.
    """

    def __init__(
        self,
        chunk: Integers,
        is_landmark: Booleans,
        token: Integers,
        chunk_size: int | None,
        phases: Integers,
        document: Integers | None = None,
        landmarks: bool = True,
        begun: Integers | None = None,
    ) -> None:
        self.has_landmarks = landmarks
        self.begun = phases if begun is None else begun
        self.chunk, self.is_landmark, self.token = chunk, is_landmark, token
        self.chunk_size, self.phases, self.document = chunk_size, phases, document
        # takes, tails and tensors asked for before: decoding and training ask for the same again
        self._made: dict[object, Any] = {}

    # --- numbers -------------------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> Integers:
        """[b] positions of each row."""
        return (self.chunk >= 0).sum(1)

    @property
    def num_positions(self) -> int:
        """P: the most of any row."""
        return self.chunk.shape[1]

    @cached_property
    def num_chunks(self) -> int:
        """N: the most chunks, open ones included, of any row."""
        return int(self.chunk.max(initial=-1)) + 1

    @cached_property
    def closed(self) -> Integers:
        """[b] chunks of each row that get their landmark here."""
        return self.is_landmark.sum(1)

    @cached_property
    def num_closed(self) -> int:
        """C: the most of any row."""
        return int(self.closed.max(initial=0))

    @cached_property
    def slots(self) -> Integers:
        """[b, P] places since the first of the chunk that stands in this call."""
        place = np.arange(self.num_positions)
        starts = np.where(np.diff(self.chunk, axis=1, prepend=-2) != 0, place, 0)
        return place - np.maximum.accumulate(starts, axis=1)

    @cached_property
    def chunk_slots(self) -> Integers:
        """[b, P] place of each position in its chunk; absent: any."""
        return self.slots + np.where(self.chunk == 0, self.begun[:, None], 0)

    @cached_property
    def places(self) -> Integers:
        """[b, P] place in its document where a chunk takes S + 1 and its landmark the last of them; absent: 0."""
        assert self.chunk_size is not None
        assert self.has_landmarks
        slot = self.slots + np.where(self.chunk == 0, self.phases[:, None], 0)
        slot = np.where(self.is_landmark, self.chunk_size, slot)
        chunk = self.chunk
        if self.document is not None:
            chunk = chunk - np.take_along_axis(self.first_chunks, chunk.clip(0), 1)
        return np.where(self.chunk >= 0, chunk * (self.chunk_size + 1) + slot, 0)

    @cached_property
    def begins_document(self) -> Booleans:
        """[b, N] chunks that are the first of their document, the row's first too."""
        found = np.zeros((len(self.chunk), self.num_chunks), bool)
        found[:, :1] = True
        if self.document is not None:
            row, place = np.nonzero((np.diff(self.document, axis=1, prepend=-1) != 0) & (self.chunk >= 0))
            found[row, self.chunk[row, place]] = True
        return found

    @cached_property
    def first_chunks(self) -> Integers:
        """[b, N] the first chunk of each chunk's document."""
        return np.maximum.accumulate(np.where(self.begins_document, np.arange(self.num_chunks), 0), axis=1)

    @cached_property
    def lengths(self) -> Integers:
        """[b, C] tokens of each closed chunk; 0 where a row closes fewer."""
        found = np.zeros((len(self.chunk), self.num_closed), np.int64)
        row, place = np.nonzero(self.is_landmark)
        found[row, self.chunk[row, place]] = self.slots[row, place] + (not self.has_landmarks)
        if self.num_closed:
            found[:, 0] += np.where(self.closed > 0, self.phases, 0)
        return found

    @cached_property
    def landmark_places(self) -> Integers:
        """[b, C] positions of the landmarks (without them, of the closing tokens); -1 where a row closes fewer."""
        found = np.full((len(self.chunk), self.num_closed), -1)
        row, place = np.nonzero(self.is_landmark)
        found[row, self.chunk[row, place]] = place
        return found

    @property
    def chunk_starts(self) -> Integers:
        """[b, C] the first position of each closed chunk; negative: in an earlier call."""
        return self.landmark_places + (not self.has_landmarks) - self.lengths

    @cached_property
    def open_tokens(self) -> Integers:
        """[b] tokens of the chunk that stays open; 0: none is."""
        if self.chunk_size is None:
            return np.zeros(len(self.chunk), np.int64)
        row = np.arange(len(self.chunk))
        last = self.counts - 1
        slot = self.slots[row, last] + 1 + np.where(self.chunk[row, last] == 0, self.phases, 0)
        return np.where(last < 0, self.phases, np.where(self.is_landmark[row, last], 0, slot))

    @cached_property
    def _open_positions(self) -> Integers:
        """[b] positions of the chunk that stays open, from its first."""
        row, last = np.arange(len(self.chunk)), self.counts - 1
        if not self.num_positions:
            return np.zeros_like(last) + self.begun
        after = np.where(self.is_landmark[row, last], 0, self.chunk_slots[row, last] + 1)
        return np.where(last < 0, self.begun, after)

    @cached_property
    def _next_chunk(self) -> Integers:
        """[b] the chunk of the position that would follow."""
        row, last = np.arange(len(self.chunk)), self.counts - 1
        if not self.num_positions:
            return np.zeros_like(last)
        return np.where(last < 0, 0, self.chunk[row, last] + self.is_landmark[row, last])

    @cached_property
    def has_short_chunks(self) -> bool:
        """Some chunk was closed early."""
        return bool((self.lengths[self.lengths > 0] != self.chunk_size).any())

    # --- tensors -------------------------------------------------------------------------------------------

    def lengths_on(self, device: torch.device) -> Tensor:
        """int64 [b, C]: ``lengths``."""
        return self._tensor("lengths", None, device)[0]

    def candidates(self, first_visible: int | None, device: torch.device) -> Tensor:
        """int64 [B, C], or [C] for all rows: at each chunk's end in a whole text, the chunks before it.

        ``first_visible``: only those that begin before the last position's place + this; None: all.
        """
        return self._tensor("candidates", first_visible, device)[0]

    def first_candidates(self, device: torch.device) -> Tensor | int:
        """int64 [b, C]: at each landmark, the first chunk of its document; 0: of every row, its first."""
        return 0 if self.document is None else self._tensor("first candidates", None, device)[0]

    def begins_document_on(self, device: torch.device) -> Tensor | None:
        """bool [b, N, 1]: ``begins_document``; None: each row is one document."""
        return None if self.document is None else self._tensor("begins document", None, device)[0]

    def documents_on(self, device: torch.device) -> Tensor | None:
        """int64 [b, P]: ``document``."""
        return None if self.document is None else self._tensor("document", None, device)[0]

    @constant
    def _tensor(self, name: str, first_visible: int | None, device: torch.device) -> tuple[Tensor]:
        """Made once per device, and no inference tensor: a graph may keep it."""
        key = name, first_visible, device
        if key not in self._made:
            if name == "mask":
                array: Any = self.is_landmark[..., None]
            elif name == "lengths":
                array = self.lengths
            elif name == "document":
                array = self.document
            elif name == "begins document":
                array = self.begins_document[..., None]
            elif name == "first candidates":
                array = self.first_chunks[:, : self.num_closed]
            else:
                array = self._candidates(first_visible)
            with torch.inference_mode(False):
                self._made[key] = (torch.from_numpy(array).to(device),)
        made: tuple[Tensor] = self._made[key]
        return made

    def _candidates(self, first_visible: int | None) -> Integers:
        places = self.landmark_places
        limits = np.where(places >= 0, np.arange(self.num_closed), 0)
        if first_visible is not None:
            starts = self.chunk_starts
            for b, i in zip(*np.nonzero(places >= 0), strict=True):
                limits[b, i] = np.searchsorted(starts[b, :i], places[b, i] + first_visible)
        return limits if len(limits) > 1 else limits[0]

    # --- between layouts -----------------------------------------------------------------------------------

    def insert_landmarks(self, tokens: Tensor, landmark: Tensor | None) -> Tensor:
        """Tokens [B, T, E] and the landmark [E] -> positions [B, P, E]."""
        x = self._from_tokens(tokens.shape[1])(tokens)
        # where nothing is closed it still takes part for its gradient: zeros, which DDP waits for
        if landmark is None or not (self.num_closed or torch.is_grad_enabled()):
            return x
        mask = self._tensor("mask", None, x.device)[0]  # [b, P, 1]
        return torch.where(mask, landmark.to(x.dtype), x)

    def _from_tokens(self, width: int) -> Take:
        if ("tokens", width) not in self._made:
            self._made["tokens", width] = Take(self.token, width)
        made: Take = self._made["tokens", width]
        return made

    def last_tokens(self, keep: int | None) -> Take:
        """Positions [B, P, E] -> the last ``keep`` tokens of each row, [B, keep, E]; None: all of this call.

        All: [B, T, E] from each row's first token on. A number: each row's last token is at the end.
        """
        if keep not in self._made:
            self._made[keep] = self._last_tokens(keep)
        made: Take = self._made[keep]
        return made

    def _last_tokens(self, keep: int | None) -> Take:
        width = int(self.token.max(initial=-1)) + 1
        places = np.full((len(self.chunk), width), -1)
        row, place = np.nonzero(self.token >= 0)
        places[row, self.token[row, place]] = place
        if keep is not None:
            tokens = self.token.max(1, initial=-1) + 1  # of this call, those that are left out too
            index = tokens[:, None] - keep + np.arange(keep)
            row = np.arange(len(places))[:, None]
            places = np.where(index >= 0, places[row, index.clip(0)], -1)
        return Take(places, self.num_positions)

    @cached_property
    def landmarks(self) -> Take:
        """Positions [B, P, E] -> their landmarks (without them, the closing tokens) [B, C, E]."""
        return Take(self.landmark_places, self.num_positions)

    @cached_property
    def rows_per_chunk(self) -> int:
        """R: the most positions of a chunk in this call."""
        return int(self.slots[self.chunk >= 0].max(initial=-1)) + 1

    @cached_property
    def rows(self) -> Take:
        """Positions [B, P, E] -> [B, N * R, E]: chunk by chunk, R rows each."""
        index = np.full((len(self.chunk), self.num_chunks * self.rows_per_chunk), -1)
        row, place = np.nonzero(self.chunk >= 0)
        index[row, self.positions.index[row, place]] = place
        return Take(index, self.num_positions)

    @cached_property
    def positions(self) -> Take:
        """[B, N * R, E] -> positions [B, P, E]."""
        index = np.where(self.chunk >= 0, self.chunk * self.rows_per_chunk + self.slots, -1)
        return Take(index, self.num_chunks * self.rows_per_chunk)

    @cached_property
    def encoder_rows(self) -> Take:
        """The closed chunks as [B, C * (S + 1), E], every landmark in row S; without landmarks [B, C * S, E].

        From positions [B, P, E]; where some row began in an open chunk, from its S slots followed by them.
        """
        S = self.chunk_size
        assert S is not None
        index = np.full((len(self.chunk), self.num_closed, S + self.has_landmarks), -1)
        before = self._with_open(np.arange(self.num_positions))
        row, place = np.nonzero((self.chunk >= 0) & (self.chunk < self.closed[:, None]))
        chunk, slot = self.chunk[row, place], self.slots[row, place]
        slot = np.where(chunk == 0, slot + self.phases[row], slot)
        if self.has_landmarks:
            slot = np.where(self.is_landmark[row, place], S, slot)
        index[row, chunk, slot] = before[place]
        if self.begins_open and self.num_closed:
            slots = np.arange(S)
            held = (slots < self.phases[:, None]) & (self.closed > 0)[:, None]
            index[:, 0, :S] = np.where(held, slots, index[:, 0, :S])
        return Take(index.reshape(len(index), -1), self._sources)

    @cached_property
    def open_rows(self) -> Take:
        """The tokens of the chunk that stays open, [B, S, E] from its first; sources as in ``encoder_rows``."""
        S = self.chunk_size
        assert S is not None
        index = np.full((len(self.chunk), S), -1)
        mine = (self.chunk == self.closed[:, None]) & (self.chunk >= 0)
        row, place = np.nonzero(mine)
        slot = self.slots[row, place] + np.where(self.closed[row] == 0, self.phases[row], 0)
        index[row, slot] = self._with_open(place)
        if self.begins_open:
            slots = np.arange(S)
            held = (slots < self.phases[:, None]) & (self.closed == 0)[:, None]
            index = np.where(held, slots, index)
        return Take(index, self._sources)

    @cached_property
    def begins_open(self) -> bool:
        """Some row begins in the middle of a chunk."""
        return bool(self.phases.any())

    def _with_open(self, places: Integers) -> Integers:
        assert self.chunk_size is not None
        return places + self.chunk_size if self.begins_open else places

    @property
    def _sources(self) -> int:
        assert self.chunk_size is not None
        return self.num_positions + (self.chunk_size if self.begins_open else 0)

    def kept_for(self, key: object) -> Any:
        """What ``keep_for`` was given: layouts are asked for again and again, and what rests on them too."""
        return self._made.get(key)

    def keep_for(self, key: object, made: Any) -> None:
        self._made[key] = made

    def closing(self, keep: int | None) -> tuple[Booleans, Take]:
        """Of ``last_tokens(keep)``: [b, n] which are followed by a landmark; those landmarks, else the tokens."""
        own = self.last_tokens(keep).index
        row = np.arange(len(own))[:, None]
        after = np.minimum(own + 1, self.num_positions - 1)
        closes = (own >= 0) & self.is_landmark[row, after] & (own + 1 < self.num_positions)
        return closes, Take(np.where(closes, own + 1, own), self.num_positions)

    # --- several calls -------------------------------------------------------------------------------------

    def after(self, earlier: Grid) -> tuple[Take, Grid]:
        """The positions of an earlier call followed by these: how to take them, and their layout.

        Takes [B, P' + P, E], both side by side.
        """
        first, second = _alike(earlier.chunk, self.chunk)
        assert earlier.document is None
        assert self.document is None
        flags = _alike(earlier.is_landmark, self.is_landmark, rows=len(first))
        tokens = _alike(np.full_like(earlier.token, -1), self.token, rows=len(first))
        second = np.where(second >= 0, second + earlier._next_chunk[:, None], -1)
        chunk = np.concatenate([first, second], axis=1)
        phases, begun = (np.broadcast_to(x, len(first)) for x in (earlier.phases, earlier.begun))
        joined = Grid(
            chunk,
            np.concatenate(flags, axis=1),
            np.concatenate(tokens, axis=1),
            self.chunk_size,
            phases,
            landmarks=self.has_landmarks,
            begun=begun,
        )
        return joined.kept(chunk >= 0)

    def tail(self, reach: int, keep: int | None) -> tuple[Take, Grid, Integers]:
        """Of each row, what its last tokens depend on: ``reach`` positions before the first of the last ``keep``.

        Also the chunks [b] that are gone. ``keep`` None: all tokens of this call.
        """
        if (reach, keep) not in self._made:
            self._made[reach, keep] = self._tail(reach, keep)
        made: tuple[Take, Grid, Integers] = self._made[reach, keep]
        return made

    def _tail(self, reach: int, keep: int | None) -> tuple[Take, Grid, Integers]:
        if keep is None:
            keep = int((self.token >= 0).sum(1).max(initial=0))
        own = self.token >= 0
        remaining = np.flip(np.cumsum(np.flip(own, 1), 1), 1)  # tokens from here on
        kept = own & (remaining <= keep)
        first = np.where(kept.any(1), kept.argmax(1), self.counts) if keep else self.counts
        start = np.maximum(0, first - reach)
        row = np.arange(len(start))
        inside = start < self.counts
        gone = np.where(inside, self.chunk[row, np.where(inside, start, 0)], self._next_chunk)
        if not start.any():
            return Take(np.arange(self.num_positions)[None], self.num_positions), self, gone
        take, grid = self.kept(np.arange(self.num_positions) >= start[:, None])
        return take, grid, gone

    def kept(self, kept: Booleans) -> tuple[Take, Grid]:
        """Some of the positions [b or B, P], in their order: how to take them, and their layout."""
        assert self.document is None  # only with a cache, which holds one text per row
        kept = kept & (self.chunk >= 0)
        counts = kept.sum(1)
        width = int(counts.max(initial=0))
        index = np.full((len(kept), width), -1)
        row, place = np.nonzero(kept)
        at = (kept.cumsum(1) - 1)[row, place]
        index[row, at] = place
        here = np.arange(len(kept))[:, None] if len(self.chunk) > 1 else 0
        absent = index < 0
        chunk = np.where(absent, -1, self.chunk[here, index.clip(0)])
        first = chunk[:, 0] if width else np.zeros(len(kept), np.int64)
        phases = np.where(first > 0, 0, self.phases)  # its slots are counted from what is here
        begun = np.zeros(len(kept), np.int64) + self._open_positions
        if width:
            begun = np.where(counts > 0, self.chunk_slots[here, index.clip(0)][:, 0], begun)
        grid = Grid(
            np.where(absent, -1, chunk - first[:, None]),
            np.where(absent, False, self.is_landmark[here, index.clip(0)]),
            np.where(absent, -1, self.token[here, index.clip(0)]),
            self.chunk_size,
            phases,
            landmarks=self.has_landmarks,
            begun=begun,
        )
        return Take(index, self.num_positions), grid


def _alike(first: Any, second: Any, rows: int = 0) -> tuple[Any, Any]:
    rows = rows or max(len(first), len(second))
    return np.broadcast_to(first, (rows, first.shape[1])), np.broadcast_to(second, (rows, second.shape[1]))


def lay_out(
    tokens: int,
    chunk_size: int | None,
    phases: Integers | None = None,
    counts: Integers | None = None,
    close_chunk: bool | Booleans = False,
    documents: Integers | None = None,
    landmarks: bool = True,
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
    """
    if phases is None and counts is None and documents is None and isinstance(close_chunk, bool):
        return lay_out_alike(tokens, chunk_size, 0, close_chunk, landmarks)
    phases = np.zeros(1, np.int64) if phases is None else phases
    counts = np.full(1, tokens) if counts is None else counts
    alike = (phases == phases[0]).all() and (counts == counts[0]).all()
    if alike and documents is None and isinstance(close_chunk, bool) and counts[0] == tokens:
        return lay_out_alike(tokens, chunk_size, int(phases[0]), close_chunk, landmarks)
    rows = max(len(phases), len(counts), 1 if isinstance(close_chunk, bool) else len(close_chunk))
    rows = max(rows, 1 if documents is None else len(documents))
    phases, counts = np.broadcast_to(phases, rows), np.broadcast_to(counts, rows)
    return _build(tokens, chunk_size, phases, counts, close_chunk, documents, landmarks)


def lay_out_alike(
    tokens: int, chunk_size: int | None, phase: int, close_chunk: bool, landmarks: bool = True
) -> Grid:
    """The grid of a call whose rows are all laid out alike; arguments as those of ``lay_out``."""
    if torch.compiler.is_compiling():
        tokens = len(range(tokens))  # a constant of the graph, though another length came before
        return _compiled[_hold(tokens, chunk_size, phase, close_chunk, landmarks)]
    known = _small if tokens <= _SMALL else _large
    return known(tokens, chunk_size, phase, close_chunk, landmarks)


# Layouts of compiled graphs, where torch.compile finds them: constants may be tensors and numbers, not objects.
_compiled: dict[str, Grid] = {}
_NUMBERS = ("num_chunks", "num_closed", "closed", "rows_per_chunk", "landmarks", "rows", "positions")


@constant
def _hold(tokens: int, chunk_size: int | None, phase: int, close_chunk: bool, landmarks: bool) -> str:
    name = f"{tokens} {chunk_size} {phase} {close_chunk} {landmarks}"
    if name not in _compiled:
        grid = _compiled[name] = _uniform(tokens, chunk_size, phase, close_chunk, landmarks)
        # computed here they are plain attributes; computed while tracing they would be part of the graph
        grid._from_tokens(tokens)
        grid.last_tokens(None)
        for attribute in _NUMBERS if chunk_size is None else (*_NUMBERS, "has_short_chunks", "encoder_rows"):
            getattr(grid, attribute)
    return name


def _uniform(tokens: int, chunk_size: int | None, phase: int, close_chunk: bool, landmarks: bool) -> Grid:
    return _build(tokens, chunk_size, np.array([phase]), np.array([tokens]), close_chunk, landmarks=landmarks)


# Decoding and training ask for few layouts again and again; long ones take hundreds of KiB each.
_SMALL = 64
_small, _large = lru_cache(maxsize=512)(_uniform), lru_cache(maxsize=16)(_uniform)


def _build(
    tokens: int,
    S: int | None,
    phases: Integers,
    counts: Integers,
    close_chunk: bool | Booleans,
    documents: Integers | None = None,
    landmarks: bool = True,
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
        return Grid(chunk, landmark, where, S, phases)
    # a landmark is of the document of the token before it
    document = np.full((rows, positions), -1)
    document[row, place] = documents[row, t]
    row, t = np.nonzero(present)
    document[row, t + before[row, t]] = documents[row, t]
    return Grid(chunk, landmark, where, S, phases, document)
