"""The Differentiable Retrieval Transformer (arXiv 2410.01651): it learns which past chunks to read.

Lower layers -> chunk encoder -> memory (keys, values, landmark vectors) -> groups of upper layers. At the
landmark of chunk t each group selects K chunks before t; every position of chunk t + 1 reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, MemoryEntries, Retrieved, Window
from trailmark.models.answers import CardFacts, LayerKind
from trailmark.models.arguments import check_tokens
from trailmark.models.candidates import no_selection
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import DRTConfig
from trailmark.models.costs import (
    CacheBytes,
    ChunkReads,
    NumberBytes,
    chunk_cache_bytes,
    chunk_multiply_adds,
    kv_width,
)
from trailmark.models.drt_retrieval import (
    MemoryChunks,
    Selector,
    TextChunks,
    Vectors,
    expect_given,
    with_vectors,
)
from trailmark.models.embedding import Given, embed_chunks, expect_embedder, given_neighbours
from trailmark.models.grid import Grid, lay_out
from trailmark.models.layers import (
    MLP,
    ChunkEncoderLayer,
    Place,
    RMSNorm,
    WindowAttention,
    WindowLayer,
    fused_linear,
    rms_normalize,
    rotary_table,
)
from trailmark.models.step import Step, place_of
from trailmark.models.text import whole_chunks
from trailmark.models.without_retrieval import (
    expect_no_neighbours,
    nothing_selected,
)
from trailmark.ops import ChunkSelection, grouped_cross_attention


def _retrieval_projection(config: DRTConfig) -> nn.Module:
    if not config.retrieval_projections or not config.scores_chunks:
        return nn.Identity()
    return nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class ChunkEncoder(nn.Module):
    """Closed chunks to memory: bidirectional layers over S tokens and the landmark, then W_k, W_v."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        assert config.num_key_value_heads is not None
        self.config = config
        width = config.num_key_value_heads * config.head_dim
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(ChunkEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # one projection for all layers and groups: the memory is read by all of them
        self.kv_proj = fused_linear(config.hidden_size, (width, width))
        self.landmark_proj = _retrieval_projection(config)

    def forward(self, positions: Tensor, grid: Grid) -> MemoryEntries:
        """Lower hidden states, as ``grid.encoder_rows`` takes them, to the entries of the closed chunks."""
        config, R = self.config, self.config.chunk_size + 1
        rows = grid.encoder_rows(positions)  # [B, C * (S + 1), E]
        rows = self.input_norm(rows).view(rows.shape[0], -1, R, rows.shape[2])
        B, C = rows.shape[:2]
        rotary = rotary_table(R, config.head_dim, config.rope_theta, rows)
        lengths = grid.lengths_on(rows.device).expand(B, C)
        mask = None
        if grid.has_short_chunks:
            row = torch.arange(R, device=rows.device)
            mask = (row < lengths[..., None]) | (row == R - 1)  # [B, C, R]: keys that exist
            mask = torch.where(mask, 0.0, -torch.inf).to(rotary).reshape(B * C, 1, 1, R)
        for layer in self.layers:
            rows = layer(rows, rotary, mask)
        rows = self.output_norm(rows)
        tokens = rows[:, :, :-1]  # the landmark is no key
        k, v = self.kv_proj(tokens).unflatten(-1, (-1, config.head_dim)).chunk(2, dim=-2)
        landmarks = self.landmark_proj(rows[:, :, -1])
        if config.retrieval_normalization:
            landmarks = rms_normalize(landmarks, config.rms_norm_eps)
        return MemoryEntries(k, v, landmarks, lengths)


class Retriever(nn.Module):
    """One group's query: W_h RMSNorm_g(h) at the landmarks, scored against the landmark vectors."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = _retrieval_projection(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """The queries [B, C, E] of landmarks hidden [B, C, E]."""
        query = self.q_proj(self.norm(hidden))
        return (
            rms_normalize(query, self.config.rms_norm_eps) if self.config.retrieval_normalization else query
        )


class Reading(NamedTuple):
    """What the chunks of a call read: K chunks each, out of a table."""

    k: Tensor  # [B, M, S, J, D]
    v: Tensor
    indices: Tensor  # [B, N, K] into the table
    weights: Tensor  # [B, N, K]
    lengths: Tensor | None  # [B, M]; None: all S


class DRTLayer(GradientCheckpointingLayer):
    """An upper layer: h = x + window(norm x); y = h + MLP(norm(h + GCA(norm h))).

    What was read feeds the MLP but bypasses the residual stream, as the published code has it;
    ``residual_gca`` adds it to the stream instead.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.head_dim, self.residual_gca = config.head_dim, config.residual_gca
        self.softmax_off_by_one, self.implementation = config.softmax_off_by_one, config.implementation
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = WindowAttention(config)
        self.gca_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gca_q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gca_o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # [B, P, E]
        grid: Grid,
        place: Place,
        kept: Window | None = None,
        *reading: Any,  # the fields of a Reading; none: nothing is read
    ) -> Tensor:
        # arguments of their own: reentrant checkpointing passes gradients to no tensor inside a tuple
        x = x + self.attention(self.attention_norm(x), place, kept)
        if not reading:
            return x + self.mlp(self.mlp_norm(x))
        k, v, indices, weights, lengths = reading
        q = self.gca_q_proj(grid.rows(self.gca_norm(x)))  # [B, N * R, E]
        found = grouped_cross_attention(
            q.view(q.shape[0], grid.num_chunks, grid.rows_per_chunk, -1, self.head_dim),
            k,
            v,
            indices,
            weights,
            lengths,
            softmax_off_by_one=self.softmax_off_by_one,
            implementation=self.implementation,
        )
        found = self.gca_o_proj(grid.positions(found.flatten(1, 2).flatten(2)))
        if self.residual_gca:
            x = x + found
            return x + self.mlp(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x + found))


class DRTForCausalLM(TrailmarkForCausalLM):
    """DRT with a language-modelling head."""

    config_class = DRTConfig
    config: DRTConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "DRTLayer"]

    def __init__(self, config: DRTConfig) -> None:
        super().__init__(config)
        assert config.num_lower_layers is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.landmark = nn.Parameter(torch.zeros(config.hidden_size))
        self.lower_layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_lower_layers))
        self.encoder = ChunkEncoder(config)
        learned = config.num_retrieval_groups if config.scores_chunks else 0
        self.retrievers = nn.ModuleList(Retriever(config) for _ in range(learned))
        self.upper_layers = nn.ModuleList(DRTLayer(config) for _ in range(config.num_upper_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._layers_per_group = config.num_upper_layers // config.num_retrieval_groups
        mark_residual_projections(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:  # last: its parts are initialised already
            fan_in = self.config.initialization == "fan_in"
            init.normal_(self.landmark, std=0.1 if fan_in else self.config.initializer_range)
            retriever: Any
            for retriever in self.retrievers:
                # both sides start in one space: a chunk first finds what looks like itself
                if self.config.retrieval_normalization and self.config.retrieval_projections:
                    init.copy_(retriever.q_proj.weight, self.encoder.landmark_proj.weight)

    def _stages(self) -> list[int]:
        return [0] * len(self.lower_layers) + [1] * len(self.upper_layers)

    def encode(self, input_ids: Tensor, before: Tensor | None = None) -> MemoryEntries:
        """The memory entries of the whole chunks of ``input_ids`` [B, n * S], without reading them.

        ``before`` [B, m * S] are the tokens before them; with at least the lower layers' reach of them
        (``num_lower_layers * (sliding_window - 1)`` positions) the entries are those of a full read.
        """
        check_tokens(input_ids, self.config.vocab_size)
        ids, skip = whole_chunks(input_ids, before, self.config.chunk_size)
        grid = lay_out(ids.shape[1], self.config.chunk_size)
        x = grid.insert_landmarks(self.embed_tokens(ids), self.landmark)
        place = Place.of(self.config, x, None)
        for layer in self.lower_layers:
            x = layer(x, place)
        vectors = self._embed(ids, grid, None)
        entries = with_vectors(self.config, self.encoder(x, grid), vectors)
        return MemoryEntries(*(part[:, skip:] for part in entries))

    def run(
        self,
        tokens: Tensor,  # [B, T]
        grid: Grid,
        cache: ChunkCache | None = None,
        keep: int | None = None,
        noise_seed: Tensor | None = None,
        given: Given | None = None,
    ) -> Hidden:
        if self.training:
            self.config.expect_trainable()
        x = grid.insert_landmarks(self.embed_tokens(tokens), self.landmark)
        step = None if cache is None else Step(cache, grid, self.config, x.shape[0])
        vectors, retrieves = None, self.config.retrieves
        if given is not None:
            expect_given(self.config, given, grid, x.shape[0])
        elif retrieves:
            vectors = self._embed(tokens, grid, step)
        place = place_of(self.config, grid, x, step)
        for number, layer in enumerate(self.lower_layers):
            x = layer(x, place, step and step.window(number))

        entries, selector = None, None
        if step is None:
            if retrieves:
                entries = self._encode(x, grid)
                found = vectors if given is None else given
                selector = Selector(
                    self.config, TextChunks(self.config, grid, entries.landmarks, found), noise_seed
                )
        else:
            if retrieves:
                if grid.num_closed:
                    step.remember(with_vectors(self.config, self.encoder(step.with_open(x), grid), vectors))
                step.keep_open(x)
            if keep == 0:  # reading: a memory depends on nothing above
                step.defer(x, self.reach())
                step.commit()
                return Hidden(None)
            x, grid, first_chunk = step.tail(x, self.reach(), keep)
            place = step.place(1, grid, x)
            if grid.num_closed and retrieves:
                size = 0 if self.embedder is None else self.embedder.size
                chunks = MemoryChunks(self.config, grid, step, first_chunk, x.device, size)
                selector = Selector(self.config, chunks)

        asked: list[ChunkSelection] = []
        for number, layer in enumerate(self.upper_layers):
            group, position = divmod(number, self._layers_per_group)
            if position == 0:
                chosen, reading = self._retrieve(group, x, entries, grid, step, selector)
                asked.append(chosen)
            kept = step and step.window(len(self.lower_layers) + number)
            x = layer(x, grid, place, kept, *(reading or ()))
        if step is not None:
            step.commit()
        return Hidden(self.norm(grid.last_tokens(keep)(x)), tuple(asked), grid.closed)

    # --- memory --------------------------------------------------------------------------------------------

    def _encode(self, x: Tensor, grid: Grid) -> MemoryEntries:
        """The entries of a whole text's chunks."""
        # where nothing is closed the encoder still runs for its gradients: zeros, which DDP waits for
        if grid.num_closed or torch.is_grad_enabled():
            return self.encoder(x, grid)
        return self._no_entries(x)

    def _no_entries(self, x: Tensor) -> MemoryEntries:
        config, B = self.config, x.shape[0]
        assert config.num_key_value_heads is not None
        kv = x.new_zeros(B, 0, config.chunk_size, config.num_key_value_heads, config.head_dim)
        lengths = torch.zeros(B, 0, dtype=torch.int64, device=x.device)
        return MemoryEntries(kv, kv, x.new_zeros(B, 0, config.hidden_size), lengths)

    def _retrieve(
        self,
        group: int,
        x: Tensor,  # [B, P, E] where the group begins
        entries: MemoryEntries | None,  # of a whole text; None: what is asked for lies in the step's memory
        grid: Grid,
        step: Step | None,
        selector: Selector | None,  # None: no chunk closes
    ) -> tuple[ChunkSelection, Reading | None]:
        """What the landmarks of the call select, and what its chunks read."""
        if not self.config.retrieves:
            return nothing_selected(x, grid), None
        if selector is None:  # decoding, in the middle of a chunk
            assert step is not None
            return no_selection(self.config.num_retrieved_chunks, x), self._read_pending(
                step.take_pending(group, grid)
            )
        query = self.retrievers[group](grid.landmarks(x)) if self.config.scores_chunks else None  # [B, C, E]
        asked = selector.select(group, query)
        if step is None:
            assert entries is not None
            return asked, self._read(asked, entries, grid)
        return asked, self._read_from_memory(asked, step, grid, group)

    def _given(self, neighbours: Tensor | None, scores: Tensor | None, has_cache: bool) -> Given | None:
        if self.config.retriever != "encoder":
            return super()._given(neighbours, scores, has_cache)
        expect_no_neighbours(self.config, neighbours, scores)
        return given_neighbours(neighbours, scores, has_cache)

    def _embed(self, tokens: Tensor, grid: Grid, step: Step | None) -> Vectors | None:
        """The encoder's queries and keys [B, C, d] of the chunks that a call closes; None: there is no encoder."""
        if self.config.retriever != "encoder":
            return None
        embedder = expect_embedder(self.embedder, self.config.embedder_fingerprint)
        return embed_chunks(embedder, tokens, grid, step)

    def _read(self, asked: ChunkSelection, entries: MemoryEntries, grid: Grid) -> Reading:
        """What the chunks of a whole text read: what the landmark before each selected.

        The first, and the first of each document, nothing.
        """
        B, _, K = asked.indices.shape
        nothing = asked.indices.new_full((B, 1, K), -1), asked.weights.new_zeros(B, 1, K)
        indices = torch.cat([nothing[0], asked.indices[:, : grid.num_chunks - 1]], dim=1)
        weights = torch.cat([nothing[1], asked.weights[:, : grid.num_chunks - 1]], dim=1)
        if (begins := grid.begins_document_on(indices.device)) is not None:
            indices, weights = indices.masked_fill(begins, -1), weights.masked_fill(begins, 0)
        lengths = entries.lengths if grid.has_short_chunks else None
        return Reading(entries.k, entries.v, indices, weights, lengths)

    def _read_from_memory(self, asked: ChunkSelection, step: Step, grid: Grid, group: int) -> Reading | None:
        """What the chunks of a call read, fetched from the memory; and what the open chunk will."""
        pending = step.take_pending(group, grid)
        (B, _, K), N = asked.indices.shape, grid.num_chunks
        chosen = asked.indices.cpu().numpy()
        step.put_pending(group, grid, chosen, asked.weights, pending)
        if N == 1:
            return self._read_pending(pending)
        if pending is None:
            first = np.full((B, 1, K), -1), asked.weights.new_zeros(B, 1, K)
        else:
            first = pending.indices[:, None], pending.weights[:, None]
        wanted = np.concatenate([first[0], chosen[:, : N - 1]], axis=1)  # [B, N, K]
        weights = torch.cat([first[1], asked.weights[:, : N - 1]], dim=1)
        if (wanted < 0).all():
            return None
        records, lengths = step.cache.memory.gather(wanted.reshape(B, -1))
        k, v = records[:, :, 0].transpose(2, 3), records[:, :, 1].transpose(2, 3)
        indices = np.where(wanted < 0, -1, np.arange(N * K).reshape(N, K))
        short = step.has_short(lengths)
        device = weights.device
        return Reading(
            k,
            v,
            torch.from_numpy(indices).to(device),
            weights,
            torch.from_numpy(lengths).to(device) if short else None,
        )

    def _read_pending(self, pending: Retrieved | None) -> Reading | None:
        """What the open chunk reads: fetched already."""
        if pending is None:
            return None
        return Reading(pending.k, pending.v, pending.slots, pending.weights[:, None], pending.short)

    def reach(self) -> int:
        """Positions before a token that can change its prediction through the upper layers.

        A layer sees W - 1 positions back; a group's first layer reads what the landmark before its chunk
        selected, at most S + 1 positions back.
        """
        config = self.config
        assert config.sliding_window is not None
        window = config.sliding_window - 1
        group = (self._layers_per_group - 1) * window + max(window, config.chunk_size + 1)
        return config.num_retrieval_groups * group

    def encoding_reach(self) -> int:
        """Chunks after a chunk whose memory entries its tokens take part in, through the lower layers."""
        config = self.config
        assert config.sliding_window is not None
        assert config.num_lower_layers is not None
        return -(-config.num_lower_layers * (config.sliding_window - 1) // (config.chunk_size + 1))

    # --- answers -------------------------------------------------------------------------------------------

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number = self.config, NumberBytes.of(self, memory_dtype)
        record = config.chunk_size * kv_width(config) * number.kept
        return chunk_cache_bytes(
            self,
            prompt,
            generated,
            number,
            record=record,
            vectors=config.hidden_size if config.scores_chunks else 0,
            fetched=config.num_retrieval_groups * config.num_retrieved_chunks * (record + number.wide),
        )

    def paper_bytes(self, length: int) -> int:
        config, kv = self.config, kv_width(self.config)
        assert config.sliding_window is not None
        landmarks = length * config.hidden_size // config.chunk_size
        read = config.num_upper_layers * config.num_retrieved_chunks * config.chunk_size * kv
        window = config.num_hidden_layers * config.sliding_window * kv
        return (landmarks + read + window) * self.dtype.itemsize

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        config, reads = self.config, ChunkReads.of(self.config, length)
        # what was found otherwise is weighed
        scored = reads.candidates if config.retriever == "causal" else reads.selected
        own = config.num_retrieval_groups * int(scored.sum()) if config.scores_chunks else 0
        return chunk_multiply_adds(self, reads, config.num_upper_layers, own)

    def layer_kinds(self) -> list[LayerKind]:
        return [*super().layer_kinds(), LayerKind([*self.retrievers], "nothing", opens_group=True)]

    def retrieval_modules(self) -> list[nn.Module]:
        upper: Any = self.upper_layers
        reading = [part for layer in upper for part in (layer.gca_norm, layer.gca_q_proj, layer.gca_o_proj)]
        return [self.encoder, self.retrievers, *reading]

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Differentiable Retrieval Transformer",
            "Each chunk of text looks back, inside attention, at the few past chunks that it retrieved; which those "
            "are it learned from the language-modelling loss.",
            (("Grouped Cross-Attention", "2410.01651"),),
        )
