"""Bytes of Landmark Attention's cache: a cell of each layer, and the chunks that full cells handed to the memory."""

from __future__ import annotations

from trailmark.memory.chunks import TABLE_BYTES, recent_chunks
from trailmark.models.costs import CacheBytes, NumberBytes
from trailmark.models.landmark.config import LandmarkConfig

_PLACE = 8  # bytes of a chunk's number


def landmark_cache_bytes(
    config: LandmarkConfig, prompt: int, generated: int, number: NumberBytes
) -> CacheBytes:
    """The bytes by part: see :meth:`trailmark.models.answers.ModelAnswers.cache_bytes`.

    Where the memory got its first chunk with the last token, and cells or heads choose, what that one will find is
    counted already.
    """
    S, k, D = config.chunk_size, config.num_retrieved_chunks, config.head_dim
    N, H, J = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    chunks, slots, in_cell = _walk(config, prompt, generated)
    chunks = chunks if config.retrieves else 0
    known = chunks if config.max_memory_chunks is None else min(chunks, config.max_memory_chunks)
    record = number.record(1, S + 1, D)
    heads = H if config.retrieve_per in ("token_and_head", "head") else J
    # the landmark of a chunk that closes comes with its last token, and retrieves for itself too
    asking = 1 if config.selects_for_many or generated < S else 2
    searching = 0
    if config.selects_for_many and chunks:
        rows = H if config.retrieve_per == "head" else 1
        searching = N * rows * (known * number.wide if in_cell else 0)
        searching += N * rows * k * _PLACE if config.causal_retrieval else 0
    return CacheBytes(
        window=N * 2 * J * D * slots * number.own,
        states=searching,
        records=known * N * J * record.record_bytes,
        landmarks=known * N * J * D * number.landmark,
        tables=known * TABLE_BYTES,
        gathered=asking * heads * k * record.given_bytes if known else 0,
        recent=recent_chunks(record.given_bytes, N * J) * N * J * record.given_bytes if known else 0,
    )


def _walk(config: LandmarkConfig, prompt: int, generated: int) -> tuple[int, int, int]:
    """Chunks in memory, slots of a cell's buffers, tokens of the present cell."""
    S, length = config.chunk_size, config.local_length
    begin = (prompt - 1) // length * length  # of the cell in which the prompt ends
    memory, slots = begin // S, config.cell_positions()
    phase = held = begin % S
    closed = 0  # in this cell
    for token in range(begin + 1, prompt + generated + 1):
        phase, held = phase + 1, held + 1
        if phase == S or token == prompt:
            phase, held, closed = 0, held + 1, closed + 1
        if held > slots:  # an early landmark takes a place that no full chunk has
            slots = max(held, slots * 3 // 2)
        if token % length == 0:
            memory, closed, held = memory + closed, 0, phase
    return memory, slots, (prompt + generated) % length
