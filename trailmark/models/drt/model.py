"""The Differentiable Retrieval Transformer (arXiv 2410.01651): it learns which past chunks to read.

Lower layers -> chunk encoder -> memory (keys, values, landmark vectors) -> groups of upper layers. At the
landmark of chunk t each group selects K chunks before t; every position of chunk t + 1 reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import MemoryEntries, Window
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts, FittedMemory, LayerKind
from trailmark.models.costs import (
    CacheBytes,
    ChunkReads,
    NumberBytes,
    chunk_cache_bytes,
    chunk_multiply_adds,
    kv_width,
)
from trailmark.models.drt.chunks import MemoryChunks, Reading, TextChunks, expect_given, of_set, with_vectors
from trailmark.models.drt.config import DRTConfig
from trailmark.models.embedding import Given, given_neighbours
from trailmark.models.grid import Grid, Integers
from trailmark.models.layered import Chunks, NoChunks, RetrievingForCausalLM
from trailmark.models.layers import (
    MLP,
    ChunkEncoderLayer,
    Place,
    RMSNorm,
    WindowAttention,
    WindowLayer,
    encode_chunks,
    fused_linear,
    rms_normalize,
    rotary_where_a_window_ends,
    rotate,
)
from trailmark.models.step import Step
from trailmark.ops import ReadAgain, grouped_cross_attention


def _retrieval_projection(config: DRTConfig) -> nn.Module:
    if not config.retrieval_projections or not config.scores_chunks:
        return nn.Identity()
    return nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class ChunkEncoder(nn.Module):
    """Closed chunks to memory: bidirectional layers over S tokens and the landmark, then W_k, W_v."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_key_value_heads * config.head_dim
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(ChunkEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # keys, then values: one set for all that read the memory, or a set for each group or layer, in their order
        self.kv_proj = fused_linear(config.hidden_size, (width,) * (2 * config.kv_per_chunk))
        self.landmark_proj = _retrieval_projection(config)

    def forward(self, positions: Tensor, grid: Grid, keeps_kv: bool = True) -> MemoryEntries:
        """Lower hidden states, as ``grid.encoder_rows`` takes them, to the entries of the closed chunks.

        ``keeps_kv``: whether the memory keeps keys and values; if not, and a landmark sums its chunk up, they are empty
        [B, C, 0, J, D].
        """
        config = self.config
        rows = self.input_norm(grid.encoder_rows(positions)).unflatten(1, (-1, config.chunk_size + 1))
        tokens, summary, lengths = encode_chunks(config, self.layers, self.output_norm, rows, grid, keeps_kv)
        k, v = self.kv_proj(tokens).unflatten(-1, (-1, config.head_dim)).chunk(2, dim=-2)
        if config.memory_values == "next":
            # what does not exist is 0: so is what follows a short chunk's last token
            v = torch.cat([v[:, :, 1:], torch.zeros_like(v[:, :, :1])], 2)
        return MemoryEntries(k, v, self.landmark_vectors(summary), lengths)

    def landmark_vectors(self, summary: Tensor) -> Tensor:
        """What is searched among, of what sums chunks up [B, C, E]."""
        landmarks: Tensor = self.landmark_proj(summary)
        if not self.config.retrieval_normalization:
            return landmarks
        return rms_normalize(landmarks, self.config.rms_norm_eps)


class Retriever(nn.Module):
    """One group's query: W_h RMSNorm_g(h) at the landmarks, scored against the landmark vectors.

    With ``retrieval_query`` "chunk" W_c l more, of the asking chunk's own landmark vector l.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = _retrieval_projection(config)
        if config.retrieval_query == "chunk":
            self.chunk_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, own: Tensor | None = None) -> Tensor:
        """The queries [B, C, E] of landmarks hidden [B, C, E], whose chunks have the landmark vectors ``own``."""
        query = self.q_proj(self.norm(hidden))
        if own is not None:
            query = query + self.chunk_proj(own.to(hidden.dtype))  # a memory may keep another type
        return (
            rms_normalize(query, self.config.rms_norm_eps) if self.config.retrieval_normalization else query
        )


class DRTLayer(GradientCheckpointingLayer):
    """An upper layer: h = x + window(norm x); y = h + MLP(norm(h + GCA(norm h))).

    What was read feeds the MLP but bypasses the residual stream, as the published code has it;
    ``residual_gca`` adds it to the stream instead. Keys and values of GCA have no biases and no norms, unlike
    self-attention here and in the chunk encoder (``attention_bias``, ``qk_norm``): several layers may read the same
    keys (``memory_kv``), and then no layer could bring its own.

    With ``virtual_key`` "window" GCA asks with the window's queries (their norms and biases too), turned as for keys
    that stand where the window ends; else with queries of its own, which have neither.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.residual_gca = config.residual_gca
        self.softmax_off_by_one = config.softmax_off_by_one
        self.implementation = config.gca_implementation or config.implementation
        self.beside_window, self.window = config.virtual_key == "window", config.sliding_window
        self.rope = config.rope
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = WindowAttention(config)
        if not self.beside_window:
            self.gca_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.gca_q_proj = nn.Linear(config.hidden_size, config.attention_width, bias=False)
        self.gca_o_proj = nn.Linear(config.attention_width, config.hidden_size, bias=False)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # [B, P, E]
        place: Place,
        kept: Window | None = None,
        *reading: Any,  # the fields of a Reading; none: nothing is read
    ) -> Tensor:
        # arguments of their own: reentrant checkpointing passes gradients to no tensor inside a tuple
        if not reading:
            x = x + self.attention(self.attention_norm(x), place, kept)
            return x + self.mlp(self.mlp_norm(x))
        if self.beside_window:
            q, k, v = self.attention.heads(self.attention_norm(x))
            out, lse = self.attention.attend_with_lse(q, k, v, place, kept)
            x = x + self.attention.o_proj(out.flatten(2))
            rows = reading[0].rows
            assert self.window is not None
            q = rotate(q, rotary_where_a_window_ends(q, self.window, self.rope))
            read = self._attend_to_chunks(rows(q), (rows(out), rows(lse)), *reading)
        else:
            x = x + self.attention(self.attention_norm(x), place, kept)
            read = self.read(x, *reading)
        if self.residual_gca:
            x = x + read
            return x + self.mlp(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x + read))

    def read(self, x: Tensor, *reading: Any) -> Tensor:
        """What positions x [B, P, E] read of the chunks of a Reading, by queries of their own, [B, P, E]."""
        q = self.gca_q_proj(reading[0].rows(self.gca_norm(x)))
        return self._attend_to_chunks(q, None, *reading)

    def _attend_to_chunks(
        self,
        q: Tensor,
        beside: tuple[Tensor, Tensor] | None,
        grid: Grid,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        weights: Tensor,
        lengths: Any,
        again: ReadAgain | None = None,
    ) -> Tensor:
        """What positions read of the chunks of a Reading, [B, P, E].

        Args:
            q: [B, N * R, H, D], or [B, N * R, H * D], of the rows of the chunks that read.
            beside: [B, N * R, H, D] what they had from elsewhere, and [B, N * R, H] its log-sum-exp.
        """
        chunks = grid.num_chunks, grid.rows_per_chunk
        if beside is not None:  # chunks of equal weight count once each, as the window's keys do
            weights = weights * (indices >= 0).sum(-1, keepdim=True)
        read = grouped_cross_attention(
            q.reshape(len(q), *chunks, self.num_heads, self.head_dim),
            k,
            v,
            indices,
            weights,
            lengths,
            softmax_off_by_one=self.softmax_off_by_one,
            implementation=self.implementation,
            beside=None
            if beside is None
            else (beside[0].unflatten(1, chunks), beside[1].unflatten(1, chunks)),
            again=again,
        )
        rows = len(q), chunks[0] * chunks[1], self.num_heads * self.head_dim
        out: Tensor = self.gca_o_proj(grid.positions(read.reshape(rows)))
        return out


class DRTForCausalLM(RetrievingForCausalLM):
    """DRT with a language-modelling head."""

    config_class = DRTConfig
    config: DRTConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "DRTLayer"]
    shares_texts = True
    additions = ("landmark", "encoder.*", "retrievers.*", "upper_layers.*.gca_*")
    scoring = ("encoder.landmark_proj.*", "retrievers.*")

    def __init__(self, config: DRTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.landmark = nn.Parameter(torch.zeros(config.hidden_size))
        self.lower_layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_lower_layers))
        self.encoder = ChunkEncoder(config)
        learned = config.num_retrieval_groups if config.scores_chunks else 0
        self.retrievers = nn.ModuleList(Retriever(config) for _ in range(learned))
        self.upper_layers = nn.ModuleList(DRTLayer(config) for _ in range(config.num_upper_layers))
        self._finish(RMSNorm(config.hidden_size, config.rms_norm_eps))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:  # last: its parts are initialised already
            fan_in = self.config.initialization == "fan_in"
            init.normal_(self.landmark, std=0.1 if fan_in else self.config.initializer_range)
            retriever: Any
            for retriever in self.retrievers:
                # both sides start in one space: a chunk first finds what looks like itself
                if self.config.retrieval_query == "chunk":
                    init.eye_(retriever.chunk_proj.weight)
                    init.zeros_(retriever.q_proj.weight)
                elif self.config.retrieval_normalization and self.config.retrieval_projections:
                    init.copy_(retriever.q_proj.weight, self.encoder.landmark_proj.weight)
            if self.config.gca_start == "lookup":
                self._start_as_lookup()

    def _start_as_lookup(self) -> None:
        """Let q . k be how alike two states are, and what is read be what the values were made of."""
        config, weight = self.config, self.encoder.kv_proj.weight
        J, D, E = config.num_key_value_heads, config.head_dim, config.hidden_size
        heads, drawn = config.num_attention_heads // J, torch.empty_like(weight)
        keys, values = (part.unflatten(0, (-1, J * D)) for part in drawn.chunk(2))  # [sets, J * D, E]
        keys.normal_(std=E**-0.5)
        for rows in values:
            nn.init.orthogonal_(rows)
        init.copy_(weight, drawn)
        layer: Any
        for number, layer in enumerate(self.upper_layers):
            k, v = (part[config.kv_set_of_layer(number)].unflatten(0, (J, D)) for part in (keys, values))
            q, o = (part.repeat_interleave(heads, 0).flatten(0, 1) for part in (k, v / heads))
            init.copy_(layer.gca_q_proj.weight, q)
            init.copy_(layer.gca_o_proj.weight, o.T)

    def _given(self, neighbours: Tensor | None, scores: Tensor | None, has_cache: bool) -> Given | None:
        if self.config.retriever == "random":  # whatever is read
            return super()._given(neighbours, scores, has_cache)
        return given_neighbours(neighbours, scores, has_cache, self.config.retrieves)

    # --- chunks ----------------------------------------------------------------------------------------------

    @property
    def _record_shape(self) -> tuple[int, ...]:
        config = self.config
        return 2, config.kv_per_chunk * config.num_key_value_heads, config.chunk_size, config.head_dim

    def _expected_state(self) -> Expected:
        expected, width = super()._expected_state(), self.config.hidden_size
        if self.config.retriever == "encoder" and self.embedder is not None:
            width = (width if self.config.scores_chunks else 0) + 2 * self.embedder.size
        _, J, S, D = self._record_shape
        read = J * self.config.kv_per_group // self.config.kv_per_chunk
        sizes = {**expected.sizes, "LE": width, "PS": S, "PJ": read, "PD": D}
        return expected._replace(sizes=sizes) if self.config.retrieves else expected

    def _landmark(self) -> Tensor:
        return self.landmark

    def _entries(self, x: Tensor, ids: Tensor | None, grid: Grid, step: Step | None) -> MemoryEntries:
        vectors = self._embed(ids, grid)
        keeps_kv = step is None or step.cache.memory.keeps_kv
        return with_vectors(self.config, self.encoder(x, grid, keeps_kv), vectors)

    def _text_chunks(
        self, x: Tensor, tokens: Tensor, grid: Grid, noise_seed: Tensor | None, given: Given | None
    ) -> tuple[Tensor, Chunks]:
        if given is not None:
            expect_given(self.config, given, grid, x.shape[0])
        if not self.config.retrieves:
            return x, NoChunks(grid, x)
        vectors = self._embed(self._ids_of_chunks(tokens, grid), grid) if given is None else given
        # where nothing is closed the encoder still runs for its gradients: zeros, which DDP waits for
        runs = grid.num_closed or torch.is_grad_enabled()
        entries = self.encoder(x, grid) if runs else self._no_entries(x)
        return x, TextChunks(self.config, grid, entries, vectors, noise_seed, self.context_parallel)

    def _memory_chunks(self, x: Tensor, grid: Grid, step: Step, first_chunk: Integers) -> Chunks:
        if not self.config.retrieves:
            return NoChunks(grid, x)
        size = 0 if self.config.retriever != "encoder" or self.embedder is None else self.embedder.size
        return MemoryChunks(self.config, grid, step, first_chunk, x, size)

    def _no_entries(self, x: Tensor) -> MemoryEntries:
        B, (_, J, S, D) = x.shape[0], self._record_shape
        kv = x.new_zeros(B, 0, S, J, D)
        lengths = torch.zeros(B, 0, dtype=torch.int64, device=x.device)
        return MemoryEntries(kv, kv, x.new_zeros(B, 0, self.config.hidden_size), lengths)

    def _query(self, group: int, x: Tensor, grid: Grid, chunks: Any) -> Tensor | None:
        if not self.config.scores_chunks:
            return None
        own = chunks.own if self.config.retrieval_query == "chunk" else None
        query: Tensor = self.retrievers[group](grid.landmarks(x), own)
        return query

    def _of_layer(self, reading: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        if not reading:
            return reading
        number = number % self.config.layers_per_group if self.config.memory_kv == "layer" else 0
        return of_set(Reading(*reading), number, self.config.num_key_value_heads)

    # --- how far ---------------------------------------------------------------------------------------------

    def reach(self) -> int:
        """Positions before a token that can change its prediction through the upper layers.

        A layer sees W - 1 positions back; a group's first layer reads what the landmark before its chunk
        selected, at most S + 1 positions back.
        """
        config = self.config
        assert config.sliding_window is not None
        window = config.sliding_window - 1
        group = (config.layers_per_group - 1) * window + max(window, config.chunk_size + 1)
        return config.num_retrieval_groups * group

    # --- answers -------------------------------------------------------------------------------------------

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number = self.config, NumberBytes.of(self, memory_dtype)
        J, S, D = config.num_key_value_heads, config.chunk_size, config.head_dim
        read = number.record(config.kv_per_group * J, S, D).given_bytes + number.wide
        return chunk_cache_bytes(
            self,
            prompt,
            generated,
            number,
            record=number.record(config.kv_per_chunk * J, S, D),
            vectors=config.hidden_size if config.scores_chunks else 0,
            fetched=config.num_retrieval_groups * config.num_retrieved_chunks * read,
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

    def made_for_layers(self) -> tuple[nn.Module, int] | None:
        return self.encoder.kv_proj, self.config.kv_per_chunk

    def fitted_memory(self) -> FittedMemory | None:
        if not self.config.reads_beside_window:
            return None
        layers: list[Any] = list(self.upper_layers)
        closing, encoder, config = [layer.gca_o_proj for layer in layers], self.encoder, self.config
        asks = (
            config.ranks_all_chunks and config.retrieval_projections and config.retrieval_query == "landmark"
        )
        learned = [*self.retrievers] if asks else []
        return FittedMemory(
            encoder,
            encoder.kv_proj,
            config.first_readers,
            closing,
            encoder.landmark_proj,
            encoder.landmark_vectors,
            learned,
            config.retrieval_scale * config.hidden_size**-0.5,
            config.retrieval_recency,
        )

    @torch.no_grad()
    def read_as_attended(self) -> None:
        layer: Any
        for layer in self.upper_layers:
            layer.gca_o_proj.weight.copy_(layer.attention.o_proj.weight)

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Differentiable Retrieval Transformer",
            "Each chunk of text looks back, inside attention, at the few past chunks that it retrieved; which those "
            "are it learned from the language-modelling loss.",
            (("Grouped Cross-Attention", "2410.01651"),),
        )
