"""What a text costs by formula: bytes of a cache by part, and multiply-adds of attention (arXiv 2410.01651, Sec. 3.2).

The paper counts, for N layers of width d: O(L d / S + N / 2 K S d + N W d) numbers on the device in inference, and
O(G L^2 / S^2 + N / 2 L K S + N L W) steps. Here the same is counted exactly, for the layout that the caches have:
docs/reading.md says what is where. Letters: docs/math.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trailmark.memory.chunks import TABLE_BYTES, recent_chunks
from trailmark.models import (
    BlockRecurrentConfig,
    DRTConfig,
    LandmarkConfig,
    RPTConfig,
    SlidingWindowConfig,
    TrailmarkConfig,
    TrailmarkForCausalLM,
)

_IDS = 8  # bytes of a token's number


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one text's cache after a prompt and some tokens that were generated one by one."""

    window: int = 0  # keys and values of the layers' windows, cells or, without a window, of all positions
    open_chunk: int = 0  # states, keys or tokens of the chunk (or block) that is not full
    retrieved: int = 0  # what the open chunk reads
    states: int = 0  # recurrent states with their keys and values; a cell's running maxima
    records: int = 0  # keys and values of past chunks: on the memory's tier
    landmarks: int = 0  # vectors of past chunks: on the device
    tables: int = 0  # numbers, places and lengths of past chunks: on the host
    gathered: int = 0  # what one layer fetches for a token, and then lets go of: Landmark Attention
    recent: int = 0  # records used last, which stay on the device in front of another tier

    @property
    def window_bytes(self) -> int:
        """What ``cache.window_bytes()`` counts."""
        return self.window + self.open_chunk + self.retrieved + self.states

    @property
    def memory_bytes(self) -> int:
        """What ``cache.memory_bytes()`` counts."""
        return self.records + self.landmarks + self.tables

    @property
    def total(self) -> int:
        """All that is carried from token to token, wherever it lies, each number once."""
        return self.window_bytes + self.memory_bytes

    def on_device(self, tier: str, device: str = "cpu") -> int:
        """What a ``device``, "cpu" or "cuda", must hold with the memory on ``tier``, but for weights."""
        held = self.window_bytes + self.landmarks + self.gathered
        if tier == "device":
            held += self.records
        # without a GPU the host's memory is the device's, and nothing is kept twice
        return held + (self.recent if tier == "disk" or (tier, device) == ("host", "cuda") else 0)

    def parts(self) -> dict[str, int]:
        """Those that are not 0, by name."""
        return {name: number for name, number in asdict(self).items() if number}


def cache_bytes(
    model: TrailmarkForCausalLM, prompt: int, generated: int, memory_dtype: torch.dtype | None = None
) -> CacheBytes:
    """Of a cache that has read ``prompt`` tokens, whose end is closed, and ``generated`` more, one by one.

    Exact but for two things that a cache counts in whole: buffers without a window (full attention) grow by halves and
    are up to half as large again as the positions in use, which are counted here; and with ``max_memory_chunks`` a
    store holds, beside the chunks that count, those that one call wrote.

    Args:
        memory_dtype: of keys and values in memory; None: the model's.

    Raises:
        ValueError: another model than trailmark's.
    """
    config: Any = model.config
    number = model.dtype.itemsize
    kept = number if memory_dtype is None else memory_dtype.itemsize
    wide = torch.promote_types(model.dtype, torch.float32).itemsize
    kv = 2 * config.num_key_value_heads * config.head_dim  # 2 J D
    N, W, tokens = config.num_hidden_layers, config.sliding_window, prompt + generated
    if isinstance(config, SlidingWindowConfig):
        return CacheBytes(window=N * (W or tokens) * kv * number)
    if isinstance(config, BlockRecurrentConfig):
        assert config.block_size is not None
        assert config.num_states is not None
        return CacheBytes(
            window=N * config.sliding_window * kv * number,
            open_chunk=config.block_size * kv * number,
            states=config.num_states * (config.hidden_size * wide + kv * number),
        )
    if isinstance(config, LandmarkConfig):
        return _of_cells(config, prompt, generated, number, kept, wide)
    if not isinstance(config, DRTConfig | RPTConfig):
        raise ValueError(f"model: expected one of trailmark's, got {type(model).__name__}.")
    S, E, K = config.chunk_size, config.hidden_size, config.num_retrieved_chunks
    chunks = num_closed(prompt, generated, S) if config.retrieves else 0  # that are kept
    size = _embedder_size(model) if config.retriever == "encoder" and config.retrieves else 0
    if isinstance(config, DRTConfig):
        record = S * kv * kept
        own = E if config.scores_chunks else 0
        fetched = config.num_retrieval_groups * K * (record + wide)
    else:
        record = S * E * kept  # states as two halves, projected by each layer that reads
        own = 0 if size else 2 * E  # key and query
        layers = -(-config.num_upper_layers // config.cross_attention_every)
        fetched = K * (2 if config.continuation else 1) * (layers * S * kv * number + number)
    landmark = (own + 2 * size) * (wide if size else number)
    return CacheBytes(
        window=N * config.sliding_window * kv * number,
        open_chunk=S * E * number + (S * _IDS if size else 0) if config.retrieves else 0,
        retrieved=fetched if _has_selected(config, prompt, generated) else 0,
        records=chunks * record,
        landmarks=chunks * landmark,
        tables=chunks * TABLE_BYTES,
        recent=recent_chunks(record) * record if chunks else 0,
    )


def num_closed(prompt: int, generated: int, chunk_size: int) -> int:
    """Chunks of ``prompt`` tokens, the last of them closed early if it must be, and of ``generated`` after them."""
    return -(-prompt // chunk_size) + generated // chunk_size


def _embedder_size(model: TrailmarkForCausalLM) -> int:
    if model.embedder is None:
        raise ValueError("model: expected its embedder to be set, got none. Set model.embedder first.")
    return model.embedder.size


def _has_selected(config: DRTConfig | RPTConfig, prompt: int, generated: int) -> bool:
    """Whether the last chunk that closed found a chunk before it."""
    S = config.chunk_size
    chunks = num_closed(prompt, generated, S)
    if config.first_visible is None:
        return chunks > 1
    last = prompt + generated // S * S - 1  # its last token
    place = last + chunks if config.has_landmarks else last  # as positions are counted
    return chunks > 1 and place + config.first_visible > 0


def _of_cells(
    config: LandmarkConfig, prompt: int, generated: int, number: int, kept: int, wide: int
) -> CacheBytes:
    """Landmark Attention: a cell of each layer, and the chunks that full cells handed to the memory."""
    assert config.local_length is not None
    assert config.num_key_value_heads is not None
    S, k, D = config.chunk_size, config.num_retrieved_chunks, config.head_dim
    N, H, J = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    chunks, slots, in_cell = _walk(config, prompt, generated)
    chunks = chunks if config.retrieves else 0
    known = chunks if config.max_memory_chunks is None else min(chunks, config.max_memory_chunks)
    record = 2 * (S + 1) * D * kept
    heads = H if config.retrieve_per in ("token_and_head", "head") else J
    # the landmark of a chunk that closes comes with its last token, and retrieves for itself too
    asking = 1 if config.selects_for_many or generated < S else 2
    searching = 0
    if config.selects_for_many and chunks:
        rows = H if config.retrieve_per == "head" else 1
        searching = N * rows * (known * wide if in_cell else 0)
        searching += N * rows * k * _IDS if config.causal_retrieval else 0
    return CacheBytes(
        window=N * 2 * J * D * slots * number,
        states=searching,
        records=known * N * J * record,
        landmarks=known * N * J * D * number,
        tables=known * TABLE_BYTES,
        gathered=asking * heads * k * record if known else 0,
        recent=recent_chunks(record, N * J) * N * J * record if known else 0,
    )


def _walk(config: LandmarkConfig, prompt: int, generated: int) -> tuple[int, int, int]:
    """Chunks in memory, slots of a cell's buffers, tokens of the present cell."""
    assert config.local_length is not None
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


def foreign_cache_bytes(config: Any, tokens: int, itemsize: int) -> int | None:
    """Of transformers' ``DynamicCache``: 2 J D numbers for each token of each layer, of the last W - 1 in a window.

    None: the configuration does not say its sizes in the usual fields.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if heads is None or layers is None:
        return None
    J = getattr(config, "num_key_value_heads", None) or heads
    D = getattr(config, "head_dim", None) or config.hidden_size // heads
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    short = tokens if window is None else min(tokens, window - 1)
    seen = sum(tokens if kind == "full_attention" else short for kind in kinds)
    return 2 * seen * J * D * itemsize


def paper_bytes(config: TrailmarkConfig, length: int, itemsize: int) -> int | None:
    """Device memory after ``length`` tokens as arXiv 2410.01651, Sec. 3.2 counts it, with the memory offloaded.

    L d / S + N / 2 K S d + N W d, with keys and values counted apart (2 J D for d) and the vectors of landmarks as E.
    N W d of a window alone, N L d of full attention; None for models that the section does not count.
    """
    assert config.num_key_value_heads is not None
    kv, N, W = (
        2 * config.num_key_value_heads * config.head_dim,
        config.num_hidden_layers,
        config.sliding_window,
    )
    if isinstance(config, SlidingWindowConfig):
        return N * (W or length) * kv * itemsize
    if not isinstance(config, DRTConfig):
        return None
    assert W is not None
    landmarks = length * config.hidden_size // config.chunk_size
    read = config.num_upper_layers * config.num_retrieved_chunks * config.chunk_size * kv
    return (landmarks + read + N * W * kv) * itemsize


def attention_multiply_adds(model: TrailmarkForCausalLM, length: int) -> dict[str, int]:
    """Multiply-adds of all queries with keys and weights with values, of one forward over a whole text, by part.

    arXiv 2410.01651, Sec. 3.2: "selection" is G L^2 / S^2, "retrieved" N / 2 L K S, "window" N L W there; here each is
    the exact sum: the first chunks find less, the first positions see less. Projections, the MLP and what encodes
    chunks are linear in the length and not counted.

    Raises:
        ValueError: a model that lacks its embedder.
    """
    config: Any = model.config
    E, N, W = config.hidden_size, config.num_hidden_layers, config.sliding_window
    if isinstance(config, LandmarkConfig):  # a whole text, as in training: all positions before each
        return {"all": 2 * E * N * _seen(length + length // config.chunk_size, None)}
    if isinstance(config, BlockRecurrentConfig):
        assert config.block_size is not None
        assert config.num_states is not None
        M, S = config.num_states, config.block_size
        blocks = (length - 1) // S  # the last writes nothing
        return {
            "window": 2 * E * N * _seen(length, W),
            "states": 2 * E * (length * M + blocks * (M * M + M * S)),
        }
    if not isinstance(config, DRTConfig | RPTConfig):
        return {"window" if W else "all": 2 * E * N * _seen(length, W)}
    S, K = config.chunk_size, config.num_retrieved_chunks
    chunks, positions_of_chunk = length // S, S + config.has_landmarks
    positions = length + (chunks if config.has_landmarks else 0)
    candidates = np.arange(chunks) * config.retrieves  # of each chunk that closes
    if config.first_visible is not None:
        ends = (candidates + 1) * positions_of_chunk - 1 + config.first_visible
        candidates = np.clip(-(-ends // positions_of_chunk), 0, candidates)
    selected = np.minimum(candidates, K)
    # chunk c + 1 reads what chunk c found; the last one's tokens are what is left of the text
    rows = np.full(chunks, positions_of_chunk, np.int64)
    if chunks:
        rows[-1] = length - chunks * S
    pairs = int((selected * rows).sum()) * S
    if isinstance(config, RPTConfig):
        layers = -(-config.num_upper_layers // config.cross_attention_every)
        layers *= 2 if config.continuation else 1
        own = 0 if config.retriever == "encoder" else int(candidates.sum())
    else:
        layers = config.num_upper_layers
        # what was found otherwise is weighed
        scored = candidates if config.retriever == "causal" else selected
        own = config.num_retrieval_groups * int(scored.sum()) if config.scores_chunks else 0
    # searched once, for all groups
    size = _embedder_size(model) if config.retriever == "encoder" and config.retrieves else 0
    return {
        "window": 2 * E * N * _seen(positions, W),
        "retrieved": 2 * E * layers * pairs,
        "selection": E * own + size * int(candidates.sum()),
    }


def _seen(positions: int, window: int | None) -> int:
    """Pairs of a position and one that it sees, itself included."""
    w = positions if window is None else min(window, positions)
    return w * (w + 1) // 2 + (positions - w) * w
