"""The layout of one call: which token, chunk and landmark stands where, and how to take positions from it.

Everything here is numbers, made once for a layout and used by all layers. ``torch.compile`` looks into nothing of it:
what a layout says is a constant of the graph (:func:`trailmark.models.takes.constant`).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.tables import Booleans, Integers
from trailmark.models.takes import Table, Take, constant


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
        counts_landmarks: whether windows count landmarks as positions; else tokens alone.
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
        counts_landmarks: bool = True,
    ) -> None:
        self.has_landmarks = landmarks
        self.counts_landmarks = counts_landmarks
        self.begun = phases if begun is None else begun
        self.chunk, self.is_landmark, self.token = chunk, is_landmark, token
        self.chunk_size, self.phases, self.document = chunk_size, phases, document
        # asked for before, by what they depend on: decoding and training ask for the same again
        self._from_tokens: dict[int, Take] = {}
        self._last_tokens: dict[int | None, Take] = {}
        self._limits: dict[int | None, Table] = {}
        self._caps: dict[int, Table | None] = {}
        self._asking: dict[tuple[int, int], tuple[Table, Table]] = {}
        self.tails: dict[tuple[int, int | None], tuple[Take, Grid, Integers]] = {}
        """Of :func:`trailmark.models.grid.tail`, by its arguments."""

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
    def is_counted(self) -> Booleans:
        """[b, P] positions that windows count and show: all, or the tokens alone."""
        return (self.chunk >= 0) & (self.counts_landmarks | ~self.is_landmark)

    @cached_property
    def counted(self) -> Integers:
        """[b] positions of each row that windows count."""
        return self.is_counted.sum(1)

    @cached_property
    def num_counted(self) -> int:
        """The most of any row."""
        return int(self.counted.max(initial=0))

    @cached_property
    def numbers(self) -> Integers:
        """[b, P] how many positions before each are counted: its own number, or that of the token after a landmark."""
        return self.is_counted.cumsum(1) - self.is_counted

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

    def closing_rows(self) -> Integers | None:
        """The rows that close a chunk, where they are fewer than all, and at least one."""
        closing = np.flatnonzero(self.closed)
        return closing if 0 < len(closing) < len(self.closed) else None

    def of_rows(self, rows: Integers) -> Grid:
        """The layout of some of several rows."""
        document = None if self.document is None else self.document[rows]
        some = self.chunk[rows], self.is_landmark[rows], self.token[rows]
        return Grid(
            *some,
            self.chunk_size,
            self.phases[rows],
            document,
            self.has_landmarks,
            self.begun[rows],
            self.counts_landmarks,
        )

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
        begins = np.zeros((len(self.chunk), self.num_chunks), bool)
        begins[:, :1] = True
        if self.document is not None:
            row, place = np.nonzero((np.diff(self.document, axis=1, prepend=-1) != 0) & (self.chunk >= 0))
            begins[row, self.chunk[row, place]] = True
        return begins

    @cached_property
    def first_chunks(self) -> Integers:
        """[b, N] the first chunk of each chunk's document."""
        return np.maximum.accumulate(np.where(self.begins_document, np.arange(self.num_chunks), 0), axis=1)

    @cached_property
    def lengths(self) -> Integers:
        """[b, C] tokens of each closed chunk; 0 where a row closes fewer."""
        lengths = np.zeros((len(self.chunk), self.num_closed), np.int64)
        row, place = np.nonzero(self.is_landmark)
        lengths[row, self.chunk[row, place]] = self.slots[row, place] + (not self.has_landmarks)
        if self.num_closed:
            lengths[:, 0] += np.where(self.closed > 0, self.phases, 0)
        return lengths

    @cached_property
    def landmark_places(self) -> Integers:
        """[b, C] positions of the landmarks (without them, of the closing tokens); -1 where a row closes fewer."""
        places = np.full((len(self.chunk), self.num_closed), -1)
        row, place = np.nonzero(self.is_landmark)
        places[row, self.chunk[row, place]] = place
        return places

    @cached_property
    def landmark_numbers(self) -> Integers:
        """[b, C] the numbers of the landmarks (``numbers``); -1 where a row closes fewer."""
        places = self.landmark_places
        if not self.num_closed:
            return places
        return np.where(places < 0, -1, np.take_along_axis(self.numbers, places.clip(0), 1))

    @property
    def chunk_starts(self) -> Integers:
        """[b, C] the number of the first position of each closed chunk; negative: in an earlier call."""
        return self.landmark_numbers + (not self.has_landmarks) - self.lengths

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
    def open_positions(self) -> Integers:
        """[b] positions of the chunk that stays open, from its first."""
        row, last = np.arange(len(self.chunk)), self.counts - 1
        if not self.num_positions:
            return np.zeros_like(last) + self.begun
        after = np.where(self.is_landmark[row, last], 0, self.chunk_slots[row, last] + 1)
        return np.where(last < 0, self.begun, after)

    @cached_property
    def next_chunk(self) -> Integers:
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
        return self._lengths.on(device)

    def candidates(self, first_visible: int | None, device: torch.device) -> Tensor:
        """int64 [B, C], or [C] for all rows: at each chunk's end in a whole text, the chunks before it.

        ``first_visible``: only those that begin before the last position's place + this; None: all.
        """
        return self._candidates(first_visible, device)[0]

    def first_candidates(self, device: torch.device) -> Tensor | int:
        """int64 [b, C]: at each landmark, the first chunk of its document; 0: of every row, its first."""
        return 0 if self.document is None else self._first_candidates.on(device)

    def begins_document_on(self, device: torch.device) -> Tensor | None:
        """bool [b, N, 1]: ``begins_document``; None: each row is one document."""
        return None if self.document is None else self._begins_document.on(device)

    def documents_on(self, device: torch.device) -> Tensor | None:
        """int64 [b, n]: ``document`` of what is counted, side by side; None: each row is one document."""
        return None if self.document is None else self._documents.on(device)

    def numbers_on(self, device: torch.device) -> Tensor:
        """int64 [b, P]: ``numbers``."""
        return self._numbers.on(device)

    def capped_on(self, most: int, device: torch.device) -> Tensor | None:
        """int64 [b, P]: ``numbers``, but none more than ``most`` after its document's first; None: none is more."""
        return self._capped(most, device)[0]

    @constant
    def _capped(self, most: int, device: torch.device) -> tuple[Tensor | None]:
        if most not in self._caps:
            capped = np.minimum(self.numbers, self.document_starts + most)
            beyond = (capped != self.numbers) & (self.chunk >= 0)
            self._caps[most] = Table(capped) if beyond.any() else None
        table = self._caps[most]
        return (None if table is None else table.on(device),)

    @constant
    def asking(self, window: int, sinks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """What the landmarks of a whole text see, where windows do not show them: see ``layers.Asking``."""
        key = window, sinks
        if key not in self._asking:
            number, place = self.landmark_numbers, self.landmark_places.clip(0)
            start = np.take_along_axis(self.document_starts, place, 1) if self.num_closed else place
            before = number[..., None] - window + np.arange(1, window)
            before = np.where((before >= start[..., None]) & (number[..., None] >= 0), before, -1)
            seen = np.concatenate([start[..., None] + np.arange(sinks), before], axis=2)
            self._asking[key] = Table(seen), Table(number)
        seen_on, number_on = (table.on(device) for table in self._asking[key])
        return seen_on, number_on, seen_on

    @cached_property
    def _lengths(self) -> Table:
        return Table(self.lengths)

    @cached_property
    def _landmark_mask(self) -> Table:
        return Table(self.is_landmark[..., None])

    @cached_property
    def _first_candidates(self) -> Table:
        return Table(self.first_chunks[:, : self.num_closed])

    @cached_property
    def _begins_document(self) -> Table:
        return Table(self.begins_document[..., None])

    @cached_property
    def _documents(self) -> Table:
        assert self.document is not None
        if self.counts_landmarks:
            return Table(self.document)
        place = self.tokens.index
        return Table(np.where(place < 0, -1, np.take_along_axis(self.document, place.clip(0), 1)))

    @cached_property
    def _numbers(self) -> Table:
        return Table(self.numbers)

    @constant
    def _candidates(self, first_visible: int | None, device: torch.device) -> tuple[Tensor]:
        if first_visible not in self._limits:
            self._limits[first_visible] = Table(candidate_limits(self, first_visible))
        return (self._limits[first_visible].on(device),)

    # --- between layouts -----------------------------------------------------------------------------------

    def insert_landmarks(self, tokens: Tensor, landmark: Tensor | None) -> Tensor:
        """Tokens [B, T, E] and the landmark [E] -> positions [B, P, E]."""
        x = self.from_tokens(tokens.shape[1])(tokens)
        # where nothing is closed it still takes part for its gradient: zeros, which DDP waits for
        if landmark is None or not (self.num_closed or torch.is_grad_enabled()):
            return x
        mask = self._landmark_mask.on(x.device)  # [b, P, 1]
        return torch.where(mask, landmark.to(x.dtype), x)

    def from_tokens(self, width: int) -> Take:
        """Tokens [B, width, ...] -> positions [B, P, ...]."""
        if width not in self._from_tokens:
            self._from_tokens[width] = Take(self.token, width)
        return self._from_tokens[width]

    def last_tokens(self, keep: int | None) -> Take:
        """Positions [B, P, E] -> the last ``keep`` tokens of each row, [B, keep, E]; None: all of this call.

        All: [B, T, E] from each row's first token on. A number: each row's last token is at the end.
        """
        if keep not in self._last_tokens:
            self._last_tokens[keep] = Take(last_token_places(self, keep), self.num_positions)
        return self._last_tokens[keep]

    @cached_property
    def landmarks(self) -> Take:
        """Positions [B, P, E] -> their landmarks (without them, the closing tokens) [B, C, E]."""
        return Take(self.landmark_places, self.num_positions)

    @cached_property
    def tokens(self) -> Take:
        """Positions [B, P, E] -> the tokens among them."""
        kept = (self.chunk >= 0) & ~self.is_landmark
        index = np.full((len(kept), int(kept.sum(1).max(initial=0))), -1)
        row, place = np.nonzero(kept)
        index[row, (kept.cumsum(1) - 1)[row, place]] = place
        return Take(index, self.num_positions)

    @cached_property
    def from_parts(self) -> Take:
        """The tokens, followed by the landmarks, [B, T + C, E] -> positions [B, P, E]."""
        index = np.full(self.chunk.shape, -1)
        row, place = np.nonzero(self.tokens.index >= 0)
        index[row, self.tokens.index[row, place]] = place
        row, place = np.nonzero(self.landmark_places >= 0)
        index[row, self.landmark_places[row, place]] = self.tokens.count + place
        return Take(index, self.tokens.count + self.num_closed)

    @cached_property
    def document_starts(self) -> Integers:
        """[b, P] the number of the first position of each position's document."""
        if self.document is None:
            return np.zeros_like(self.chunk)
        begins = np.diff(self.document, axis=1, prepend=-1) != 0
        return np.maximum.accumulate(np.where(begins, self.numbers, 0), axis=1)

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
        return Take(closed_chunk_places(self), self._sources)

    def tokens_of_chunks(self, x: Tensor) -> Tensor:
        """Of positions x [B, P, ...], as ``encoder_rows`` takes them, the closed chunks' tokens [B, C, S, ...].

        What stands past a chunk's length has no meaning.
        """
        S = self.chunk_size
        assert S is not None
        if not self.num_closed:
            return x.new_zeros(len(x), 0, S, *x.shape[2:])
        return self.encoder_rows(x).unflatten(1, (self.num_closed, -1))[:, :, :S]

    @cached_property
    def open_rows(self) -> Take:
        """The tokens of the chunk that stays open, [B, S, E] from its first; sources as in ``encoder_rows``."""
        return Take(open_chunk_places(self), self._sources)

    @cached_property
    def begins_open(self) -> bool:
        """Some row begins in the middle of a chunk."""
        return bool(self.phases.any())

    @property
    def _sources(self) -> int:
        assert self.chunk_size is not None
        return self.num_positions + (self.chunk_size if self.begins_open else 0)

    def closing(self, keep: int | None) -> tuple[Booleans, Take]:
        """Of ``last_tokens(keep)``: [b, n] which are followed by a landmark; those landmarks, else the tokens."""
        own = self.last_tokens(keep).index
        row = np.arange(len(own))[:, None]
        after = np.minimum(own + 1, self.num_positions - 1)
        closes = (own >= 0) & self.is_landmark[row, after] & (own + 1 < self.num_positions)
        return closes, Take(np.where(closes, own + 1, own), self.num_positions)

    def prepared(self) -> Grid:
        """This layout with everything made that a plain call on it asks for.

        Made while ``torch.compile`` traces such a call, it would be part of the graph.
        """
        self.from_tokens(int(self.token.max(initial=-1)) + 1)
        self.last_tokens(None)
        for name in _ASKED_FOR if self.chunk_size is None else (*_ASKED_FOR, *_ASKED_FOR_WITH_CHUNKS):
            getattr(self, name)
        return self


_ASKED_FOR = (
    *("num_chunks", "num_closed", "closed", "rows_per_chunk", "landmarks", "rows", "positions"),
    *("_landmark_mask", "_lengths", "_numbers", "num_counted", "tokens", "from_parts"),
)
_ASKED_FOR_WITH_CHUNKS = ("has_short_chunks", "encoder_rows")


# --- index tables ----------------------------------------------------------------------------------------


def last_token_places(grid: Grid, keep: int | None) -> Integers:
    """[b, n] where the tokens of each row stand, all or the last ``keep``; -1: there is none."""
    width = int(grid.token.max(initial=-1)) + 1
    places = np.full((len(grid.chunk), width), -1)
    row, place = np.nonzero(grid.token >= 0)
    places[row, grid.token[row, place]] = place
    if keep is None:
        return places
    tokens = grid.token.max(1, initial=-1) + 1  # of this call, those that are left out too
    index = tokens[:, None] - keep + np.arange(keep)
    row = np.arange(len(places))[:, None]
    return np.where(index >= 0, places[row, index.clip(0)], -1)


def candidate_limits(grid: Grid, first_visible: int | None) -> Integers:
    """See :meth:`Grid.candidates`."""
    places = grid.landmark_numbers
    limits = np.where(places >= 0, np.arange(grid.num_closed), 0)
    if first_visible is not None:
        starts = grid.chunk_starts
        for b, i in zip(*np.nonzero(places >= 0), strict=True):
            limits[b, i] = np.searchsorted(starts[b, :i], places[b, i] + first_visible)
    return limits if len(limits) > 1 else limits[0]


def closed_chunk_places(grid: Grid) -> Integers:
    """[b, C * rows] where the rows of each closed chunk stand: see :attr:`Grid.encoder_rows`."""
    S = grid.chunk_size
    assert S is not None
    index = np.full((len(grid.chunk), grid.num_closed, S + grid.has_landmarks), -1)
    row, place = np.nonzero((grid.chunk >= 0) & (grid.chunk < grid.closed[:, None]))
    chunk, slot = grid.chunk[row, place], grid.slots[row, place]
    slot = np.where(chunk == 0, slot + grid.phases[row], slot)
    if grid.has_landmarks:
        slot = np.where(grid.is_landmark[row, place], S, slot)
    index[row, chunk, slot] = place + (S if grid.begins_open else 0)
    if grid.begins_open and grid.num_closed:
        slots = np.arange(S)
        held = (slots < grid.phases[:, None]) & (grid.closed > 0)[:, None]
        index[:, 0, :S] = np.where(held, slots, index[:, 0, :S])
    return index.reshape(len(index), -1)


def open_chunk_places(grid: Grid) -> Integers:
    """[b, S] where the tokens of the chunk that stays open stand: see :attr:`Grid.open_rows`."""
    S = grid.chunk_size
    assert S is not None
    index = np.full((len(grid.chunk), S), -1)
    row, place = np.nonzero((grid.chunk == grid.closed[:, None]) & (grid.chunk >= 0))
    slot = grid.slots[row, place] + np.where(grid.closed[row] == 0, grid.phases[row], 0)
    index[row, slot] = place + (S if grid.begins_open else 0)
    if grid.begins_open:
        slots = np.arange(S)
        held = (slots < grid.phases[:, None]) & (grid.closed == 0)[:, None]
        index = np.where(held, slots, index)
    return index
