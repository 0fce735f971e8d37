"""HiLS (arXiv 2607.02980): every token attends to a window and, layer by layer, to chunks beyond it that it chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, ChunkMemory, MemoryEntries, Window
from trailmark.memory.chunks import TABLE_BYTES, recent_chunks
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts
from trailmark.models.arguments import check_cache, check_tensors, check_tokens
from trailmark.models.candidates import selection_of_tokens
from trailmark.models.causal_lm import TrailmarkForCausalLM, taken_back
from trailmark.models.costs import CacheBytes, NumberBytes, kv_width, num_closed
from trailmark.models.embedding import Given
from trailmark.models.grid import Grid, Integers, Take
from trailmark.models.hils.config import HiLSConfig
from trailmark.models.hils.focus import focus_of
from trailmark.models.hils.past import MemoryPast, Past, TextPast
from trailmark.models.hils.sight import Sight
from trailmark.models.layers import MLP, Place, RMSNorm, WindowAttention, head_norm
from trailmark.models.outputs import Hidden
from trailmark.models.reads import AveragedReads, BeforeReading
from trailmark.models.step import Step
from trailmark.models.text import Text, present_tokens
from trailmark.ops import ChunkSelection


class Calibration(nn.Module):
    """Queries that score chunks: norm((W_q + B A) x), with a norm of their own where queries have one."""

    def __init__(self, config: HiLSConfig) -> None:
        super().__init__()
        self.down_proj = nn.Linear(config.hidden_size, config.calibration_rank, bias=False)
        self.up_proj = nn.Linear(config.calibration_rank, config.attention_width, bias=False)
        self.norm = head_norm(config, config.num_attention_heads)

    def forward(self, x: Tensor, q: Tensor) -> Tensor:
        """Of positions x [B, P, E] and their projected queries q [B, P, H, D], [B, P, H, D]."""
        scoring = q + self.up_proj(self.down_proj(x)).view(q.shape)
        return scoring if self.norm is None else self.norm(scoring)


class HiLSLayer(GradientCheckpointingLayer):
    """h = x + attention(norm(x)); y = h + MLP(norm(h)); attention is to the window and, where it is given, the past."""

    def __init__(self, config: HiLSConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = WindowAttention(config, number)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.calibration = None
        if config.calibration_rank and number in config.retrieving_layers:
            self.calibration = Calibration(config)

    def forward(
        self,
        x: Tensor,
        place: Place,
        kept: Window | None = None,
        past: Past | None = None,
        chooses: bool = True,
    ) -> Tensor:
        """x [B, P, E]; ``chooses``: else the past only notes what it will be known by."""
        q, scoring, k, v = self.heads(x)
        if past is not None and not chooses:
            past.note(q, scoring, k, v, place)
        if past is None or not chooses:
            attended = self.attention.attend(q, k, v, place, kept)
        else:
            window = self.attention.attend_with_lse(q, k, v, place, kept)
            attended = past.read(q, scoring, k, v, place, window).flatten(2)
        x = x + self.attention.o_proj(attended)
        return x + self.mlp(self.mlp_norm(x))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries, those that score chunks (None: the same), keys and values of positions x [B, P, E]."""
        normal = self.attention_norm(x)
        projected = self.attention.projected(normal)
        q, k, v = self.attention.normal(*projected)
        if self.calibration is None:
            return q, None, k, v
        return q, self.calibration(normal, projected[0]) * self.attention.query_factor, k, v


class HiLSForCausalLM(TrailmarkForCausalLM):
    """HiLS with a language-modelling head; MoBA and exact block-sparse attention by ``chunk_score``.

    A call on a cache runs in pieces shorter than the window, so that no chunk is chosen before it is in memory; no
    gradient passes from piece to piece. Where a text that is read passes through windows alone (``reading``), or the
    last layer alone chooses, whose output reading does not need, it runs in large pieces and searches nothing.
    """

    config_class = HiLSConfig
    config: HiLSConfig
    _no_split_modules = ["HiLSLayer"]
    compiles = False  # layouts depend on what was read
    additions = ("landmark", "layers.*.calibration.*")
    scoring = ("layers.*.calibration.*",)

    def __init__(self, config: HiLSConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # where nothing of it is used there is none, and a landmark only closes its chunk
        self.landmark = nn.Parameter(torch.zeros(config.hidden_size)) if config.asks_landmarks else None
        self.layers = nn.ModuleList(HiLSLayer(config, n) for n in range(config.num_hidden_layers))
        self._finish(RMSNorm(config.hidden_size, config.rms_norm_eps))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.landmark is not None:
            fan_in = self.config.initialization == "fan_in"
            init.normal_(self.landmark, std=1.0 if fan_in else self.config.initializer_range)

    # --- what the base asks ----------------------------------------------------------------------------------

    def _stages(self) -> list[int]:
        return self.config.window_stages

    def _make_memory(
        self, tier: str, capacity: int, folder: Path | None, dtype: torch.dtype | None, search: Any
    ) -> ChunkMemory:
        if search is not None:
            raise ValueError(
                f"search: expected None with a {type(self).__name__}, whose tokens search by shares of their "
                f"attention, got a {type(search).__name__}. Leave it out."
            )
        planes = len(self.config.retrieving_layers)
        return ChunkMemory(tier, capacity, folder, dtype, search, planes=planes)

    @property
    def _record_shape(self) -> tuple[int, ...]:
        config = self.config
        return 2, config.num_key_value_heads, config.chunk_size, config.head_dim

    def _expected_state(self) -> Expected:
        expected, config = super()._expected_state(), self.config
        if not config.retrieves:
            return expected
        summaries, heads, width = config.summary_shape
        sizes = {
            "LE": width,
            "LP": len(config.retrieving_layers) * summaries * heads,
            "OE": config.state_width,
        }
        return expected._replace(sizes={**expected.sizes, **sizes}, kept=("open_states",))

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
        if cache is None:
            x, selected = self._through(tokens, grid, None)
            return Hidden(self.norm(grid.last_tokens(keep)(x)), selected)
        parts, chosen = list[Tensor](), list[tuple[ChunkSelection, ...]]()
        for part, x, selected in self._piece_by_piece(tokens, grid, cache):
            if keep != 0:
                parts.append(part.last_tokens(None)(x))
                chosen.append(selected)
        if keep == 0:
            return Hidden(None)
        x = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if keep is not None:
            counts = (grid.token >= 0).sum(1)
            place = counts[:, None] - keep + np.arange(keep)
            return Hidden(self.norm(Take(np.where(place < 0, -1, place), x.shape[1])(x)))
        layers = zip(*chosen, strict=True)
        return Hidden(
            self.norm(x),
            tuple(ChunkSelection(*(torch.cat(x, 1) for x in zip(*layer, strict=True))) for layer in layers),
        )

    def _piece_by_piece(
        self, tokens: Tensor, grid: Grid, cache: ChunkCache, known: Integers | None = None
    ) -> Iterator[tuple[Grid, Tensor, tuple[ChunkSelection, ...]]]:
        """What :meth:`_through` gives of each piece of a call's tokens, which the cache then holds; and its layout."""
        for columns, part in self._pieces(grid, cache, tokens.shape):
            of_part = tokens[:, columns]
            step = Step(cache, part, self.config, len(tokens), of_part)
            x, selected = self._through(of_part, part, step, known)
            step.commit()
            yield part, x, selected

    def _pieces(self, grid: Grid, cache: ChunkCache, shape: torch.Size) -> Iterator[tuple[slice, Grid]]:
        """The tokens of a call, column by column, and their layout as they follow what was read."""
        B, T = shape
        W, S = self.config.sliding_window, self.config.chunk_size
        assert W is not None
        most = W - 1
        if most >= T:
            yield slice(0, T), grid
            return
        counts = (grid.token >= 0).sum(1)
        closes: Any = False
        if grid.has_short_chunks:
            row, place = np.nonzero(grid.is_landmark)
            closes = np.zeros((len(counts), T), bool)
            closes[row, grid.token[row, place - 1]] = True
        size = most // S * S or most
        first = 0
        while first < T:
            phases = cache.begun(B).phases
            last = min(first + size - (int(phases.max()) if size > S else 0), T)
            mine = np.clip(counts - first, 0, last - first)
            early = closes if isinstance(closes, bool) else closes[:, first:last]
            yield slice(first, last), self.layouts.lay_out(last - first, phases, mine, early)
            first = last

    def _through(
        self, tokens: Tensor, grid: Grid, step: Step | None, known: Integers | None = None
    ) -> tuple[Tensor, tuple[ChunkSelection, ...]]:
        """Tokens [B, T] through all layers: positions [B, P, E] and what the tokens chose in each layer.

        Args:
            known: [B] so many chunks may be chosen, those in sight too; None: those beyond each token's window.
        """
        x, past, places = self._enter(tokens, grid, step, known=known)
        x = self._run_layers(len(self.layers), x, past, places, step)
        if isinstance(past, MemoryPast):
            past.remember()
        chosen = () if past is None else past.selected
        return x, tuple(selection_of_tokens(layer, grid) for layer in chosen)

    def _read_part(self, text: Text, cache: ChunkCache, prompt: bool) -> None:
        if self.config.remembers_windows and (self.reads_as_it_predicts or not prompt):
            self._remember(text.ids, self._lay_out(text, cache), cache)
        else:
            super()._read_part(text, cache, prompt)

    def focus(self, input_ids: Tensor, cache: ChunkCache, attention_mask: Tensor | None = None) -> None:
        count, last = self.config.num_focus_chunks, self.config.sliding_window
        if count is None or cache.state is None or not cache.num_chunks.any():
            return
        assert last is not None
        input_ids = check_tokens(input_ids, self.config.vocab_size)
        check_cache(cache, input_ids, self.training, lambda: self._cache_key)
        check_tensors(attention_mask=attention_mask)
        B, T = input_ids.shape
        present = None if attention_mask is None else present_tokens(attention_mask, T, B, cache)
        text, chunks = Text.of(input_ids, present, False), cache.num_chunks
        width = text.ids.shape[1]
        text = text.columns(max(0, width - last), width)
        with torch.no_grad(), taken_back(cache):
            cache.state = replace(cache.state, focus=())
            # what the window shows now is beyond it once an answer is written
            looks = self._piece_by_piece(text.ids, self._lay_out(text, cache), cache, known=chunks)
            chosen = [layer for _, _, selected in looks for layer in selected]
        cache.state = replace(cache.state, focus=focus_of(chosen, chunks, count))

    def _remember(self, tokens: Tensor, grid: Grid, cache: ChunkCache) -> None:
        """Read tokens [B, T] with windows alone, of the last layer no more than what is kept."""
        step = Step(cache, grid, self.config, len(tokens), tokens)
        past = self._noted(tokens, grid, len(self.layers), step)
        if past is not None:
            assert isinstance(past, MemoryPast)
            past.remember()
        step.commit()

    def _noted(self, tokens: Tensor, grid: Grid, count: int, step: Step | None) -> Past | None:
        """What the first ``count`` layers let be known of tokens [B, T], each of which sees its window alone."""
        x, past, places = self._enter(tokens, grid, step, chooses=False)
        x = self._run_layers(count - 1, x, past, places, step, chooses=False)
        layer: Any = self.layers[count - 1]
        q, scoring, k, v = layer.heads(x)
        place = places[self.config.windows[count - 1]]
        if step is not None and not step.is_apart:
            layer.attention.keep(k, v, place, step.window(count - 1))
        if past is not None and count - 1 in self.config.retrieving_layers:
            past.note(q, scoring, k, v, place)
        return past

    def _enter(
        self,
        tokens: Tensor,
        grid: Grid,
        step: Step | None,
        chooses: bool = True,
        known: Integers | None = None,
    ) -> tuple[Tensor, Past | None, dict[int | None, Place]]:
        """Positions [B, P, E] below the first layer, and what they see: of the past, and in windows of each size."""
        x = grid.insert_landmarks(self.embed_tokens(tokens), self.landmark)
        config = self.config
        assert config.sliding_window is not None
        # chunks by themselves lie in no memory: all that they see is the call's own
        of_text = step is None or step.is_apart
        sight = None
        if config.retrieves:
            seen = Sight.of if chooses else Sight.of_windows
            sight = seen(grid, config.sliding_window, None if of_text else step)
            sight = sight if known is None else sight.with_chunks(grid, known)
        kinds = dict(zip(config.windows, self._stages(), strict=True))
        places: dict[int | None, Place] = {}
        for window, stage in kinds.items():
            assert window is not None
            windows = sight.windows if sight is not None and window == config.longest_window else None
            if step is None:
                places[window] = Place.of(config, grid, x, window=window, windows=windows)
            else:
                places[window] = step.place(stage, grid, x, windows)
        if sight is None:
            return x, None, places
        if step is None or step.is_apart:
            return x, TextPast(config, grid, sight, x, step), places
        return x, MemoryPast(config, grid, sight, x, step), places

    def _run_layers(
        self,
        count: int,
        x: Tensor,
        past: Past | None,
        places: dict[int | None, Place],
        step: Step | None,
        chooses: bool = True,
    ) -> Tensor:
        """Positions x [B, P, E] through the first ``count`` layers."""
        windows, choosing = self.config.windows, set(self.config.retrieving_layers)
        for number, layer in enumerate(self.layers[:count]):
            kept = step and step.window(number)
            x = layer(x, places[windows[number]], kept, past if number in choosing else None, chooses)
        return x

    # --- a memory that depends on windows alone --------------------------------------------------------------

    @property
    def reads_as_it_predicts(self) -> bool:
        return self.config.reading == "chooses" or self.config.chooses_last

    @property
    def can_be_planted(self) -> bool:
        return self.config.remembers_windows

    @property
    def focuses(self) -> bool:
        return self.config.num_focus_chunks is not None

    @property
    def can_keep_tokens(self) -> bool:
        # a memory of tokens lacks the sinks, which are no keys of a chunk, and encodes a chunk without its place
        one = len(self.config.retrieving_layers) == 1 and not self._encoding_has_place
        return self.can_be_planted and one

    @property
    def _encoding_has_place(self) -> bool:
        return super()._encoding_has_place or self.config.far_position == "true"

    def reading_piece(self, num_tokens: int | None = None) -> int:
        # what all layers that choose keep of a piece stands in memory together
        if self.config.remembers_windows:
            most = _STATES // len(self.config.retrieving_layers)
            num_tokens = min(super().reading_piece(num_tokens), most)
        return super().reading_piece(num_tokens)

    @property
    def waits(self) -> bool:
        return False

    @property
    def _memory_layers(self) -> int:
        """Layers that take part in what a memory keeps."""
        return self.config.retrieving_layers[-1] + 1

    def encoding_reach(self) -> int:
        if not self.can_be_planted:
            return 0
        config = self.config
        assert config.sliding_window is not None
        return -(-(self._memory_layers - 1) * (config.sliding_window - 1) // config.chunk_size)

    def encode_chunks(
        self, ids: Tensor, grid: Grid, cache: ChunkCache | None = None, start: int = 0
    ) -> MemoryEntries:
        if not (self.can_be_planted and self.config.retrieves):
            return super().encode_chunks(ids, grid, cache, start)
        step = self._step_apart(grid, cache, start, len(ids))
        past = self._noted(ids, grid, self._memory_layers, step)
        assert past is not None
        return past.closed(past.states)

    # --- answers ---------------------------------------------------------------------------------------------

    @property
    def selects_by_chunk(self) -> bool:
        return False

    def follow_reads(self) -> AveragedReads:
        config = self.config
        layers, heads = len(config.retrieving_layers), config.num_key_value_heads
        settings = {"sliding_window": config.sliding_window, "chunk_score": config.chunk_score}
        return AveragedReads(layers, heads, config.num_retrieved_chunks, config.chunk_size, settings)

    def before_reading(self) -> BeforeReading:
        config = self.config
        assert config.sliding_window is not None
        tokens = config.longest_window
        return BeforeReading(
            tokens, f"a window of {config.sliding_window:,} tokens, on to a chunk's beginning"
        )

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number = self.config, NumberBytes.of(self, memory_dtype)
        S, layers, wide = config.chunk_size, len(config.retrieving_layers), kv_width(config)
        slots = sum(config.num_sinks + (window or 0) for window in config.windows)
        window = slots * wide * number.own
        if not config.retrieves:
            return CacheBytes(window=window)
        chunks, summary = num_closed(prompt, generated, S), math.prod(config.summary_shape)
        record = number.record(config.num_key_value_heads, S, config.head_dim)
        fetched = config.num_key_value_heads * config.num_retrieved_chunks  # of each head its own, at most
        return CacheBytes(
            window=window,
            open_chunk=S * config.state_width * number.own,
            records=chunks * layers * record.record_bytes,
            landmarks=chunks * layers * summary * number.wide_landmark,
            tables=chunks * TABLE_BYTES,
            gathered=record.given_bytes * (chunks if config.chunk_score == "mass" else fetched),
            recent=recent_chunks(record.given_bytes, layers) * layers * record.given_bytes,
        )

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        config, width = self.config, self.config.attention_width
        S, W, layers = config.chunk_size, config.sliding_window, len(config.retrieving_layers)
        assert W is not None
        # tokens, and after each whole chunk a landmark, which is no key of its own; sinks count as keys of a chunk too
        number = np.concatenate([np.arange(length), S * np.arange(1, length // S + 1)])
        is_key = np.arange(len(number)) < length
        edge = np.maximum(number - W + 1, 0)

        def seen(start: Integers) -> int:
            return int((number - start + is_key + np.minimum(config.num_sinks, start)).sum())

        if not config.retrieves:
            return {"window": 2 * width * config.num_hidden_layers * seen(edge)}
        beyond = edge // S  # chunks before a window, which goes on to the beginning of one
        windows = layers * seen(beyond * S) + (config.num_hidden_layers - layers) * seen(edge)
        chosen = int(np.minimum(beyond, config.num_retrieved_chunks).sum())
        scored = int(beyond.sum()) * (S if config.chunk_score == "mass" else config.summary_shape[0])
        return {
            "window": 2 * width * windows,
            "retrieved": 2 * width * layers * chosen * S,
            "selection": width * layers * scored,
        }

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        score, weights = config.get("chunk_score", "expansion"), config.get("chunk_weights", "score")
        apart = (
            " A text that is read passes through windows alone." if config.get("reading") == "windows" else ""
        )
        kinds = config.get("layer_types")
        where = "every layer"
        if isinstance(kinds, list):
            where = f"{kinds.count('full_attention')} of its {len(kinds)} layers"
        title, papers = "model whose tokens choose chunks to attend to", _PAPERS.get(score, ())
        if score == "mass":
            title = "model with block-sparse attention"
        elif (score, weights, config.get("summary_tokens")) == ("mean", "keys", None):
            title = "MoBA model"
        elif (score, weights) == ("expansion", "score"):
            title = "HiLS model"
        return CardFacts(
            title,
            f"Every token attends to a window and, in {where}, to the few chunks beyond it that would get the "
            f"largest share of its attention.{apart}",
            papers,
        )


_STATES = 1 << 15  # tokens times layers that choose, in a piece that is read with windows
_PAPERS = {"mean": (("MoBA", "2502.13189"),), "expansion": (("HiLS", "2607.02980"),)}
