"""The Retrieval-Pretrained Transformer (Rubin and Berant, 2024), and RPT-Contriever (arXiv 2410.01651, App. E).

Lower layers -> chunk encoder and retriever -> memory -> upper layers with chunked cross-attention. At the end of chunk
c, K chunks before it are selected; its last token and all but the last of chunk c + 1 read them (RETRO's shift).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import MemoryEntries, Window
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts, LayerKind
from trailmark.models.candidates import expect_selectable
from trailmark.models.costs import (
    CacheBytes,
    ChunkReads,
    NumberBytes,
    chunk_cache_bytes,
    chunk_multiply_adds,
    kv_width,
)
from trailmark.models.embedding import Given, Vectors, expect_earlier, expect_selected, given_neighbours
from trailmark.models.grid import Grid, Integers
from trailmark.models.layered import Chunks, NoChunks, RetrievingForCausalLM
from trailmark.models.layers import MLP, Place, RMSNorm, WindowAttention, WindowLayer
from trailmark.models.outputs import Hidden
from trailmark.models.reads import SelectedReads
from trailmark.models.rpt.chunks import MemoryChunks, Prepare, TextChunks
from trailmark.models.rpt.config import RPTConfig
from trailmark.models.rpt.neighbours import (
    ChunkedCrossAttention,
    ChunkRetriever,
    NeighbourAugmentor,
    NeighbourEncoder,
    NeighbourGate,
    Readers,
    Reading,
)
from trailmark.models.rpt.ranking import Ranking, expect_targets
from trailmark.models.step import Step


class RPTLayer(GradientCheckpointingLayer):
    """An upper layer: h = x + window(norm x); h <- h + CCA(norm h), if it reads; y = h + MLP(norm h)."""

    def __init__(self, config: RPTConfig, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = WindowAttention(config)
        if reads:
            self.cca_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.cca = ChunkedCrossAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # [B, P, E]
        place: Place,
        kept: Window | None,
        *reading: Any,  # the fields of a Reading, keys and values those of this layer
    ) -> Tensor:
        # arguments of their own: reentrant checkpointing passes gradients to no tensor inside a tuple
        x = x + self.attention(self.attention_norm(x), place, kept)
        if self.reads:
            x = x + self.cca(self.cca_norm(x), *reading)
        return x + self.mlp(self.mlp_norm(x))


class RPTForCausalLM(RetrievingForCausalLM):
    """RPT with a language-modelling head."""

    config_class = RPTConfig
    config: RPTConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "RPTLayer"]
    additions = ("encoder.*", "retriever.*", "augmentor.*", "gate.*", "upper_layers.*.cca*")
    scoring = ("retriever.*",)
    ranking_progress: float = 1.0
    """How far training is, 0 to 1, for what changes with it (:class:`Ranking`); a trainer may set it."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lower_layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_lower_layers))
        self.encoder = NeighbourEncoder(config)
        self.retriever = ChunkRetriever(config) if config.retriever == "learned" else None
        self.augmentor = NeighbourAugmentor(config) if config.neighbour_augmentation else None
        self.gate = NeighbourGate(config) if config.neighbour_gate else None
        self.upper_layers = nn.ModuleList(
            RPTLayer(config, reads=number % config.cross_attention_every == 0)
            for number in range(config.num_upper_layers)
        )
        self._finish(RMSNorm(config.hidden_size, config.rms_norm_eps))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        elif isinstance(module, ChunkedCrossAttention | ChunkRetriever):
            init.normal_(module.null_k, std=1e-4)
            init.normal_(module.null_v, std=1e-4)

    @torch.compiler.disable(reason="an RPT's chunks are laid out in numpy")
    def run(self, *arguments: Any, **named: Any) -> Hidden:
        return super().run(*arguments, **named)

    # --- chunks ----------------------------------------------------------------------------------------------

    def _states(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None, Vectors | None]:
        """Of the chunks that close, from positions x [B, P, E]: states [B, C, S, E], rows that exist, learned vectors.

        Rows that exist [B, C, S]: None: all. With a step, x stands after the open chunk's.
        """
        S = self.config.chunk_size
        rows = grid.encoder_rows(x).unflatten(1, (-1, S))
        present = None
        if grid.has_short_chunks:
            lengths = grid.lengths_on(x.device).expand(len(rows), -1)
            present = torch.arange(S, device=x.device) < lengths[..., None]
        vectors = None if self.retriever is None else self.retriever(rows, present)
        return self.encoder(rows, present), present, vectors

    def _embed(self, ids: Tensor | None, grid: Grid) -> Vectors | None:
        vectors = super()._embed(ids, grid)
        if vectors is None:
            return None
        wide = torch.promote_types(self.lm_head.weight.dtype, torch.float32)
        return vectors[0].to(wide), vectors[1].to(wide)

    def _text_chunks(
        self, x: Tensor, tokens: Tensor, grid: Grid, noise_seed: Tensor | None, given: Given | None
    ) -> tuple[Tensor, Chunks]:
        if given is not None:
            expect_earlier(given, grid, x.shape[0])
            expect_selectable(given, grid, self.config.first_visible)
            given = given.to(x.device)
        if not self.config.retrieves:
            return x, self._no_chunks(grid, x)
        states, present, vectors = self._states(x, grid)
        if self.retriever is not None:
            if torch.is_grad_enabled():
                # no other way to it where nothing is ranked: zeros, which DDP waits for
                x = x + sum(part[..., :0].sum() for part in vectors or ())
        elif given is None:
            vectors = self._embed(self._ids_of_chunks(tokens, grid), grid)
        ranking = Ranking(self.config, self.ranking_progress)
        of_chunks = states, present
        return x, TextChunks(
            self.config, grid, x, of_chunks, vectors, given, self._preparation, ranking, noise_seed
        )

    @property
    def _record_shape(self) -> tuple[int, ...]:
        return 2, 1, self.config.chunk_size, self.config.hidden_size // 2

    def _expected_state(self) -> Expected:
        expected, width = super()._expected_state(), self.config.hidden_size
        if self.retriever is None and self.embedder is not None:
            width = self.embedder.size
        return (
            expected._replace(sizes={**expected.sizes, "LE": 2 * width})
            if self.config.retrieves
            else expected
        )

    def _entries(self, x: Tensor, ids: Tensor | None, grid: Grid, step: Step | None) -> MemoryEntries:
        """States as two halves, and landmark vectors (key, query) [B, C, 2 d].

        Queries too: a later call may be the first that runs the upper layers on the tokens that read what they find.
        """
        states, present, vectors = self._states(x, grid)
        if present is not None:  # what does not exist has no part in the scales of a memory in int8
            states = states.masked_fill(~present[..., None], 0)
        if vectors is None:
            vectors = self._embed(ids, grid)
        assert vectors is not None
        queries, keys = vectors
        k, v = states[:, :, :, None].chunk(2, dim=-1)  # [B, C, S, 1, E / 2]
        lengths = grid.lengths_on(x.device).expand(len(states), -1)
        return MemoryEntries(k, v, torch.cat([keys, queries], dim=-1), lengths)

    def _memory_chunks(self, x: Tensor, grid: Grid, step: Step, first_chunk: Integers) -> Chunks:
        config = self.config
        if not config.retrieves:
            return self._no_chunks(grid, x)
        size = config.hidden_size if self.embedder is None or self.retriever else self.embedder.size
        return MemoryChunks(config, grid, step, first_chunk, x, size, self._preparation, self._projected)

    def _no_chunks(self, grid: Grid, x: Tensor) -> Chunks:
        return NoChunks(grid, x, Readers.of(grid).nothing(self.config, x))

    @property
    def _preparation(self) -> Prepare | None:
        """What neighbours go through before they are read; None: nothing."""
        return None if self.augmentor is None and self.gate is None else self._prepare

    def _prepare(
        self, rows: Tensor, present: Tensor | None, asking: Tensor, asking_present: Tensor | None
    ) -> Tensor:
        """Neighbours [B, C, K, L, E] as they are read, of the chunks with states ``asking`` [B, C, S, E]."""
        for part in (self.augmentor, self.gate):
            if part is not None:
                rows = part(rows, present, asking, asking_present)
        return rows

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, L, n J, D] of rows [B, K, L, E], of the n layers that read."""
        layers = cast("list[RPTLayer]", list(self.upper_layers))
        pairs = [layer.cca.project(rows) for layer in layers if layer.reads]
        return torch.cat([k for k, _ in pairs], dim=-2), torch.cat([v for _, v in pairs], dim=-2)

    def _of_layer(self, reading: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        """With the keys and values of one upper layer."""
        assert isinstance(reading, Reading)
        if reading.kept_k is None or number % self.config.cross_attention_every:
            return reading
        assert reading.kept_v is not None
        place, J = number // self.config.cross_attention_every, self.config.num_key_value_heads
        heads = slice(place * J, (place + 1) * J)
        return reading._replace(kept_k=reading.kept_k[..., heads, :], kept_v=reading.kept_v[..., heads, :])

    def _given(self, neighbours: Tensor | None, scores: Tensor | None, has_cache: bool) -> Given | None:
        given = given_neighbours(neighbours, scores, has_cache, self.config.retrieves)
        if given is None:
            return None
        if self.config.retriever == "encoder":
            expect_selected(given, self.config.num_retrieved_chunks, False)
        elif scores is None:
            raise ValueError(
                "neighbour_scores: expected them with neighbours for retriever='learned', which learns to rank these "
                "candidates, got none. Pass them, or set retriever='encoder' to read the chunks given."
            )
        else:
            expect_targets(given)
        return given

    def reach(self) -> int:
        """Positions before a token that can change its prediction through the upper layers.

        A layer sees W - 1 positions back; what a token reads was selected at most S - 1 positions before it.
        """
        config = self.config
        assert config.sliding_window is not None
        window = config.sliding_window - 1
        return (config.num_upper_layers - 1) * window + max(window, config.chunk_size - 1)

    # --- answers ---------------------------------------------------------------------------------------------

    def follow_reads(self) -> SelectedReads:
        return SelectedReads(1, {"continuation": self.config.continuation})

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number = self.config, NumberBytes.of(self, memory_dtype)
        S, E = config.chunk_size, config.hidden_size
        read = config.num_reading_layers * S * kv_width(config) * number.own + number.own
        return chunk_cache_bytes(
            self,
            prompt,
            generated,
            number,
            record=number.record(1, S, E // 2),  # states as two halves, projected by each layer that reads
            vectors=2 * E if config.retriever == "learned" else 0,  # key and query
            fetched=config.num_retrieved_chunks * (2 if config.continuation else 1) * read,
        )

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        config, reads = self.config, ChunkReads.of(self.config, length)
        scored = int(reads.candidates.sum()) if config.retriever == "learned" else 0
        layers = config.num_reading_layers * (2 if config.continuation else 1)
        return chunk_multiply_adds(self, reads, layers, scored)

    def training_progress(self, share: float) -> None:
        self.ranking_progress = share

    def layer_kinds(self) -> list[LayerKind]:
        lower, encoder, _ = super().layer_kinds()
        upper: Any = self.upper_layers
        reading = LayerKind([layer for layer in upper if layer.reads])
        return [lower, encoder, reading, LayerKind([layer for layer in upper if not layer.reads])]

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Retrieval-Pretrained Transformer",
            "At the end of each chunk past chunks are retrieved, which the upper layers read in chunked "
            "cross-attention.",
            (("RPT", "2306.13421"), ("RPT-Contriever in Grouped Cross-Attention", "2410.01651")),
        )
