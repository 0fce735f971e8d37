"""A whole trace summed up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trailmark.trace.lines import TracedChunk


def totals(chunks: Sequence[TracedChunk]) -> tuple[int, float, float]:
    """Tokens that bear a loss, and the sums of their losses with and without retrieval, in nats."""
    known = np.concatenate([np.zeros(0), *(chunk.losses for chunk in chunks)])
    without = np.concatenate([np.zeros(0), *(chunk.losses_without for chunk in chunks)])
    bears = np.isfinite(known)
    return (
        int(bears.sum()),
        float(known[bears].sum(dtype=np.float64)),
        float(without[bears].sum(dtype=np.float64)),
    )
