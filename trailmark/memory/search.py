"""Search over a memory's landmarks: exact, or by an approximate index of faiss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from trailmark.ops import ChunkSelection, select_chunks
from trailmark.ops.arguments import require

_CHECKED = 64  # of so many chunks the last is kept, to notice a memory that was written again
_BATCH = 1 << 14  # landmarks converted at once; a multiple of _CHECKED
_TRAINING_CHUNKS = 32  # per list of the index
_TRAINING_ROUNDS = 10  # of k-means
_NEW_CHUNKS = 4096  # of a query are searched exactly if a chunk's age counts
_GROWTH = 4  # the lists are trained again when the memory is so many times larger


class ExactSearch:
    """Every landmark is scored, block by block.

    A search of your own has the same method; ``recency`` is passed by its name and only if it is not 0.
    """

    def select(
        self,
        query: Tensor,  # [B, n, E]
        blocks: Sequence[Tensor],  # [B, m, E] each
        num_retrieved: int,
        num_candidates: Tensor,  # [n] or [B, n]
        scale: float | None = None,
        recency: float = 0.0,
    ) -> ChunkSelection:
        """As :func:`select_chunks`; ``blocks`` are one table of landmarks in that order."""
        return select_chunks(query, blocks, num_retrieved, num_candidates, scale=scale, recency=recency)


def anew(search: Any) -> Any:
    """A search like this one which knows no landmarks."""
    search = copy(search)
    if hasattr(search, "forget"):
        search.forget()
    return search


class FaissSearch:
    """An inverted file of faiss: scores the landmarks in the few lists nearest to a query, not all.

    For one text: all rows of a batch share its landmarks (a batch of 1 or of stride 0); blocks after those may
    be each row's own. Landmarks enter the index as they are first seen, ``batch_chunks`` at a time; those that
    are not yet in it, and the rows' own, are searched exactly, as is everything while a query has fewer than
    ``min_chunks`` candidates or the lists hold fewer than K. What the index finds is scored again, so that of
    what it finds the K best are chosen, with exact scores and weights and the earlier of equals.

    A chunk outside the searched lists is missed. Of the 8 best by exact search over 262,144 landmarks (2,048
    clusters | random directions; norms equal), at E = 64: 0.99 | 0.56 are found, at E = 512: 1.00 | 0.18; a
    landmark that stands out (cosine 0.9 with the query, all others random): 0.99. ``num_probes`` trades time
    for this. The index holds 2 E + 8 bytes a chunk (landmarks in bfloat16), on the CPU.

    Where a chunk's age counts (``recency``, which the index does not know), the newest 4,096 candidates are searched
    exactly too. An older one is found by its product alone, and of those that are no longer new the age decides little:
    its logarithm differs by 4 from 4,096 chunks to 262,144. The numbers above are without it.

    A memory that was cut, or cut and written again from there to its end, is noticed by the last landmark that the
    index has, and what no longer stands in it leaves the index. Where others were changed before that one, as those of
    an edited text that is read again, call :meth:`forget`; a cache that is ``reset`` begins with a search of its own.

    Args:
        min_chunks: exact search below so many chunks.
        batch_chunks: landmarks enter the index in such batches.
        num_lists: of the inverted file; None: 2 sqrt(M) when it is trained, again each time M is 4 times larger.
        num_probes: lists that each query searches.
        overfetch: the index is asked for ``overfetch * K`` chunks.

    Raises:
        ValueError: if faiss is not installed, or for a number below 1.
    """

    def __init__(
        self,
        min_chunks: int = 16384,
        batch_chunks: int = 4096,
        num_lists: int | None = None,
        num_probes: int = 64,
        overfetch: int = 4,
    ) -> None:
        numbers = {
            "min_chunks": min_chunks,
            "batch_chunks": batch_chunks,
            "num_lists": num_lists,
            "num_probes": num_probes,
            "overfetch": overfetch,
        }
        for name, number in numbers.items():
            require(number is None or number >= 1, name, number, "at least 1")
        _faiss()
        self.min_chunks, self.batch_chunks = min_chunks, batch_chunks
        self.num_lists, self.num_probes, self.overfetch = num_lists, num_probes, overfetch
        self.forget()

    def forget(self) -> None:
        """Drop the index; the next search builds it again from the landmarks as they are then."""
        self._index: Any = None
        self._trained = 0  # chunks when it was
        self._kept: Tensor | None = None  # [num_indexed / _CHECKED, E] float32

    @property
    def num_indexed(self) -> int:
        """Chunks in the index."""
        return 0 if self._index is None else self._index.ntotal

    def select(
        self,
        query: Tensor,  # [B, n, E]
        blocks: Sequence[Tensor],  # [B, m, E] each
        num_retrieved: int,
        num_candidates: Tensor,  # [n] or [B, n]
        scale: float | None = None,
        recency: float = 0.0,
    ) -> ChunkSelection:
        """As :func:`select_chunks`, but a chunk may be missed.

        Raises:
            ValueError: if rows of a batch have different landmarks from the start.
        """
        K, (B, n) = num_retrieved, query.shape[:2]
        text = _of_one_text(blocks)
        most = int(num_candidates.max()) if num_candidates.numel() else 0
        known = min(most, sum(block.shape[1] for block in text))  # beyond that it may be uninitialised
        exact = (query, blocks, K, num_candidates)
        if known < self.min_chunks:
            return select_chunks(*exact, scale=scale, recency=recency)
        # also where landmarks of a model in training come in: the choice has no gradient
        with torch.no_grad():
            indexed = self._follow([block[0].detach() for block in text], known)
            ends = num_candidates.to(query.device).expand(B, n)[..., None]
            near = self._nearest(query, K, indexed)  # [B, n, F]
            near = near.masked_fill(near >= ends, -1)
            enough = (near >= 0).sum(-1, keepdim=True) >= K
            # exactly: what is not in the index, and what is new, for the index knows no age
            first = torch.full_like(ends[..., 0], indexed)
            if recency:
                first = torch.minimum(first, (ends[..., 0] - _NEW_CHUNKS).clamp(min=0))
            late = self._late(query, blocks, K, ends[..., 0], first, scale, recency)
            near = near.masked_fill(near >= first[..., None], -1)
            chosen = _best(query, blocks, torch.cat([near, late], dim=-1), K, ends[..., 0], scale, recency)
            # a query with few candidates, or whose lists hold few
            short = (ends < self.min_chunks) | ~enough  # [B, n, 1]
            columns = short.flatten(2).any(-1).any(0).nonzero()[:, 0]
            if len(columns):
                some = num_candidates[..., columns]
                again = select_chunks(
                    query[:, columns], blocks, K, some, scale=scale, recency=recency
                ).indices
                chosen[:, columns] = torch.where(short[:, columns], again, chosen[:, columns])
        return select_chunks(*exact, indices=chosen, scale=scale, recency=recency)

    @staticmethod
    def _late(
        query: Tensor,
        blocks: Sequence[Tensor],
        K: int,
        ends: Tensor,
        first: Tensor,
        scale: float | None,
        recency: float,
    ) -> Tensor:
        """The K best [B, n, K] of chunks ``first ... ends - 1`` [B, n], exactly; none before all of them is scored."""
        low = int(first.min()) if first.numel() else 0
        ends, first = (ends - low).clamp(min=0), first - low
        found = select_chunks(
            query, _beyond(blocks, low), K, ends, first, scale=scale, recency=recency
        ).indices
        return torch.where(found < 0, found, found + low)

    def _nearest(self, query: Tensor, K: int, indexed: int) -> Tensor:
        """Up to ``overfetch * K`` of the first ``indexed`` chunks [B, n, F] in any order; -1 for none."""
        faiss = _faiss()
        # what was cut off the memory but may come back stays in the index, unseen
        within = faiss.IDSelectorRange(0, indexed) if indexed < self.num_indexed else None
        how = faiss.SearchParametersIVF(nprobe=self.num_probes, sel=within)
        asked = query.detach().flatten(0, 1).to("cpu", torch.float32).contiguous().numpy()
        _, chunks = self._index.search(asked, self.overfetch * K, params=how)
        return torch.from_numpy(chunks).to(query.device).view(*query.shape[:2], -1)

    def _follow(self, text: list[Tensor], known: int) -> int:
        """Bring the index up to the first ``known`` landmarks; returns how many of them it stands for."""
        self._drop_changed(text, known)
        full = known - known % _CHECKED
        if self._index is None or known >= _GROWTH * self._trained:
            self._train(text, known)
        if full - self.num_indexed >= self.batch_chunks or not self.num_indexed:
            for first in range(self.num_indexed, full, _BATCH):
                self._add(_rows(text, first, min(first + _BATCH, full)))
        return min(full, self.num_indexed)

    def _train(self, text: list[Tensor], known: int) -> None:
        faiss = _faiss()
        self.forget()
        E = text[0].shape[-1]
        lists = min(known, self.num_lists or round(2 * math.sqrt(known)))
        self._index = faiss.IndexIVFScalarQuantizer(
            faiss.IndexFlatIP(E),
            E,
            lists,
            faiss.ScalarQuantizer.QT_bf16,
            faiss.METRIC_INNER_PRODUCT,
            False,  # codes are landmarks, not residuals
        )
        self._index.cp.niter = _TRAINING_ROUNDS
        self._index.cp.min_points_per_centroid = 1  # else faiss warns
        count = min(known, _TRAINING_CHUNKS * lists)
        places = torch.arange(count) * known // count
        self._index.train(_as_array(_rows_at(text, places)))
        self._trained = known

    def _add(self, landmarks: Tensor) -> None:  # [n, E], n a multiple of _CHECKED
        self._index.add(_as_array(landmarks))
        new = landmarks[_CHECKED - 1 :: _CHECKED].to("cpu", torch.float32, copy=True)
        self._kept = new if self._kept is None else torch.cat([self._kept, new])

    def _drop_changed(self, text: list[Tensor], known: int) -> None:
        """Take out of the index what no longer stands in the memory.

        Landmarks are written one after another: if the last of those that are known and indexed is as it was,
        so are all before it.
        """
        count = min(known, self.num_indexed) // _CHECKED
        if self._kept is None or not count:
            return
        if self._kept.shape[-1] == text[0].shape[-1]:
            last = _rows(text, count * _CHECKED - 1, count * _CHECKED)
            if _same(last, self._kept[count - 1 : count]).all():
                return
            places = torch.arange(count) * _CHECKED + _CHECKED - 1
            same = _same(_rows_at(text, places), self._kept[:count])
            # one before the first that changed, too: an equal landmark may stand where another text goes on
            keep = max(0, int(same.long().cumprod(0).sum()) - 1)
        else:
            keep = 0
        if not keep:
            self.forget()
            return
        faiss = _faiss()
        self._index.remove_ids(faiss.IDSelectorRange(keep * _CHECKED, self.num_indexed))
        self._kept = self._kept[:keep]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ValueError(
            'search: FaissSearch needs faiss, which is not installed. pip install "trailmark[faiss]", '
            "or search exactly (the default)."
        ) from error
    return faiss


def _of_one_text(blocks: Sequence[Tensor]) -> list[Tensor]:
    """The blocks at the start that all rows of the batch share."""
    filled = [block for block in blocks if block.shape[1]]
    text = []
    for block in filled:
        if block.shape[0] > 1 and block.stride(0) != 0:
            break
        text.append(block)
    require(
        bool(text or not filled),
        "blocks",
        f"a batch of {filled[0].shape[0] if filled else 0} with landmarks of their own",
        "one text for all rows (a batch of 1, or of stride 0)",
        "FaissSearch indexes one text: read one, then ask on branches of it, or search exactly.",
    )
    return text


def _beyond(blocks: Sequence[Tensor], first: int) -> list[Tensor]:
    """Blocks [B, m, E] without their first chunks, of one table."""
    rest, begin = [], 0
    for block in blocks:
        rest.append(block[:, max(0, first - begin) :])
        begin += block.shape[1]
    return rest


def _rows(text: Sequence[Tensor], first: int, last: int) -> Tensor:
    """Landmarks ``first ... last - 1`` [last - first, E]."""
    parts, begin = [], 0
    for block in text:  # [m, E]
        low, high = max(first - begin, 0), min(last - begin, len(block))
        if low < high:
            parts.append(block[low:high])
        begin += len(block)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows_at(text: Sequence[Tensor], places: Tensor) -> Tensor:
    """Landmarks [len(places), E] at ascending places."""
    parts, begin = [], 0
    for block in text:  # [m, E]
        here = places[(places >= begin) & (places < begin + len(block))] - begin
        parts.append(block[here.to(block.device)])
        begin += len(block)
    return torch.cat(parts)


def _same(ours: Tensor, theirs: Tensor) -> Tensor:
    """[n] bool of [n, E]: which rows are equal in float32, NaN and NaN too."""
    ours = ours.to("cpu", torch.float32)
    return ((ours == theirs) | (ours.isnan() & theirs.isnan())).all(-1)


def _as_array(landmarks: Tensor) -> Any:
    return landmarks.to("cpu", torch.float32).contiguous().numpy()


def _best(
    query: Tensor,
    blocks: Sequence[Tensor],
    candidates: Tensor,
    K: int,
    ends: Tensor,
    scale: float | None,
    recency: float,
) -> Tensor:
    """The K best [B, n, K] of the candidates [B, n, F] (-1: none) by exact score, ascending, -1 last."""
    beyond = 1 << 53
    candidates = candidates.masked_fill(candidates < 0, beyond).sort(dim=-1).values
    candidates = candidates.masked_fill(candidates == beyond, -1)
    F = candidates.shape[-1]
    scores = select_chunks(query, blocks, F, ends, indices=candidates, scale=scale, recency=recency).scores
    # stable: the earlier of equals
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    chosen = candidates.gather(-1, order)
    chosen = chosen.masked_fill(chosen < 0, beyond).sort(dim=-1).values
    return chosen.masked_fill(chosen == beyond, -1)
