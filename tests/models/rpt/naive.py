"""RPT written naively, one text at a time, from its equations: loops over chunks and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.models.naive import Naive
from trailmark.models import RPTForCausalLM

Rows = tuple[Tensor, Tensor]  # of a neighbour [n, E], and their places [n]


class NaiveRPT(Naive):
    """One text [T]: ``logits`` [T, V]; of each closed chunk ``retrieval``, and the ``scores`` of its candidates.

    Args:
        lengths: tokens of each chunk; None: S, the last the rest. The last one is closed if it is full or ``close``.
        neighbours: chunks to read for each closed chunk, instead of a search.
        vector: of the tokens of a chunk, what an encoder makes of them: it asks with the first, is found by the second.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: RPTForCausalLM,
        ids: Tensor,
        lengths: Sequence[int] | None = None,
        close: bool = False,
        neighbours: Sequence[Sequence[int]] | None = None,
        vector: Callable[[list[int]], tuple[list[float], list[float]]] | None = None,
    ) -> None:
        super().__init__(model.config)
        c, S, T = self.config, self.config.chunk_size, len(ids)
        lengths = lengths or [min(S, T - first) for first in range(0, T, S)]
        assert sum(lengths) == T
        chunks, first = [], 0  # the tokens of each chunk
        for n in lengths:
            chunks.append(list(range(first, first + n)))
            first += n
        closed = chunks if close or lengths[-1] == S else chunks[:-1]
        x = model.embed_tokens(ids)
        for layer in model.lower_layers:
            x = self.window_layer(layer, x)
        kept = [self.encode(model.encoder, x[chunk]) for chunk in closed]
        asks: list[Any] = []  # of each closed chunk, the vectors that it asks with and is found by
        if vector is not None:
            asks = [
                [torch.tensor(part, dtype=x.dtype) for part in vector(ids[chunk].tolist())]
                for chunk in closed
            ]
        elif neighbours is None:
            asks = [self.vectors(model.retriever, x[chunk]) for chunk in closed]
        self.retrieval: list[list[int]] = []
        self.scores: list[dict[int, float]] = []
        for n, chunk in enumerate(closed):
            if neighbours is not None:
                self.retrieval.append([m for m in neighbours[n] if m >= 0])
                continue
            last_reader = chunk[-1] + S - 1
            seen_from = last_reader - (c.sliding_window - 1)
            candidates = [m for m in range(n) if not c.exclude_visible_chunks or chunks[m][0] < seen_from]
            factor = 1.0 if vector else c.hidden_size**-0.5
            score = {m: float(asks[n][0] @ asks[m][1]) * factor for m in candidates}
            self.scores.append(score)
            best = sorted(candidates, key=lambda m: -score[m])[: c.num_retrieved_chunks]
            self.retrieval.append(sorted(best))
        found: list[list[Rows]] = []  # what the readers of each closed chunk see
        for n, chosen in enumerate(self.retrieval):
            found.append([])
            for m in chosen:
                rows, place = kept[m], torch.arange(len(kept[m]))
                if c.continuation:
                    rows = torch.cat([rows, kept[m + 1]])
                    place = torch.cat([place, S + torch.arange(len(kept[m + 1]))])
                found[-1].append((self.prepared(model, rows, place, kept[n]), place))
        # what each token reads, and from which place: of the last chunk that ended at it or before it
        reads: list[tuple[list[Rows], int]] = []
        for n, chunk in enumerate(chunks):
            for i, t in enumerate(chunk):
                if n < len(closed) and t == chunk[-1]:
                    reads.append((found[n], S - 1))
                else:
                    reads.append((found[n - 1] if n else [], S + i))
        for number, layer in enumerate(model.upper_layers):
            x = x + self.window_attention(layer.attention, self.norm(layer.attention_norm, x))
            if number % c.cross_attention_every == 0:
                h = self.norm(layer.cca_norm, x)
                x = x + torch.stack(
                    [self.read(layer.cca, h[t], *of_token) for t, of_token in enumerate(reads)]
                )
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
        self.logits = model.lm_head(self.norm(model.norm, x) * c.logit_scale)

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[n, heads, D] each."""
        return x.unflatten(-1, (parts, -1, self.config.head_dim)).unbind(1)

    def null_of(self, module: Any) -> tuple[Tensor, ...]:
        """Its null key and value [1, J, D]."""
        return self.split(torch.cat([module.null_k, module.null_v])[None], 2)

    def inside(self, attention: Any, x: Tensor, place: Tensor, null: Sequence[Tensor] = ()) -> Tensor:
        """Every row sees every row, and the null key."""
        q, k, v = self.heads(attention, x)
        q, k = self.rotate(q, place), self.rotate(k, place)
        if null:
            k, v = (torch.cat(pair) for pair in zip(null, (k, v), strict=True))
        return attention.o_proj(self.attend(q, k, v, torch.zeros(1)))

    def encode(self, encoder: Any, x: Tensor) -> Tensor:
        x = self.norm(encoder.input_norm, x)
        for layer in encoder.layers:
            x = x + self.inside(layer.attention, self.norm(layer.attention_norm, x), torch.arange(len(x)))
            x = x + self.mlp(layer.mlp, self.norm(layer.mlp_norm, x))
        return self.norm(encoder.output_norm, x)

    def vectors(self, retriever: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        normal = self.norm(retriever.attention_norm, x)
        u = (x + self.inside(retriever, normal, torch.arange(len(x)), self.null_of(retriever))).mean(0)
        asking = retriever.q_proj(self.norm(retriever.query_norm, u))
        return asking, retriever.k_proj(self.norm(retriever.key_norm, u))

    def prepared(self, model: Any, rows: Tensor, place: Tensor, asking: Tensor) -> Tensor:
        if self.config.neighbour_augmentation:
            own = model.augmentor
            rows = rows + self.inside(own.attention, self.norm(own.attention_norm, rows), place)
            (q,) = self.split(own.q_proj(self.norm(own.query_norm, rows)), 1)
            k, v = self.split(own.kv_proj(self.norm(own.chunk_norm, asking)), 2)
            rows = rows + own.o_proj(self.attend(q, k, v, torch.zeros(1)))
        if self.config.neighbour_gate:
            own = model.gate
            w = own.gate_proj(self.norm(own.norm, rows.mean(0) + own.chunk_proj(asking.mean(0))))
            rows = rows * (0.1 + 0.9 * torch.sigmoid(w / self.config.hidden_size))
        return rows

    def read(self, cca: Any, h: Tensor, found: list[Rows], place: int) -> Tensor:
        """One token's h [E] at its place reads all rows of all its neighbours, and the null key."""
        (q,) = self.split(cca.q_proj(h[None]), 1)
        keys, values = ([x] for x in self.null_of(cca))
        for rows, places in found:
            k, v = self.split(cca.kv_proj(rows), 2)
            keys.append(self.rotate(k, places))
            values.append(v)
        q = self.rotate(q, torch.tensor([place]))
        return cca.o_proj(self.attend(q, torch.cat(keys), torch.cat(values), torch.zeros(1)))[0]
