"""What a text costs by formula: bytes of a cache by part, and multiply-adds of attention (arXiv 2410.01651, Sec. 3.2).

The paper counts, for N layers of width d: O(L d / S + N / 2 K S d + N W d) numbers on the device in inference, and
O(G L^2 / S^2 + N / 2 L K S + N L W) steps. Here the same is counted exactly, for the layout that the caches have:
docs/reading.md says what is where. Letters: docs/math.md. A model's own formula stands with the model
(``cache_bytes``, ``paper_bytes``, ``attention_multiply_adds``); here is what several share.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trailmark.memory.chunks import TABLE_BYTES, landmark_dtype, recent_chunks
from trailmark.memory.encoding import smallest_dtype
from trailmark.memory.tiers.base import tier_named
from trailmark.memory.tiers.records import RecordLayout

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
        kind = tier_named(tier)
        held = self.window_bytes + self.landmarks + self.gathered
        if kind.takes == "device":
            held += self.records
        # without a GPU the host's memory is the device's, and nothing is kept twice
        return held + (self.recent if kind.keeps_recent(device) else 0)

    def as_tokens(self, model: Any, memory_dtype: torch.dtype | None) -> CacheBytes:
        """The same on a tier that keeps tokens, from what is kept in the model's own type.

        Args:
            memory_dtype: of landmark vectors; None: as they come.
        """
        config, chunks = model.config, self.tables // TABLE_BYTES
        if not chunks:
            return self
        size = 0 if model.embedder is None else embedder_size(model)
        number = torch.promote_types(model.dtype, torch.float32) if size else model.dtype
        kept = number if memory_dtype is None else memory_dtype
        return replace(
            self,
            open_chunk=self.open_chunk + (0 if size else config.chunk_size * _IDS),
            records=chunks * config.chunk_size * smallest_dtype(config.vocab_size).itemsize,
            landmarks=self.landmarks // number.itemsize * kept.itemsize,
        )

    def parts(self) -> dict[str, int]:
        """Those that are not 0, by name."""
        return {name: number for name, number in asdict(self).items() if number}


class NumberBytes(NamedTuple):
    """What numbers of each kind take in a model's caches: bytes of one, and of keys and values in memory the type."""

    own: int  # of the model's type
    kept: torch.dtype  # of keys and values in memory
    wide: int  # of scores and states that are never below float32
    landmark: int  # of landmark vectors in memory
    wide_landmark: int  # of those that are never below float32 but where the memory rounds them

    @classmethod
    def of(cls, model: Any, memory_dtype: torch.dtype | None) -> NumberBytes:
        own, wide = model.dtype, torch.promote_types(model.dtype, torch.float32)
        landmark, wide_landmark = (landmark_dtype(x, memory_dtype, False).itemsize for x in (own, wide))
        return cls(own.itemsize, memory_dtype or own, wide.itemsize, landmark, wide_landmark)

    def record(self, heads: int, keys: int, head_dim: int) -> RecordLayout:
        """A record's: of the ``keys`` and as many values of each head."""
        return RecordLayout((2, heads, keys, head_dim), self.kept, "meta")


def kv_width(config: Any) -> int:
    """2 J D: numbers of one position's keys and values in one layer."""
    width: int = 2 * config.num_key_value_heads * config.head_dim
    return width


def num_closed(prompt: int, generated: int, chunk_size: int) -> int:
    """Chunks of ``prompt`` tokens, the last of them closed early if it must be, and of ``generated`` after them."""
    return -(-prompt // chunk_size) + generated // chunk_size


def window_slots(config: Any) -> int:
    """Positions whose keys and values a layer's window keeps: n sinks and W more."""
    slots: int = config.num_sinks + config.sliding_window
    return slots


def pairs_in_sight(positions: int, window: int | None, sinks: int = 0) -> int:
    """Pairs of a position and one that it sees, itself included."""
    w = positions if window is None else min(window, positions)
    n = min(sinks, positions - w)  # outside the window, position W sees one sink, the next two, up to all
    return w * (w + 1) // 2 + (positions - w) * w + n * (n + 1) // 2 + (positions - w - n) * n


def embedder_size(model: Any) -> int:
    """Numbers of an embedder's vector; 0 for a model that has none to ask.

    Raises:
        ValueError: a model that lacks its embedder.
    """
    if model.config.retriever != "encoder" or not model.config.retrieves:
        return 0
    if model.embedder is None:
        raise ValueError("model: expected its embedder to be set, got none. Set model.embedder first.")
    size: int = model.embedder.size
    return size


# --- models that keep closed chunks: DRT, RPT ----------------------------------------------------------------------


def chunk_cache_bytes(
    model: Any,
    prompt: int,
    generated: int,
    number: NumberBytes,
    *,
    record: RecordLayout,
    vectors: int,
    fetched: int,
) -> CacheBytes:
    """The cache of a model whose layers have windows and whose closed chunks are kept.

    Args:
        record: of a chunk's keys and values, or of what they are made of.
        vectors: numbers of a chunk's landmark vectors, without those of an embedder.
        fetched: bytes that the open chunk reads.
    """
    config = model.config
    S, size = config.chunk_size, embedder_size(model)
    chunks = num_closed(prompt, generated, S) if config.retrieves else 0  # that are kept
    landmark = (vectors + 2 * size) * (number.wide_landmark if size else number.landmark)
    return CacheBytes(
        window=config.num_hidden_layers * window_slots(config) * kv_width(config) * number.own,
        open_chunk=S * config.hidden_size * number.own + (S * _IDS if size else 0) if config.retrieves else 0,
        retrieved=fetched if _has_selected(config, prompt, generated) else 0,
        records=chunks * record.record_bytes,
        landmarks=chunks * landmark,
        tables=chunks * TABLE_BYTES,
        recent=recent_chunks(record.given_bytes) * record.given_bytes if chunks else 0,
    )


def _has_selected(config: Any, prompt: int, generated: int) -> bool:
    """Whether the last chunk that closed found a chunk before it."""
    S = config.chunk_size
    chunks = num_closed(prompt, generated, S)
    if config.first_visible is None:
        return chunks > 1
    last = prompt + generated // S * S - 1  # its last token
    # as positions are counted; a landmark that takes none stands where the next token will
    place = last + (chunks if config.counts_landmarks else int(config.has_landmarks))
    return bool(chunks > 1 and place + config.first_visible > 0)


class ChunkReads(NamedTuple):
    """What the closed chunks of a text may select and do select, in the best case."""

    positions: int  # of the text, as windows count them
    candidates: npt.NDArray[np.int64]  # [C] of each chunk
    selected: npt.NDArray[np.int64]  # [C]
    pairs: int  # of a row that reads and a token that is read

    @classmethod
    def of(cls, config: Any, length: int) -> ChunkReads:
        S, K = config.chunk_size, config.num_retrieved_chunks
        chunks, positions_of_chunk = length // S, S + config.counts_landmarks
        positions = length + (chunks if config.counts_landmarks else 0)
        candidates = np.arange(chunks) * config.retrieves
        if config.first_visible is not None:
            # a hidden landmark stands where the next token will
            last = (candidates + 1) * positions_of_chunk - (not config.hides_landmarks)
            ends = last + config.first_visible
            candidates = np.clip(-(-ends // positions_of_chunk), 0, candidates)
        selected = np.minimum(candidates, K)
        # chunk c + 1 reads what chunk c found; the last one's tokens are what is left of the text
        rows = np.full(chunks, S + config.has_landmarks, np.int64)
        if chunks:
            rows[-1] = length - chunks * S
        return cls(positions, candidates, selected, int((selected * rows).sum()) * S)


def chunk_multiply_adds(model: Any, reads: ChunkReads, layers: int, scored: int) -> dict[str, int]:
    """Multiply-adds of a model whose layers have windows and of which ``layers`` read what is selected.

    Args:
        scored: pairs of a query and a landmark vector of the model's own.
    """
    config, width = model.config, model.config.attention_width
    window = pairs_in_sight(reads.positions, config.sliding_window, config.num_sinks)
    if config.hides_landmarks:  # a landmark sees what the next token does, without it
        number = np.arange(1, len(reads.candidates) + 1) * config.chunk_size
        near = np.minimum(number, config.sliding_window - 1)
        window += int((near + np.clip(number - config.sliding_window + 1, 0, config.num_sinks)).sum())
    return {
        "window": 2 * width * config.num_hidden_layers * window,
        "retrieved": 2 * width * layers * reads.pairs,
        # an embedder's vectors are searched once, for all groups
        "selection": config.hidden_size * scored + embedder_size(model) * int(reads.candidates.sum()),
    }


# --- models of transformers ----------------------------------------------------------------------------------------


def foreign_cache_bytes(config: Any, tokens: int, itemsize: int) -> int | None:
    """Bytes of transformers' ``DynamicCache``: 2 J D numbers for each token and layer, in a window of the last W - 1.

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
