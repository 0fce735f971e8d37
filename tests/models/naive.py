"""The equations of a window and of a DRT, position by position: what the other oracles stand on too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.models.transformers64 import scaled_rope
from trailmark.models import DRTForCausalLM, SlidingWindowForCausalLM
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.layers import SelfAttention


class Naive:
    """Dense masks, loops over chunks; nothing shared with the ops, the layers' forward or the grid."""

    def __init__(self, config: TrailmarkConfig) -> None:
        self.config: Any = config

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        if getattr(self.config, "norm", "rms") == "layer":
            x = x - x.mean(-1, keepdim=True)
        return self.rms(norm, x)

    def rms(self, norm: Any, x: Tensor) -> Tensor:
        return self.unit(x) * norm.weight

    def unit(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) ** -0.5

    def mlp(self, mlp: Any, x: Tensor) -> Tensor:
        if getattr(self.config, "mlp", "swiglu") == "gelu":
            up = mlp.up_proj(x)
            return mlp.down_proj(up * 0.5 * (1 + torch.erf(up * 0.5**0.5)))
        gate, up = mlp.gate_up_proj(x).split(self.config.intermediate_size, dim=-1)
        return mlp.down_proj(gate * torch.sigmoid(gate) * up)

    def window_layer(self, layer: Any, x: Tensor, number: int = 0) -> Tensor:
        x = x + self.window_attention(layer.attention, self.norm(layer.attention_norm, x), number)
        return x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))

    def window_attention(self, attention: SelfAttention, x: Tensor, number: int = 0) -> Tensor:
        _, scores, v = self.look(attention, x, number)
        return attention.o_proj(self.weigh(scores, v))

    def look(self, attention: SelfAttention, x: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D] before they are turned, scores [H, T, P] and values [P, J, D]."""
        c, place, is_key = self.config, self.numbers(len(x)), self.is_key(len(x))
        q, k, v = self.heads(attention, x)
        given = q
        distance = (place[:, None] - place).to(x.dtype)
        hidden = (
            (distance < 0) | ~is_key | ((distance == 0) & ~is_key[:, None])
        )  # a landmark that is no key itself
        outside = torch.zeros_like(hidden)
        full = c.layer_types is not None and c.layer_types[number] == "full_attention"
        if c.sliding_window is not None and not full:
            outside = distance >= c.sliding_window
            hidden |= outside & (place >= c.num_sinks)
        of_sinks = q
        if c.window_position == "rope":
            most = c.max_sink_distance
            of_sinks = self.rotate(q, place if most is None else place.clamp(max=most))
            q, k = self.rotate(q, place), self.rotate(k, place)
            bias = torch.zeros_like(distance)[None]
        else:
            bias = -self.slopes(c.num_attention_heads).to(x.dtype)[:, None, None] * distance
        bias = bias.masked_fill(hidden, -torch.inf)
        if not outside.any():
            return given, self.scores_of(q, k, bias), v
        return given, self.scores_of(q, k, bias, of_sinks, outside), v

    def numbers(self, positions: int) -> Tensor:
        """[P] of the positions, as windows count them."""
        return torch.arange(positions)

    def is_key(self, positions: int) -> Tensor:
        """[P] which positions are attended to."""
        return torch.ones(positions, dtype=torch.bool)

    def slopes(self, heads: int) -> Tensor:
        """[H]: 2^-8/H, its powers; or those of the next lower power of two, and between them of the next higher."""
        power = heads if self.config.alibi_slopes == "geometric" else 2 ** (len(f"{heads:b}") - 1)
        known = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
        return torch.tensor((known + between)[:heads], dtype=torch.float64)

    def heads(self, attention: SelfAttention, x: Tensor) -> list[Tensor]:
        c = self.config
        H, J, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        parts = attention.qkv_proj(x).split([H * D, J * D, J * D], dim=-1)
        if c.qk_norm == "all":
            parts = [self.rms(attention.q_norm, parts[0]), self.rms(attention.k_norm, parts[1]), parts[2]]
        q, k, v = (part.unflatten(-1, (-1, D)) for part in parts)
        if c.qk_norm == "head":
            q, k = self.rms(attention.q_norm, q), self.rms(attention.k_norm, k)
        return [q, k, v]

    @cached_property
    def rope(self) -> tuple[Tensor, float]:
        """Frequencies [D / 2], and what turned queries and keys are multiplied by."""
        c, D = self.config, self.config.head_dim
        plain = c.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        if c.rope_scaling is None:
            return plain, 1.0
        if c.rope_scaling["rope_type"] == "in_range":
            turns = plain * c.rope_scaling["original_max_position_embeddings"] / (2 * math.pi)
            return torch.where(turns >= c.rope_scaling["turns"], plain, 0.0), 1.0
        return scaled_rope(D, c.rope_theta, c.rope_scaling)

    def rotate(self, x: Tensor, place: Tensor) -> Tensor:
        frequencies, factor = self.rope
        angle = place[:, None, None] * frequencies
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return factor * torch.stack(turned, dim=-1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return self.weigh(self.scores_of(q, k, bias), v)

    def encoded(self, encoder: Any, x: Tensor, place: Tensor) -> Tensor:
        """A chunk's rows through the layers of a chunk encoder, each row looking at all."""
        for layer in encoder.layers:
            q, k, v = self.heads(layer.attention, self.norm(layer.attention_norm, x))
            attended = self.attend(self.rotate(q, place), self.rotate(k, place), v, torch.zeros(1))
            x = x + layer.attention.o_proj(attended)
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
        return self.norm(encoder.output_norm, x)

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        """[T, H * D]"""
        v = v.repeat_interleave(len(scores) // v.shape[1], dim=1)
        return torch.einsum("htp,phd->thd", scores.softmax(-1), v).flatten(1)

    def scores_of(
        self,
        q: Tensor,
        k: Tensor,
        bias: Tensor,
        of_sinks: Tensor | None = None,  # queries of the pairs ``outside`` [T, P] the window
        outside: Tensor | None = None,
    ) -> Tensor:
        """[H, T, P]"""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("thd,phd->htp", q, k)
        if of_sinks is not None:
            assert outside is not None
            scores = torch.where(outside, torch.einsum("thd,phd->htp", of_sinks, k), scores)
        return scores * q.shape[-1] ** -0.5 + bias


class NaiveWindow(Naive):
    """One text [T] through the window model."""

    @torch.no_grad()
    def __init__(self, model: SlidingWindowForCausalLM, ids: Tensor) -> None:
        super().__init__(model.config)
        x = model.embed_tokens(ids)
        for number, layer in enumerate(model.layers):
            x = self.window_layer(layer, x, number)
        self.logits = model.lm_head(self.norm(model.norm, x) * self.config.logit_scale)  # [T, V]


class NaiveDRT(Naive):
    """One text [T] through a DRT.

    ``lengths`` are the tokens of each chunk; the last chunk has a landmark if it is full or ``close``.
    """

    @torch.no_grad()
    def __init__(
        self, model: DRTForCausalLM, ids: Tensor, lengths: Sequence[int] | None = None, close: bool = False
    ) -> None:
        super().__init__(model.config)
        c, S, T = self.config, self.config.chunk_size, len(ids)
        lengths = lengths or [min(S, T - first) for first in range(0, T, S)]
        assert sum(lengths) == T
        rows: list[Tensor] = []  # of all positions
        starts, landmarks, first = [], [], 0
        for n, length in enumerate(lengths):
            starts.append(len(rows))
            rows += model.embed_tokens(ids[first : first + length])
            first += length
            if n + 1 < len(lengths) or length == S or close:
                landmarks.append(len(rows))
                rows.append(model.landmark)
        ends = [*starts[1:], len(rows)]
        x = torch.stack(rows)  # [P, E]
        counted = torch.ones(len(rows), dtype=torch.bool)
        if not c.landmarks_as_keys:
            counted[landmarks] = False
        self._counted = counted
        numbers = self.numbers(len(rows)).tolist()
        for layer in model.lower_layers:
            x = self.window_layer(layer, x)
        memory = [
            self.encode(model, x[start : mark + 1])
            for start, mark in zip(starts[: len(landmarks)], landmarks, strict=True)
        ]
        self.retrieval: list[list[tuple[list[int], list[float]]]] = []  # group, chunk: indices and weights
        self.scores: list[list[dict[int, float]]] = []  # group, chunk: of every chunk that may be selected
        per_group = len(model.upper_layers) // c.num_retrieval_groups
        for number, layer in enumerate(model.upper_layers):
            if number % per_group == 0:
                asked, scores = [], []
                for n, landmark in enumerate(landmarks):
                    last_row = numbers[landmark] + S + c.landmarks_as_keys  # of the next chunk, were it full
                    visible_from = last_row - (c.sliding_window - 1)
                    candidates = [
                        m
                        for m in range(n)
                        if not c.exclude_visible_chunks or numbers[starts[m]] < visible_from
                    ]
                    score = self.score(model, number // per_group, x[landmark], memory, n, candidates)
                    best = sorted(self.choose(number // per_group, n, score)[: c.num_retrieved_chunks])
                    weights = torch.tensor([score[m] for m in best], dtype=x.dtype).softmax(0)
                    asked.append((best, weights.tolist()))
                    scores.append(score)
                self.retrieval.append(asked)
                self.scores.append(scores)
            q, scores, values = self.look(layer.attention, self.norm(layer.attention_norm, x))
            h = x + layer.attention.o_proj(self.weigh(scores, values))
            # as to a key at the window's end, which carries yarn's factor too
            if c.window_position == "rope":
                q = self.rotate(q, torch.full((len(q),), c.sliding_window)) * self.rope[1]
            found = h.new_zeros(len(h), c.num_attention_heads * c.head_dim)
            for n in range(1, len(lengths)):
                own = slice(starts[n], ends[n])
                seen, held = [scores[:, own]], [values]
                for m, weight in zip(*asked[n - 1], strict=True):
                    k, v = (x[:, self.kv_of(number, per_group)] for x in memory[m][:2])
                    if c.virtual_key == "zero":
                        found[own] += weight * self.read(layer, h[own], k, v)
                        continue
                    times = math.log(len(asked[n - 1][0]) * weight)
                    seen.append(self.scores_of(q[own], k, torch.zeros(1)) + times)
                    held.append(v)
                both = self.weigh(torch.cat(seen, dim=-1), torch.cat(held))
                found[own] += both - self.weigh(seen[0], values)
            found = layer.gca_o_proj(found)
            x = h + found if c.residual_gca else h
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, h + found))
        tokens_only = [p for p in range(len(rows)) if p not in landmarks]
        self.logits = model.lm_head(self.norm(model.norm, x[tokens_only]) * c.logit_scale)  # [T, V]

    def numbers(self, positions: int) -> Tensor:
        return self._counted.cumsum(0) - self._counted.long()

    def is_key(self, positions: int) -> Tensor:
        return self._counted

    def score(
        self, model: DRTForCausalLM, group: int, h: Tensor, memory: list[Any], n: int, candidates: list[int]
    ) -> dict[int, float]:
        """Of each candidate, at the landmark of chunk n with state h [E]."""
        c, retriever = self.config, model.retrievers[group]
        query = retriever.q_proj(self.norm(retriever.norm, h))
        if c.retrieval_query == "chunk":
            query = query + retriever.chunk_proj(memory[n][2])
        query = self.vector(query)
        scale = c.retrieval_scale * c.hidden_size**-0.5
        return {
            m: float(query @ memory[m][2]) * scale - c.retrieval_recency * math.log(len(candidates) - place)
            for place, m in enumerate(candidates)
        }

    def choose(self, group: int, n: int, score: dict[int, float]) -> list[int]:
        """The chunks to read, the best first."""
        return sorted(score, key=lambda m: -score[m])

    def vector(self, x: Tensor) -> Tensor:
        return self.unit(x) if self.config.retrieval_normalization else x

    def encode(self, model: DRTForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a chunk, its landmark last: keys and values of its tokens, and the landmark vector."""
        c, encoder = self.config, model.encoder
        place = torch.arange(len(rows))
        place[-1] = c.chunk_size  # an early landmark too
        x = self.encoded(encoder, self.norm(encoder.input_norm, rows), place)
        k, v = encoder.kv_proj(x[:-1]).unflatten(-1, (2, -1, c.num_key_value_heads, c.head_dim)).unbind(1)
        if c.memory_values == "next":
            v = torch.cat([v[1:], torch.zeros_like(v[:1])])
        summary = x[-1] if c.chunk_summary == "landmark" else x[:-1].mean(0)
        return k, v, self.vector(encoder.landmark_proj(summary))  # k, v [n, sets, J, D]

    def kv_of(self, number: int, per_group: int) -> int:
        """Which of a chunk's sets of keys and values upper layer ``number`` reads."""
        return {"shared": 0, "group": number // per_group, "layer": number}[self.config.memory_kv]

    def read(self, layer: Any, h: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = layer.gca_q_proj(self.norm(layer.gca_norm, h)).unflatten(-1, (-1, self.config.head_dim))
        if self.config.softmax_off_by_one:  # a key with score 0 and value 0
            k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
        return self.attend(q, k, v, torch.zeros(1))
