"""Which chunks a chunk may select: those before it in its document, on request without what the window shows whole.

``visible`` says where the window begins for the last row that reads what a chunk selects: so many positions from the
asking chunk's last position (its landmark, or without landmarks its last token). None: chunks in sight may be selected.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trailmark.models.embedding import Given
from trailmark.models.grid import Grid, Integers
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection
from trailmark.ops.arguments import values_are_checked


def numbers_in_memory(step: Step, grid: Grid, asking: Integers, visible: int | None) -> Integers:
    """[B, C] how many of a row's first chunks each chunk ``asking`` [B, C] may select; 0 where a row closes fewer."""
    closed = np.zeros(len(asking), np.int64) + grid.closed
    present = np.arange(grid.num_closed) < closed[:, None]
    limits = np.where(present, asking, 0)
    if visible is not None:
        places = (step.end - grid.counts)[:, None] + grid.landmark_places + visible
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


def no_selection(num_retrieved: int, x: Tensor) -> ChunkSelection:
    """What a call selects that closes no chunk, [B, 0, K]; x [B, ...] is any tensor of it."""
    shape = x.shape[0], 0, num_retrieved
    weights = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
    return ChunkSelection(torch.zeros(shape, dtype=torch.int64, device=x.device), weights, weights)
