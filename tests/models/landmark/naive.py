"""Landmark Attention written naively, one text at a time, from the paper: nothing of the ops, the grid or the cells.

Whole, as in training (Sec. 3.1): equations 1 to 4 with dense masks. Read (Sec. 3.2): loops over cells, positions and
heads; keys as they are before RoPE, and turned once it is known where in the prefix their chunk stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.naive import Naive
from trailmark.models import LandmarkConfig, LandmarkForCausalLM

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spot:
    """A position: of a token, or of the landmark after it."""

    token: int  # of a landmark: the one before it
    is_landmark: bool
    chunk: int
    slot: int
    cell: int


def spots_of(
    length: int, chunk_size: int, local_length: int, marks: Sequence[bool] = (), phase: int = 0
) -> list[Spot]:
    """Of a text whose first chunk lacks ``phase`` tokens, with early landmarks after the tokens marked."""
    spots, chunk, slot = [], 0, phase
    for t in range(length):
        spots.append(Spot(t, False, chunk, slot, t // local_length))
        slot += 1
        if slot == chunk_size or (marks and marks[t]):
            spots.append(Spot(t, True, chunk, chunk_size, t // local_length))
            chunk, slot = chunk + 1, 0
    return spots


class _NaiveModel(Naive):
    spots: list[Spot]

    def run(self, model: Any, ids: Tensor) -> Tensor:
        """Logits [T, V]."""
        c = self.config
        x = torch.stack(
            [model.landmark if s.is_landmark else model.embed_tokens(ids[s.token]) for s in self.spots]
        )
        gate = None if model.gate is None else model.gate[None]
        for layer in model.layers:
            normal = self.norm(layer.attention_norm, x)
            key = (
                None
                if gate is None
                else self.heads(layer.attention, self.norm(layer.attention_norm, gate))[1]
            )
            attended = self.attention(*self.heads(layer.attention, normal), key)
            x = x + layer.attention.o_proj(attended)
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
            gate = None if gate is None else gate + self.mlp(layer.mlp, self.norm(layer.mlp_norm, gate))
        at = {s.token: i for i, s in enumerate(self.spots) if c.landmark_loss == "text" or not s.is_landmark}
        self.states = self.norm(model.norm, x)
        return model.lm_head(self.states[[at[t] for t in range(len(ids))]] * c.logit_scale)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        """q [P, H, D], k, v [P, J, D] and the gate's key [1, J, D], before RoPE -> [P, E]."""
        raise NotImplementedError


class NaiveWhole(_NaiveModel):
    """One text [T] without a cache.

    ``jumps``: what is added to the places of each chunk. ``controlled``: chunks that the retrieval gate opens.
    """

    def __init__(
        self,
        model: LandmarkForCausalLM,
        ids: Tensor,
        marks: Sequence[bool] = (),
        phase: int = 0,
        jumps: Sequence[int] = (),
        controlled: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model.config)
        self.spots = spots_of(len(ids), self.config.chunk_size, 1, marks, phase)
        self.jumps, self.controlled = jumps, controlled
        self.logits = self.run(model, ids)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        L, scale, repeats = self.config.chunk_size + 1, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
        chunk = torch.tensor([s.chunk for s in self.spots])
        mark = torch.tensor([s.is_landmark for s in self.spots])
        order = torch.arange(len(self.spots))
        place = torch.tensor([s.chunk * L + s.slot for s in self.spots])
        if self.jumps:
            place = place + torch.tensor(self.jumps)[chunk]
        q, k = self.rotate(q, place), self.rotate(k, place)
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        a = torch.einsum("ihd,jhd->hij", q, k) * scale
        own = (chunk[:, None] == chunk) & (order[:, None] >= order) & ~mark
        other = (chunk[:, None] > chunk) & mark  # landmarks of earlier chunks
        controlled = torch.zeros_like(mark)
        if self.controlled is not None:
            controlled = torch.isin(chunk, torch.tensor(self.controlled, dtype=chunk.dtype)) & mark
        grouped = torch.softmax(
            a.masked_fill(~(own | (other & ~controlled)), -torch.inf), -1
        )  # S of group p_i
        far = a.masked_fill(~(other & controlled), -torch.inf)
        if self.controlled is not None:
            assert gate is not None
            far = torch.where((far > -torch.inf).any(-1, keepdim=True), far, 0.0).softmax(-1)
            far = far.masked_fill(~(other & controlled), 0)
            gate = self.rotate(gate, torch.tensor([-1])).repeat_interleave(repeats, dim=1)[0]
            near = a.masked_fill(~(own | (other & ~controlled)), -torch.inf)
            with_gate = torch.cat(
                [near, (torch.einsum("ihd,hd->hi", q, gate) * scale)[..., None]], -1
            ).softmax(-1)
            share = with_gate[..., -1:] * (other & controlled).any(-1, keepdim=True)
            grouped = grouped * (1 - share) + far * share
        weights = grouped.masked_fill(~own, 0)
        for c in range(int(chunk.max())):
            (at,) = torch.nonzero((chunk == c) & mark, as_tuple=True)[0].tolist()
            inside = ((chunk == c) & ~mark).expand_as(own)
            within = torch.softmax(a.masked_fill(~inside, -torch.inf), -1)
            weights = weights + within * grouped[..., at : at + 1] * (chunk > c)[:, None]
        self.weights = weights  # [H, P, P]
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


class NaiveReading(_NaiveModel):
    """One text [T] read in cells, without training.

    ``calls``: tokens after each call; they count only where a choice is by all of a cell that was fed so far.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LandmarkForCausalLM,
        ids: Tensor,
        marks: Sequence[bool] = (),
        calls: Sequence[int] = (),
    ) -> None:
        super().__init__(model.config)
        c: LandmarkConfig = model.config
        assert c.local_length is not None
        self.turns = (*self.rope[0].tolist(), self.rope[1])
        self.spots = spots_of(len(ids), c.chunk_size, c.local_length, marks)
        ends = [*sorted(calls), len(ids)]
        self.fed = [next(end for end in ends if end > s.token) for s in self.spots]  # with tokens before
        self.members: dict[int, list[int]] = {}
        for i, s in enumerate(self.spots):
            self.members.setdefault(s.chunk, []).append(i)
        self.retrieval: list[list[list[list[int]]]] = []  # layer, token, head: chunks
        self.opened: dict[tuple[int, ...], bool] = {}  # what shares a choice: whether it read
        self.logits = self.run(model, ids)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        self.q, self.k, self.v = q.numpy(), k.numpy(), v.numpy()
        self.gate = None if gate is None else gate.numpy()[0]
        self._turned: dict[tuple[int, int], Array] = {}
        self.found: dict[int, list[list[int]]] = {}  # of each position, by head
        out = np.zeros_like(self.q)
        for cell in range(self.spots[-1].cell + 1):
            self.read_cell(cell, out)
        tokens = [i for i, s in enumerate(self.spots) if not s.is_landmark]
        self.retrieval.append([self.found[i] for i in tokens])
        return torch.from_numpy(out).flatten(1)

    def read_cell(self, cell: int, out: Array) -> None:
        c, L, k = self.config, self.config.chunk_size + 1, self.config.num_retrieved_chunks
        mine = [i for i, s in enumerate(self.spots) if s.cell == cell]
        n = sum(s.is_landmark and s.cell < cell for s in self.spots)  # chunks in memory
        first = 0 if c.max_memory_chunks is None else max(0, n - c.max_memory_chunks)
        memory = range(first, n)
        true = c.memory_position == "true"
        begins = n if true else k + 1  # the slot after the prefix
        # where each position stands, in slots of L places
        at = {i: (begins + s.chunk - n) * L + s.slot for i, s in enumerate(self.spots) if s.chunk >= n}
        local = {i: turn(self.k[i], place, self.turns) for i, place in at.items() if i <= mine[-1]}
        scored = [m if true else max(0, k + 1 - (n - m)) for m in memory]
        landmarks = [self.chunk_at(m, slot)[-1] for m, slot in zip(memory, scored, strict=True)]  # [J, D]
        H, J, D = self.q.shape[1], self.k.shape[1], self.q.shape[2]
        turned = {i: turn(self.q[i], at[i], self.turns) for i in mine}
        scores = {}
        if len(memory):
            marks = np.stack(landmarks).repeat(H // J, axis=1)  # [M, H, D]
            scores = {i: (marks * turned[i]).sum(-1).T * D**-0.5 for i in mine}
        for i in mine:
            chosen = self.choose(i, mine, scores, memory)
            self.found[i] = []
            for h in range(H):
                out[i, h], read = self.read_from(i, turned[i][h], h * J // H, local, n, chosen[h])
                self.found[i].append(chosen[h] if read else [])
                if len(memory):
                    unit = self.sharing(i, h)
                    self.opened[unit] = self.opened.get(unit, False) or read

    def sharing(self, i: int, h: int) -> tuple[int, ...]:
        """What shares one choice of chunks."""
        c, spot = self.config, self.spots[i]
        here = (len(self.retrieval),) + ((h,) if "head" in c.retrieve_per else ())
        if c.retrieve_per.startswith("token"):
            return (*here, i)
        return (*here, spot.cell, self.fed[i], spot.chunk if c.causal_retrieval else -1)

    def choose(self, i: int, mine: list[int], scores: dict[int, Array], memory: range) -> list[list[int]]:
        """The chunks that position i reads, by head."""
        c, H = self.config, self.q.shape[1]
        if not len(memory):
            return [[]] * H
        if c.retrieve_per == "token_and_head":
            return [self.best(scores[i][h], memory) for h in range(H)]
        if c.retrieve_per == "token":
            asking = [i]
        elif c.causal_retrieval:  # the cell up to the first position of i's chunk in it
            opens = min(t for t in mine if self.spots[t].chunk == self.spots[i].chunk)
            asking = [t for t in mine if t <= opens]
        else:  # all of the cell that was fed when i was
            asking = [t for t in mine if self.spots[t].token < self.fed[i]]
        p = np.array([[log_softmax(scores[t][h]) for h in range(H)] for t in asking])  # [t, H, M]
        if c.retrieve_per == "head":
            return [self.best(p[:, h].max(0), memory) for h in range(H)]
        return [self.best(p.max((0, 1)), memory)] * H

    def best(self, score: Any, memory: range) -> list[int]:
        """k chunks in the order of the text; the earlier of equals."""
        ranked = sorted(range(len(memory)), key=lambda m: (-score[m], m))
        return sorted(memory[m] for m in ranked[: self.config.num_retrieved_chunks])

    def read_from(
        self, i: int, query: Array, j: int, local: dict[int, Array], n: int, chosen: list[int]
    ) -> tuple[Array, bool]:
        """What one head of position i reads; and whether of the memory too."""
        c, k, scale = self.config, self.config.num_retrieved_chunks, len(query) ** -0.5
        me = self.spots[i]

        def score(places: Sequence[int]) -> Array:
            return np.stack([local[t][j] for t in places]) @ query * scale

        own = [t for t in self.of_chunk(me.chunk) if t <= i and not self.spots[t].is_landmark]
        logits, values = list(score(own)), [self.v[t, j] for t in own]
        for chunk in range(n, me.chunk):  # of this cell: all were closed
            *tokens, mark = self.of_chunk(chunk)
            logits.append(score([mark])[0])
            values.append(softmax(score(tokens)) @ self.v[tokens, j])
        # those among the latest k stand at the right of the prefix, the others at its left, in their order
        late = [m for m in chosen if m >= n - k]
        slots = [*range(len(chosen) - len(late)), *range(k + 1 - len(late), k + 1)]
        gates, far = [], []
        for m, slot in zip(chosen, chosen if c.memory_position == "true" else slots, strict=True):
            *inside, gated = self.chunk_at(m, slot)[:, j] @ query * scale
            gates.append(gated)
            far.append(softmax(inside) @ self.v[self.of_chunk(m)[:-1], j])
        if self.gate is None or not chosen:
            return softmax([*logits, *gates]) @ np.stack([*values, *far]), bool(chosen)
        # one place before the text, or before the k + 1 chunks that are shown of it
        before = 0 if c.memory_position == "true" else max(0, k + 1 - n) * (c.chunk_size + 1)
        key = turn(self.gate[j], before - 1, self.turns)
        share = softmax([*logits, float(key @ query) * scale])[-1]
        near = softmax(logits) @ np.stack(values)
        if share < c.gate_cutoff:
            return near, False
        return (1 - share) * near + share * (softmax(gates) @ np.stack(far)), True

    def of_chunk(self, m: int) -> list[int]:
        """Its positions, its landmark last."""
        return self.members[m]

    def chunk_at(self, m: int, slot: int) -> Array:
        """Keys [tokens + 1, J, D] of chunk m, its landmark last, in that slot of the prefix."""
        if (m, slot) not in self._turned:
            begin = slot * (self.config.chunk_size + 1)
            spots = [(t, begin + self.spots[t].slot) for t in self.of_chunk(m)]
            self._turned[m, slot] = np.stack([turn(self.k[t], p, self.turns) for t, p in spots])
        return self._turned[m, slot]


@lru_cache(maxsize=4096)
def _turn(place: int, turns: tuple[float, ...]) -> Array:
    *frequencies, factor = turns
    return factor * np.exp(1j * place * np.array(frequencies))


def turn(x: Array, place: int, turns: tuple[float, ...]) -> Array:
    """RoPE of [..., D] by frequencies [D / 2], the last of ``turns`` a factor."""
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * _turn(place, turns)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def softmax(scores: Any) -> Array:
    e = np.exp(np.array(scores) - np.max(scores))
    return e / e.sum()


def log_softmax(scores: Any) -> Array:
    x = np.array(scores)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
