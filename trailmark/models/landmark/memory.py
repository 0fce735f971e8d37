"""What the positions of a piece read from the memory, layer by layer: score, select, gather, attend.

RoPE turns pairs of numbers by an angle that grows with position, and only differences of positions count. So keys
lie in the memory turned by their place in their chunk, and the query is turned by the distance between the
chunk and its own cell, counted in chunks: nothing that is gathered has to be turned again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import ChunkMemory, ExactSearch
from trailmark.memory.chunks import Rows
from trailmark.memory.search import anew
from trailmark.models.grid import Booleans, Integers
from trailmark.models.landmark.cell import CellStep
from trailmark.models.landmark.config import LandmarkConfig
from trailmark.models.layers import rotary_at, rotate
from trailmark.models.rope import Rope
from trailmark.ops import ChunkSelection, select_by_landmarks
from trailmark.ops.arguments import arithmetic_dtype, without_autocast
from trailmark.ops.landmark.memory import landmark_memory_attention
from trailmark.ops.landmark.selection import select_for_one
from trailmark.ops.selection.torch_path import gather

_EVEN = 1 << 12  # landmarks that are scored by one product
_SLAB_SCORES = 1 << 24  # landmark scores held at once
_SLAB_NUMBERS = 1 << 22  # of gathered keys and values


@dataclass(frozen=True)
class Reading:
    """What positions found in the memory: the mean of what they read, as if nothing else were there."""

    out: Tensor  # [B, P, H, D], float32 or wider; 0 where nothing was read
    lse: Tensor  # [B, P, H] log-sum-exp of the landmarks' scores; -inf where nothing was read
    indices: Tensor  # int64 [B, P, H or 1, k] chunk numbers; -1 last
    gates: Tensor  # [B, P, H, k] the landmarks' scores; -inf where nothing was read

    def selection(self) -> ChunkSelection:
        """[B, P, H, k]; the weights are those among the k."""
        read = self.gates > -math.inf
        weights = (self.gates - self.lse.masked_fill(self.lse == -math.inf, 0)[..., None]).exp()
        indices = self.indices.expand(self.gates.shape).masked_fill(~read, -1)
        return ChunkSelection(indices, weights, self.gates)


class LandmarkMemory:
    """The memory as one piece of a call sees it. It does not change inside a cell."""

    def __init__(self, step: CellStep, config: LandmarkConfig) -> None:
        self.step, self.config, self.memory = step, config, step.cache.memory
        size = step.before.memory
        self.last = size.chunks  # [B] chunks in memory, those dropped included
        self.first = self.memory.first_chunk(size)  # [B]
        self.offset = int(self.first.min())  # of the landmarks looked at
        self.count = int(self.last.max()) - self.offset  # M
        self.kept = self.last - self.first  # [B]
        self.short = size.short
        # one new position a row, and the same chunks of each: as in decoding
        self.single = step.present.shape[1] == 1 and bool(
            step.present.all() and (self.last == self.last[0]).all() and (self.first == self.first[0]).all()
        )
        self._latest_landmarks: Tensor | None = None
        self._scoring_turn: Tensor | None = None

    def __bool__(self) -> bool:
        return self.count > 0 and bool(self.kept.any())

    @without_autocast
    def read(self, number: int, q: Tensor, skipped: Tensor | None) -> Reading:
        """q [B, P, H, D] of a layer, turned by ``step.query_rotary``. ``skipped`` bool [B, P, H]: the gate is shut."""
        # what is skipped may still have a say in what others select
        if skipped is not None and not self.config.selects_for_many and bool(skipped.all()):
            return self._nothing(q)
        chosen = self._select(number, q)  # [B, N, Hs, k]
        return self._attend(number, q, chosen, skipped)

    def _nothing(self, q: Tensor) -> Reading:
        B, P, H, _ = q.shape
        wide = q.to(arithmetic_dtype(q))
        n = H if self.config.retrieve_per == "token_and_head" else 1
        count = int((self.kept > 0)[:, None].repeat(P, 1)[self.step.present].sum()) * n
        self.step.asked, self.step.skipped = self.step.asked + count, self.step.skipped + count
        none = torch.full((B, P, n, self.config.num_retrieved_chunks), -1, device=q.device)
        k = self.config.num_retrieved_chunks
        nothing = wide.new_full((B, P, H, k), -math.inf)
        return Reading(torch.zeros_like(wide), nothing[..., 0], none, nothing)

    def turned_for_gate(self, q: Tensor) -> Tensor:
        """q [B, P, H, D] as it stands to the retrieval gate, one place before the text or what is shown of it."""
        chunks = self.last
        if self.config.memory_position == "stingy":
            chunks = np.minimum(chunks, self.config.num_retrieved_chunks + 1)
        dtype = arithmetic_dtype(q)
        return rotate(q.to(dtype), self._turns(torch.from_numpy(chunks).to(q.device), dtype)[:, None])

    # --- selecting -----------------------------------------------------------------------------------------

    def _select(self, number: int, q: Tensor) -> Tensor:
        config, step = self.config, self.step
        B, P, H, _ = q.shape
        per, merged = config.retrieve_per, config.selects_for_many
        causal = merged and config.causal_retrieval
        device = q.device
        running, earlier = self._as_now(step.running[number]), self._chosen_as_now(step.chosen[number])
        continues = step.continues
        if self.single and bool((continues == continues[0]).all()):
            earlier = earlier if causal and continues[0] else None
            scores = self._scores(number, q, slice(0, 1))
            indices, step.running[number] = select_for_one(
                scores, config.num_retrieved_chunks, per, running, earlier
            )
            step.offset = self.offset
            if causal:
                step.chosen[number] = indices[:, 0]
            return torch.where(indices >= 0, indices + self.offset, -1) if self.offset else indices
        candidates, first, present = self._tables
        selected: list[Tensor] = []
        rows = max(1, _SLAB_SCORES // max(1, B * H * self.count))
        for start in range(0, P, rows):
            part = slice(start, min(P, start + rows))
            units: Any = step.units[:, part]
            if causal:
                base = np.where(units >= 0, units, P).min(1)
                base = np.where(base == P, 0, base)
                if start:  # whether this part goes on with the unit before it
                    continues = (units[:, 0] >= 0) & (units[:, 0] == step.units[:, start - 1])
                units = np.where(units >= 0, units - base[:, None], -1)
            chosen = select_by_landmarks(
                self._scores(number, q[:, part], part),
                config.num_retrieved_chunks,
                candidates,
                first,
                per,
                present=present[:, part],
                running=running,
                units=torch.from_numpy(units).to(device) if causal else None,
                continues=torch.from_numpy(continues).to(device) if earlier is not None else None,
                earlier=earlier,
            )
            indices = chosen.indices
            running = chosen.running
            if causal:
                indices = self._of_positions(indices, torch.from_numpy(units).to(device))
                # what the row's last unit reads, until its chunk ends
                last = torch.from_numpy((step.present[:, part].sum(1) - 1).clip(0)).to(device)
                latest = indices.gather(1, last[:, None, None, None].expand(B, 1, *indices.shape[2:]))[:, 0]
                had = torch.from_numpy(step.present[:, part].any(1)).to(device)[:, None, None]
                earlier = latest if earlier is None else torch.where(had, latest, earlier)
            elif merged:
                selected.clear()  # the maximum over all is with the last
            selected.append(indices)
        step.running[number], step.offset = running, self.offset
        if causal:
            step.chosen[number] = earlier
        indices = torch.cat(selected, dim=1) if len(selected) > 1 else selected[0]
        if causal and step.part.num_chunks < P:
            indices = self._of_units(indices)
        return torch.where(indices >= 0, indices + self.offset, -1) if self.offset else indices

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """For selecting: the numbers of candidates and the first [B], and which positions are there [B, P]."""
        arrays = self.last - self.offset, self.first - self.offset, self.step.present
        candidates, first, present = (torch.from_numpy(x).to(self.step.device) for x in arrays)
        return candidates, first, present

    def _as_now(self, running: Tensor | None) -> Tensor | None:
        """[B, Hs, M] of an earlier call: in a ragged batch other rows may have begun a cell since."""
        if running is None:
            return None
        running = running[..., self.offset - int(self.step.cell.offset[0]) :]
        return torch.nn.functional.pad(running, (0, self.count - running.shape[-1]), value=-math.inf)

    def _chosen_as_now(self, chosen: Tensor | None) -> Tensor | None:
        """[B, Hs, k] of an earlier call, counted from the same chunk as the landmarks looked at now."""
        moved = self.offset - int(self.step.cell.offset[0])
        return chosen if chosen is None or not moved else (chosen - moved).clamp(min=-1)

    def _of_positions(self, indices: Tensor, units: Tensor) -> Tensor:
        """[B, U, Hs, k] -> [B, P, Hs, k]."""
        B, P = units.shape
        at = units.clamp(min=0)[..., None, None].expand(B, P, *indices.shape[2:])
        return indices.gather(1, at).masked_fill(units[..., None, None] < 0, -1)

    def _of_units(self, indices: Tensor) -> Tensor:
        """[B, P, Hs, k] -> [B, U, Hs, k]: what each unit's first position reads."""
        rows = self.step.part.rows.index.reshape(-1, self.step.part.num_chunks, self.step.part.rows_per_chunk)
        first = np.broadcast_to(rows[:, :, 0], (len(indices), rows.shape[1]))
        at = torch.from_numpy(first.clip(0)).to(indices.device)
        gone = torch.from_numpy(first < 0).to(indices.device)[..., None, None]
        of_units = indices.gather(1, at[..., None, None].expand(*at.shape, *indices.shape[2:]))
        return of_units.masked_fill(gone, -1)

    def _scores(self, number: int, q: Tensor, part: slice) -> Tensor:
        """Scores [B, P, H, M] of a layer's landmarks, each where the scoring positions have it."""
        config = self.config
        B, P, H, D = q.shape
        dtype = arithmetic_dtype(q)
        scale = D**-0.5
        stingy = config.memory_position == "stingy"
        turned = rotate(q.to(dtype), self._away(dtype))
        parts = self._parts
        if isinstance(parts[0].rows, slice):
            scores = self._scores_in(parts[0], number, turned, scale)
        else:
            scores = turned.new_full((B, P, H, self.count), -math.inf)
            for own in parts:
                place = slice(own.offset - self.offset, own.offset - self.offset + own.count)
                scores[own.rows, :, :, place] = self._scores_in(own, number, turned[own.rows], scale)
        if stingy:
            self._score_latest(number, q.to(dtype), scores, scale)
        return scores

    def _scores_in(self, own: _Part, number: int, turned: Tensor, scale: float) -> Tensor:
        """Of queries [b, P, H, D], turned for scoring, of the rows of one memory: [b, P, H, m]."""
        B, P, H, D = turned.shape
        J, dtype = self.config.num_key_value_heads, turned.dtype
        blocks = [x[:, :, number * J : (number + 1) * J] for x in own.blocks]  # [b, m, J, D]
        if self.config.memory_position == "stingy" and number == 0:
            # below the first layer all landmarks are one vector, so all have one score here: not even rounding
            # may tell them apart, or the same text read in other pieces would read other chunks
            last = (self.last[own.rows] - 1 - own.offset).clip(0)[:, None]  # it is never let go of
            same = _take_landmarks(blocks, torch.from_numpy(last).to(turned.device), dtype)[:, 0]
            scores = torch.einsum("bpjgd,bjd->bpjg", turned.view(B, P, J, H // J, D), same)
            return scores.reshape(B, P, H, 1).mul(scale).repeat(1, 1, 1, own.count)
        if not own.exact:
            return self._found_scores(own, number, turned, blocks, scale)
        asked = turned.view(B, P, J, H // J, D).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [b, J, P g, D]
        parts = [asked @ block.to(dtype).permute(0, 2, 3, 1) for block in _even(blocks)]
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0]  # [b, J, P g, m]
        return scores.mul_(scale).view(B, J, P, H // J, -1).permute(0, 2, 1, 3, 4).reshape(B, P, H, -1)

    @cached_property
    def _parts(self) -> list[_Part]:
        """The landmarks looked at, by the memories that hold some."""
        found = []
        for rows, memory in self.memory.parts(self.kept > 0):
            offset, end = int(self.first[rows].min()), int(self.last[rows].max())
            blocks = memory.blocks(end, len(self.last[rows]), offset)
            found.append(_Part(rows, memory, offset, end - offset, blocks))
        return found

    @cached_property
    def _latest(self) -> tuple[Integers, Booleans, bool]:
        """The r <= k latest chunks of each row [B, r], which of them it has, and whether all rows have the same."""
        back = np.arange(min(self.config.num_retrieved_chunks, int(self.kept.max())), 0, -1)
        at = self.last[:, None] - back
        known = at >= self.first[:, None]
        return at, known, bool(known.all()) and bool((at == at[:1]).all())

    def _landmarks_of_latest(self, dtype: torch.dtype) -> Tensor:
        """Their landmarks [B, layers, J, D, r], turned to their distances."""
        if self._latest_landmarks is None:
            config, (at, known, _) = self.config, self._latest
            r, device = at.shape[1], self.step.device
            width = config.num_hidden_layers * config.num_key_value_heads
            landmarks = torch.zeros(len(at), r, width, config.head_dim, dtype=dtype, device=device)
            for own in self._parts:
                places = np.where(known[own.rows], at[own.rows] - own.offset, 0)
                taken = _take_landmarks(own.blocks, torch.from_numpy(places).to(device), dtype)
                landmarks[own.rows] = taken  # [b, r, layers J, D]
            L = config.chunk_size + 1
            table = _chunk_turns(r + 1, L, config.head_dim, config.rope, dtype, device)[1:].flip(0)
            back = torch.stack([table[..., 0], -table[..., 1]], -1)  # keys go back, queries stay
            landmarks = rotate(landmarks, back).permute(0, 2, 3, 1).contiguous()
            self._latest_landmarks = landmarks.unflatten(1, (config.num_hidden_layers, -1))
        return self._latest_landmarks

    def _score_latest(self, number: int, q: Tensor, scores: Tensor, scale: float) -> None:
        """The k latest chunks of each row at their own distances, into scores [B, P, H, M]."""
        B, P, H, _ = q.shape
        at, known, alike = self._latest
        mine = self._landmarks_of_latest(q.dtype)[:, number]  # [B, J, D, r]
        asked = q.view(B, P, mine.shape[1], -1, q.shape[-1]).transpose(1, 2).flatten(2, 3)  # [B, J, P g, D]
        fresh = (asked @ mine).mul_(scale).unflatten(2, (P, -1)).transpose(1, 2).reshape(B, P, H, -1)
        if alike:
            begin = int(at[0, 0]) - self.offset
            scores[..., begin : begin + at.shape[1]] = fresh
            return
        for b in range(B):
            for r in np.flatnonzero(known[b]):
                scores[b, :, :, int(at[b, r]) - self.offset] = fresh[b, :, :, r]

    def _found_scores(self, own: _Part, number: int, q: Tensor, blocks: list[Tensor], scale: float) -> Tensor:
        """Exact scores of what an approximate search finds, -inf elsewhere; each head of a layer has its own index.

        Softmax and maxima over heads or positions are then over what was found. With stingy positions the latest
        chunks are left out: they are scored apart, at other distances.
        """
        B, P, H, _ = q.shape
        J = blocks[0].shape[2]
        scores = q.new_full((B, P, H, own.count), -math.inf)
        apart = 0
        if self.config.memory_position == "stingy":
            apart = np.minimum(self.kept[own.rows], self.config.num_retrieved_chunks)
        ends = (
            torch.from_numpy(self.last[own.rows] - own.offset - apart)
            .to(q.device)[:, None]
            .expand(B, P * (H // J))
        )
        for j in range(J):
            search = _head_search(own.memory, number * J + j)
            asked = q.view(B, P, J, H // J, -1)[:, :, j].flatten(1, 2)  # [B, P g, D]
            chosen = search.select(
                asked, [x[:, :, j] for x in blocks], self.config.num_retrieved_chunks, ends, scale
            )
            at = torch.where(chosen.indices < 0, own.count, chosen.indices)
            mine = q.new_full((B, P * (H // J), own.count + 1), -math.inf)
            mine.scatter_(2, at, chosen.scores.to(q.dtype))
            scores.view(B, P, J, H // J, -1)[:, :, j] = mine[..., :-1].view(B, P, H // J, -1)
        return scores

    def _away(self, dtype: torch.dtype) -> Tensor:
        """The turn of queries [B, P, H, D] for scoring: k + 1 chunks, or the distance to the text's first."""
        if self._scoring_turn is None:
            if self.config.memory_position == "stingy":
                self._scoring_turn = self._few_turns(dtype)[-1:]
            else:
                last = torch.from_numpy(self.last).to(self.step.device)
                self._scoring_turn = self._turns(last, dtype)[:, None]
        return self._scoring_turn

    def _few_turns(self, dtype: torch.dtype) -> Tensor:
        """[k + 2, D / 2, 2] by 0 to k + 1 chunks."""
        config = self.config
        count, L = config.num_retrieved_chunks + 2, config.chunk_size + 1
        return _chunk_turns(count, L, config.head_dim, config.rope, dtype, self.step.device)

    def _turns(self, chunks: Tensor, dtype: torch.dtype) -> Tensor:
        """The turn [..., D / 2, 2] of a query by so many chunks."""
        config = self.config
        return rotary_at(chunks * (config.chunk_size + 1), config.head_dim, config.rope, dtype)

    # --- attending -----------------------------------------------------------------------------------------

    def _attend(self, number: int, q: Tensor, chosen: Tensor, skipped: Tensor | None) -> Reading:
        """Softmax over the landmarks of what was selected, and inside each of these chunks."""
        config, step = self.config, self.step
        B, P, H, D = q.shape
        J = config.num_key_value_heads
        N, Hs, k = chosen.shape[1:]
        dtype = arithmetic_dtype(q)
        queries = q.to(dtype)
        if P == 1 and skipped is None:
            return self._attend_one(number, queries, chosen)
        grouped = N not in (1, P)
        if N == P:
            queries = queries[:, :, None]  # [B, N, R, H, D]
        elif not grouped:
            queries = queries[:, None]
        else:
            queries = step.part.rows(queries.flatten(2)).view(B, N, -1, H, D)
        R = queries.shape[2]
        # a unit gathers for itself: one head (of a position, or of all in a chunk or cell), or all key/value heads
        X = H if Hs == H else J
        g, Y = H // X, 1 if Hs == H else J
        queries = queries.view(B, N, R, X, g, D).permute(0, 1, 3, 2, 4, 5)
        queries = queries.reshape(B, N * X // Y, Y, R * g, D)  # [B, U, Y, rows, D]
        U = queries.shape[1]
        turn = self._turn_back(chosen, dtype).flatten(1, 2).unsqueeze(2)  # [B, U, 1, k, D / 2, 2]
        chunks = chosen.reshape(B, U, 1, k)
        planes = (number * J + np.arange(X) // (X // J)).reshape(-1, Y)  # [U or 1, Y], the same for each of N
        planes = np.tile(planes, (U // len(planes), 1))
        wanted = (chunks >= 0).flatten(2).any(-1)  # [B, U]
        if skipped is not None:
            asked = int(wanted.sum())
            wanted = wanted & self._any_open(skipped, N, Hs, grouped)
            step.asked, step.skipped = step.asked + asked, step.skipped + asked - int(wanted.sum())
        out = queries.new_zeros(B, U, Y, R * g, D)
        lse = queries.new_full((B, U, Y, R * g), -math.inf)
        gates = queries.new_full((B, U, Y, R * g, k), -math.inf)
        units = _compact(wanted)  # [B, n]; None: all in order
        n = U if units is None else units.shape[1]
        slab = max(1, _SLAB_NUMBERS // (2 * (config.chunk_size + 1) * D * Y * k * B))
        for first in range(0, n, slab):
            some = slice(first, min(n, first + slab))
            at: Any = some if units is None else units[:, some]
            heads = planes[some] if units is None else planes[at.cpu().numpy().clip(0)]
            mine = _pick(chunks, at).expand(B, -1, Y, k)
            part = self._attend_part(_pick(queries, at), mine, _pick(turn, at), heads)
            _put(out, at, part[0])
            _put(lse, at, part[1])
            _put(gates, at, part[2])
        out = out.view(B, N, X, R, g, D).permute(0, 1, 3, 2, 4, 5).reshape(B, N, R, H, D)
        lse = lse.view(B, N, X, R, g).permute(0, 1, 3, 2, 4).reshape(B, N, R, H)
        gates = gates.view(B, N, X, R, g, k).permute(0, 1, 3, 2, 4, 5).reshape(B, N, R, H, k)
        if not grouped:
            chosen = chosen.expand(B, P, Hs, k)
            return Reading(out.view(B, P, H, D), lse.view(B, P, H), chosen, gates.view(B, P, H, k))
        back = step.part.positions
        out = back(out.flatten(1, 2).flatten(2)).view(B, P, H, D)
        units_of = torch.from_numpy(np.array(step.units)).to(q.device)
        absent = units_of[..., None] < 0
        lse = back(lse.flatten(1, 2)).view(B, P, H).masked_fill(absent, -math.inf)
        gates = back(gates.flatten(1, 2)).view(B, P, H, k).masked_fill(absent[..., None], -math.inf)
        return Reading(out, lse, self._of_positions(chosen, units_of), gates)

    def _attend_one(self, number: int, q: Tensor, chosen: Tensor) -> Reading:
        """``_attend`` of one position a row, q [B, 1, H, D] and what it chose [B, 1, Hs, k], without detours."""
        B, _, H, D = q.shape
        J = self.config.num_key_value_heads
        Hs, k = chosen.shape[2:]
        heads = np.arange(H) // (H // J) if Hs == H else np.arange(J)
        planes = (number * J + heads).reshape(Hs, -1)  # [U, Y]
        turn = self._turn_back(chosen, q.dtype)[:, 0, :, None]  # [B, U, 1, k, D / 2, 2]
        queries = q.view(B, *planes.shape, -1, D)
        chunks = chosen.view(B, Hs, 1, k).expand(B, *planes.shape, k)
        out, lse, gates = self._attend_part(queries, chunks, turn, planes)
        return Reading(out.view(B, 1, H, D), lse.view(B, 1, H), chosen, gates.reshape(B, 1, H, k))

    def _any_open(self, skipped: Tensor, N: int, Hs: int, grouped: bool) -> Tensor:
        """[B, U]: units of which some head of some position is to read; skipped [B, P, H]."""
        opened = ~skipped if Hs > 1 else (~skipped).any(-1, keepdim=True)  # [B, P, Hs]
        if grouped:
            part = self.step.part
            opened = part.rows(opened.to(torch.uint8)).view(len(opened), N, -1, Hs).any(2)
        elif opened.shape[1] != N:
            opened = opened.any(1, keepdim=True)
        return opened.flatten(1)

    def _turn_back(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """How far queries turn for each chunk that they attend to, [B, N, Hs, k, D / 2, 2]."""
        if self.config.memory_position == "true":
            last = torch.from_numpy(self.last.reshape(-1, 1, 1, 1)).to(chosen.device)
            return self._turns((last - chosen).clamp(min=0), dtype)
        room, first = self._packed
        return self._few_turns(dtype)[(room - (chosen >= first).long()).clamp_(min=0)]

    @cached_property
    def _packed(self) -> tuple[Tensor, Tensor]:
        """How many chunks back each that a row reads would stand, were all old [B, 1, 1, k]; its first latest one.

        They are packed: the latest to the right, the others to the left, a place between them.
        """
        k = self.config.num_retrieved_chunks
        most = np.minimum(self.kept, k).reshape(-1, 1, 1, 1)
        arrays = most + 1 - np.arange(k), self.last.reshape(most.shape) - most
        room, first = (torch.from_numpy(x).to(self.step.device) for x in arrays)
        return room, first

    def _attend_part(
        self, queries: Tensor, chosen: Tensor, turns: Tensor, planes: Integers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, n, Y, rows, D] of units that read chosen [B, n, Y, k]: output, lse [..], gates [.., k]."""
        S = self.config.chunk_size
        B, n, Y, k = chosen.shape
        dtype = queries.dtype
        numbers = chosen.cpu().numpy().reshape(B, -1)
        where = np.broadcast_to(planes[..., None], (B, n, Y, k)).reshape(B, -1)
        records, lengths = self.memory.gather(numbers, where)  # [B, n Y k, 2, 1, S + 1, D]
        records = records.view(B, n, Y, k, 2, S + 1, -1)
        keys, values = records[..., 0, :, :].to(dtype), records[..., 1, :S, :].to(dtype)
        tokens = None
        if self.short:  # the landmark's key is one of them
            tokens = torch.from_numpy(lengths.clip(2) - 1).to(queries.device).view(B, n, Y, k)
        return landmark_memory_attention(queries, keys, values, turns, chosen >= 0, tokens)


@lru_cache(maxsize=64)
def _chunk_turns(
    count: int, step: int, head_dim: int, rope: Rope, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[count, D / 2, 2]: the turns by 0, step, 2 step ... positions."""
    with torch.inference_mode(False):
        return rotary_at(torch.arange(count, device=device) * step, head_dim, rope, dtype)


def _even(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Landmarks [b, m, J, D] in parts of any sizes, _EVEN at a time: how they lie decides no bit of a product.

    Two that are equal have one score then, or the same two whatever was branched or loaded, and the same is chosen.
    """
    ends = list(accumulate(part.shape[1] for part in parts))
    for first in range(0, ends[-1], _EVEN):
        last = min(first + _EVEN, ends[-1])
        own = [
            part[:, max(0, first - end + part.shape[1]) : last - end + part.shape[1]]
            for part, end in zip(parts, ends, strict=True)
            if end > first and end - part.shape[1] < last
        ]
        yield own[0] if len(own) == 1 else torch.cat(own, 1)


def _take_landmarks(blocks: list[Tensor], places: Tensor, dtype: torch.dtype) -> Tensor:
    """Landmarks [B, r, J, D] at places [B, r] of a table in blocks [B, m, J, D]."""
    at = places[:, :, None, None].expand(-1, -1, blocks[0].shape[2], 1)  # [B, r, J, 1]
    return gather(blocks, at, dtype)[:, :, :, 0]


@dataclass(frozen=True)
class _Part:
    """The landmarks that some rows look at, all of one memory."""

    rows: Rows
    memory: ChunkMemory
    offset: int  # the first chunk
    count: int
    blocks: list[Tensor]  # [b, m, layers J, D]

    @property
    def exact(self) -> bool:
        """All landmarks are scored: no search was asked for, or the memory is too small for it."""
        search = self.memory.search
        return isinstance(search, ExactSearch) or self.count < getattr(search, "min_chunks", 0)


def _head_search(memory: ChunkMemory, plane: int) -> Any:
    searches = memory.head_searches
    if plane not in searches:
        searches[plane] = anew(memory.search)
    return searches[plane]


def _compact(wanted: Tensor) -> Tensor | None:
    """The units [B, n] that read something, -1 where a row has fewer; None: all do."""
    if bool(wanted.all()):
        return None
    counts = wanted.sum(1)
    order = torch.sort(~wanted, dim=1, stable=True).indices[:, : int(counts.max())]
    return order.masked_fill(torch.arange(order.shape[1], device=order.device) >= counts[:, None], -1)


def _pick(x: Tensor, at: Any) -> Tensor:
    """Units [B, n, ...] of x [B, N, ...]; -1 picks any."""
    if isinstance(at, slice):
        return x[:, at]
    return x.gather(1, at.clamp(min=0).view(*at.shape, *(1,) * (x.dim() - 2)).expand(*at.shape, *x.shape[2:]))


def _put(x: Tensor, at: Any, new: Tensor) -> None:
    if isinstance(at, slice):
        x[:, at] = new
        return
    b, i = (at >= 0).nonzero(as_tuple=True)
    x[b, at[b, i]] = new[b, i]
