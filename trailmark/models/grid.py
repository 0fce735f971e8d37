"""From tokens to positions and chunks: where landmarks stand (design, semantics 1 and 5).

One call lays its tokens out as full chunks and at most one shorter one at the end. Positions are the tokens
with a landmark after each closed chunk; rows are the same laid out as [B, N, S + 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """The layout of ``num_tokens`` tokens that begin at a chunk's start."""

    num_tokens: int
    chunk_size: int  # S
    close_chunk: bool  # a last chunk that is not full gets its landmark early

    @property
    def num_chunks(self) -> int:
        """N, the open chunk included."""
        return -(-self.num_tokens // self.chunk_size)

    @property
    def num_closed(self) -> int:
        """Chunks that have their landmark in this call."""
        return self.num_chunks if self.close_chunk else self.num_tokens // self.chunk_size

    @property
    def num_positions(self) -> int:
        return self.num_tokens + self.num_closed

    @property
    def num_open_tokens(self) -> int:
        return 0 if self.close_chunk else self.num_tokens % self.chunk_size

    @property
    def num_early_tokens(self) -> int:
        """Tokens of a last chunk closed before it was full; 0: there is none."""
        return self.num_tokens % self.chunk_size if self.close_chunk else 0

    def insert_landmarks(self, tokens: Tensor, landmark: Tensor) -> Tensor:
        """[B, T, E] and [E] -> positions [B, T + landmarks, E]."""
        B, _, E = tokens.shape
        full = self.num_tokens // self.chunk_size
        cut = full * self.chunk_size
        closed = tokens[:, :cut].view(B, full, self.chunk_size, E)
        mark = landmark.to(tokens.dtype).expand(B, full, 1, E)
        parts = [torch.cat([closed, mark], dim=2).view(B, -1, E)]
        if cut < self.num_tokens:
            parts.append(tokens[:, cut:])
        if self.num_early_tokens:  # an early landmark directly follows the last token
            parts.append(landmark.to(tokens.dtype).expand(B, 1, E))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def rows(self, positions: Tensor) -> Tensor:
        """Positions [B, P, E] -> [B, N, S + 1, E], zeros after the last."""
        B, P, E = positions.shape
        R = self.chunk_size + 1
        if missing := self.num_chunks * R - P:
            positions = F.pad(positions, (0, 0, 0, missing))
        return positions.view(B, self.num_chunks, R, E)

    def positions(self, rows: Tensor) -> Tensor:
        """[B, N, S + 1, E] -> positions [B, P, E]."""
        return _first(rows.flatten(1, 2), self.num_positions)

    def tokens(self, positions: Tensor) -> Tensor:
        """Positions [B, P, E] -> tokens [B, T, E]: the landmarks leave."""
        return _first(self.rows(positions)[:, :, : self.chunk_size].flatten(1, 2), self.num_tokens)

    def landmarks(self, positions: Tensor) -> Tensor:
        """Positions [B, P, E] -> their landmarks [B, closed, E]."""
        full = self.num_tokens // self.chunk_size
        marks = self.rows(positions)[:, :full, -1]
        if not self.num_early_tokens:
            return marks
        return torch.cat([marks, positions[:, -1:]], dim=1)

    def encoder_rows(self, positions: Tensor) -> Tensor:
        """Positions [B, P, E] -> the closed chunks [B, closed, S + 1, E], every landmark in row S."""
        rows = _first(self.rows(positions), self.num_closed)
        if not self.num_early_tokens:
            return rows
        r = self.num_early_tokens
        last = F.pad(rows[:, -1:, :r], (0, 0, 0, self.chunk_size - r))
        return torch.cat([rows[:, :-1], torch.cat([last, rows[:, -1:, r : r + 1]], dim=2)], dim=1)


def _first(x: Tensor, count: int) -> Tensor:
    """x[:, :count], without a slice (and its backward) where that is all of x."""
    return x if x.shape[1] == count else x[:, :count]
