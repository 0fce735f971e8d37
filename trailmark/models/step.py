"""One call of a model on a cache: what it finds there, and what it leaves once it is done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.cache import ChunkCache
from trailmark.memory.chunks import MemoryEntries, MemorySize
from trailmark.memory.state import CacheState, Deferred, Retrieved
from trailmark.memory.window import Span, Window, WindowCall
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.grid import Grid, Integers, join, tail
from trailmark.models.layers import Place


class Step:
    """Collects what a call changes; ``commit`` puts it in place in one go.

    Args:
        cache: what is carried. grid: the layout of the new tokens.
        batch_size: B, the rows of the call.
        tokens: int64 [B, T] of the call, for a memory that keeps them, or with ``keeps_ids`` a model that does.
    """

    def __init__(
        self,
        cache: ChunkCache,
        grid: Grid,
        config: TrailmarkConfig,
        batch_size: int,
        tokens: Tensor | None = None,
        keeps_ids: bool = False,
    ) -> None:
        self.cache, self.grid, self.config = cache, grid, config
        self.before = cache.begun(batch_size)
        rows = np.zeros(batch_size, np.int64)
        self.counts = rows + grid.counted
        # positions of each row after the call, as windows count
        self.end = self.before.num_positions + self.counts
        self.size: MemorySize = self.before.memory
        self.open_states = self.before.open_states
        self.open_ids: Tensor | None = self.before.open_ids
        self.states, self.state_kv = self.before.states, self.before.state_kv
        self.deferred: Deferred | None = None
        self.pending: list[Retrieved | None] = list(self.before.pending)
        self._windows = dict(zip(cache.stages, cache.windows, strict=True))  # of each stage that has layers
        self._calls: dict[int, WindowCall] = {}
        # the last stage: the next one mostly has the same positions
        self._placed: tuple[Grid, Place] | None = None
        self.ids: Tensor | None = None  # [B, P] of the call, where they are kept
        self.is_apart = False
        if tokens is not None and config.retrieves and (keeps_ids or cache.memory.keeps_tokens):
            self.ids = grid.insert_landmarks(tokens.long(), None)
            self.open_ids = self._kept_open(self.before.open_ids, self.ids)

    @classmethod
    def apart(
        cls, cache: ChunkCache, first: int, grid: Grid, config: TrailmarkConfig, batch_size: int
    ) -> Step:
        """A call whose first position has the number ``first`` in a text that ``cache`` (of one row) has read further.

        It sees the sinks that lie there, and nothing else of what was read. Never to be committed.
        """
        text = cache.branch(batch_size)  # its windows are copies: a call of one position writes into them
        text.state = replace(text.begun(batch_size), num_positions=np.full(batch_size, first))
        step = cls(text, grid, config, batch_size)
        step.is_apart = True
        return step

    # --- windows -------------------------------------------------------------------------------------------

    def place(self, stage: int, grid: Grid, x: Tensor, windows: Integers | None = None) -> Place:
        """Where positions x [B, P, E], the last of the text, stand for the layers of a stage, all of one window.

        ``windows`` [b, P]: of each position its own, at most that.
        """
        counts = np.zeros_like(self.end) + grid.counted
        window = self._windows.get(stage, self.config.sliding_window)
        sinks = 0 if window is None else self.config.num_sinks
        span, known = self.before.spans[stage], None
        other, earlier = self._placed or (None, None)
        if earlier is not None and grid is other and windows is None and earlier.windows is None:
            assert earlier.call is not None
            if earlier.call.goes_on(span, window, sinks, x.device):
                self._calls[stage] = earlier.call  # as in decoding, where one stage saw what the other did
                return earlier
        call = WindowCall(span, self.end - counts, counts, grid.num_counted, window, x.device, sinks)
        self._calls[stage] = call
        if earlier is not None:
            assert earlier.call is not None
            same = grid is other or (grid.counts_landmarks and earlier.call.stands_as(call))
            known = earlier if same else None
        place = Place.of(self.config, grid, x, call, known, window, windows)
        self._placed = grid, place
        return place

    def window(self, layer: int) -> Window:
        return self.before.layers[layer]

    # --- chunks --------------------------------------------------------------------------------------------

    def with_open(self, x: Tensor) -> Tensor:
        """Positions x [B, P, E] after the open chunk's S slots, if some row has an open chunk."""
        return self._after_open(self.before.open_states, x)

    def with_open_ids(self, ids: Tensor) -> Tensor:
        """The same of token ids [B, P]."""
        return self._after_open(self.before.open_ids, ids)

    def _after_open(self, held: Tensor | None, x: Tensor) -> Tensor:
        if not self.grid.begins_open:
            return x
        assert held is not None
        return torch.cat([held, x], dim=1)

    def keep_open(self, x: Tensor) -> None:
        """Keep of positions x [B, P, E] what belongs to the chunk that stays open."""
        self.open_states = self._kept_open(self.before.open_states, x)

    def _kept_open(self, held: Tensor | None, x: Tensor) -> Tensor:
        grid = self.grid
        if grid.num_positions == 1 and not grid.num_closed and held is not None and grid.counts.all():
            # its slot is not read before the call is done, so a call that fails has harmed nothing
            if len(grid.counts) == 1:
                held[:, int(grid.phases[0])] = x[:, 0].detach()
            else:
                row, slot = torch.arange(len(held)), torch.from_numpy(grid.phases.copy())
                held[row.to(x.device), slot.to(x.device)] = x[:, 0].detach()
            return held
        with torch.inference_mode(False):
            fresh = x.new_empty(x.shape[0], grid.open_rows.index.shape[1], *x.shape[2:])
        fresh.copy_(grid.open_rows(self._after_open(held, x.detach())))
        return fresh

    def keep_states(self, states: Tensor, kv: Tensor) -> None:
        """Keep recurrent states [B, M, E] and their keys and values [B, M, 2 J D]."""
        with torch.inference_mode(False):  # copies: views would keep more, and no graph could hold them
            self.states, self.state_kv = states.detach().clone(), kv.detach().clone()

    def remember(self, entries: MemoryEntries, rows: Integers | None = None) -> None:
        """Write the closed chunks into the memory: entries of all rows, or of ``rows`` [b], which alone close some."""
        if rows is not None:
            entries = _in_rows(entries, rows, len(self.end))
        if self.cache.memory.keeps_tokens and self.ids is not None:
            ids = self.grid.tokens_of_chunks(self.with_open_ids(self.ids))
            entries = entries._replace(tokens=ids)
        starts = (self.end - self.counts)[:, None] + self.grid.chunk_starts
        counts = np.zeros_like(self.end) + self.grid.closed
        self.size = self.cache.memory.write(self.before.memory, entries, starts, counts)

    def take_pending(self, group: int, grid: Grid) -> Retrieved | None:
        """What the first chunk of positions laid out as ``grid`` reads; None: nothing."""
        pending = self.before.pending[group]
        if pending is None:
            return None
        counts = np.zeros_like(self.end) + grid.counted
        upper = self.before.spans[self.cache.stages[-1]]
        gap = self.end - counts != upper.end  # what was selected there is for chunks that were left out
        if gap.any():
            if gap.all():
                return None
            return pending.without(gap)
        return pending

    def put_pending(
        self,
        group: int,
        grid: Grid,
        chosen: Integers,
        weights: Tensor,
        earlier: Retrieved | None,
        heads: slice = slice(None),
    ) -> None:
        """Fetch what the last landmark of each row selected: chosen and weights [B, C, K]."""
        B = len(chosen)
        row, last = np.arange(B), np.zeros(B, np.int64) + grid.closed - 1  # [B]; -1: none was closed
        closes = last >= 0
        indices = np.where(closes[:, None], chosen[row, last.clip(0)], -1)
        place = torch.from_numpy(last.clip(0)).to(weights.device)
        mine = weights[torch.arange(B, device=weights.device), place]  # [B, K]
        goes_on = None if earlier is None or closes.all() else earlier.indices[~closes]
        if (indices < 0).all() and (goes_on is None or (goes_on < 0).all()):
            self.pending[group] = None
            return
        k, v, lengths = self.fetch(indices, heads)
        short = self.has_short(lengths)
        fresh = Retrieved.of(indices, lengths, mine.detach(), k, v, short)
        self.pending[group] = fresh if earlier is None or goes_on is None else earlier.replaced(closes, fresh)

    def fetch(self, chunks: Integers, heads: slice = slice(None)) -> tuple[Tensor, Tensor, Integers]:
        """Keys and values [B, n, S, J, D] and lengths [B, n] of chunks [B, n] of the memory; -1 gives any.

        ``heads``: of those that the memory keeps, which are wanted.
        """
        records, lengths = self.cache.memory.gather(chunks)
        k, v = (records[:, :, part, heads].transpose(2, 3) for part in (0, 1))
        return k, v, lengths

    def has_short(self, lengths: Integers) -> bool:
        """Whether attention is told the lengths [B, n] of the chunks that it reads.

        In a batch it is, if any chunk was closed early: what a neighbour selects must not change a row's bits.
        """
        assert self.config.chunk_size
        return bool((lengths < self.config.chunk_size).any()) or (len(lengths) > 1 and self.size.short)

    # --- what the upper layers have not seen -----------------------------------------------------------------

    def tail(self, x: Tensor, reach: int | None, keep: int | None) -> tuple[Tensor, Grid, Integers]:
        """The positions that the upper layers must see: states, layout and the number [B] of their first chunk.

        Those deferred by earlier calls and x [B, P, E], but no more than ``reach`` positions before the first
        of the last ``keep`` tokens (None: all of this call).
        """
        grid, first_chunk = self.grid, self.before.memory.chunks
        if (waiting := self.before.deferred) is not None:
            none = np.full_like(waiting.chunk, -1)
            phases = np.zeros(len(waiting.chunk), np.int64)
            earlier = Grid(
                waiting.chunk,
                waiting.is_landmark,
                none,
                grid.chunk_size,
                phases,
                landmarks=grid.has_landmarks,
                begun=waiting.begun,
                counts_landmarks=grid.counts_landmarks,
            )
            take, grid = join(earlier, grid)
            x, first_chunk = take(torch.cat([waiting.states, x], dim=1)), waiting.first_chunk
        if reach is None:
            return x, grid, first_chunk
        take, grid, gone = tail(grid, reach, keep)
        return take(x), grid, first_chunk + gone

    def defer(self, x: Tensor, reach: int) -> None:
        """Leave x [B, P, E] to a later call's upper layers."""
        states, grid, first_chunk = self.tail(x, reach, 0)
        with torch.inference_mode(False):  # a copy: a view would keep the whole call's states
            states = states.detach().clone()
        self.deferred = Deferred(states, grid.chunk, grid.is_landmark, first_chunk, grid.begun)

    # --- the end -------------------------------------------------------------------------------------------

    def commit(self) -> None:
        before, tokens = self.before, (self.grid.token >= 0).sum(1)
        spans, layers = list(before.spans), list(before.layers)
        for stage, call in self._calls.items():
            spans[stage] = Span(*call.after)
        for number, layer in enumerate(layers):
            stage = self.cache.stages[number]
            if stage in self._calls:
                layers[number] = self._calls[stage].staged(layer)
        self.cache.state = CacheState(
            num_tokens=before.num_tokens + tokens,
            num_positions=self.end,
            phases=np.zeros_like(self.end) + self.grid.open_tokens,
            memory=self.size,
            spans=tuple(spans),
            layers=tuple(layers),
            pending=tuple(self.pending),
            open_states=self.open_states,
            open_ids=self.open_ids,
            deferred=self.deferred,
            states=self.states,
            state_kv=self.state_kv,
            focus=before.focus,
        )


def _in_rows(entries: MemoryEntries, rows: Integers, batch_size: int) -> MemoryEntries:
    """Entries of some rows [b, n, ...] among those of all [B, n, ...]; the others have none."""
    place = torch.from_numpy(rows)

    def among(x: Tensor) -> Tensor:
        x = x.expand(len(rows), *x.shape[1:]).detach()
        return x.new_zeros(batch_size, *x.shape[1:]).index_copy_(0, place.to(x.device), x)

    return entries.each(among)
