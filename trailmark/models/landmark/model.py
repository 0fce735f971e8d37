"""Landmark Attention (arXiv 2305.16300): a landmark after each chunk learns, in plain attention, to stand for it.

In training every position attends to its own chunk, and to others through their landmarks, over the whole text.
In reading, a text is cut in cells: a cell's positions attend to it as in training, and to the k chunks of the
memory whose landmarks score best, in every layer anew (cell.py, memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import CacheState, ChunkCache, ChunkMemory
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts
from trailmark.models.candidates import no_selection, selection_of_tokens
from trailmark.models.causal_lm import TrailmarkForCausalLM
from trailmark.models.costs import CacheBytes, NumberBytes
from trailmark.models.embedding import Given
from trailmark.models.grid import Grid, Integers, Take
from trailmark.models.grid import keep as keep_positions
from trailmark.models.landmark.cell import CellStep
from trailmark.models.landmark.config import LandmarkConfig
from trailmark.models.landmark.costs import landmark_cache_bytes
from trailmark.models.landmark.memory import LandmarkMemory, Reading
from trailmark.models.layers import SelfAttention, make_mlp, make_norm, rotary_at, rotate
from trailmark.models.outputs import Hidden
from trailmark.models.reads import AveragedReads, BeforeReading
from trailmark.models.text import Text
from trailmark.ops import ChunkSelection, LandmarkLayout, fold_seed, landmark_attention
from trailmark.ops.arguments import arithmetic_dtype, without_autocast


@dataclass(frozen=True)
class Sight:
    """Where the positions of a call stand and what they see, for all layers of a call without a cache."""

    rotary: Tensor  # [1 or B, P, D / 2, 2]
    layout: LandmarkLayout
    # with a retrieval gate: own chunks and those that it does not control; those that it does
    near: LandmarkLayout | None = None
    gated: LandmarkLayout | None = None


# of layouts that were asked for before: training asks for the same again
_SIGHTS: WeakKeyDictionary[Grid, dict[tuple[Any, ...], Sight]] = WeakKeyDictionary()


class LandmarkLayer(GradientCheckpointingLayer):
    """h = x + attention(norm(x)); y = h + MLP(norm(h))."""

    attends = "nothing"  # that a kernel keeps less of than the torch path

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, gate: Tensor | None, sight: Sight) -> tuple[Tensor, Tensor | None]:
        """x [B, P, E] and the retrieval gate token's state [1, E] below this layer -> both above it.

        Together, for FSDP2 has a layer's weights whole only while its forward runs.
        """
        return self._attend(x, gate, sight), None if gate is None else self.next_gate(gate)

    def _attend(self, x: Tensor, gate: Tensor | None, sight: Sight) -> Tensor:
        q, k, v = self.attention.heads(self.attention_norm(x))
        q, k = rotate(q, sight.rotary), rotate(k, sight.rotary)
        implementation = self.config.implementation
        if gate is None:
            out = landmark_attention(q, k, v, sight.layout, implementation=implementation)
            assert isinstance(out, Tensor)
            return self.close(x, out)
        assert sight.near is not None
        assert sight.gated is not None
        near, lse = landmark_attention(q, k, v, sight.near, implementation=implementation, return_lse=True)
        far, far_lse = landmark_attention(
            q, k, v, sight.gated, implementation=implementation, return_lse=True
        )
        share = torch.sigmoid(self.gate_scores(gate, q) - lse)
        share = share.masked_fill(far_lse == -torch.inf, 0)[..., None]
        return self.close(x, near * (1 - share).to(near.dtype) + far * share.to(far.dtype))

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, after attention [B, P, H, D]."""
        x = x + self.attention.o_proj(attended.flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    # --- the retrieval gate (App. D) -----------------------------------------------------------------------

    def next_gate(self, gate: Tensor) -> Tensor:
        """The gate token's state [1, E] above this layer: it attends to nothing, so it is the same in every text."""
        return gate + self.mlp(self.mlp_norm(gate))

    def gate_scores(self, gate: Tensor, q: Tensor) -> Tensor:
        """Scores [B, P, H] of the gate's key for q [B, P, H, D], turned by its distance to place -1."""
        config = self.config
        _, key, _ = self.attention.heads(self.attention_norm(gate))  # [1, J, D]
        at = torch.tensor([-1], device=q.device)
        key = rotate(key, rotary_at(at, config.head_dim, config.rope, q.dtype))[0]
        groups = q.unflatten(2, (key.shape[0], -1))  # [B, P, J, g, D]
        return _products(groups, key[:, None]).flatten(2) * config.head_dim**-0.5


@without_autocast
def _products(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of the last dimension, in float32 or wider; y is broadcast."""
    dtype = arithmetic_dtype(x, y)
    return (x.to(dtype) * y.to(dtype)).sum(-1)


class LandmarkForCausalLM(TrailmarkForCausalLM):
    """Landmark Attention with a language-modelling head.

    Without a cache a text is attended to whole, as in training, in time quadratic in its length. With one it is
    read in cells (``local_length`` tokens, counted from its start), with ``num_retrieved_chunks`` chunks of the
    memory. Where there are no more than those the two agree. With ``num_retrieved_chunks`` 0 a call with a cache sees
    the cell alone and keeps nothing; a call without one sees all of its text as ever. A call with a cache has no
    gradient. ``torch.compile`` breaks the graph once, where positions are laid out.
    """

    config_class = LandmarkConfig
    config: LandmarkConfig
    _no_split_modules = ["LandmarkLayer"]
    additions = ("landmark", "gate")

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.landmark = nn.Parameter(torch.zeros(config.hidden_size))
        self.gate = nn.Parameter(torch.zeros(config.hidden_size)) if config.gate_probability else None
        self.layers = nn.ModuleList(LandmarkLayer(config) for _ in range(config.num_hidden_layers))
        self._finish(make_norm(config))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            fan_in = self.config.initialization == "fan_in"
            for vector in (self.landmark, self.gate):
                if vector is not None:
                    init.normal_(vector, std=1.0 if fan_in else self.config.initializer_range)

    # --- what the base asks --------------------------------------------------------------------------------

    def _stages(self) -> list[int]:
        return [0] * len(self.layers)

    def reach(self) -> int | None:
        """A cell sees itself and, before it, at most the chunk that it began in; the memory, all."""
        return self.config.cell_positions()

    def _piece_size(self) -> int:
        return self.config.local_length

    def _begun(self, state: CacheState) -> Integers:
        return np.zeros_like(state.phases) if state.cell is None else state.cell.tokens

    @property
    def _record_shape(self) -> tuple[int, ...]:
        return 2, 1, self.config.chunk_size + 1, self.config.head_dim

    def _expected_state(self) -> Expected:
        expected, config = super()._expected_state(), self.config
        assert config.local_length is not None
        return expected._replace(sizes={**expected.sizes, "LE": config.head_dim, "CT": config.local_length})

    def _make_memory(
        self, tier: str, capacity: int, folder: Path | None, dtype: torch.dtype | None, search: Any
    ) -> ChunkMemory:
        config = self.config
        planes = config.num_hidden_layers * config.num_key_value_heads
        return ChunkMemory(
            tier, capacity, folder, dtype, search, planes=planes, max_chunks=config.max_memory_chunks
        )

    def _lay_out(self, text: Text, cache: ChunkCache | None, noise_seed: Tensor | None = None) -> Grid:
        if noise_seed is None or cache is not None or self.config.landmark_phase == "fixed":
            return super()._lay_out(text, cache)
        # of a row's first document, which may be cut; one that begins in the row begins a chunk, as in reading
        S = self.config.chunk_size
        phases = (fold_seed(noise_seed, _PHASE) % S).cpu().numpy()
        return self.layouts.lay_out(text.ids.shape[1], phases, text.counts, text.close_chunk, text.documents)

    def run(
        self,
        tokens: Tensor,  # [B, T]
        grid: Grid,
        cache: ChunkCache | None = None,
        keep: int | None = None,
        noise_seed: Tensor | None = None,
        given: Given | None = None,
    ) -> Hidden:
        if cache is not None:
            with torch.no_grad():
                return self._read_cells(tokens, grid, cache, keep)
        x = grid.insert_landmarks(self.embed_tokens(tokens), self.landmark)
        sight = self._sight(grid, x, noise_seed)
        gate = None if sight.gated is None or self.gate is None else self.gate[None]
        layer: Any
        for layer in self.layers:
            x, gate = layer(x, gate, sight)
        return self._hidden(x, grid, keep)

    # --- a whole text --------------------------------------------------------------------------------------

    @torch.compiler.disable(reason="what a layout says depends on its numbers")
    def _sight(self, grid: Grid, x: Tensor, noise_seed: Tensor | None) -> Sight:
        """Positions x [B, P, E] of a whole text. ``noise_seed`` [B]: in training."""
        config, B = self.config, x.shape[0]
        jumps = noise_seed is not None and config.position_jump > 1
        gated = noise_seed is not None and self.gate is not None
        # layouts are shared by all models of the process
        key = B, x.device, x.dtype, config.head_dim, config.rope
        known = _SIGHTS.setdefault(grid, {})
        if not (jumps or gated) and key in known:
            return known[key]
        with torch.inference_mode(False):  # a later call may train on the same layout
            chunk = torch.from_numpy(grid.chunk).to(x.device).expand(B, -1)  # [B, P]
            places = torch.from_numpy(grid.places).to(x.device)
            if jumps:
                assert noise_seed is not None
                places = places + self._jumps(chunk, noise_seed, grid)
            rotary = rotary_at(places, config.head_dim, config.rope, x.dtype)
            landmarks = torch.from_numpy(grid.is_landmark).to(x.device).expand(B, -1)
            documents = grid.documents_on(x.device)
            documents = torch.where(chunk >= 0, 0, -1) if documents is None else documents.expand(B, -1)
            layout = LandmarkLayout.of(landmarks.clone(), documents)
        sight = Sight(rotary, layout)
        if gated:
            assert noise_seed is not None
            number = torch.arange(layout.num_chunks, device=x.device)
            drawn = fold_seed(noise_seed[:, None].to(x.device), _GATE, number)  # [B, C] below 2 ** 32
            controlled = drawn < config.gate_probability * 2**32
            return Sight(rotary, layout, layout.seeing(~controlled), layout.seeing(controlled, own=False))
        if not jumps:
            known[key] = sight
        return sight

    def _jumps(self, chunk: Tensor, noise_seed: Tensor, grid: Grid) -> Tensor:
        """App. E: what the landmarks of its document before each position [B, P] of chunk [B, P] add to its place.

        Drawn for each chunk as the row numbers it.
        """
        count = int(chunk.max()) + 1
        number = torch.arange(max(1, count), device=chunk.device)
        drawn = fold_seed(noise_seed[:, None].to(chunk.device), _JUMP, number) % self.config.position_jump
        before = drawn.cumsum(1) - drawn  # [B, N] at each chunk
        if grid.document is not None:
            first = torch.from_numpy(grid.first_chunks).to(chunk.device).expand(before.shape)
            before = before - before.gather(1, first)
        return before.gather(1, chunk.clamp(min=0))

    def _hidden(
        self, x: Tensor, grid: Grid, keep: int | None, retrieval: tuple[ChunkSelection, ...] | None = None
    ) -> Hidden:
        """After the last layer, of all positions x [B, P, E]."""
        x = self.norm(x)
        if self.config.landmark_loss != "text":
            return Hidden(grid.last_tokens(keep)(x), retrieval)
        closes, take = grid.closing(keep)
        if keep is not None:
            return Hidden(take(x), retrieval)
        flags = torch.from_numpy(closes).to(x.device).expand(x.shape[0], -1)
        return Hidden(take(x), retrieval, own=(grid.last_tokens(None)(x), flags[..., None].to(x.dtype)))

    # --- landmarks in the loss -----------------------------------------------------------------------------

    def bearing_loss(self, labels: Tensor, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        labels = super().bearing_loss(labels, input_ids, document_ids)
        if self.config.landmark_loss != "none_after_eos":
            return labels
        eos = self.config.eos_token_id
        ends = torch.isin(input_ids, torch.as_tensor(eos, device=input_ids.device))
        return labels.masked_fill(F.pad(ends[:, :-1], (1, 0)), -100)

    def landmark_terms(self, logits: Tensor, states: Tensor, own: Tensor, closes: Tensor) -> Tensor:
        """Cross entropy with the landmark as one token more, less that without it.

        Where a token is predicted, log(1 + e^(z - log sum e^logits)) with the landmark's logit z; where the landmark
        is, at the last token of its chunk, log(1 + e^(log sum e^logits - z)).
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        closes = closes[..., 0] > 0

        def margin(logits: Tensor, states: Tensor) -> Tensor:
            return _products(states, self.landmark) - logits.to(wide).logsumexp(-1)

        extra = F.softplus(margin(logits, states))
        own = own * self.config.logit_scale
        last = own[closes]  # [n, E]
        predicted = F.softplus(-margin(self.lm_head(last), last))
        return extra.masked_scatter(closes, extra[closes] + predicted)

    # --- cell by cell --------------------------------------------------------------------------------------

    def _read_cells(self, tokens: Tensor, grid: Grid, cache: ChunkCache, keep: int | None) -> Hidden:
        x = grid.insert_landmarks(self.embed_tokens(tokens), self.landmark)
        B = x.shape[0]
        out = None if keep == 0 else torch.zeros_like(x)
        pieces: list[tuple[Take, list[ChunkSelection]]] = []
        for take, part in self._parts(grid, cache, B):
            step = CellStep(cache, part, self.config, x)
            states, chosen = self._read_cell(take(x), step, keep)
            step.commit()
            if out is not None:
                _put(out, take, states)
                pieces.append((take, chosen))
        if out is None:
            return Hidden(None)
        return self._hidden(out, grid, keep, self._joined(pieces, grid, out) if keep is None else None)

    def _parts(self, grid: Grid, cache: ChunkCache, B: int) -> Iterator[tuple[Take, Grid]]:
        """The positions of a call, cell by cell of each row."""
        config = self.config
        cell = cache.begun(B).cell
        begun = np.zeros(B, np.int64) if cell is None else cell.tokens
        if len(grid.chunk) == 1 and (begun == begun[0]).all():
            begun = begun[:1]
        # a landmark belongs to the cell of the token before it
        number = np.cumsum(grid.token >= 0, axis=1) - 1 + begun[:, None]
        number = np.where(np.broadcast_to(grid.chunk, number.shape) >= 0, number // config.local_length, -1)
        if not number.size or (number == 0).all():
            yield Take(np.arange(grid.num_positions)[None], grid.num_positions), grid
            return
        for n in range(int(number.max()) + 1):
            yield keep_positions(grid, number == n)

    def _read_cell(self, x: Tensor, step: CellStep, keep: int | None) -> tuple[Tensor, list[ChunkSelection]]:
        """The positions x [B, P, E] of one piece through all layers: their states.

        And, where all of a call is wanted (``keep`` None), what each layer read.
        """
        config, memory = self.config, LandmarkMemory(step, self.config)
        gate, chosen = None if self.gate is None else self.gate[None], []
        layer: Any
        for number, layer in enumerate(self.layers):
            q, k, v = layer.attention.heads(layer.attention_norm(x))
            keys, values = step.append(number, k, v)
            if keep == 0 and number == len(self.layers) - 1 and not config.selects_for_many:
                break  # a memory depends on nothing above its keys
            q = rotate(q, step.query_rotary)
            near, lse = step.attend(q, keys, values)
            if memory:
                far, share = self._far(number, q, lse, memory, layer, gate)
                near = near.to(share.dtype) * (1 - share) + far.out * share
                if keep is None:
                    chosen.append(far.selection())
            x = layer.close(x, near.to(x.dtype))
            gate = None if gate is None else layer.next_gate(gate)
        return x, chosen

    def _far(
        self, number: int, q: Tensor, lse: Tensor, memory: LandmarkMemory, layer: Any, gate: Tensor | None
    ) -> tuple[Reading, Tensor]:
        """What a layer's q [B, P, H, D] read, and its share [B, P, H, 1] beside the cell with lse [B, P, H]."""
        if gate is None:
            far = memory.read(number, q, None)
            share = torch.sigmoid(far.lse - lse.to(far.lse.dtype))
            return far, share.masked_fill(far.lse == -torch.inf, 0)[..., None]
        share = torch.sigmoid(layer.gate_scores(gate, memory.turned_for_gate(q)) - lse)
        skipped = share < self.config.gate_cutoff
        far = memory.read(number, q, skipped)
        share = share.masked_fill(far.lse == -torch.inf, 0)
        # a head whose gate is shut reads nothing, though others of its unit do
        share = share.masked_fill(skipped, 0)
        far = replace(far, gates=far.gates.masked_fill(skipped[..., None], -torch.inf))
        return far, share[..., None]

    def _joined(
        self, pieces: list[tuple[Take, list[ChunkSelection]]], grid: Grid, x: Tensor
    ) -> tuple[ChunkSelection, ...]:
        """What each layer read, of the tokens of the call [B, T, H, k]."""
        H, k = self.config.num_attention_heads, self.config.num_retrieved_chunks
        layers = []
        for number in range(len(self.layers)):
            joined = no_selection(x, x.shape[1], H, k)
            for take, chosen in pieces:
                if chosen:
                    for whole, part in zip(joined, chosen[number], strict=True):
                        _put(whole, take, part)
            layers.append(selection_of_tokens(joined, grid))
        return tuple(layers)

    # --- answers -------------------------------------------------------------------------------------------

    @property
    def selects_by_chunk(self) -> bool:
        return False

    def follow_reads(self) -> AveragedReads:
        config = self.config
        return AveragedReads(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_retrieved_chunks,
            config.chunk_size,
            {"local_length": config.local_length, "retrieve_per": config.retrieve_per},
        )

    def before_reading(self) -> BeforeReading:
        cell = self.config.local_length
        assert cell is not None
        if cell <= 2 * self.config.chunk_size:
            return super().before_reading()
        return BeforeReading(cell, f"a cell of {cell:,} tokens")

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        return landmark_cache_bytes(self.config, prompt, generated, NumberBytes.of(self, memory_dtype))

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        """Of a whole text, as in training: all positions before each."""
        positions = length + length // self.config.chunk_size
        return super().attention_multiply_adds(positions)

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Landmark Attention model",
            "A landmark after each chunk stands for it in attention; far chunks are read through their landmarks.",
            (("Landmark Attention", "2305.16300"),),
        )


# what is drawn in training, by the number that is folded into the seed
_PHASE, _JUMP, _GATE = 101, 102, 103


def _put(whole: Tensor, take: Take, part: Tensor) -> None:
    """Positions part [B, n, ...] back to their places in whole [B, P, ...]."""
    if len(take.index) == 1:
        whole[:, torch.from_numpy(take.index[0]).to(whole.device)] = part
        return
    b, i = (torch.from_numpy(x).to(whole.device) for x in np.nonzero(take.index >= 0))
    whole[b, torch.from_numpy(take.index).to(whole.device)[b, i]] = part[b, i]
