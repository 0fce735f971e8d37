"""What is cited: the chunks that a row read, and where their tokens stand."""

from __future__ import annotations

import pytest
import torch

from tests.models.landmark.test_reading import EACH_CAUSAL_WAY
from tests.models.tiny import landmark, tokens
from trailmark.server.following import Follower


@EACH_CAUSAL_WAY
@pytest.mark.parametrize("length", [60, 400])
def test_chunks_that_a_bounded_memory_has_put_out_are_not_cited(way: dict[str, str], length: int) -> None:
    """A call of many cells reads chunks that are gone at its end; those that are left stand where they stood."""
    model = landmark(max_memory_chunks=4, **way)
    cache, size = model.new_cache(), model.config.chunk_size
    with torch.no_grad():
        out = model(tokens(length), past_key_values=cache, output_retrieval=True, logits_to_keep=1)
    assert any((chosen.indices >= 0).any() for chosen in out.retrieval)
    first, closed = int(cache.memory.first_chunk(cache.state.memory)[0]), int(cache.num_chunks[0])
    cited = Follower(model).after(out.retrieval, 0, closed, length, cache)
    assert all(first <= read.chunk < closed for read in cited)
    assert all(read.positions == (read.chunk * size, (read.chunk + 1) * size) for read in cited)
