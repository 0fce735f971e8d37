"""The Differentiable Retrieval Transformer (arXiv 2410.01651): it learns which past chunks to read.

Lower layers -> chunk encoder -> memory (keys, values, landmark vectors) -> groups of upper layers. At the
landmark of chunk t each group selects K chunks before t; every position of chunk t + 1 reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, MemoryEntries, Retrieved, Window
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import DRTConfig
from trailmark.models.grid import Grid, Integers, lay_out
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
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, fold_seed, grouped_cross_attention, select_chunks


def _retrieval_projection(config: DRTConfig) -> nn.Module:
    if not config.retrieval_projections:
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
        self.retrievers = nn.ModuleList(Retriever(config) for _ in range(config.num_retrieval_groups))
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
        self._check_tokens(input_ids)
        skip = 0 if before is None else before.shape[1] // self.config.chunk_size
        ids = input_ids if before is None else torch.cat([before, input_ids], dim=1)
        if ids.shape[1] % self.config.chunk_size or input_ids.shape[1] % self.config.chunk_size:
            raise ValueError(
                f"input_ids: expected whole chunks of {self.config.chunk_size} tokens, "
                f"got {input_ids.shape[1]} after {ids.shape[1] - input_ids.shape[1]}."
            )
        grid = lay_out(ids.shape[1], self.config.chunk_size)
        x = grid.insert_landmarks(self.embed_tokens(ids), self.landmark)
        place = Place.of(self.config, x, None)
        for layer in self.lower_layers:
            x = layer(x, place)
        entries = self.encoder(x, grid)
        return MemoryEntries(*(part[:, skip:] for part in entries))

    def run(
        self,
        tokens: Tensor,  # [B, T]
        grid: Grid,
        cache: ChunkCache | None = None,
        keep: int | None = None,
        noise_seed: Tensor | None = None,
    ) -> Hidden:
        self._check_retrieval()
        x = grid.insert_landmarks(self.embed_tokens(tokens), self.landmark)
        step = None if cache is None else Step(cache, grid, self.config, x.shape[0])
        place = Place.of(self.config, x, None) if step is None else step.place(0, grid, x)
        for number, layer in enumerate(self.lower_layers):
            x = layer(x, place, step and step.window(number))

        entries, first_chunk = None, np.zeros(1, np.int64)
        if step is None:
            entries = self._encode(x, grid)
        else:
            if grid.num_closed:
                step.remember(self.encoder(step.with_open(x), grid))
            step.keep_open(x)
            if keep == 0:  # reading: a memory depends on nothing above
                step.defer(x, self.reach())
                step.commit()
                return Hidden(None)
            x, grid, first_chunk = step.tail(x, self.reach(), keep)
            place = step.place(1, grid, x)

        asked: list[ChunkSelection] = []
        for number, layer in enumerate(self.upper_layers):
            group, position = divmod(number, self._layers_per_group)
            if position == 0:
                found, reading = self._retrieve(group, x, entries, grid, step, first_chunk, noise_seed)
                asked.append(found)
            kept = step and step.window(len(self.lower_layers) + number)
            x = layer(x, grid, place, kept, *(reading or ()))
        if step is not None:
            step.commit()
        return Hidden(self.norm(grid.last_tokens(keep)(x)), tuple(asked), grid.closed)

    def _check_retrieval(self) -> None:
        if self.training and self.config.num_retrieved_chunks == 1:
            raise ValueError(
                "num_retrieved_chunks: expected at least 2 in training, got 1: the weight of a single chunk is "
                "always 1, so its score gets no gradient and the retriever learns nothing."
            )

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
        first_chunk: Integers,  # [B] number of the grid's first chunk
        noise_seed: Tensor | None,
    ) -> tuple[ChunkSelection, Reading | None]:
        """What the landmarks of the call select, and what its chunks read."""
        if step is None:
            assert entries is not None
            query = self.retrievers[group](grid.landmarks(x))  # [B, C, E]
            seed = fold_seed(noise_seed, group) if noise_seed is not None else None
            asked = self._select(query, entries, grid, seed)
            return asked, self._read(asked, entries, grid)
        if not grid.num_closed:  # decoding, in the middle of a chunk
            return self._nothing_asked(x), self._read_pending(step.take_pending(group, grid))
        query = self.retrievers[group](grid.landmarks(x))
        asked = self._select_from_memory(query, step, grid, first_chunk)
        return asked, self._read_from_memory(asked, step, grid, group)

    def _nothing_asked(self, x: Tensor) -> ChunkSelection:
        shape = x.shape[0], 0, self.config.num_retrieved_chunks
        weights = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return ChunkSelection(torch.zeros(shape, dtype=torch.int64, device=x.device), weights, weights)

    @property
    def _retrieval_scale(self) -> float:
        return self.config.retrieval_scale * self.config.hidden_size**-0.5

    def _select(
        self, query: Tensor, entries: MemoryEntries, grid: Grid, noise_seed: Tensor | None
    ) -> ChunkSelection:
        """For each landmark of a whole text, chunks before it."""
        visible = self._first_visible(0) if self.config.exclude_visible_chunks else None
        return select_chunks(
            query,
            entries.landmarks,
            self.config.num_retrieved_chunks,
            grid.candidates(visible, query.device),
            noise_seed=noise_seed if self.config.retrieval_noise else None,
            scale=self._retrieval_scale,
            implementation="reference" if self.config.implementation == "reference" else None,
        )

    def _first_visible(self, landmark: int) -> int:
        """The first position visible to the last row of the chunk after a landmark, were that chunk full."""
        assert self.config.sliding_window is not None
        return int(landmark) + 1 + self.config.chunk_size - (self.config.sliding_window - 1)

    def _select_from_memory(
        self, query: Tensor, step: Step, grid: Grid, first_chunk: Integers
    ) -> ChunkSelection:
        """For each landmark [B, C] that a call closes, chunks before it, of this call or earlier ones."""
        present = np.arange(grid.num_closed) < (np.zeros_like(first_chunk) + grid.closed)[:, None]
        limits = np.where(present, first_chunk[:, None] + np.arange(grid.num_closed), 0)
        if self.config.exclude_visible_chunks:
            first = step.end - grid.counts  # of each row's positions
            places = np.broadcast_to(grid.landmark_places, limits.shape)
            for b, i in zip(*np.nonzero(present), strict=True):
                visible = self._first_visible(first[b] + places[b, i])
                limits[b, i] = step.cache.memory.starting_before(int(b), int(limits[b, i]), visible)
        return step.cache.memory.select(
            query,
            int(step.size.chunks.max()),
            self.config.num_retrieved_chunks,
            torch.from_numpy(limits).to(query.device),
            self._retrieval_scale,
        )

    def _read(self, asked: ChunkSelection, entries: MemoryEntries, grid: Grid) -> Reading:
        """What the chunks of a whole text read: what the landmark before each selected; the first, nothing."""
        B, _, K = asked.indices.shape
        nothing = asked.indices.new_full((B, 1, K), -1), asked.weights.new_zeros(B, 1, K)
        indices = torch.cat([nothing[0], asked.indices[:, : grid.num_chunks - 1]], dim=1)
        weights = torch.cat([nothing[1], asked.weights[:, : grid.num_chunks - 1]], dim=1)
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
