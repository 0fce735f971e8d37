"""Chunks that are encoded by themselves: of a text that is changed, and of a memory that keeps tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import ChunkCache, MemoryEntries
from trailmark.memory.encoding import Chunks, smallest_dtype
from trailmark.memory.tiers.records import RecordLayout
from trailmark.models.arguments import check_count, check_tokens
from trailmark.models.grid import Grid, Layouts
from trailmark.models.step import Step

_BEGINNINGS = 64  # texts whose sinks are kept


class EncodingMixin:
    """What a model makes of chunks without reading them; where ``can_be_planted`` says that this can be done."""

    config: Any
    layouts: Layouts
    _cache_key: Any

    def encode(
        self,
        input_ids: Tensor,
        before: Tensor | None = None,
        cache: ChunkCache | None = None,
        first_chunk: int = 0,
    ) -> MemoryEntries:
        """The memory entries of the whole chunks of ``input_ids`` [B, n * S], without reading them.

        ``before`` [B, m * S] are the tokens before them; with at least ``encoding_reach`` chunks of them the entries
        are those of a full read. With sinks (``num_sinks``) entries depend on the text's beginning and on their place
        in it too: see ``cache`` and ``first_chunk``.

        Args:
            cache: of one row that has read a text with the same sinks, and whose chunks so far are full; it stays as
                it is. None: the text begins with these tokens.
            first_chunk: in that text the number of the first chunk of ``before``; without it, of ``input_ids``.

        Raises:
            ValueError: other than whole chunks, a token outside the vocabulary, or a cache of another kind.
            NotImplementedError: a model that keeps no chunks that could be encoded by themselves.
        """
        check_tokens(input_ids, self.config.vocab_size)
        check_count("first_chunk", first_chunk, 0, "Chunks are counted from 0.")
        size = getattr(self.config, "chunk_size", 1)
        ids = input_ids if before is None else torch.cat([before, input_ids], dim=1)
        check_tokens(ids, self.config.vocab_size)
        skipped = ids.shape[1] - input_ids.shape[1]
        if ids.shape[1] % size or skipped % size:
            raise ValueError(
                f"input_ids: expected whole chunks of {size} tokens, got {input_ids.shape[1]} after {skipped}."
            )
        start = first_chunk * (size + self.config.counts_landmarks)
        grid = self.layouts.of(ids.shape[1], False)
        entries = self.encode_chunks(ids, grid, cache, start).each(lambda part: part[:, skipped // size :])
        return entries._replace(tokens=input_ids.unflatten(1, (-1, size)))

    def encode_chunks(
        self, ids: Tensor, grid: Grid, cache: ChunkCache | None = None, start: int = 0
    ) -> MemoryEntries:
        """The memory entries of the chunks that tokens ``ids`` [B, T], laid out as ``grid``, close.

        Args:
            cache: as for :meth:`encode`, but that its chunks may be of any length.
            start: in that text the number of the first position, as windows count them; 0: the text begins here.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps no chunks that could be encoded by themselves."
        )

    @property
    def _encoding_has_place(self) -> bool:
        """Whether what is made of a chunk depends on its place in its text, or on how that begins."""
        return bool(self.config.num_sinks)

    def _step_apart(self, grid: Grid, cache: ChunkCache | None, start: int, batch_size: int) -> Step | None:
        """The call of :meth:`encode_chunks`, that sees the sinks of a text; None: nothing but its own tokens.

        Raises:
            ValueError: a cache that has not read them.
        """
        if cache is None or not start or not self._encoding_has_place:
            return None
        read = int(cache.num_tokens.max(initial=0))
        if cache.model != self._cache_key or cache.batch_size != 1 or read < self.config.num_sinks:
            raise ValueError(
                f"cache: expected one of this model, of one row that has read at least the {self.config.num_sinks} "
                f"tokens that stay visible (num_sinks), got one of {cache.batch_size or 0} rows and {read} tokens. "
                "Read the text first: cache = model.read(ids)."
            )
        return Step.apart(cache, start, grid, self.config, batch_size)


class TokenEncoder:
    """Makes keys and values of a chunk of a memory that keeps tokens: what a reading would have kept.

    An :class:`trailmark.memory.encoding.Encoder`.

    Args:
        model: of class :class:`trailmark.models.TrailmarkForCausalLM`, whose chunks can be encoded by themselves.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self.landmarks, self.sinks = int(config.counts_landmarks), int(config.num_sinks)
        self.reach = int(model.encoding_reach()) * (config.chunk_size + self.landmarks)
        self.token_dtype = smallest_dtype(config.vocab_size)
        # by their tokens and lengths: what has read them
        self._beginnings: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkCache] = {}

    @property
    def layout(self) -> RecordLayout:
        """Of a record of keys and values, as the model's weights are now."""
        weight = self._model.lm_head.weight
        return RecordLayout(self._model._record_shape, weight.dtype, weight.device)

    def __call__(self, chunks: Chunks, beginning: Chunks | None) -> Tensor:
        """The record [2, J, S, D] of the last of ``chunks``.

        Raises:
            ValueError: a token outside the vocabulary: the memory was damaged.
        """
        cache = None if beginning is None else self._read(beginning)
        ids, grid = self._laid_out(chunks)
        entries = self._model.encode_chunks(ids, grid, cache, chunks.start)
        return torch.stack([x[0, -1].transpose(0, 1) for x in (entries.k, entries.v)])  # [S, J, D] each

    def _laid_out(self, chunks: Chunks) -> tuple[Tensor, Grid]:
        model, S = self._model, self._model.config.chunk_size
        vocab, most = model.config.vocab_size, int(chunks.tokens.max())
        if not 0 <= int(chunks.tokens.min()) <= most < vocab:
            raise ValueError(
                f"memory: expected tokens of the vocabulary, 0 to {vocab - 1}, got {most} in a chunk that is to be "
                "encoded again: the memory was damaged. trailmark verify says where; take it from a copy, or read the "
                "text again."
            )
        ids = chunks.tokens[None].to(model.device)
        if all(length == S for length in chunks.lengths):
            return ids, model.layouts.of(ids.shape[1], False)
        closes = np.zeros((1, ids.shape[1]), bool)
        closes[0, np.cumsum(chunks.lengths) - 1] = True
        return ids, model.layouts.lay_out(ids.shape[1], close_chunk=closes)

    def _read(self, beginning: Chunks) -> ChunkCache:
        key = tuple(beginning.tokens.tolist()), tuple(beginning.lengths)
        if key not in self._beginnings:
            cache: ChunkCache = self._model.new_cache()
            ids, grid = self._laid_out(beginning)
            self._model.run(ids, grid, cache)
            if len(self._beginnings) == _BEGINNINGS:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings[key] = cache
        return self._beginnings[key]
