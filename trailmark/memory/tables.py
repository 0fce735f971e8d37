"""Where each chunk of a memory lies, and its landmark vectors: tables that grow, and let go of what was evicted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Integers = np.ndarray[Any, np.dtype[np.int64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]

# of the first segment, in chunks and in bytes a row; each further one doubles what is there
_FIRST_LANDMARKS, _FIRST_BYTES = 1024, 16 << 20


class Tables(NamedTuple):
    """Of own chunks ``first ...``, int64 [B, m] each. Replaced as one: Ctrl-C leaves the old ones or the new."""

    first: int
    records: Integers  # number of the chunk's first record
    starts: Integers
    lengths: Integers

    @classmethod
    def empty(cls) -> Tables:
        return cls(0, *(np.zeros((0, 0), np.int64) for _ in range(3)))

    def with_room(self, rows: int, chunks: int, gone: int, least: int) -> Tables:
        """Room for so many own chunks of each row; columns of the first ``gone``, which no row needs, are left out."""
        first, *tables = self
        end = first + tables[0].shape[1]
        if chunks <= end:
            return self
        old = max(0, end - gone)
        grown = np.zeros((3, rows, max(chunks - gone, old + old // 2, least, 64)), np.int64)
        for table, before in zip(grown, tables, strict=True):
            table[: len(before), :old] = before[:, before.shape[1] - old :]
        return Tables(gone, *grown)

    def take_rows(self, rows: Integers) -> Tables:
        """Row b is a copy of row ``rows[b]``."""
        return Tables(self.first, *(x[rows] for x in self[1:])) if len(self.records) else self


class Landmarks(NamedTuple):
    """Landmark vectors of own chunks ``first ...``, in segments that are never copied again; as :class:`Tables`."""

    first: int = 0
    segments: tuple[Tensor, ...] = ()  # [B, m, ..., E]; in memory [..., B, m, E]

    def with_room(self, new: Tensor, chunks: int, gone: int, capacity: int, most: int | None) -> Landmarks:
        """Room for so many own chunks of each row.

        Segments of the first ``gone`` alone are let go of.

        Args:
            new: [B, n, ..., E] as what is to be written. capacity: chunks of the first segment, if it is known.
            most: chunks of a row that count, so that a segment is not much larger; None: all.
        """
        B, _, *shape = new.shape
        begin, segments = self
        while segments and begin + segments[0].shape[1] <= gone:
            begin, segments = begin + segments[0].shape[1], segments[1:]
        if not segments:
            begin = gone
        held = sum(segment.shape[1] for segment in segments)
        need = chunks - begin
        if need > held:
            # models that search all keys keep vectors of no number
            least = _FIRST_BYTES // max(1, math.prod(shape) * new.element_size())
            size = max(held, 0 if held else capacity, min(_FIRST_LANDMARKS, max(64, least)))
            if most is not None:
                size = min(size, max(64, most // 2))
            with torch.inference_mode(False):
                segment = new.new_empty(*shape[:-1], B, max(need - held, size), shape[-1])
            segments = (*segments, as_read(segment))
        return Landmarks(begin, segments)

    def write(self, landmarks: Tensor, first: Integers, counts: Integers) -> None:
        """Put ``counts`` [B] of landmarks [B, n, ..., E] at own chunks ``first`` [B] ..., where there is room."""
        alike = bool((first == first[0]).all() and (counts == counts[0]).all())
        for b in [slice(None)] if alike else [slice(b, b + 1) for b in range(len(landmarks))]:
            at, end = int(first[b][0]), int((first + counts)[b][0])
            begin = self.first
            for segment in self.segments:
                done, stop = max(at, begin), min(end, begin + segment.shape[1])
                if done < stop:
                    segment[b, done - begin : stop - begin] = landmarks[b, done - at : stop - at]
                begin += segment.shape[1]

    def between(self, first: int, last: int) -> list[Tensor]:
        """Those of own chunks ``first ... last - 1``, in parts [B, m, ..., E]."""
        parts, begin = [], self.first
        for segment in self.segments:
            low, high = max(first - begin, 0), min(last - begin, segment.shape[1])
            if low < high:
                parts.append(segment[:, low:high])
            begin += segment.shape[1]
        return parts

    def take_rows(self, rows: Integers) -> Landmarks:
        """Row b is a copy of row ``rows[b]``."""
        index = torch.from_numpy(rows)
        with torch.inference_mode(False):  # they are written to later
            segments = [as_read(as_stored(x).index_select(-3, index.to(x.device))) for x in self.segments]
        return Landmarks(self.first, tuple(segments))


def as_read(landmarks: Tensor) -> Tensor:
    """[..., B, m, E] -> [B, m, ..., E], the same memory: those of one plane stand side by side."""
    return landmarks.movedim((-3, -2), (0, 1))


def as_stored(landmarks: Tensor) -> Tensor:
    """[B, m, ..., E] -> [..., B, m, E], the same memory."""
    return landmarks.movedim((0, 1), (-3, -2))
