"""RPT from its equations: one text, token by token. Nothing of the model is used but its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trailmark.models import RPTForCausalLM


class NaiveRPT:
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
        self.config = c = model.config
        self.weights = dict(model.state_dict())
        S, T = c.chunk_size, len(ids)
        lengths = lengths or [min(S, T - first) for first in range(0, T, S)]
        assert sum(lengths) == T
        chunks, first = [], 0  # the tokens of each chunk
        for n in lengths:
            chunks.append(list(range(first, first + n)))
            first += n
        closed = chunks if close or lengths[-1] == S else chunks[:-1]

        x = self.weights["embed_tokens.weight"][ids]
        assert c.num_lower_layers is not None
        for number in range(c.num_lower_layers):
            x = self.window_layer(x, f"lower_layers.{number}.")
        kept = [self.encoded(x[chunk]) for chunk in closed]
        asks: list[tuple[Tensor, Tensor]] = []
        if neighbours is None:
            for chunk in closed:
                asks.append(
                    tuple(torch.tensor(part, dtype=x.dtype) for part in vector([int(ids[t]) for t in chunk]))  # type: ignore[arg-type]
                    if vector
                    else self.vectors(x[chunk])
                )
        self.retrieval: list[list[int]] = []
        self.scores: list[dict[int, float]] = []
        for n, chunk in enumerate(closed):
            if neighbours is not None:
                self.retrieval.append([m for m in neighbours[n] if m >= 0])
                continue
            last_reader = chunk[-1] + S - 1
            assert c.sliding_window is not None
            seen_from = last_reader - (c.sliding_window - 1)
            candidates = [m for m in range(n) if not c.exclude_visible_chunks or chunks[m][0] < seen_from]
            factor = 1.0 if vector else c.hidden_size**-0.5
            score = {m: float(asks[n][0] @ asks[m][1]) * factor for m in candidates}
            self.scores.append(score)
            self.retrieval.append(
                sorted(sorted(candidates, key=lambda m: -score[m])[: c.num_retrieved_chunks])
            )
        # what each closed chunk's readers see: rows and their places
        found: list[list[tuple[Tensor, list[int]]]] = []
        for n in range(len(closed)):
            found.append([])
            for m in self.retrieval[n]:
                rows, places = [kept[m]], list(range(len(kept[m])))
                if c.continuation:
                    rows.append(kept[m + 1])
                    places += [S + i for i in range(len(kept[m + 1]))]
                found[-1].append((self.prepared(torch.cat(rows), places, kept[n]), places))
        # what each token reads: of the last chunk that ended at it or before it
        reads: list[tuple[int, int]] = []
        for t in range(T):
            own = next(n for n, chunk in enumerate(chunks) if t in chunk)
            if own < len(closed) and t == chunks[own][-1]:
                reads.append((own, S - 1))
            else:
                reads.append((own - 1, S + chunks[own].index(t)))
        for number in range(c.num_upper_layers):
            name = f"upper_layers.{number}."
            x = x + self.window(self.norm(x, name + "attention_norm"), name + "attention.")
            if number % c.cross_attention_every == 0:
                h = self.norm(x, name + "cca_norm")
                x = x + torch.stack(
                    [
                        self.read(h[t], place, found[n] if n >= 0 else [], name + "cca.")
                        for t, (n, place) in enumerate(reads)
                    ]
                )
            x = x + self.mlp(self.norm(x, name + "mlp_norm"), name + "mlp.")
        self.logits = self.norm(x, "norm") * c.logit_scale @ self.weights["lm_head.weight"].T

    # --- parts -----------------------------------------------------------------------------------------------

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = sum(x[..., i] ** 2 for i in range(x.shape[-1])) / x.shape[-1]
        return x / torch.sqrt(mean + self.config.rms_norm_eps)[..., None] * self.weights[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[name + ".weight"].T
        return out + self.weights[name + ".bias"] if name + ".bias" in self.weights else out

    def mlp(self, x: Tensor, name: str) -> Tensor:
        both = self.linear(x, name + "gate_up_proj")
        n = self.config.intermediate_size
        gate, up = both[:, :n], both[:, n:]
        return self.linear(gate / (1 + torch.exp(-gate)) * up, name + "down_proj")

    def parts(self, x: Tensor, name: str, heads: Sequence[int]) -> list[Tensor]:
        """x [T, E] through a fused projection: [T, heads, D] each."""
        D, out = self.config.head_dim, self.linear(x, name)
        ends = [sum(heads[: i + 1]) * D for i in range(len(heads))]
        return [out[:, end - n * D : end].reshape(len(x), n, D) for n, end in zip(heads, ends, strict=True)]

    def turn(self, x: Tensor, place: int) -> Tensor:
        """[heads, D]: pairs (2i, 2i + 1) turned by place * theta ** (-2i / D)."""
        out, D = x.clone(), x.shape[-1]
        for i in range(0, D, 2):
            angle = place * self.config.rope_theta ** (-i / D)
            cos, sin = math.cos(angle), math.sin(angle)
            out[:, i] = cos * x[:, i] - sin * x[:, i + 1]
            out[:, i + 1] = sin * x[:, i] + cos * x[:, i + 1]
        return out

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], bias: Sequence[float]) -> Tensor:
        """One query [H, D], keys and values [J, D] each: [H * D]."""
        (H, D), J = q.shape, keys[0].shape[0]
        out = []
        for h in range(H):
            j = h // (H // J)
            score = torch.stack(
                [q[h] @ key[j] * D**-0.5 - self.slope(h) * b for key, b in zip(keys, bias, strict=True)]
            )
            weight = torch.exp(score - score.max())
            out.append(
                sum(w * value[j] for w, value in zip(weight / weight.sum(), values, strict=True))
                + torch.zeros_like(q[h])
            )
        return torch.cat(out)

    def slope(self, head: int) -> float:
        return 2.0 ** (-8 * (head + 1) / self.config.num_attention_heads)

    @property
    def heads(self) -> tuple[int, int, int]:
        J = self.config.num_key_value_heads
        assert J is not None
        return self.config.num_attention_heads, J, J

    def window_layer(self, x: Tensor, name: str) -> Tensor:
        x = x + self.window(self.norm(x, name + "attention_norm"), name + "attention.")
        return x + self.mlp(self.norm(x, name + "mlp_norm"), name + "mlp.")

    def window(self, x: Tensor, name: str) -> Tensor:
        """A true window: a token sees itself and the W - 1 before it, wherever chunks end."""
        c, W = self.config, self.config.sliding_window
        assert W is not None
        q, k, v = self.parts(x, name + "qkv_proj", self.heads)
        out = []
        for t in range(len(x)):
            first = max(0, t - W + 1)
            seen = [*range(min(c.num_sinks, first)), *range(first, t + 1)]
            beyond = 0 if c.max_sink_distance is None else max(0, t - c.max_sink_distance)
            if c.window_position == "rope":
                keys = [self.turn(k[p], p + beyond * (p < first)) for p in seen]
                query, bias = self.turn(q[t], t), [0.0] * len(seen)
            else:
                keys, query, bias = [k[p] for p in seen], q[t], [float(t - p) for p in seen]
            out.append(self.attend(query, keys, [v[p] for p in seen], bias))
        return self.linear(torch.stack(out), name + "o_proj")

    def inside(
        self, x: Tensor, places: Sequence[int], name: str, null: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Every row sees every row, and the null key."""
        q, k, v = self.parts(x, name + "qkv_proj", self.heads)
        keys, values = [self.turn(key, p) for key, p in zip(k, places, strict=True)], list(v)
        if null is not None:
            keys, values = [null[0], *keys], [null[1], *values]
        out = [
            self.attend(self.turn(query, p), keys, values, [0.0] * len(keys))
            for query, p in zip(q, places, strict=True)
        ]
        return self.linear(torch.stack(out), name + "o_proj")

    def null(self, name: str) -> tuple[Tensor, Tensor]:
        D = self.config.head_dim
        return self.weights[name + "null_k"].view(-1, D), self.weights[name + "null_v"].view(-1, D)

    def encoded(self, x: Tensor) -> Tensor:
        x = self.norm(x, "encoder.input_norm")
        for number in range(self.config.num_encoder_layers):
            name = f"encoder.layers.{number}."
            x = x + self.inside(self.norm(x, name + "attention_norm"), range(len(x)), name + "attention.")
            x = x + self.mlp(self.norm(x, name + "mlp_norm"), name + "mlp.")
        return self.norm(x, "encoder.output_norm")

    def vectors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        name = "retriever."
        normal = self.norm(x, name + "attention_norm")
        u = (x + self.inside(normal, range(len(x)), name, self.null(name))).mean(0)
        return (
            self.linear(self.norm(u, name + "query_norm"), name + "q_proj"),
            self.linear(self.norm(u, name + "key_norm"), name + "k_proj"),
        )

    def prepared(self, rows: Tensor, places: Sequence[int], asking: Tensor) -> Tensor:
        c = self.config
        if c.neighbour_augmentation:
            name = "augmentor."
            rows = rows + self.inside(self.norm(rows, name + "attention_norm"), places, name + "attention.")
            (q,) = self.parts(self.norm(rows, name + "query_norm"), name + "q_proj", self.heads[:1])
            k, v = self.parts(self.norm(asking, name + "chunk_norm"), name + "kv_proj", self.heads[1:])
            out = [self.attend(query, list(k), list(v), [0.0] * len(k)) for query in q]
            rows = rows + self.linear(torch.stack(out), name + "o_proj")
        if c.neighbour_gate:
            pooled = rows.mean(0) + self.linear(asking.mean(0), "gate.chunk_proj")
            w = self.linear(self.norm(pooled, "gate.norm"), "gate.gate_proj")
            rows = rows * (0.1 + 0.9 / (1 + torch.exp(-w / c.hidden_size)))
        return rows

    def read(self, h: Tensor, place: int, found: list[tuple[Tensor, list[int]]], name: str) -> Tensor:
        """One token's h [E] at its place reads all rows of all its neighbours, and the null key."""
        (q,) = self.parts(h[None], name + "q_proj", self.heads[:1])
        null_k, null_v = self.null(name)
        keys, values = [null_k], [null_v]
        for rows, places in found:
            k, v = self.parts(rows, name + "kv_proj", self.heads[1:])
            keys += [self.turn(key, p) for key, p in zip(k, places, strict=True)]
            values += list(v)
        out = self.attend(self.turn(q[0], place), keys, values, [0.0] * len(keys))
        return self.linear(out, name + "o_proj")
