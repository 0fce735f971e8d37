"""The loop of every model whose layers stand on each other with a window: lower layers, memory, upper layers.

Lower layers run on every token that is read, and what they say of a closed chunk goes into the memory. Upper layers
read chunks, and run only where a result needs them: on the last positions of what was read, in a later call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trailmark.memory import ChunkCache, MemoryEntries
from trailmark.memory.schema import Expected
from trailmark.models.candidates import no_selection, selection_of_tokens
from trailmark.models.causal_lm import TrailmarkForCausalLM
from trailmark.models.context_parallel import Stretch
from trailmark.models.embedding import Given, Vectors, embed_chunks, expect_embedder
from trailmark.models.grid import Grid, Integers
from trailmark.models.layers import Place
from trailmark.models.outputs import Hidden
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection


class Chunks(ABC):
    """The chunks that the landmarks (or tokens) of a call may select: those of a whole text, or those of a memory.

    Training, prefill and decoding ask it the same two questions, once for each group of upper layers.
    """

    asks = True
    """Whether some chunk closes, so that something is to be selected."""
    ranking: Tensor | None = None
    """[B] what a learned ranking of these chunks adds to the loss of each row."""

    @abstractmethod
    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        """What each closed chunk of the call selects, [B, C, K]; where tokens select, each position, [B, P, J, K].

        Args:
            query: [B, C, E] of the group's landmarks, or [B, P, d] of positions; None: of a model that asks with what
                it knows of the chunks.
        """

    def scores(self) -> tuple[Tensor, ...]:
        """Of each group that selected, the scores [B, C, C] of all candidates of a whole text, -inf for the others.

        Of a model that ``ranks_all_chunks``.
        """
        raise NotImplementedError

    @abstractmethod
    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        """What the positions of the call read: arguments of an upper layer's forward. Empty: nothing."""


class NoChunks(Chunks):
    """Of a model with retrieval off; x [B, ...] is any tensor of the call."""

    asks = False

    def __init__(self, grid: Grid, x: Tensor, reading: tuple[Any, ...] = ()) -> None:
        self._nothing, self._reading = no_selection(x, grid.num_closed, 0), reading

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        return self._nothing

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        return self._reading


class LayeredForCausalLM(TrailmarkForCausalLM):
    """``lower_layers``, then ``upper_layers``; a model overrides where it differs."""

    lower_layers: nn.ModuleList
    upper_layers: nn.ModuleList
    norm: nn.Module
    upper: ClassVar[tuple[str, ...]] = ("upper_layers.*", "norm.*", "lm_head.*")
    _upper_stage = 1
    """Of the upper layers' windows: 1, for they see other positions than the lower ones; 0 where there are no lower."""

    # --- what a model may override -------------------------------------------------------------------------

    @property
    def _keeps_ids(self) -> bool:
        """Whether a cache keeps the tokens of the open chunk, for the encoder that finds chunks."""
        return getattr(self.config, "retriever", None) == "encoder"

    def _upper(self) -> nn.ModuleList:
        """The layers that may wait until a result needs them."""
        return self.upper_layers

    def _landmark(self) -> Tensor | None:
        """The state [E] of a landmark below the first layer; None: there are none."""
        return None

    def _run_lower(self, x: Tensor, grid: Grid, place: Place, step: Step | Stretch | None) -> Tensor:
        """Positions x [B, P, E] through the layers that run on every token."""
        of_text = step is None or isinstance(step, Stretch)
        if of_text and place.asking is not None and self._has_fixed_tokens(grid):
            place = replace(place, fixed_tokens=True)
        for number, layer in enumerate(self.lower_layers):
            x = layer(x, place, step and step.window(number))
        return x

    def _has_fixed_tokens(self, grid: Grid) -> bool:
        """Whether of what lower layers make of a text whose landmarks nobody attends to these alone have a gradient."""
        below = (self.embed_tokens, self.lower_layers)
        trained = any(parameter.requires_grad for part in below for parameter in part.parameters())
        return torch.is_grad_enabled() and grid.num_closed > 0 and not trained

    def _text_chunks(
        self, x: Tensor, tokens: Tensor, grid: Grid, noise_seed: Tensor | None, given: Given | None
    ) -> tuple[Tensor, Chunks | None]:
        """Positions x [B, P, E] of a whole text, and its chunks for the upper layers; None: these read none."""
        return x, None

    def _remember(self, x: Tensor, tokens: Tensor, grid: Grid, step: Step) -> None:
        """Write what positions x [B, P, E] of a call on a cache leave for later calls."""

    def _memory_chunks(self, x: Tensor, grid: Grid, step: Step, first_chunk: Integers) -> Chunks | None:
        """The memory's chunks for positions x [B, P, E], whose first chunk has the number ``first_chunk`` [B]."""
        return None

    def _query(self, group: int, x: Tensor, grid: Grid, chunks: Chunks) -> Tensor | None:
        """What the landmarks among positions x [B, P, E] ask with, [B, C, E]; where tokens select, all of them."""
        return None

    def _begin_group(self, group: int, x: Tensor, reading: tuple[Any, ...]) -> Tensor:
        """Positions x [B, P, E] through what stands before the layers of a group."""
        return x

    def _of_layer(self, reading: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        """The part of a reading that is upper layer ``number``'s."""
        return reading

    # --- the loop ------------------------------------------------------------------------------------------

    def _stages(self) -> list[int]:
        upper = len(self._upper())
        return [0] * (self.config.num_hidden_layers - upper) + [self._upper_stage] * upper

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
        x = grid.insert_landmarks(self.embed_tokens(tokens), self._landmark())
        chunks: Chunks | None = None
        step: Step | Stretch | None
        stages = self._stages()[self.config.num_hidden_layers - len(self._upper()) :]  # of the upper layers
        places: dict[int, Place] = {}
        if cache is None:
            parallel = self.context_parallel
            step = None if parallel is None else Stretch(parallel, self.config, grid, x)
            place = Place.of(self.config, grid, x) if step is None else step.place(grid, x)
            places = dict.fromkeys(stages, place)
            x = self._run_lower(x, grid, place, step)
            x, chunks = self._text_chunks(x, tokens, grid, noise_seed, given)
        else:
            step = call = Step(cache, grid, self.config, x.shape[0], tokens, self._keeps_ids)
            if self._upper_stage:
                place = call.place(0, grid, x)
                x = self._run_lower(x, grid, place, call)
                self._remember(x, tokens, grid, call)
            if self._upper():
                reach = self.reach()
                if keep == 0 and reach is not None:  # reading: what is kept depends on nothing above
                    call.defer(x, reach)
                    call.commit()
                    return Hidden(None)
                x, grid, first_chunk = call.tail(x, reach, keep)
                places = {stage: call.place(stage, grid, x) for stage in dict.fromkeys(stages)}
                chunks = self._memory_chunks(x, grid, call, first_chunk)
        x, selections = self._run_upper(x, grid, [places[stage] for stage in stages], step, chunks)
        if step is not None:
            step.commit()
        if keep == 0:
            return Hidden(None)
        states = self.norm(grid.last_tokens(keep)(x))
        if not self.selects_by_chunk:
            return Hidden(states, tuple(selection_of_tokens(chosen, grid) for chosen in selections))
        if chunks is None:
            return Hidden(states)
        return Hidden(states, tuple(selections), grid.closed, ranking=chunks.ranking, chunks=chunks)

    def _run_upper(
        self,
        x: Tensor,
        grid: Grid,
        places: list[Place],
        step: Step | Stretch | None,
        chunks: Chunks | None,
    ) -> tuple[Tensor, list[ChunkSelection]]:
        """Positions x [B, P, E] through the upper layers, and what the landmarks among them selected for each group.

        Args:
            places: of each of these layers.
        """
        upper = self._upper()
        lower = self.config.num_hidden_layers - len(upper)
        per_group = len(upper) // getattr(self.config, "num_retrieval_groups", 1)
        selections: list[ChunkSelection] = []
        reading: tuple[Any, ...] = ()
        for number, layer in enumerate(upper):
            group, position = divmod(number, per_group)
            if position == 0:
                if chunks is not None:
                    query = self._query(group, x, grid, chunks) if chunks.asks else None
                    selections.append(chunks.select(group, query))
                    reading = chunks.reading(group, selections[group])
                x = self._begin_group(group, x, reading)
            kept = step and step.window(lower + number)
            x = layer(x, places[number], kept, *self._of_layer(reading, number))
        return x, selections


class RetrievingForCausalLM(LayeredForCausalLM):
    """A model whose lower layers write closed chunks into a memory, which its upper layers read."""

    def _entries(self, x: Tensor, ids: Tensor | None, grid: Grid, step: Step | None) -> MemoryEntries:
        """What a memory keeps of the chunks that a call closes.

        Args:
            x: [B, P, E] above the lower layers; with a step after the open chunk's (``step.with_open``).
            ids: [B, C, S] tokens of these chunks; None: the model does not keep them (``_keeps_ids``).
        """
        raise NotImplementedError

    def _expected_state(self) -> Expected:
        expected = super()._expected_state()
        if not self.config.retrieves:
            return expected
        kept = ("open_states", "open_ids") if self._keeps_ids else ("open_states",)
        return expected._replace(sizes={**expected.sizes, "OE": self.config.hidden_size}, kept=kept)

    def _remember(self, x: Tensor, tokens: Tensor, grid: Grid, step: Step) -> None:
        if not self.config.retrieves:
            return
        if grid.num_closed:
            # which rows close a chunk is told by how many tokens they have: what the others are changes nothing
            closing = grid.closing_rows()
            layout = grid if closing is None else grid.of_rows(closing)

            def of_closing(rows: Tensor, with_open: Callable[[Tensor], Tensor]) -> Tensor:
                rows = with_open(rows) if layout.begins_open else rows
                if closing is None:
                    return rows
                return rows.index_select(0, torch.from_numpy(closing).to(rows.device))

            ids = None
            if self._keeps_ids:
                assert step.ids is not None
                ids = layout.tokens_of_chunks(of_closing(step.ids, step.with_open_ids))
            step.remember(self._entries(of_closing(x, step.with_open), ids, layout, step), closing)
        step.keep_open(x)

    def _ids_of_chunks(self, tokens: Tensor, grid: Grid) -> Tensor | None:
        """Of tokens [B, T] of whole chunks those of the chunks that close, [B, C, S]; None as for ``_entries``."""
        if not self._keeps_ids:
            return None
        return grid.tokens_of_chunks(grid.insert_landmarks(tokens.long(), None))

    def _embed(self, ids: Tensor | None, grid: Grid) -> Vectors | None:
        """The encoder's queries and keys [B, C, d] of chunks with tokens ids [B, C, S]; None: there is no encoder."""
        if ids is None:
            return None
        embedder = expect_embedder(self.embedder, getattr(self.config, "embedder_fingerprint", None))
        return embed_chunks(embedder, ids, grid)

    def encode_chunks(
        self, ids: Tensor, grid: Grid, cache: ChunkCache | None = None, start: int = 0
    ) -> MemoryEntries:
        if not self.config.retrieves:
            return super().encode_chunks(ids, grid, cache, start)
        x = grid.insert_landmarks(self.embed_tokens(ids), self._landmark())
        step = self._step_apart(grid, cache, start, len(ids))
        place = Place.of(self.config, grid, x) if step is None else step.place(0, grid, x)
        x = self._run_lower(x, grid, place, step)
        return self._entries(x, self._ids_of_chunks(ids, grid), grid, None)

    def encoding_reach(self) -> int:
        """Chunks after a chunk whose memory entries its tokens take part in, through the lower layers."""
        config: Any = self.config
        positions = config.num_lower_layers * (config.sliding_window - 1)
        return -(-positions // (config.chunk_size + config.counts_landmarks))
