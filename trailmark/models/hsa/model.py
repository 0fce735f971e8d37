"""HSA (arXiv 2504.16795, 2511.23319): every token chooses the past chunks that it reads, in layers between windows.

Lower layers -> chunk encoder -> memory (keys, values, landmark vectors) -> groups: a layer that reads, without a window
or positions, then layers with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkMemory, FaissSearch, MemoryEntries
from trailmark.memory.chunks import TABLE_BYTES, recent_chunks
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts, LayerKind
from trailmark.models.costs import CacheBytes, NumberBytes, kv_width, num_closed, pairs_in_sight, window_slots
from trailmark.models.embedding import Given
from trailmark.models.grid import Grid, Integers
from trailmark.models.hsa.chunks import MemoryChunks, TextChunks
from trailmark.models.hsa.config import HSAConfig
from trailmark.models.layered import Chunks, RetrievingForCausalLM
from trailmark.models.layers import (
    MLP,
    ChunkEncoderLayer,
    RMSNorm,
    WindowLayer,
    encode_chunks,
    fused_linear,
    head_norm,
    rms_normalize,
)
from trailmark.models.reads import AveragedReads, BeforeReading
from trailmark.models.step import Step
from trailmark.ops import grouped_cross_attention


class ChunkEncoder(nn.Module):
    """Closed chunks to memory: bidirectional layers over S tokens and a landmark after them, then W_k, W_v, W_l."""

    def __init__(self, config: HSAConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_memory_heads * config.head_dim
        self.landmark = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(ChunkEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.kv_proj = fused_linear(config.hidden_size, (width, width))
        self.k_norm = head_norm(config, config.num_memory_heads)
        self.landmark_proj = nn.Linear(config.hidden_size, config.retrieval_size, bias=False)

    def forward(self, positions: Tensor, grid: Grid, keeps_kv: bool = True) -> MemoryEntries:
        """Lower hidden states, as ``grid.encoder_rows`` takes them, to the entries of the closed chunks.

        ``keeps_kv``: whether the memory keeps keys and values; if not, and a landmark sums its chunk up, they are empty
        [B, C, 0, J, D].
        """
        config = self.config
        rows = grid.encoder_rows(positions).unflatten(1, (-1, config.chunk_size))  # [B, C, S, E]
        rows = torch.cat([rows, self.landmark.to(rows.dtype).expand(*rows.shape[:2], 1, -1)], 2)
        tokens, summary, lengths = encode_chunks(config, self.layers, self.output_norm, rows, grid, keeps_kv)
        k, v = self.kv_proj(tokens).unflatten(-1, (-1, config.head_dim)).chunk(2, dim=-2)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return MemoryEntries(k, v, _scored(config, self.landmark_proj(summary)), lengths)


class Retriever(nn.Module):
    """One group's queries, W_q RMSNorm(h), and what is added to a score for each more recent chunk."""

    def __init__(self, config: HSAConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.hidden_size, config.retrieval_size, bias=False)
        self.decay = nn.Parameter(torch.zeros(1)) if config.recency_decay else None

    def forward(self, hidden: Tensor) -> Tensor:
        """The queries [B, P, d] of positions hidden [B, P, E]."""
        return _scored(self.config, self.q_proj(self.norm(hidden)))


def _scored(config: HSAConfig, x: Tensor) -> Tensor:
    """One side of the scores [B, n, d], of each head that chooses by itself."""
    if not config.retrieval_normalization:
        return x
    return rms_normalize(x.unflatten(-1, (config.num_retrieval_heads, -1)), config.rms_norm_eps).flatten(-2)


class HSALayer(GradientCheckpointingLayer):
    """What a group begins with: y = h + MLP(norm(h + HSA(norm h))).

    What was read feeds the MLP but bypasses the residual stream, as published; ``residual_gca`` adds it there instead.
    Queries and keys have no positions, and norms where self-attention has them.
    """

    def __init__(self, config: HSAConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.hidden_size, config.attention_width, bias=False)
        self.q_norm = head_norm(config, config.num_attention_heads)
        self.o_proj = nn.Linear(config.attention_width, config.hidden_size, bias=False)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *reading: Any) -> Tensor:
        """x [B, P, E]; then the fields of a Reading, or none: nothing is read."""
        # arguments of their own: reentrant checkpointing passes gradients to no tensor inside a tuple
        if not reading:
            return x + self.mlp(self.mlp_norm(x))
        read = self._read(x, *reading)
        if self.config.residual_gca:
            x = x + read
            return x + self.mlp(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x + read))

    def _read(
        self, x: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """What positions x [B, P, E] read of the chunks of a Reading, [B, P, E]."""
        config = self.config
        q = self.q_proj(self.attention_norm(x)).unflatten(-1, (-1, config.head_dim))  # [B, P, H, D]
        if self.q_norm is not None:
            q = self.q_norm(q)
        if indices.shape[2] == 1:  # of all heads
            indices, weights = indices[:, :, 0], weights[:, :, 0]
        read = grouped_cross_attention(
            q[:, :, None],
            k,
            v,
            indices,
            weights,
            lengths,
            softmax_off_by_one=config.softmax_off_by_one,
            implementation=config.implementation,
        )
        out: Tensor = self.o_proj(read[:, :, 0].flatten(2))
        return out


class HSAForCausalLM(RetrievingForCausalLM):
    """HSA with a language-modelling head."""

    config_class = HSAConfig
    config: HSAConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "HSALayer"]
    compiles = False  # which chunks each token may select is laid out in numpy
    additions = ("encoder.*", "retrievers.*", "readers.*")
    scoring = ("encoder.landmark_proj.*", "retrievers.*")

    def __init__(self, config: HSAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lower_layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_lower_layers))
        self.encoder = ChunkEncoder(config)
        groups = range(config.num_retrieval_groups)
        self.retrievers = nn.ModuleList(Retriever(config) for _ in groups)
        self.readers = nn.ModuleList(HSALayer(config) for _ in groups)
        self.upper_layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_upper_layers))
        self._finish(RMSNorm(config.hidden_size, config.rms_norm_eps))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ChunkEncoder):
            fan_in = self.config.initialization == "fan_in"
            init.normal_(module.landmark, std=0.1 if fan_in else self.config.initializer_range)
        elif isinstance(module, Retriever) and module.decay is not None:
            init.zeros_(module.decay)
        elif (
            module is self and self.config.retrieval_normalization
        ):  # last: its parts are initialised already
            retriever: Any
            for (
                retriever
            ) in self.retrievers:  # both sides start in one space: a chunk first finds what looks like it
                init.copy_(retriever.q_proj.weight, self.encoder.landmark_proj.weight)

    # --- chunks ----------------------------------------------------------------------------------------------

    def _make_memory(
        self, tier: str, capacity: int, folder: Path | None, dtype: torch.dtype | None, search: Any
    ) -> ChunkMemory:
        heads = self.config.num_retrieval_heads
        if heads > 1 and isinstance(search, FaissSearch):
            raise ValueError(
                f"search: expected None with num_retrieval_heads {heads}, got a FaissSearch, which knows one vector a "
                "chunk. Search exactly."
            )
        return super()._make_memory(tier, capacity, folder, dtype, search)

    @property
    def _record_shape(self) -> tuple[int, ...]:
        config = self.config
        return 2, config.num_memory_heads, config.chunk_size, config.head_dim

    def _expected_state(self) -> Expected:
        expected = super()._expected_state()
        if not self.config.retrieves:
            return expected
        return expected._replace(sizes={**expected.sizes, "LE": self.config.retrieval_size})

    def _entries(self, x: Tensor, ids: Tensor | None, grid: Grid, step: Step | None) -> MemoryEntries:
        entries: MemoryEntries = self.encoder(x, grid, step is None or step.cache.memory.keeps_kv)
        return entries

    def _text_chunks(
        self, x: Tensor, tokens: Tensor, grid: Grid, noise_seed: Tensor | None, given: Given | None
    ) -> tuple[Tensor, Chunks | None]:
        if not self.config.retrieves:
            return x, None
        # where nothing is closed the encoder still runs for its gradients: zeros, which DDP waits for
        return x, TextChunks(self.config, self._decays, grid, self.encoder(x, grid), noise_seed)

    def _memory_chunks(self, x: Tensor, grid: Grid, step: Step, first_chunk: Integers) -> Chunks | None:
        if not self.config.retrieves:
            return None
        return MemoryChunks(self.config, self._decays, grid, step, first_chunk, x.device)

    @property
    def _decays(self) -> list[Tensor | None]:
        retrievers: Any = self.retrievers
        return [retriever.decay for retriever in retrievers]

    def _query(self, group: int, x: Tensor, grid: Grid, chunks: Chunks) -> Tensor:
        query: Tensor = self.retrievers[group](x)
        return query

    def _begin_group(self, group: int, x: Tensor, reading: tuple[Any, ...]) -> Tensor:
        if not reading:
            nothing: Tensor = self.readers[group](x)
            return nothing
        (slabs,) = reading
        parts = [self.readers[group](x[:, columns], *part) for columns, part in slabs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _of_layer(self, reading: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        return ()  # the group's first layer read it

    # --- answers ---------------------------------------------------------------------------------------------

    def reach(self) -> int:
        """A token asks by itself, so the upper layers look back through their windows alone."""
        config = self.config
        assert config.sliding_window is not None
        return config.num_upper_layers * (config.sliding_window - 1)

    @property
    def selects_by_chunk(self) -> bool:
        return False

    @property
    def can_be_planted(self) -> bool:
        """What the memory keeps of a chunk comes from lower layers, whatever tokens select above them."""
        return self.reach() is not None

    def follow_reads(self) -> AveragedReads:
        config = self.config
        heads, K, S = config.num_retrieval_heads, config.num_retrieved_chunks, config.chunk_size
        settings = {"chunk_weights": config.chunk_weights}
        return AveragedReads(config.num_retrieval_groups, heads, K, S, settings, "group")

    def before_reading(self) -> BeforeReading:
        size = self.config.chunk_size
        return BeforeReading(size, f"a chunk of {size} tokens")

    def layer_kinds(self) -> list[LayerKind]:
        windows = [kind for kind in super().layer_kinds() if not isinstance(kind.layers[0], HSALayer)]
        opening = [nn.ModuleList(pair) for pair in zip(self.retrievers, self.readers, strict=True)]
        return [*windows, LayerKind(opening, "nothing", opens_group=True)]

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number = self.config, NumberBytes.of(self, memory_dtype)
        S = config.chunk_size
        window = config.num_hidden_layers * window_slots(config) * kv_width(config) * number.own
        if not config.retrieves:
            return CacheBytes(window=window)
        chunks = num_closed(prompt, generated, S)
        record = number.record(config.num_memory_heads, S, config.head_dim)
        return CacheBytes(
            window=window,
            open_chunk=S * config.hidden_size * number.own,
            records=chunks * record.record_bytes,
            landmarks=chunks * config.retrieval_size * number.landmark,
            tables=chunks * TABLE_BYTES,
            gathered=config.num_retrieval_heads * config.num_retrieved_chunks * record.given_bytes,
            recent=recent_chunks(record.given_bytes) * record.given_bytes if chunks else 0,
        )

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        config, width = self.config, self.config.attention_width
        pairs = pairs_in_sight(length, config.sliding_window, config.num_sinks)
        found = {"window": 2 * width * config.num_hidden_layers * pairs}
        if not config.retrieves:
            return found
        candidates = np.arange(length) // config.chunk_size  # of each token
        chosen = int(np.minimum(candidates, config.num_retrieved_chunks).sum())
        groups = config.num_retrieval_groups
        return found | {
            "retrieved": 2 * width * groups * chosen * config.chunk_size,
            "selection": config.retrieval_size * groups * int(candidates.sum()),
        }

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "model with hierarchical sparse attention",
            "Every token chooses the few past chunks that it reads, by scores that it learned from the "
            "language-modelling loss.",
            (("HSA", "2504.16795"), ("HSA-UltraLong", "2511.23319")),
        )
