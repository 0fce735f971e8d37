"""The Retrieval-Pretrained Transformer (Rubin and Berant, 2024), and RPT-Contriever (arXiv 2410.01651, App. E).

Lower layers -> chunk encoder and retriever -> memory -> upper layers with chunked cross-attention. At the end of chunk
c, K chunks before it are selected; its last token and all but the last of chunk c + 1 read them (RETRO's shift).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, MemoryEntries, Window
from trailmark.models.answers import CardFacts, LayerKind
from trailmark.models.arguments import check_tokens
from trailmark.models.candidates import expect_selectable, no_selection, numbers_in_memory
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import RPTConfig
from trailmark.models.costs import (
    CacheBytes,
    ChunkReads,
    NumberBytes,
    chunk_cache_bytes,
    chunk_multiply_adds,
    kv_width,
)
from trailmark.models.embedding import (
    Given,
    as_selection,
    embed_chunks,
    expect_earlier,
    expect_embedder,
    expect_selected,
    given_neighbours,
)
from trailmark.models.grid import Grid, Integers, lay_out
from trailmark.models.layers import MLP, Place, RMSNorm, WindowAttention, WindowLayer
from trailmark.models.reads import SelectedReads
from trailmark.models.rpt_neighbours import (
    ChunkedCrossAttention,
    ChunkRetriever,
    NeighbourAugmentor,
    NeighbourEncoder,
    NeighbourGate,
    Readers,
    Reading,
)
from trailmark.models.rpt_reading import MemoryReader, nothing_read
from trailmark.models.step import Step, place_of
from trailmark.models.text import whole_chunks
from trailmark.models.without_retrieval import (
    expect_no_neighbours,
    nothing_selected,
)
from trailmark.ops import ChunkSelection, fold_seed, ranking_loss, select_chunks
from trailmark.ops.arguments import values_are_checked


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
        readers: Readers,
        place: Place,
        kept: Window | None,
        turn: Tensor,  # [b, P, D / 2, 2]
        *reading: Any,  # the fields of a Reading, keys and values those of this layer
    ) -> Tensor:
        # arguments of their own: reentrant checkpointing passes gradients to no tensor inside a tuple
        x = x + self.attention(self.attention_norm(x), place, kept)
        if self.reads:
            x = x + self.cca(self.cca_norm(x), readers.grid, turn, *reading)
        return x + self.mlp(self.mlp_norm(x))


class RPTForCausalLM(TrailmarkForCausalLM):
    """RPT with a language-modelling head."""

    config_class = RPTConfig
    config: RPTConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "RPTLayer"]
    ranking_progress: float = 1.0
    """How far training is, 0 to 1, for what changes with it (:meth:`_ranking`); a trainer may set it."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__(config)
        assert config.num_lower_layers is not None
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
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        mark_residual_projections(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        elif isinstance(module, ChunkedCrossAttention | ChunkRetriever):
            init.normal_(module.null_k, std=1e-4)
            init.normal_(module.null_v, std=1e-4)

    def _stages(self) -> list[int]:
        return [0] * len(self.lower_layers) + [1] * len(self.upper_layers)

    @torch.compiler.disable(reason="an RPT's chunks are laid out in numpy")
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
        x = grid.insert_landmarks(self.embed_tokens(tokens), None)
        step = None if cache is None else Step(cache, grid, self.config, x.shape[0])
        if given is not None:
            expect_earlier(given, grid, x.shape[0])
            scores = None if given.scores is None else given.scores.to(x.device)
            given = Given(given.indices.to(x.device), scores)
        place = place_of(self.config, grid, x, step)
        for number, layer in enumerate(self.lower_layers):
            x = layer(x, place, step and step.window(number))

        ranking, retrieves = None, self.config.retrieves
        if step is None and retrieves:
            states, present, vectors = self._chunks(x, tokens, grid, None, given)
            asked, ranking = self._select(vectors, x, grid, noise_seed, given)
            readers = Readers.of(grid)
            reading = self._read(asked, states, present, readers)
            if self.retriever is not None and vectors is not None and torch.is_grad_enabled():
                # no other way to it where nothing is ranked: zeros, which DDP waits for
                x = x + sum(part[..., :0].sum() for part in vectors)
        elif step is None:
            readers = Readers.of(grid)
            asked, reading = nothing_selected(x, grid), nothing_read(readers, x)
        else:
            if retrieves:
                self._remember(x, tokens, grid, step)
                step.keep_open(x)
            if keep == 0:  # reading: a memory depends on nothing above
                step.defer(x, self.reach())
                step.commit()
                return Hidden(None)
            x, grid, first_chunk = step.tail(x, self.reach(), keep)
            place = step.place(1, grid, x)
            readers = Readers.of(grid)
            asked, reading = self._retrieve(x, grid, step, readers, first_chunk)

        turn = readers.turn(self.config.head_dim, self.config.rope_theta, x)
        for number, layer in enumerate(self.upper_layers):
            kept = step and step.window(len(self.lower_layers) + number)
            x = layer(x, readers, place, kept, turn, *self._of_layer(reading, number))
        if step is not None:
            step.commit()
        return Hidden(self.norm(grid.last_tokens(keep)(x)), (asked,), grid.closed, ranking=ranking)

    def _of_layer(self, reading: Reading, number: int) -> Reading:
        """With the keys and values of one upper layer."""
        if reading.kept_k is None or number % self.config.cross_attention_every:
            return reading
        assert self.config.num_key_value_heads is not None
        assert reading.kept_v is not None
        place, J = number // self.config.cross_attention_every, self.config.num_key_value_heads
        heads = slice(place * J, (place + 1) * J)
        return reading._replace(kept_k=reading.kept_k[..., heads, :], kept_v=reading.kept_v[..., heads, :])

    # --- chunks ----------------------------------------------------------------------------------------------

    def _chunks(
        self,
        x: Tensor,  # [B, P, E], after the open chunk's with a step
        tokens: Tensor,  # [B, T] of the call
        grid: Grid,
        step: Step | None,
        given: Given | None,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Of the chunks that close: states [B, C, S, E], rows that exist [B, C, S], queries and keys [B, C, d].

        Rows that exist: None: all. Queries and keys: None where chunks are given for an encoder.
        """
        S = self.config.chunk_size
        rows = grid.encoder_rows(x).unflatten(1, (-1, S))
        present = None
        if grid.has_short_chunks:
            lengths = grid.lengths_on(x.device).expand(len(rows), -1)
            present = torch.arange(S, device=x.device) < lengths[..., None]
        vectors = None
        if self.retriever is not None:
            vectors = self.retriever(rows, present)
        elif given is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            queries, keys = self._embed(tokens, grid, step)
            vectors = queries.to(wide), keys.to(wide)
        return self.encoder(rows, present), present, vectors

    def _embed(self, tokens: Tensor, grid: Grid, step: Step | None) -> tuple[Tensor, Tensor]:
        """The encoder's queries and keys [B, C, d] of the chunks that a call closes."""
        embedder = expect_embedder(self.embedder, self.config.embedder_fingerprint)
        return embed_chunks(embedder, tokens, grid, step)

    def _remember(self, x: Tensor, tokens: Tensor, grid: Grid, step: Step) -> None:
        """Write the chunks that a call closes into the memory."""
        if grid.num_closed:
            step.remember(self._entries(step.with_open(x), tokens, grid, step))
        elif self.retriever is None:
            self._embed(tokens, grid, step)  # keeps the open chunk's tokens

    def _entries(self, x: Tensor, tokens: Tensor, grid: Grid, step: Step | None) -> MemoryEntries:
        """What a memory keeps: states as two halves, and landmark vectors (key, query) [B, C, 2 d].

        Queries too: a later call may be the first that runs the upper layers on the tokens that read what they find.
        """
        states, _, vectors = self._chunks(x, tokens, grid, step, None)
        assert vectors is not None
        queries, keys = vectors
        k, v = states[:, :, :, None].chunk(2, dim=-1)  # [B, C, S, 1, E / 2]
        lengths = grid.lengths_on(x.device).expand(len(states), -1)
        return MemoryEntries(k, v, torch.cat([keys, queries], dim=-1), lengths)

    def encode(self, input_ids: Tensor, before: Tensor | None = None) -> MemoryEntries:
        """The memory entries of the whole chunks of ``input_ids`` [B, n * S], without reading them.

        ``before`` [B, m * S] are the tokens before them; with at least the lower layers' reach of them
        (``num_lower_layers * (sliding_window - 1)`` positions) the entries are those of a full read.
        """
        check_tokens(input_ids, self.config.vocab_size)
        ids, skip = whole_chunks(input_ids, before, self.config.chunk_size)
        grid = lay_out(ids.shape[1], self.config.chunk_size, landmarks=False)
        x = self.embed_tokens(ids)
        place = Place.of(self.config, x, None)
        for layer in self.lower_layers:
            x = layer(x, place)
        return MemoryEntries(*(part[:, skip:] for part in self._entries(x, ids, grid, None)))

    # --- which chunks are selected ---------------------------------------------------------------------------

    @property
    def _vector_size(self) -> int:
        """d numbers of a query or a key."""
        if self.retriever is not None:
            return self.config.hidden_size
        assert self.embedder is not None
        return self.embedder.size

    @property
    def _scale(self) -> float:
        return self.config.hidden_size**-0.5 if self.config.retriever == "learned" else 1.0

    def _select(
        self,
        vectors: tuple[Tensor, Tensor] | None,
        x: Tensor,
        grid: Grid,
        noise_seed: Tensor | None,
        given: Given | None,
    ) -> tuple[ChunkSelection, Tensor | None]:
        """For each chunk of a whole text, chunks of its document before it; and what their ranking adds to the loss."""
        if given is not None:
            expect_selectable(given, grid, self.config.first_visible)
        if vectors is None:
            assert given is not None
            return as_selection(given, 1.0, torch.promote_types(x.dtype, torch.float32)), None
        K, (queries, keys) = self.config.num_retrieved_chunks, vectors
        limits = grid.candidates(self.config.first_visible, x.device)
        first = grid.first_candidates(x.device)
        way = "reference" if self.config.implementation == "reference" else None
        asked = select_chunks(queries, keys, K, limits, first, scale=self._scale, implementation=way)
        if given is None:
            return asked, None
        assert given.scores is not None
        found = given.indices
        scores = select_chunks(queries, keys, found.shape[2], limits, indices=found, scale=self._scale).scores
        ranking = self._ranking(scores, given)
        if noise_seed is not None:
            gold = self._reads_gold(noise_seed)[:, None, None]
            chosen = torch.where(gold, _best(given, K), asked.indices)
            asked = select_chunks(queries, keys, K, limits, indices=chosen, scale=self._scale)
        return asked, ranking

    def _ranking(self, scores: Tensor, given: Given) -> Tensor:
        """[B]: the ranking loss of candidates' scores [B, C, n] with its weight.

        With ``ranking_progress`` the weight goes from 0 to ``ranking_weight`` and the margin from 1 to
        ``ranking_margin``, evenly.
        """
        config, progress = self.config, self.ranking_progress
        assert given.scores is not None
        margin = 1 + (config.ranking_margin - 1) * progress
        loss = ranking_loss(scores, given.scores, given.indices >= 0, margin, config.ranking_threshold)
        return config.ranking_weight * progress * loss

    def _reads_gold(self, noise_seed: Tensor) -> Tensor:
        """[B] bool, drawn from each row's seed: whether it reads the chunks with the best target scores.

        Their share goes with ``ranking_progress`` p from the first to the last probability as (1 - cos(pi p)) / 2.
        """
        config = self.config
        first, last = config.first_gold_probability, config.gold_probability
        share = first + (last - first) * (1 - math.cos(math.pi * self.ranking_progress)) / 2
        return (fold_seed(noise_seed, 0).double() + 0.5) * 2.0**-32 < share

    def _retrieve(
        self, x: Tensor, grid: Grid, step: Step, readers: Readers, first_chunk: Integers
    ) -> tuple[ChunkSelection, Reading]:
        """What the chunks of a call select in the memory, and what its positions [B, P, E] read."""
        if not self.config.retrieves:
            return nothing_selected(x, grid), nothing_read(readers, x)
        prepare = None if self.augmentor is None and self.gate is None else self._prepare
        reader = MemoryReader(self.config, step, x, prepare, self._projected)
        if not grid.num_closed:  # decoding, in the middle of a chunk
            nothing = no_selection(self.config.num_retrieved_chunks, x)
            return nothing, reader.read_left(readers)
        memory, num_chunks = step.cache.memory, int(step.size.chunks.max())
        asking = first_chunk[:, None] + np.arange(grid.num_closed)  # [B, C]
        numbers = torch.from_numpy(asking.clip(max=num_chunks - 1)).to(x.device)
        d = self._vector_size
        queries = memory.landmarks_of(numbers, num_chunks, slice(d, 2 * d))
        limits_in_row = numbers_in_memory(step, grid, asking, self.config.first_visible)
        limits = torch.from_numpy(limits_in_row).to(x.device)
        K = self.config.num_retrieved_chunks
        asked = memory.select(queries, num_chunks, K, limits, self._scale, slice(0, d))
        return asked, reader.read(asked.indices.cpu().numpy(), asking, grid, readers)

    # --- what is read ----------------------------------------------------------------------------------------

    def _read(
        self, asked: ChunkSelection, states: Tensor, present: Tensor | None, readers: Readers
    ) -> Reading:
        """What the groups of a whole text read, of states [B, C, S, E] and the rows that exist [B, C, S]."""
        chosen = asked.indices
        B, C, K = chosen.shape
        if not C:  # the table has one chunk that nothing reads: its projections too get zeros for gradients
            empty = states.new_zeros(B, 1, self._rows, states.shape[3])
            zero = states.sum()
            if self.augmentor is not None or self.gate is not None:
                asking = states.new_zeros(B, 1, states.shape[2], states.shape[3])
                empty = self._prepare(empty[:, :, None], None, asking, None)[:, :, 0]
            return Reading(readers.take(chosen), None, None, empty + zero, None)
        rows = states
        if self.config.continuation:
            rows = _with_next(states)
        exist = present
        if present is not None and self.config.continuation:
            exist = _with_next(present)
        if self.augmentor is None and self.gate is None:
            return Reading(readers.take(chosen), None, None, rows, exist)
        first = torch.arange(B, device=chosen.device)[:, None, None] * C
        flat = (chosen.clamp(min=0) + first).flatten()
        pairs = rows.flatten(0, 1).index_select(0, flat).view(B, C, K, *rows.shape[2:])
        if exist is not None:
            exist = exist.flatten(0, 1).index_select(0, flat).view(B, C, K, -1)
        pairs = self._prepare(pairs, exist, states, present)
        place = torch.arange(C * K, device=chosen.device).view(C, K)
        indices = readers.take(torch.where(chosen < 0, -1, place))
        return Reading(
            indices, None, None, pairs.flatten(1, 2), None if exist is None else exist.flatten(1, 2)
        )

    @property
    def _upper(self) -> list[RPTLayer]:
        return cast("list[RPTLayer]", list(self.upper_layers))

    @property
    def _rows(self) -> int:
        """L rows of a neighbour."""
        return self.config.chunk_size * (2 if self.config.continuation else 1)

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
        pairs = [layer.cca.project(rows) for layer in self._upper if layer.reads]
        return torch.cat([k for k, _ in pairs], dim=-2), torch.cat([v for _, v in pairs], dim=-2)

    def _given(self, neighbours: Tensor | None, scores: Tensor | None, has_cache: bool) -> Given | None:
        expect_no_neighbours(self.config, neighbours, scores)
        given = given_neighbours(neighbours, scores, has_cache)
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
            _expect_targets(given)
        return given

    def reach(self) -> int:
        """Positions before a token that can change its prediction through the upper layers.

        A layer sees W - 1 positions back; what a token reads was selected at most S - 1 positions before it.
        """
        config = self.config
        assert config.sliding_window is not None
        window = config.sliding_window - 1
        return (config.num_upper_layers - 1) * window + max(window, config.chunk_size - 1)

    def encoding_reach(self) -> int:
        """Chunks after a chunk whose memory entries its tokens take part in, through the lower layers."""
        config = self.config
        assert config.sliding_window is not None
        assert config.num_lower_layers is not None
        return -(-config.num_lower_layers * (config.sliding_window - 1) // config.chunk_size)

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
            record=S * E * number.kept,  # states as two halves, projected by each layer that reads
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
        upper = self._upper
        reading = LayerKind([layer for layer in upper if layer.reads])
        return [lower, encoder, reading, LayerKind([layer for layer in upper if not layer.reads])]

    def retrieval_modules(self) -> list[nn.Module]:
        parts = [self.encoder, self.retriever, self.augmentor, self.gate]
        reading = [part for layer in self._upper if layer.reads for part in (layer.cca_norm, layer.cca)]
        return [*(part for part in parts if part is not None), *reading]

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Retrieval-Pretrained Transformer",
            "At the end of each chunk past chunks are retrieved, which the upper layers read in chunked "
            "cross-attention.",
            (("RPT", "2306.13421"), ("RPT-Contriever in Grouped Cross-Attention", "2410.01651")),
        )


def _expect_targets(given: Given) -> None:
    """That candidates are different chunks, since each is read once, with scores that can be compared."""
    assert given.scores is not None
    if not values_are_checked(given.indices):
        return
    ordered = given.indices.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        b, c, _ = twice.nonzero()[0].tolist()
        raise ValueError(
            f"neighbours: expected different candidates for a chunk, got {given.indices[b, c].tolist()} for chunk {c} "
            f"of row {b}. Leave each in once, and put -1 for the rest."
        )
    wrong = ~(given.scores.isfinite() | (given.indices < 0).to(given.scores.device))
    if bool(wrong.any()):
        b, c, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"neighbour_scores: expected finite numbers where neighbours has a chunk, got "
            f"{float(given.scores[b, c, n])} for chunk {c} of row {b}. Put -1 in neighbours where there is no score."
        )


def _best(given: Given, num_retrieved: int) -> Tensor:
    """The candidates with the best target scores, [B, C, K] ascending, -1 last; of equals the first."""
    assert given.scores is not None
    indices, missing = given.indices, given.indices < 0
    order = given.scores.masked_fill(missing, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    beyond = torch.iinfo(torch.int64).max
    chosen = indices.gather(-1, order)[..., :num_retrieved]
    chosen = chosen.masked_fill(chosen < 0, beyond).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == beyond, -1)
    return nn.functional.pad(chosen, (0, num_retrieved - chosen.shape[-1]), value=-1)


def _with_next(states: Tensor) -> Tensor:
    """[B, C, S, ...] -> [B, C, 2 S, ...]: each chunk and the one after it; after the last, zeros."""
    return torch.cat([states, torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], dim=1)], dim=2)
