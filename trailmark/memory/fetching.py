"""Fetching the records of chunks that lie in a memory and in those that it goes on from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.tables import Integers


class Source(Protocol):
    """What gives records by number."""

    def gather(self, numbers: Tensor) -> Tensor: ...


class Located(NamedTuple):
    """Chunks that were asked for and lie in one memory."""

    source: Source
    places: Integers  # [m] which of those asked for
    numbers: Integers  # [m] of records
    lengths: Integers  # [m]


def fetch_each(parts: list[Located], chunks: Integers) -> tuple[Tensor | None, Integers, int]:
    """Records [n, ...] and lengths [n] of chunks [n], each as often as it is asked for, and how many differ.

    None: nothing was asked for.
    """
    needed = sum(len(np.unique(part.numbers)) for part in parts)
    records = [part.source.gather(torch.from_numpy(part.numbers)) for part in parts]
    if not parts:
        return None, chunks, 0
    if len(parts) == 1:
        return records[0], parts[0].lengths, needed
    lengths = np.empty(len(chunks), np.int64)
    with torch.inference_mode(False):
        together = records[0].new_empty(len(chunks), *records[0].shape[1:])
        for part, some in zip(parts, records, strict=True):
            together[torch.from_numpy(part.places)] = some
            lengths[part.places] = part.lengths
    return together, lengths, needed


def fetch_once(parts: list[Located], chunks: Integers) -> tuple[Tensor | None, Integers, int]:
    """The same, where a store is asked for each record once, however many ask for it; -1 is given any."""
    lengths, which = (np.zeros(len(chunks), np.int64) for _ in range(2))
    records: list[Tensor] = []
    count = 0
    for part in parts:
        # all in this memory, each once: in order, and not copied again
        if len(part.numbers) == len(chunks) == len(set(part.numbers.tolist())):
            return part.source.gather(torch.from_numpy(part.numbers)), part.lengths, len(chunks)
        distinct, number = np.unique(part.numbers, return_inverse=True)
        records.append(part.source.gather(torch.from_numpy(distinct)))
        which[part.places] = count + number
        lengths[part.places] = part.lengths
        count += len(distinct)
    if not records:
        return None, lengths, 0
    with torch.inference_mode(False):
        together = records[0] if len(records) == 1 else torch.cat(records)
        return together.index_select(0, torch.from_numpy(which).to(together.device)), lengths, count
