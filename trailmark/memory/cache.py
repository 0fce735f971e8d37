"""The cache: all that a model carries from call to call, of a batch of texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from trailmark.files import HeldFolder
from trailmark.memory.chunks import ChunkMemory, MemorySize
from trailmark.memory.joined import JoinedMemory, join_states, of_each_row
from trailmark.memory.schema import Expected
from trailmark.memory.snapshot import load_state, save_state
from trailmark.memory.state import STATES, CacheState, take_rows
from trailmark.memory.tables import Integers
from trailmark.memory.window import Span, Window


class ChunkCache(Cache):
    """Windows, the open chunk, what it reads, and the memory of past chunks.

    Rows may hold texts of different lengths, at different places of a chunk. The window is constant: per layer
    and row 2 (n + W) J D numbers. The memory grows by 2 S J D + E numbers (of a
    model that keeps several sets of keys and values, 2 S J D for each) and 24 bytes a chunk.

    Args:
        model: what it was made for; a model refuses another's.
        windows: W of each layer; None: no limit. stages: of each layer, which of the stages it belongs to:
            layers of a stage have always seen the same positions.
        num_groups: G.
        memory: where chunks go.
        sinks: n, first positions of a text that a layer with a window keeps too.
    """

    is_compileable = False  # asked by transformers' generate

    def __init__(
        self,
        model: tuple[object, ...],
        windows: Sequence[int | None],
        stages: Sequence[int],
        num_groups: int = 0,
        memory: ChunkMemory | None = None,
        sinks: int = 0,
    ) -> None:
        self.sinks = sinks
        self.model, self.windows, self.stages, self.num_groups = model, windows, stages, num_groups
        self.memory = memory or ChunkMemory()
        self.state: CacheState | None = None
        self.notes: dict[str, Any] = {}
        """JSON of the user's own, saved and loaded with the cache: what was read, for instance."""
        self.identity: Callable[[], dict[str, Any]] = (
            dict  # of the weights: what a saved memory is checked by
        )
        super().__init__(layers=[])

    @property
    def layers(self) -> list[Any]:
        """Of transformers' ``Cache``: one :class:`Window` per layer."""
        return list(self._empty_layers() if self.state is None else self.state.layers)

    @layers.setter
    def layers(self, value: list[Any]) -> None:
        if value:
            raise ValueError("layers: expected none, a ChunkCache makes its own.")

    def _empty_layers(self) -> tuple[Window, ...]:
        return tuple(Window(w, 0 if w is None else self.sinks) for w in self.windows)

    def begun(self, batch_size: int) -> CacheState:
        """The present state; before the first call, the empty one of so many rows."""
        if self.state is not None:
            return self.state
        zero = np.zeros(batch_size, np.int64)
        return CacheState(
            num_tokens=zero,
            num_positions=zero,
            phases=zero,
            memory=MemorySize(zero, 0),
            spans=(Span(zero, zero),) * (max(self.stages) + 1),
            layers=self._empty_layers(),
            pending=(None,) * self.num_groups,
        )

    # --- how far it is -------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, of the longest row; landmarks are not counted."""
        return 0 if self.state is None else int(self.state.num_tokens.max())

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int | None:
        """B, the rows that were read; None: nothing yet."""
        return None if self.state is None else len(self.state.num_tokens)

    @property
    def num_tokens(self) -> Integers:
        """[B] tokens read of each row."""
        return np.zeros(0, np.int64) if self.state is None else self.state.num_tokens

    @property
    def num_chunks(self) -> Integers:
        """[B] chunks in memory of each row."""
        return np.zeros(0, np.int64) if self.state is None else self.state.memory.chunks

    def window_bytes(self) -> int:
        """Bytes of the windows, the open chunk, what it reads, recurrent states and what waits for the upper layers.

        What decoding on a CPU copies of what the open chunk reads, in a lower precision or with absent keys, is not
        counted.
        """
        if self.state is None:
            return 0
        held = [getattr(self.state, name) for name in STATES]
        held += [] if self.state.deferred is None else [self.state.deferred.states]
        held += [x for got in self.state.pending if got is not None for x in (got.k, got.v, got.weights)]
        numbers = sum(x.numel() * x.element_size() for x in held if x is not None)
        cell = 0 if self.state.cell is None else self.state.cell.num_bytes()
        return sum(x.num_bytes() for x in self.state.layers) + numbers + cell

    def memory_bytes(self) -> int:
        """Bytes of the chunks in memory, on whatever tier; see :meth:`ChunkMemory.num_bytes`."""
        return 0 if self.state is None else self.memory.num_bytes(self.state.memory)

    def num_bytes(self) -> int:
        """Bytes of all that it holds: :meth:`memory_bytes` and :meth:`window_bytes`."""
        return self.memory_bytes() + self.window_bytes()

    def save(self, folder: str | Path, held: HeldFolder | None = None) -> None:
        """Save everything in ``folder``, for ``model.load_cache``; on tier "disk" chunks that lie there stay there.

        A memory that was saved there before is replaced in one step: a save that is killed leaves it whole.

        Args:
            held: see :func:`trailmark.memory.saved.save`.

        Raises:
            ValueError: nothing was read, the folder cannot be written to, the disk is full, or chunks that come from a
                saved memory were damaged since.
        """
        if self.state is None:
            raise ValueError(
                "cache: expected one that has read something, got an empty one. Read a text first."
            )
        if isinstance(self.memory, JoinedMemory):
            raise ValueError(
                f"cache: expected one memory to save, got {self.batch_size} that were joined. Take a row out with "
                "cache.leave([row]), and save that."
            )
        save_state(self.state, self.memory, folder, self.identity(), self.notes, held)

    def load(self, folder: str | Path, device: torch.device, expected: Expected) -> None:
        """Go on from what was saved in ``folder``; this cache is empty. Models call it: ``model.load_cache``.

        Args:
            expected: what the model's state is like.
        """
        identity = self.identity()
        self.state, self.notes = load_state(folder, self.begun, self.memory, identity, device, expected)

    # --- rows ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything that was read."""
        memory = self.memory.emptied()
        self.state = None
        self.memory, self.notes = memory, {}

    def branch(self, batch_size: int = 1) -> ChunkCache:
        """A cache of ``batch_size`` rows that go on from here; this one (of one row) stays as it is.

        They share its memory: nothing of it is copied, and what they add is their own.
        """
        if self.batch_size not in (None, 1):
            raise ValueError(
                f"branch: expected a cache of one row, got a batch of {self.batch_size}. Read one text a time."
            )
        other = self._alike()
        other.memory = self.memory.branch(self.begun(1).memory)
        if self.state is None:
            return other
        other.state = take_rows(self.state, np.zeros(batch_size, np.int64))
        other.state = replace(other.state, memory=other.state.memory._replace(records=0))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkCache:
        """As transformers' documents keep a prompt: of one row a branch; the model is copied in no case."""
        if self.batch_size in (None, 1):
            other = self.branch()
            other.notes = copy.deepcopy(self.notes)
            return other
        if isinstance(self.memory, JoinedMemory):  # rows in memories of their own, on any tiers
            other = ChunkCache.join([row.branch() for row in self._rows()])
            other.notes = copy.deepcopy(self.notes)
            return other
        other = self._alike()
        memo |= {id(x): x for x in (self.identity, self.memory.encoder)}
        for name, value in vars(self).items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other

    @classmethod
    def join(cls, caches: Sequence[ChunkCache]) -> ChunkCache:
        """A cache whose rows are those of several caches of one model, in their order.

        Texts may be of any lengths and memories on any tiers: of these nothing is copied, and each row goes on in its
        own. The caches given are empty afterwards; rows leave again with :meth:`leave` or :meth:`split`.

        Raises:
            ValueError: no caches, the same one twice, one that has read nothing, or one of another model.
        """
        if not caches or len({id(cache) for cache in caches}) < len(caches):
            raise ValueError(f"caches: expected different caches, at least one, got {len(caches)}.")
        first = caches[0]
        for number, cache in enumerate(caches):
            if cache.state is None or cache.model != first.model:
                came = "an empty one" if cache.state is None else "one of another model"
                raise ValueError(
                    f"caches: expected caches of one model that have read something, got {came} as number {number}. "
                    "Read a text first."
                )
        states = [cache.begun(1) for cache in caches]
        rows = [
            row
            for cache, state in zip(caches, states, strict=True)
            for row in of_each_row(cache.memory, state.memory)
        ]
        joined = first._alike()
        joined.state = join_states(states, MemorySize.joined([size for _, size in rows]))
        joined.memory = JoinedMemory.of([memory for memory, _ in rows])
        for cache in caches:
            cache.reset()
        return joined

    def leave(self, rows: Sequence[int]) -> ChunkCache:
        """Take rows out: a cache of these, in this order; this one keeps the others in theirs.

        Raises:
            ValueError: rows that it does not have, the same one twice, or none.
        """
        B = self.batch_size or 0
        if not rows or len(set(rows)) < len(rows) or not all(0 <= row < B for row in rows):
            raise ValueError(
                f"rows: expected different numbers of its {B} rows, at least one, got {list(rows)}."
            )
        assert self.state is not None
        alone = of_each_row(self.memory, self.state.memory)
        others = [row for row in range(B) if row not in set(rows)]
        left = self._alike()
        for cache, some in ((left, list(rows)), (self, others)):
            if not some:
                cache.reset()
                continue
            size = MemorySize.joined([alone[row][1] for row in some])
            state = replace(take_rows(self.state, np.array(some)), memory=size)
            cache.state, cache.memory = state, JoinedMemory.of([alone[row][0] for row in some])
        return left

    def split(self) -> list[ChunkCache]:
        """A cache for each row, in their order; this one is empty afterwards."""
        if self.state is None:
            return []
        caches = self._rows()
        self.reset()
        return caches

    def _rows(self) -> list[ChunkCache]:
        """A cache for each row, which has the memory that it has here."""
        assert self.state is not None
        caches = []
        for b, (memory, size) in enumerate(of_each_row(self.memory, self.state.memory)):
            cache = self._alike()
            cache.memory, cache.state = memory, replace(take_rows(self.state, np.array([b])), memory=size)
            caches.append(cache)
        return caches

    def _alike(self) -> ChunkCache:
        """An empty cache of the same model."""
        other = ChunkCache(self.model, self.windows, self.stages, self.num_groups, sinks=self.sinks)
        other.identity = self.identity
        return other

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was (beam search)."""
        if self.state is not None:
            rows = beam_idx.cpu().numpy()
            if np.array_equal(rows, np.arange(len(self.state.num_tokens))):
                return  # often, and a copy of every landmark otherwise
            memory = self.memory.with_rows(rows)
            self.state, self.memory = take_rows(self.state, rows), memory

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        if self.batch_size is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, as transformers' ``crop``; the sign does not matter.

        Exact or refused: tokens of the open chunk, while no window is full, or all. To come back from anything,
        ``branch`` before reading it.

        Raises:
            ValueError: tokens whose past is gone.
        """
        state, n = self.state, abs(int(tokens_to_remove))
        if n == 0 or state is None:
            return
        if (state.num_tokens == n).all():
            self.reset()
            return
        possible = bool((state.num_tokens >= n).all()) and state.deferred is None
        begun = bool(state.phases.any()) or bool(state.memory.chunks.any())
        chunked = bool(self.num_groups) or state.states is not None or begun
        if chunked:
            possible = possible and bool((state.phases >= n).all())
        possible = possible and state.cell is None
        for stage, window in zip(self.stages, self.windows, strict=True):
            # a call that failed may have written into one slot more
            if window is not None:
                possible = possible and bool((state.spans[stage].end < window).all())
        if not possible:
            raise ValueError(
                f"tokens_to_remove: expected tokens whose past is still there, got {n}: full windows and closed "
                "chunks keep nothing older. Call branch() before reading what may be taken back."
            )
        self.state = replace(
            state,
            num_tokens=state.num_tokens - n,
            num_positions=state.num_positions - n,
            phases=state.phases - n if chunked else state.phases,
            spans=tuple(Span(span.start, span.end - n) for span in state.spans),
        )
