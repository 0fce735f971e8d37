"""HiLS written naively, one text at a time, from the paper: loops over layers, positions and heads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.models.naive import Naive
from trailmark.models import HiLSForCausalLM


class NaiveHiLS(Naive):
    """One text [T]; early landmarks after the tokens marked. Of the first ``read`` tokens none chooses.

    ``focus``: of the chunks that were read no others are chosen. ``known``: so many may be, those in
    sight too.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: HiLSForCausalLM,
        ids: Tensor,
        marks: Sequence[bool] = (),
        read: int = 0,
        focus: Collection[int] = (),
        known: int | None = None,
    ) -> None:
        super().__init__(model.config)
        self.read, self.focus, self.known = read, focus, known
        c, T = self.config, len(ids)
        self.chunks: list[list[int]] = []  # the tokens of each; the last may be open
        rows, self.mark_of = [], dict[int, int]()  # of each closed chunk, its landmark's row
        self.row_of: list[int] = []  # of each token
        open_chunk: list[int] = []
        for t in range(T):
            self.row_of.append(len(rows))
            rows.append(model.embed_tokens(ids[t]))
            open_chunk.append(t)
            if len(open_chunk) == c.chunk_size or (marks and marks[t]):
                self.mark_of[len(self.chunks)] = len(rows)
                rows.append(torch.zeros_like(rows[-1]) if model.landmark is None else model.landmark)
                self.chunks.append(open_chunk)
                open_chunk = []
        if open_chunk:
            self.chunks.append(open_chunk)
        x = torch.stack(rows)
        self.number = [0] * len(rows)  # tokens before each row
        for row in range(1, len(rows)):
            self.number[row] = self.number[row - 1] + (row - 1 not in self.mark_of.values())
        self.retrieval: list[list[list[list[int]]]] = []  # layer, token, key/value head: chunks
        self.weights: list[list[list[dict[int, float]]]] = []  # of each among them
        self.shares: list[list[list[dict[int, float]]]] = []  # of each, of all that is seen
        for number, layer in enumerate(model.layers):
            chooses = c.layer_types is None or c.layer_types[number] == "full_attention"
            normal = self.norm(layer.attention_norm, x)
            q, k, v = self.heads(layer.attention, normal)
            asking = q
            if chooses and c.calibration_rank:
                asking = self.calibrated(layer, normal)
            out = self.attend_to_all(
                q, asking, k[self.row_of], v[self.row_of], chooses and c.num_retrieved_chunks > 0
            )
            x = x + layer.attention.o_proj(out.flatten(1))
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
        self.logits = model.lm_head(self.norm(model.norm, x[self.row_of]) * c.logit_scale)

    def calibrated(self, layer: Any, normal: Tensor) -> Tensor:
        """[P, H, D]: (W_q + B A) x, and its norm."""
        c, extra = self.config, layer.calibration
        low = extra.up_proj.weight @ extra.down_proj.weight  # [H D, E]
        width = c.num_attention_heads * c.head_dim
        asking = normal @ (layer.attention.qkv_proj.weight[:width] + low).T
        if layer.attention.qkv_proj.bias is not None:
            asking = asking + layer.attention.qkv_proj.bias[:width]
        if c.qk_norm == "all":
            asking = self.rms(extra.norm, asking)
        asking = asking.unflatten(-1, (-1, c.head_dim))
        return self.rms(extra.norm, asking) if c.qk_norm == "head" else asking

    def attend_to_all(self, q: Tensor, asking: Tensor, k: Tensor, v: Tensor, chooses: bool) -> Tensor:
        """q [P, H, D] of all rows, k and v [T, J, D] of tokens -> [P, H, D]."""
        c = self.config
        (P, H, D), J = q.shape, k.shape[1]
        place = torch.tensor(self.number)
        near_k = far_k = self.rotate(k, torch.arange(len(k)))
        near_q = far_q = self.rotate(q, place)
        asking_q = self.rotate(asking, place)
        sink_q = near_q
        if c.max_sink_distance is not None:
            sink_q = self.rotate(q, place.clamp(max=c.max_sink_distance))
        if c.far_position == "window":
            edge_of_window = torch.full((P,), c.far_distance or c.sliding_window)
            far_k, far_q, asking_q = (
                k,
                *(self.rotate(x, edge_of_window) * self.rope[1] for x in (q, asking)),
            )
        starts = [chunk[0] for chunk in self.chunks]
        out = torch.zeros_like(q)
        chosen_by: dict[int, list[list[int]]] = {}
        weights_by: dict[int, list[dict[int, float]]] = {}
        shares_by: dict[int, list[dict[int, float]]] = {}
        for i in range(P):
            is_mark = i in self.mark_of.values()
            edge = max(0, self.number[i] - c.sliding_window + 1)
            local = max(m for m, start in enumerate(starts) if start <= edge)  # the chunk that holds the edge
            last = self.number[i] - is_mark
            asks = chooses and last >= self.read
            left = starts[local] if asks else edge
            seen = [(t, near_q) for t in range(left, last + 1)]
            seen += [(t, sink_q) for t in range(min(c.num_sinks, left, last + 1))]
            window = torch.tensor(
                [[float(by[i, h] @ near_k[t, h * J // H]) * D**-0.5 for t, by in seen] for h in range(H)],
                dtype=q.dtype,
            )  # [H, n]
            beyond = local if self.known is None else self.known
            keys = {m: [t for t in self.chunks[m] if t >= c.num_sinks] for m in range(beyond if asks else 0)}
            was_read = self.read // c.chunk_size if self.focus else 0
            candidates = [m for m in keys if keys[m] and (m in self.focus or m >= was_read)]
            shares: list[dict[int, float]] = []
            for h in range(H):
                score = {m: self.score(m, keys[m], asking_q, i, h, far_k[:, h * J // H]) for m in candidates}
                seen_by = torch.cat([window[h], torch.tensor(list(score.values()), dtype=q.dtype)]).logsumexp(
                    0
                )
                shares.append({m: float(s - seen_by) for m, s in score.items()})
            chosen_by[i], weights_by[i], shares_by[i] = [], [], []
            for j in range(J):
                most = {m: max(shares[h][m] for h in range(H) if h * J // H == j) for m in candidates}
                best = sorted(candidates, key=lambda m: (-most[m], m))[: c.num_retrieved_chunks]
                chosen_by[i].append(sorted(best))
                among = torch.tensor([most[m] for m in sorted(best)], dtype=q.dtype).softmax(0).tolist()
                weights_by[i].append(dict(zip(sorted(best), among, strict=True)))
                shares_by[i].append({m: math.exp(most[m]) for m in best})
            for h in range(H):
                j = h * J // H
                far = [far_k[keys[m], j] @ far_q[i, h] * D**-0.5 for m in chosen_by[i][j]]
                if c.chunk_weights == "score":  # in place of what the keys of a chunk add up to
                    score_of = [self.score(m, keys[m], asking_q, i, h, far_k[:, j]) for m in chosen_by[i][j]]
                    far = [x - x.logsumexp(0) + s for x, s in zip(far, score_of, strict=True)]
                scores = torch.cat([window[h], *far])
                values = v[[t for t, _ in seen] + [t for m in chosen_by[i][j] for t in keys[m]], j]
                out[i, h] = scores.softmax(0) @ values if len(scores) else 0
        if chooses:
            self.retrieval.append([chosen_by[row] for row in self.row_of])
            self.weights.append([weights_by[row] for row in self.row_of])
            self.shares.append([shares_by[row] for row in self.row_of])
        return out

    def score(self, m: int, keys: list[int], far_q: Tensor, i: int, h: int, far_k: Tensor) -> float:
        """What head h of row i scores chunk m with."""
        c, scale = self.config, far_q.shape[-1] ** -0.5
        if c.chunk_score == "mass":
            return float((far_k[keys] @ far_q[i, h] * scale).logsumexp(0))
        size, masses = c.summary_tokens or c.chunk_size, []
        for first in range(0, len(keys), size):
            part = keys[first : first + size]
            own = far_k[part]
            if c.chunk_score == "mean":
                masses.append(float(own.mean(0) @ far_q[i, h] * scale) + math.log(len(part)))
                continue
            rows = [self.row_of[t] for t in part] if c.summary_query == "tokens" else [self.mark_of[m]]
            p = (own @ far_q[rows, h].mean(0) * scale).softmax(0)
            masses.append(float((p @ own) @ far_q[i, h] * scale - (p * p.log()).sum()))
        return float(torch.tensor(masses, dtype=far_q.dtype).logsumexp(0))


def read_in(found: Any, row: int) -> list[list[list[list[int]]]]:
    """What each layer's [B, T, J, K] lists for a row."""
    return [
        [[[m for m in head if m >= 0] for head in t] for t in layer.indices[row].tolist()] for layer in found
    ]
