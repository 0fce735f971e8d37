"""HSA written naively, one text at a time, from the papers: loops over groups, tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.models.naive import Naive
from tests.models.tiny import chunk_lengths
from trailmark.models import HSAForCausalLM


class NaiveHSA(Naive):
    """One text [T]; its chunks end early after the tokens marked."""

    @torch.no_grad()
    def __init__(self, model: HSAForCausalLM, ids: Tensor, marks: Sequence[bool] = ()) -> None:
        super().__init__(model.config)
        c = self.config
        lengths, closed = chunk_lengths(marks or [False] * len(ids), c.chunk_size)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.ends = ends if closed else ends[:-1]  # of the chunks that are closed
        x = model.embed_tokens(ids)
        for layer in model.lower_layers:
            x = self.window_layer(layer, x)
        memory = [self.encode(model, x[a:b]) for a, b in zip([0, *self.ends], self.ends, strict=False)]
        self.retrieval: list[list[list[list[int]]]] = []  # group, token, head that chooses: chunks
        self.weights: list[list[list[list[float]]]] = []
        per_group = len(model.upper_layers) // c.num_retrieval_groups
        for group in range(c.num_retrieval_groups):
            if c.num_retrieved_chunks:
                self.choose(model.retrievers[group], x, memory)
            x = self.read(model.readers[group], x, memory)
            for layer in model.upper_layers[group * per_group : (group + 1) * per_group]:
                x = self.window_layer(layer, x)
        self.logits = model.lm_head(self.norm(model.norm, x) * c.logit_scale)

    def encode(self, model: HSAForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States [n, E] of a chunk -> keys and values [n, J, D], and the landmark vector of each head that chooses."""
        c, encoder = self.config, model.encoder
        place = torch.tensor([*range(len(rows)), c.chunk_size])
        x = self.encoded(encoder, torch.cat([rows, encoder.landmark[None]]), place)
        k, v = encoder.kv_proj(x[:-1]).unflatten(-1, (2, c.num_memory_heads, c.head_dim)).unbind(1)
        summary = x[-1] if c.chunk_summary == "landmark" else x[:-1].mean(0)
        return self.normal(encoder.k_norm, k), v, self.side(encoder.landmark_proj(summary))

    def side(self, x: Tensor) -> Tensor:
        """One side of a score [J, d / J]."""
        x = x.unflatten(-1, (self.config.num_retrieval_heads, -1))
        return self.unit(x) if self.config.retrieval_normalization else x

    def normal(self, norm: Any, x: Tensor) -> Tensor:
        """Queries or keys [n, heads, D] through their norm."""
        if norm is None:
            return x
        return (
            self.rms(norm, x) if self.config.qk_norm == "head" else self.rms(norm, x.flatten(1)).view(x.shape)
        )

    def choose(self, retriever: Any, x: Tensor, memory: list[Any]) -> None:
        c = self.config
        chosen, weights = list[list[list[int]]](), list[list[list[float]]]()
        scale = c.retrieval_scale * (c.retrieval_size / c.num_retrieval_heads) ** -0.5
        for t, state in enumerate(x):
            query = self.side(retriever.q_proj(self.norm(retriever.norm, state)))
            chosen.append([])
            weights.append([])
            for head in range(c.num_retrieval_heads):
                score = {
                    m: float(query[head] @ memory[m][2][head]) * scale
                    for m, end in enumerate(self.ends)
                    if end <= t
                }
                best = sorted(sorted(score, key=lambda m: -score[m])[: c.num_retrieved_chunks])
                chosen[-1].append(best)
                weights[-1].append(self.weights_of(retriever, [score[m] for m in best]))
        self.retrieval.append(chosen)
        self.weights.append(weights)

    def weights_of(self, retriever: Any, scores: list[float]) -> list[float]:
        """Of chunks whose last is the most recent."""
        if self.config.chunk_weights == "softmax":
            decay = float(retriever.decay) if self.config.recency_decay else 0.0
            grown = [math.exp(r + decay * age) for age, r in enumerate(reversed(scores))]
            return [x / sum(grown) for x in reversed(grown)]
        left, weights = 1.0, []
        for r in reversed(scores):
            share = 1 / (1 + math.exp(-r))
            weights.append(left * share)
            left *= 1 - share
        return weights[::-1]

    def read(self, layer: Any, x: Tensor, memory: list[Any]) -> Tensor:
        c = self.config
        q = layer.q_proj(self.norm(layer.attention_norm, x)).unflatten(-1, (-1, c.head_dim))
        q = self.normal(layer.q_norm, q)
        found = torch.zeros_like(q)
        for t in range(len(x) if self.retrieval else 0):
            for h in range(c.num_attention_heads):
                j = h * c.num_memory_heads // c.num_attention_heads
                chooser = 0 if c.num_retrieval_heads == 1 else j
                pairs = zip(self.retrieval[-1][t][chooser], self.weights[-1][t][chooser], strict=True)
                for m, weight in pairs:
                    k, v = memory[m][0][:, j], memory[m][1][:, j]
                    grown = (k @ q[t, h] * c.head_dim**-0.5).exp()
                    found[t, h] += weight * (grown @ v) / (grown.sum() + c.softmax_off_by_one)
        read = layer.o_proj(found.flatten(1))
        if c.residual_gca:
            x = x + read
            return x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
        return x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x + read))
