"""The Differentiable Retrieval Transformer (arXiv 2410.01651): it learns which past chunks to read.

Lower layers -> chunk encoder -> memory (keys, values, landmark vectors) -> groups of upper layers. At the
landmark of chunk t each group selects K chunks before t; every position of chunk t + 1 reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, MemoryEntries
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import DRTConfig
from trailmark.models.grid import Grid
from trailmark.models.layers import (
    MLP,
    ChunkEncoderLayer,
    KeysAndValues,
    RMSNorm,
    WindowAttention,
    WindowLayer,
    fused_linear,
    rms_normalize,
    rotary_table,
)
from trailmark.models.sliding_window import keep_window
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
        """Lower hidden states of positions [B, P, E] to the entries of the chunks that are closed."""
        config = self.config
        rows = self.input_norm(grid.encoder_rows(positions))  # [B, n, S + 1, E]
        B, n, R, _ = rows.shape
        rotary = rotary_table(R, config.head_dim, config.rope_theta, rows)
        lengths = torch.full((B, n), config.chunk_size, device=rows.device)
        mask = None
        if grid.num_early_tokens:
            lengths[:, -1] = grid.num_early_tokens
            row = torch.arange(R, device=rows.device)
            mask = (row < lengths[..., None]) | (row == R - 1)  # [B, n, R]: keys that exist
            mask = torch.where(mask, 0.0, -torch.inf).to(rotary.real).reshape(B * n, 1, 1, R)
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

    def forward(
        self,
        hidden: Tensor,  # [B, n, E]: the asking landmarks, chunks first_chunk ...
        landmarks: Tensor,  # [B, M, E]
        first_chunk: int,
        noise_seed: Tensor | None,
        num_candidates: Tensor | None,  # [B, n]; None: all chunks before the asking one
    ) -> ChunkSelection:
        config = self.config
        query = self.q_proj(self.norm(hidden))
        if config.retrieval_normalization:
            query = rms_normalize(query, config.rms_norm_eps)
        n, M = hidden.shape[1], landmarks.shape[1]
        if num_candidates is None:
            num_candidates = torch.arange(first_chunk, first_chunk + n, device=hidden.device)
        return select_chunks(
            query,
            landmarks,
            config.num_retrieved_chunks,
            num_candidates.clamp(max=M),
            noise_seed=noise_seed,
            scale=config.retrieval_scale * config.hidden_size**-0.5,
            implementation="reference" if config.implementation == "reference" else None,
        )


class DRTLayer(GradientCheckpointingLayer):
    """An upper layer: h = x + window(norm x); y = h + MLP(norm(h + GCA(norm h))).

    What was read feeds the MLP but bypasses the residual stream, as the published code has it;
    ``residual_gca`` adds it to the stream instead.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.config = config
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
        k: Tensor,
        v: Tensor,  # [B, M, S, J, D]
        indices: Tensor,
        weights: Tensor,  # [B, N, K]: what each chunk of the grid reads
        lengths: Tensor | None,
        grid: Grid,
        carried: KeysAndValues | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        attended, kept = self.attention(self.attention_norm(x), carried)
        x = x + attended
        q = self.gca_q_proj(grid.rows(self.gca_norm(x)))  # [B, N, S + 1, E]
        found = grouped_cross_attention(
            q.unflatten(-1, (-1, self.config.head_dim)),
            k,
            v,
            indices,
            weights,
            lengths,
            softmax_off_by_one=self.config.softmax_off_by_one,
            implementation=self.config.implementation,
        )
        found = self.gca_o_proj(grid.positions(found.flatten(3)))
        if self.config.residual_gca:
            x = x + found
            return x + self.mlp(self.mlp_norm(x)), kept
        return x + self.mlp(self.mlp_norm(x + found)), kept

    def keys_and_values(self, x: Tensor, carried: KeysAndValues | None) -> KeysAndValues:
        """Only what later positions will see of x."""
        return self.attention.keys_and_values(self.attention_norm(x), carried)


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

    def new_cache(self, memory_tier: str = "device", num_tokens: int = 0) -> ChunkCache:
        if memory_tier != "device":
            raise ValueError(f"memory_tier: expected 'device' in this version, got {memory_tier!r}.")
        config = self.config
        chunks = -(-num_tokens // config.chunk_size)
        return ChunkCache(config.num_hidden_layers, config.num_retrieval_groups, chunks)

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
        grid = Grid(ids.shape[1], self.config.chunk_size, False)
        x = grid.insert_landmarks(self.embed_tokens(ids), self.landmark)
        for layer in self.lower_layers:
            x, _ = layer(x)
        entries = self.encoder(x, grid)
        return MemoryEntries(*(part[:, skip:] for part in entries))

    def run(
        self,
        input_ids: Tensor,  # [B, T]
        cache: ChunkCache | None,
        close_chunk: bool,
        noise_seed: Tensor | None,
        reading: bool,
        output_retrieval: bool,
    ) -> Hidden:
        config, T = self.config, input_ids.shape[1]
        self._check_retrieval()
        ids = input_ids
        if cache is not None and cache.open_tokens is not None:
            ids = torch.cat([cache.open_tokens, input_ids], dim=1)  # the open chunk is read again
        grid = Grid(ids.shape[1], config.chunk_size, close_chunk)
        opened = grid.num_open_tokens
        if cache is not None:
            cache.num_tokens += T
            cache.open_tokens = ids[:, ids.shape[1] - opened :] if opened else None
            if reading and not grid.num_closed:
                return Hidden(None)
        window: list[KeysAndValues | None] = [None] * config.num_hidden_layers
        pending: list[ChunkSelection | None] = [None] * config.num_retrieval_groups
        if cache is not None:
            window, pending = list(cache.window), cache.pending

        def keep(number: int, kept: KeysAndValues) -> None:
            if cache is not None and grid.num_closed:  # up to the last landmark
                until = kept[0].shape[1] - opened
                cache.window[number] = keep_window(
                    (kept[0][:, :until], kept[1][:, :until]), config.sliding_window
                )

        x = grid.insert_landmarks(self.embed_tokens(ids), self.landmark)
        for number, layer in enumerate(self.lower_layers):
            x, kept = layer(x, window[number])
            keep(number, kept)
        first_chunk = 0 if cache is None else len(cache.memory)
        memory, lengths = self._remember(x, grid, cache)

        tail = self.reading_tail(config.chunk_size)
        if reading and grid.num_chunks > tail:
            # What later text sees of the upper layers depends on the last chunks alone; what these do not
            # see of keys before them does not reach the end of the piece.
            skipped = grid.num_chunks - tail
            x = x[:, skipped * (config.chunk_size + 1) :]
            grid = Grid(grid.num_tokens - skipped * config.chunk_size, config.chunk_size, close_chunk)
            first_chunk += skipped
            window, pending = [None] * len(window), [None] * len(pending)

        found: list[ChunkSelection] = []
        layers_per_group = config.num_upper_layers // config.num_retrieval_groups
        uppers: list[Any] = list(self.upper_layers)
        for number, layer in enumerate(uppers, start=len(self.lower_layers)):
            group, position = divmod(number - len(self.lower_layers), layers_per_group)
            if position == 0:
                seed = None
                if noise_seed is not None and config.retrieval_noise:
                    seed = fold_seed(noise_seed, group)
                limit = self._visible_limit(lengths, first_chunk, grid.num_closed)
                ask: Any = self.retrievers[group]
                found.append(ask(grid.landmarks(x), memory.landmarks, first_chunk, seed, limit))
                indices, weights = _shift(pending[group], found[-1], grid.num_chunks)
            if reading and number == config.num_hidden_layers - 1:
                keep(number, layer.keys_and_values(x, window[number]))
                break
            short = memory.lengths if _any_short(grid, cache) else None
            x, kept = layer(x, memory.k, memory.v, indices, weights, short, grid, window[number])
            keep(number, kept)

        if cache is not None and grid.num_closed:
            cache.pending = [ChunkSelection(*(part[:, -1:].detach() for part in asked)) for asked in found]
        retrieval = tuple(found) if output_retrieval else None
        if reading:
            return Hidden(None, retrieval)
        return Hidden(self.norm(grid.tokens(x)[:, -T:]), retrieval)

    def _check_retrieval(self) -> None:
        if self.training and self.config.num_retrieved_chunks == 1:
            raise ValueError(
                "num_retrieved_chunks: expected at least 2 in training, got 1: the weight of a single chunk is "
                "always 1, so its score gets no gradient and the retriever learns nothing."
            )

    def _remember(self, x: Tensor, grid: Grid, cache: ChunkCache | None) -> tuple[MemoryEntries, Tensor]:
        """Encode and store the chunks closed in this call.

        Returns the entries that this call may read, and the lengths [B, M] of all chunks.
        """
        # where nothing is closed the encoder still runs for its gradients: zeros, which DDP waits for
        encodes = grid.num_closed or (cache is None and torch.is_grad_enabled())
        entries = self.encoder(x, grid) if encodes else self._no_entries(x)
        if cache is None:
            return entries, entries.lengths
        # A call that closes one chunk reads only what was there before it: a branch then copies nothing.
        before = cache.memory.tables() if len(cache.memory) and grid.num_closed <= 1 else None
        cache.memory.append(entries, all_full=not grid.num_early_tokens)
        if before is None:
            before = cache.memory.tables() if grid.num_closed > 1 else self._no_entries(x)
        if grid.num_closed <= 1:
            return before, torch.cat([before.lengths, entries.lengths], dim=1)
        return before, before.lengths

    def _no_entries(self, x: Tensor) -> MemoryEntries:
        config, B = self.config, x.shape[0]
        assert config.num_key_value_heads is not None
        kv = x.new_zeros(B, 0, config.chunk_size, config.num_key_value_heads, config.head_dim)
        lengths = torch.zeros(B, 0, dtype=torch.int64, device=x.device)
        return MemoryEntries(kv, kv, x.new_zeros(B, 0, config.hidden_size), lengths)

    def reading_tail(self, chunk_size: int) -> int:
        """Chunks at the end of a text whose upper layers decide all that later text sees of these layers.

        A layer sees ``sliding_window - 1`` positions back; a group's queries reach the chunk after next.
        """
        config = self.config
        assert config.sliding_window is not None
        rows = chunk_size + 1
        positions = config.num_upper_layers * (config.sliding_window - 1)
        positions += 2 * rows * config.num_retrieval_groups
        return -(-positions // rows) + 1

    def encoding_reach(self) -> int:
        """Chunks after a chunk whose memory entries its tokens take part in, through the lower layers."""
        config = self.config
        assert config.sliding_window is not None
        assert config.num_lower_layers is not None
        return -(-config.num_lower_layers * (config.sliding_window - 1) // (config.chunk_size + 1))

    def _visible_limit(self, lengths: Tensor, first: int, count: int) -> Tensor | None:
        """num_candidates [B, n] that excludes chunks wholly visible to the last row of the reading chunk."""
        config = self.config
        if not config.exclude_visible_chunks:
            return None
        assert config.sliding_window is not None
        starts = torch.nn.functional.pad((lengths + 1).cumsum(1), (1, 0))  # [B, M + 1] positions
        reading_ends = starts[:, first + 1 : first + count + 1] + config.chunk_size  # its landmark, if full
        reached = reading_ends - (config.sliding_window - 1)
        hidden = torch.searchsorted(
            starts[:, :-1].contiguous(), reached.contiguous()
        )  # chunks that start before
        return torch.minimum(hidden, torch.arange(first, first + count, device=lengths.device))


def _any_short(grid: Grid, cache: ChunkCache | None) -> bool:
    return bool(grid.num_early_tokens) or (cache is not None and cache.memory.has_short_chunks)


def _shift(pending: ChunkSelection | None, asked: ChunkSelection, num_chunks: int) -> tuple[Tensor, Tensor]:
    """What each chunk of the call reads [B, N, K]: what the landmark before it selected."""
    B, _, K = asked.indices.shape
    if pending is None:
        first = asked.indices.new_full((B, 1, K), -1), asked.weights.new_zeros(B, 1, K)
    else:
        first = pending.indices, pending.weights
    indices = torch.cat([first[0], asked.indices[:, : num_chunks - 1]], dim=1)
    return indices, torch.cat([first[1], asked.weights[:, : num_chunks - 1]], dim=1)
