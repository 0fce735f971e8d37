"""Needles planted in a memory that has read a text: exactly the memory of the text with the needles in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM

_TOGETHER = 1 << 12  # tokens within which places are encoded at a time, with what they reach


class Rows(Protocol):
    """The chunks of a text: a tensor [N, S], or what makes those that are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


@contextmanager
def planted(
    model: TrailmarkForCausalLM, cache: ChunkCache, ids: Rows, chunks: Tensor, texts: Tensor
) -> Iterator[ChunkCache]:
    """Inside, ``cache`` (one row that has read ``ids`` [N, S]) holds ``texts`` [n, S] at chunks ``chunks`` [n].

    It has read them by ``model.read`` alone: where a text is read otherwise than predicted, this is that of a text that
    was read.

    The entries of these chunks, and of those after them that the lower layers reach, are encoded again from
    the changed text. Nothing else that the cache carries depends on them: the sinks stay as they are, and the upper
    layers have not run yet (:meth:`read` leaves them to the first question, so ask on branches). A model without
    memory (retrieval off, for one) carries nothing of text outside its window: nothing to do.

    Raises:
        ValueError: a chunk that was not read, or that the window still sees; texts that change the sinks; a cache of
            several rows, with early landmarks, or whose last positions the upper layers have seen; a model that cannot
            be planted in.
    """
    if not model.can_be_planted:
        raise ValueError(
            "model: expected one whose memory of a chunk depends on that chunk and the few before it, got "
            f"{type(model).__name__}: all that it reads later depends on it. Read the text with the needles in it (or, "
            "with a HiLS, with reading 'windows')."
        )
    if not model.config.retrieves:
        yield cache
        return
    S, reach = ids.shape[1], model.encoding_reach()
    read = _chunks_read(model, cache, S)
    count = read - model.chunks_in_sight(S)
    wrong = [place for place in chunks.tolist() if not 0 <= place < count]
    if wrong:
        raise ValueError(
            f"chunks: expected {f'numbers from 0 to {count - 1}' if count > 0 else 'none'}, got {wrong[0]}: of the "
            f"{read} chunks that were read, windows still see the last {min(read, read - count)}. Read on before "
            "planting there."
        )
    _expect_sinks_kept(model.config.num_sinks, ids, chunks, texts)
    replaced = []
    try:
        for begin, stop in _stretches(sorted(chunks.tolist()), reach, _TOGETHER // S):
            first = max(0, begin - reach)
            changed = ids[first:stop].to(model.device, copy=True)
            inside = (chunks >= first) & (chunks < stop)
            changed[chunks[inside] - first] = texts[inside].to(changed)
            before, here = changed[: begin - first].view(1, -1), changed[begin - first :].reshape(1, -1)
            entries = model.encode(here, before if before.shape[1] else None, cache, first)
            replaced.append((begin, cache.memory.replace(begin, entries)))
        yield cache
    finally:
        for place, entries in reversed(replaced):
            cache.memory.replace(place, entries)


def _stretches(places: Sequence[int], reach: int, most: int) -> list[tuple[int, int]]:
    """First and last chunk + 1 of what is encoded at a time: ``places``, ascending, and ``reach`` chunks after each.

    Those that overlap are one, as long as their places lie within ``most`` chunks.
    """
    found: list[tuple[int, int]] = []
    for place in places:
        begin, stop = found[-1] if found else (place, place)
        if place < stop and place - begin < most:
            found[-1] = begin, place + 1 + reach
        else:
            found.append((place, place + 1 + reach))
    return found


def _chunks_read(model: TrailmarkForCausalLM, cache: ChunkCache, chunk_size: int) -> int:
    """Chunks of a cache in which needles can be planted."""
    state = cache.state
    if state is None or len(state.num_tokens) != 1:
        raise ValueError(
            f"cache: expected one row that has read a text, got {0 if state is None else len(state.num_tokens)}. "
            "Read one text, plant there, and ask on its branches."
        )
    read = int(cache.num_chunks[0])
    if int(state.num_tokens[0] - state.phases[0]) != read * chunk_size:
        raise ValueError(
            "cache: expected full chunks, got early landmarks: needles are planted in whole chunks."
        )
    waiting = 0
    if (deferred := state.deferred) is not None:  # counted as windows count
        waiting = int(((deferred.chunk >= 0) & ~(model.config.hides_landmarks & deferred.is_landmark)).sum())
    reach = model.reach()
    assert reach is not None
    if model.waits and waiting < min(reach, int(state.num_positions[0])):
        raise ValueError(
            "cache: expected a text whose end was only read, got one whose last positions went through the upper "
            "layers, which found what was there. Use model.read(ids, cache), and ask on cache.branch()."
        )
    return read


def _expect_sinks_kept(num_sinks: int, ids: Rows, chunks: Tensor, texts: Tensor) -> None:
    """All that is read later depends on a text's first tokens."""
    S = ids.shape[1]
    for place, text in zip(chunks.tolist(), texts, strict=True):
        kept = max(0, num_sinks - place * S)
        if not torch.equal(text[:kept].cpu(), ids[place : place + 1][0, :kept].cpu()):
            raise ValueError(
                f"texts: expected the text's own first {num_sinks} tokens, which stay visible (num_sinks), got others "
                f"in chunk {place}: all that was read depends on them. Plant behind them."
            )
