"""Which chunks a chunk may select: those before it in its document, on request without what the window shows whole.

``visible`` says where the window begins for the last row that reads what a chunk selects: so many positions from the
asking chunk's last position (its landmark, or without landmarks its last token). None: chunks in sight may be selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import ChunkMemory, MemorySize
from trailmark.memory.chunks import Rows
from trailmark.memory.joined import widest
from trailmark.models.embedding import Given
from trailmark.models.grid import Grid, Integers
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, score_chunks, select_chunks
from trailmark.ops.arguments import values_are_checked
from trailmark.ops.selection.torch_path import gather


class TextCandidates:
    """The chunks of a whole text, each a candidate for those that close after it in its document.

    Args:
        visible: see above. reference: whether the oracle selects.
        begins: the first chunk whose landmark asks here; those before it are asked for elsewhere.
        asking: how many do. None: all.
    """

    def __init__(
        self,
        grid: Grid,
        visible: int | None,
        reference: bool,
        device: torch.device,
        begins: int = 0,
        asking: int | None = None,
    ) -> None:
        self.device, self.reference, self.begins = device, reference, begins
        self.asking = grid.num_closed if asking is None else asking
        own = slice(begins, begins + self.asking)
        self.limits: Tensor = grid.candidates(visible, device)[..., own]
        self.first = grid.first_candidates(device)
        if isinstance(self.first, Tensor):
            self.first = self.first[..., own]

    def numbers(self, in_document: bool) -> Tensor:
        """[C] or [B, C] of the chunks that close, counted through the row or in their documents."""
        numbers = torch.arange(self.begins, self.begins + self.asking, device=self.device)
        return numbers - self.first if in_document else numbers

    def select(
        self,
        query: Tensor,
        keys: Tensor,
        num_retrieved: int,
        scale: float,
        indices: Tensor | None = None,
        noise_seed: Tensor | None = None,
        recency: float = 0.0,
    ) -> ChunkSelection:
        """:func:`select_chunks` for queries [B, C, d] of the chunks that ask, among keys [B, M, d] of all.

        ``indices`` [B, C, K]: chunks that are chosen already. Noise is drawn for pairs of chunks as the row
        counts them.
        """
        return select_chunks(
            query,
            keys,
            num_retrieved,
            self.limits,
            self.first,
            indices,
            noise_seed=noise_seed,
            scale=scale,
            recency=recency,
            implementation="reference" if self.reference else None,
            first_query=self.begins,
        )

    def scores(self, query: Tensor, keys: Tensor, scale: float, recency: float = 0.0) -> Tensor:
        """The scores [B, C, M] of all candidates; -inf where there is none."""
        return score_chunks(query, keys, self.limits, self.first, scale, recency)


class MemoryCandidates:
    """The chunks of a memory, for those that a call closes: chunks before each, of this call or earlier ones.

    Args:
        first_chunk: int64 [B] number of the grid's first chunk. visible: see above.
    """

    first = 0

    def __init__(
        self, grid: Grid, step: Step, first_chunk: Integers, visible: int | None, device: torch.device
    ) -> None:
        self.memory, self.size, self.device = step.cache.memory, step.size, device
        self.asking = first_chunk[:, None] + np.arange(grid.num_closed)  # as if every row closed as many
        self.limits = torch.from_numpy(_limits_in_memory(step, grid, self.asking, visible)).to(device)

    def numbers(self, in_document: bool) -> Tensor:
        """[B, C] of the chunks that close."""
        return torch.from_numpy(self.asking).to(self.device)

    def select(
        self,
        query: Tensor,
        part: slice | None,
        num_retrieved: int,
        scale: float,
        indices: Tensor | None = None,
        recency: float = 0.0,
    ) -> ChunkSelection:
        """The same for queries [B, C, d], by ``part`` of the landmark vectors; None: all of them."""
        K = num_retrieved if indices is None else indices.shape[-1]
        shape = (*query.shape[1:2], K)

        def search(rows: Rows, memory: ChunkMemory, blocks: list[Tensor]) -> ChunkSelection:
            asked, limits = query[rows], self.limits[rows]
            blocks = [x if part is None else x[..., part] for x in blocks] or [asked[:, :0]]
            if indices is None:
                aged = {"recency": recency} if recency else {}
                return memory.search.select(asked, blocks, K, limits, scale, **aged)
            return select_chunks(
                asked, blocks, K, limits, indices=indices[rows], scale=scale, recency=recency
            )

        return select_in_each(self.memory, self.size, self.limits, shape, query, search)

    def own(self, part: slice) -> Tensor:
        """That part of the landmark vectors of the chunks that close, [B, C, d]."""

        def vectors(rows: Rows, memory: ChunkMemory) -> tuple[Tensor]:
            count = int(self.size.chunks[rows].max())
            numbers = torch.from_numpy(self.asking[rows].clip(max=count - 1)).to(self.device)
            parts = [x[:, :, None, part] for x in memory.blocks(count, len(numbers))]
            return (gather(parts, numbers[:, :, None, None], parts[0].dtype)[:, :, 0, 0],)

        found = in_all_rows(self.memory.parts(self.size.chunks > 0), vectors, len(self.asking), (0,))
        assert found is not None, "a chunk that closes is in memory"
        return found[0]

    def select_nearest(self, begin: int, size: int, num_retrieved: int, scale: float) -> ChunkSelection:
        """By vectors that lie in the memory: keys [d] from ``begin`` on in a landmark vector, then queries [d]."""
        middle, end = begin + size, begin + 2 * size
        return self.select(self.own(slice(middle, end)), slice(begin, middle), num_retrieved, scale)


def in_all_rows(
    parts: Iterable[tuple[Rows, ChunkMemory]],
    find: Callable[[Rows, ChunkMemory], Sequence[Tensor]],
    B: int,
    nothing: Sequence[float],
) -> tuple[Tensor, ...] | None:
    """What ``find`` gives for some rows and their memory [b, ...], put together as tensors [B, ...] of all rows.

    Args:
        parts: of ``memory.parts``. nothing: of each tensor, what rows hold that are in none of them.

    Returns:
        None: there is no part.
    """
    found = [(rows, find(rows, memory)) for rows, memory in parts]
    if not found:
        return None
    if isinstance(found[0][0], slice):  # all rows
        return tuple(found[0][1])
    every = list[Tensor]()
    for no, each in zip(nothing, zip(*(of_rows for _, of_rows in found), strict=True), strict=True):
        dtype = widest(each)  # memories may keep vectors in types of their own
        together = each[0].new_full((B, *each[0].shape[1:]), no, dtype=dtype)
        for (rows, _), x in zip(found, each, strict=True):
            together[rows] = x.to(dtype)
        every.append(together)
    return tuple(every)


Search = Callable[[Rows, ChunkMemory, list[Tensor]], ChunkSelection]


def select_in_each(
    memory: ChunkMemory, size: MemorySize, limits: Tensor, shape: tuple[int, ...], x: Tensor, search: Search
) -> ChunkSelection:
    """What the rows of a call select, each among the landmarks of the memory that it lies in.

    Args:
        size: of the memory. limits: int64 [B, n] of each query. x: [B, ...] any tensor of the call.
        shape: (n, ..., K) of what a row selects.
        search: of some rows, a memory of these and its blocks of landmarks, gives what they select, [b, n, ..., K].
    """
    asking = (limits > 0).flatten(1).any(1).cpu().numpy()

    def found(rows: Rows, own: ChunkMemory) -> ChunkSelection:
        return search(rows, own, own.blocks(int(size.chunks[rows].max()), len(size.chunks[rows])))

    if (chosen := in_all_rows(memory.parts(asking), found, len(x), NOTHING)) is not None:
        return ChunkSelection(*chosen)
    return no_selection(x, *shape)


def _limits_in_memory(step: Step, grid: Grid, asking: Integers, visible: int | None) -> Integers:
    """[B, C] how many of a row's first chunks each chunk ``asking`` [B, C] may select; 0 where a row closes fewer."""
    closed = np.zeros(len(asking), np.int64) + grid.closed
    present = np.arange(grid.num_closed) < closed[:, None]
    limits = np.where(present, asking, 0)
    if visible is not None:
        places = (step.end - grid.counted)[:, None] + grid.landmark_numbers + visible
        for b, i in zip(*np.nonzero(present), strict=True):
            limits[b, i] = step.cache.memory.starting_before(int(b), int(limits[b, i]), int(places[b, i]))
    return limits


def expect_selectable(given: Given, grid: Grid, visible: int | None) -> None:
    """That chunks given for those of a whole text are ones that these may select.

    Raises:
        ValueError: the window shows one whole.
    """
    if visible is None or not values_are_checked(given.indices):
        return
    wrong = given.indices >= grid.candidates(visible, given.indices.device)[..., None]
    if bool(wrong.any()):
        b, c, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"neighbours: expected no chunk that the window still shows whole (exclude_visible_chunks), got "
            f"{int(given.indices[b, c, n])} for chunk {c} of row {b}. Make the table with the model's "
            "sliding_window, or set exclude_visible_chunks false."
        )


NOTHING = (-1, 0.0, -math.inf)  # index, weight and score where nothing was selected


def no_selection(x: Tensor, *shape: int) -> ChunkSelection:
    """Nothing for each that selects, [B, *shape]; x [B, ...] is any tensor of the call."""
    indices = torch.full((len(x), *shape), -1, device=x.device)
    weights = x.new_zeros(indices.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    return ChunkSelection(indices, weights, torch.full_like(weights, -math.inf))


def last_chunks(chosen: ChunkSelection, had: Integers, own: Integers) -> ChunkSelection:
    """Of selections [B, C', K], ``had`` [b] of each row, the last ``own`` [b] ones as [B, C, K]; the rest is -1."""
    B = chosen.indices.shape[0]
    place = np.arange(int(own.max(initial=0)))
    index = np.broadcast_to((had - own)[:, None] + place, (B, len(place)))
    gone = np.broadcast_to(place >= own[:, None], (B, len(place)))
    if chosen.indices.shape[1] == len(place) and not gone.any():
        return chosen
    row = torch.arange(B)[:, None]
    at = torch.from_numpy(np.where(gone, 0, index))
    missing = torch.from_numpy(gone.copy())[..., None]
    parts = zip(chosen, NOTHING, strict=True)
    return ChunkSelection(*(x[row, at].masked_fill(missing.to(x.device), nothing) for x, nothing in parts))


def selection_of_tokens(chosen: ChunkSelection, grid: Grid) -> ChunkSelection:
    """What positions select [B, P, H, K] -> what the call's tokens do, [B, T, H, K]; absent ones nothing."""
    take = grid.last_tokens(None)
    absent = torch.from_numpy(take.index < 0).to(chosen.indices.device)[..., None, None]
    parts = zip(chosen, NOTHING, strict=True)
    return ChunkSelection(*(take(x).masked_fill(absent, nothing) for x, nothing in parts))


def distinct_chunks(wanted: Integers) -> tuple[Integers, Integers]:
    """Of chunks [B, ..., K], -1 for none: the different ones [B, n] of each row, and which of them each is."""
    rows = [np.unique(row[row >= 0]) for row in wanted]
    chunks = np.full((len(rows), max(map(len, rows))), -1)
    indices = np.full_like(wanted, -1)
    for row, found, own, index in zip(wanted, rows, chunks, indices, strict=True):
        own[: len(found)] = found
        index[row >= 0] = np.searchsorted(found, row[row >= 0])
    return chunks, indices
