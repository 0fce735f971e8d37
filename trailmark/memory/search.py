"""Search over a memory's landmarks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trailmark.ops import ChunkSelection, select_chunks


class ExactSearch:
    """Every landmark is scored, block by block."""

    def select(
        self,
        query: Tensor,  # [B, n, E]
        blocks: Sequence[Tensor],  # [B, m, E] each
        num_retrieved: int,
        num_candidates: Tensor,  # [B, n]
        scale: float,
    ) -> ChunkSelection:
        return select_chunks(query, blocks, num_retrieved, num_candidates, scale=scale)
