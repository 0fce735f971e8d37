"""The tokens of one call as its rows have them: padding left out, documents numbered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.models.grid import Booleans, Grid, Integers
from trailmark.ops import ChunkSelection


class RetrievalScores(NamedTuple):
    """How each landmark of a whole text scores all chunks that it may select, in each group."""

    scores: tuple[Tensor, ...]  # [B, C, C]; -inf where chunk m is no candidate of chunk n's landmark
    chunks: Tensor  # int64 [B, T]: the chunk of each token, counted through the row; -1 for padding


@dataclass
class Text:
    """The tokens of one call, each row's at its beginning."""

    ids: Tensor  # [B, T]
    counts: Integers | None  # [B] tokens of each row; None: T
    close_chunk: bool | Booleans
    order: Tensor | None = None  # [B, columns] the column that each token came from; None: its own
    documents: Integers | None = None  # [B, T] each token's document in its row, from 0; None: one a row

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        present: Tensor | None,
        close_chunk: bool | Tensor,
        document_ids: Tensor | None = None,
    ) -> Text:
        marks: bool | Booleans
        if isinstance(close_chunk, Tensor):
            if close_chunk.shape != input_ids.shape or close_chunk.dtype != torch.bool:
                raise ValueError(
                    f"close_chunk: expected True, False or bool of shape {tuple(input_ids.shape)}, got "
                    f"{close_chunk.dtype} of {tuple(close_chunk.shape)}."
                )
            marks = close_chunk.cpu().numpy()
        elif not isinstance(close_chunk, bool):
            raise ValueError(
                f"close_chunk: expected True, False or a bool tensor of shape {tuple(input_ids.shape)}, got "
                f"{type(close_chunk).__name__}."
            )
        else:
            marks = close_chunk
        ids = None if document_ids is None else document_ids.cpu().numpy()
        if present is None:
            return cls(input_ids, None, marks, documents=_numbered(ids, None))
        order = torch.sort(~present, dim=1, stable=True).indices
        if not isinstance(marks, bool):
            marks = np.take_along_axis(marks & present.cpu().numpy(), order.cpu().numpy(), 1)
        counts = present.sum(1).cpu().numpy()
        width = int(counts.max())  # columns that are padding in every row are left out
        if not isinstance(marks, bool):
            marks = marks[:, :width]
        if ids is not None:
            ids = np.take_along_axis(ids, order.cpu().numpy(), 1)[:, :width]
        return cls(input_ids.gather(1, order[:, :width]), counts, marks, order, _numbered(ids, counts))

    def in_columns(self, states: Tensor) -> Tensor:
        """States [B, T', E] of the tokens -> [B, T, E] in the columns that they came from."""
        if self.order is None:
            return states
        states = F.pad(states, (0, 0, 0, self.order.shape[1] - states.shape[1]))
        back = self.order.argsort(dim=1)[..., None].expand_as(states)
        return states.gather(1, back)

    def chunks_in_columns(self, grid: Grid, device: torch.device) -> Tensor:
        """int64 [B, T]: the chunk of each token in its column, -1 where there is none."""
        found = np.full((len(grid.token), self.ids.shape[1]), -1)
        row, place = np.nonzero(grid.token >= 0)
        found[row, grid.token[row, place]] = grid.chunk[row, place]
        chunks = torch.from_numpy(found).to(device).expand(len(self.ids), -1)
        return self.in_columns(chunks[..., None] + 1)[..., 0] - 1

    def selection_in_columns(self, chosen: ChunkSelection) -> ChunkSelection:
        """A selection [B, T', H, K] of the tokens -> [B, T, H, K] in the columns that they came from."""
        if self.order is None:
            return chosen
        shape = chosen.indices.shape[2:]
        indices, weights, scores = (x.flatten(2) for x in chosen)
        indices = self.in_columns(indices + 1) - 1
        scores = self.in_columns(scores).masked_fill(indices < 0, -math.inf)
        return ChunkSelection(*(x.unflatten(2, shape) for x in (indices, self.in_columns(weights), scores)))

    def last(self, states: Tensor, keep: int) -> Tensor:
        """States [B, T, E] of the tokens -> those of each row's last ``keep``, zeros before its first."""
        if self.counts is None:
            return states[:, -keep:]
        place = torch.from_numpy(self.counts[:, None] - keep + np.arange(keep)).to(states.device)
        last = states.gather(1, place.clamp(min=0)[..., None].expand(*place.shape, states.shape[2]))
        return last.masked_fill(place[..., None] < 0, 0)

    def columns(self, first: int, last: int) -> Text:
        """A part of the text, counted so that all rows end together: a short row is all in the last parts."""
        width = self.ids.shape[1]
        if (first, last) == (0, width):
            return self
        counts = self.counts
        if counts is None:
            marks = self.close_chunk
            if isinstance(marks, bool):
                marks = marks and last == width
            else:
                marks = marks[:, first:last]
            return Text(self.ids[:, first:last], None, marks)
        shift = width - counts
        start, stop = np.maximum(first - shift, 0), np.maximum(last - shift, 0)
        index = np.minimum(start[:, None] + np.arange(last - first), width - 1)
        ids = self.ids.gather(1, torch.from_numpy(index).to(self.ids.device))
        if isinstance(self.close_chunk, bool):
            marks = self.close_chunk and last == width
        else:
            marks = np.take_along_axis(self.close_chunk, index, 1)
        return Text(ids, stop - start, marks)

    def parted(self, first: Integers) -> tuple[Text, Text]:
        """Each row's first so many [B] tokens, and the others; no documents."""
        rows, width = self.ids.shape
        counts = np.full(rows, width) if self.counts is None else self.counts
        parts = []
        for start, number in ((np.zeros_like(first), first), (first, counts - first)):
            index = np.minimum(start[:, None] + np.arange(int(number.max())), width - 1)
            marks = self.close_chunk
            if not isinstance(marks, bool):
                marks = np.take_along_axis(marks, index, 1)
            elif marks:  # after a row's last token
                marks = (index == counts[:, None] - 1) & (np.arange(index.shape[1]) < number[:, None])
            alike = bool((number == index.shape[1]).all())
            ids = self.ids.gather(1, torch.from_numpy(index).to(self.ids.device))
            parts.append(Text(ids, None if alike else number, marks))
        return parts[0], parts[1]


def _numbered(ids: Integers | None, counts: Integers | None) -> Integers | None:
    """Document ids [B, T] as numbers 0, 1, ... in each row's order, past a row's ``counts`` [B] too.

    None: no row has two documents, so that such a call is the same as one without ids.
    """
    if ids is None:
        return None
    changes = np.zeros(ids.shape, np.int64)
    changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
    if counts is not None:
        changes *= np.arange(ids.shape[1]) < counts[:, None]
    if not changes.any():
        return None
    for b in np.flatnonzero(changes.any(1)):
        row = ids[b] if counts is None else ids[b, : counts[b]]
        begun = row[np.concatenate([[0], np.flatnonzero(changes[b])])]
        values, times = np.unique(begun, return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"document_ids: expected each document of a row in one piece, got {values[times > 1][0]} again after "
                f"another in row {b}. Number the documents of a row in their order: 0, 1, ..."
            )
    return changes.cumsum(1)


@torch.compiler.disable(reason="whether something is padded depends on the mask's values")
def present_tokens(mask: Tensor, num_tokens: int, batch_size: int, cache: ChunkCache | None) -> Tensor | None:
    """The mask as bool [B, T] of the new tokens; None: none is padding. Padding inside a text is refused."""
    seen = 0 if cache is None else cache.get_seq_length()
    rows, width = mask.shape if mask.dim() == 2 else (0, 0)
    fits = width in (num_tokens, seen + num_tokens)
    if not fits and cache is not None and width > num_tokens and rows == cache.batch_size:
        # a cache counts tokens, not the padding that came with them
        fits = bool((mask[:, :-num_tokens].bool().sum(1).cpu().numpy() == cache.num_tokens).all())
    if rows != batch_size or not fits:
        whole = f", or with the {seen} cached tokens before" if seen else ""
        raise ValueError(
            f"attention_mask: expected shape [{batch_size}, {num_tokens}] as input_ids{whole}, got "
            f"{list(mask.shape)}. Pass the tokenizer's own mask, or none if nothing is padded."
        )
    present = mask[:, -num_tokens:].bool()
    if bool(present.all()):
        return None
    tokens = present.any(1)
    tokens = tokens.all() if cache is None else tokens.any()  # with a cache, a text may go on later
    if bool(((present[:, 1:] != present[:, :-1]).sum(1) > 1).any() or not tokens):
        raise ValueError(
            "attention_mask: expected each row to be tokens with padding at one end, got padding inside or "
            "a row without tokens."
        )
    return present


def at_columns(states: Tensor, columns: Tensor) -> Tensor:
    """Of states [B, T, E] those of some columns [B, n] of each row: [B, n, E]."""
    B, T = states.shape[:2]
    row = torch.arange(B, device=columns.device)[:, None] * T
    return (
        states.flatten(0, 1).index_select(0, (row + columns).flatten()).view(*columns.shape, states.shape[2])
    )
