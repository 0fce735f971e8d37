"""The Block-Recurrent Transformer from its equations: one text, token by token and block by block.

Nothing of the model but its weights is used: loops over tokens, heads and states, matrices cut out of the fused ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trailmark.models import BlockRecurrentForCausalLM


class NaiveBlockRecurrent:
    """One text [T]: ``logits`` [T, V], and ``states`` [M, E] of each block, S_0 first."""

    @torch.no_grad()
    def __init__(self, model: BlockRecurrentForCausalLM, ids: Tensor) -> None:
        self.config = c = model.config
        self.weights = dict(model.state_dict())
        x = self.weights["embed_tokens.weight"][ids]  # [T, E]
        assert c.recurrent_layer is not None
        for number in range(c.num_hidden_layers):
            if number + 1 < c.recurrent_layer:
                x = self.layer(x, f"lower_layers.{number}.")
            elif number + 1 == c.recurrent_layer:
                x = self.layer(x, "recurrent_layer.")
            else:
                x = self.layer(x, f"upper_layers.{number - c.recurrent_layer}.")
        self.logits = self.norm(x, "norm") * c.logit_scale @ self.weights["lm_head.weight"].T

    def layer(self, x: Tensor, name: str) -> Tensor:
        c, E = self.config, self.config.hidden_size
        D, J = c.head_dim, c.num_key_value_heads
        assert J is not None
        recurrent = name == "recurrent_layer."
        queries = [E, E] if recurrent else [E]
        normal = self.norm(x, name + "attention_norm")
        parts = self.weights[name + "attention.qkv_proj.weight"].split([*queries, J * D, J * D])
        *q, k, v = (normal @ part.T for part in parts)
        found = [self.window(q[0], k, v)]
        if recurrent:
            found.append(self.recur(q[1], k, v))
        x = x + torch.cat(found, dim=-1) @ self.weights[name + "attention.o_proj.weight"].T
        normal = self.norm(x, name + "mlp_norm")
        gate, up = (normal @ w.T for w in self.weights[name + "mlp.gate_up_proj.weight"].chunk(2))
        return x + (gate * torch.sigmoid(gate) * up) @ self.weights[name + "mlp.down_proj.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[name + ".weight"]

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Self-attention [T, E] over the last W tokens, the own one included."""
        c, rows = self.config, []
        assert c.sliding_window is not None
        for t in range(len(q)):
            first = max(0, t - c.sliding_window + 1)
            sinks = list(range(min(c.num_sinks, first)))
            seen = [*sinks, *range(first, t + 1)]
            # a sink is turned on by as much as the query stands beyond the furthest that it is scored from
            beyond = 0 if c.max_sink_distance is None else max(0, t - c.max_sink_distance)
            places = [p + beyond * (p < first) for p in seen]
            rows.append(self.attend(q[t], k[seen], v[seen], t, places))
        return torch.stack(rows)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, place: int | None = None, seen: list[int] | None = None
    ) -> Tensor:
        """One query [E] to keys and values [p, J * D]; with places, as the window tells them apart."""
        c, heads = self.config, []
        D, H, J = c.head_dim, c.num_attention_heads, c.num_key_value_heads
        assert J is not None
        for h in range(H):
            j = h // (H // J)
            query, keys = q[h * D : (h + 1) * D], k[:, j * D : (j + 1) * D]
            bias = torch.zeros(len(keys), dtype=q.dtype)
            if seen is not None:
                assert place is not None
                if c.window_position == "rope":
                    query = self.turned(query, place)
                    keys = torch.stack([self.turned(key, p) for key, p in zip(keys, seen, strict=True)])
                else:
                    bias = 2.0 ** (-8 * (h + 1) / H) * (torch.tensor(seen, dtype=q.dtype) - place)
            weight = (keys @ query / D**0.5 + bias).exp()
            heads.append(weight / weight.sum() @ v[:, j * D : (j + 1) * D])
        return torch.cat(heads)

    def turned(self, x: Tensor, place: int) -> Tensor:
        out, D = [], len(x)
        for i in range(0, D, 2):
            angle = place * self.config.rope_theta ** (-i / D)
            out += [x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)]
            out += [x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)]
        return torch.stack(out)

    def recur(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What tokens [T] read in the states of their block, [T, E]; full blocks write the next states."""
        S, rows = self.config.block_size, []
        assert S is not None
        self.states = [self.weight("initial.weight")]
        for first in range(0, len(q), S):
            keys, values = self.of_states(self.states[-1])
            rows += [self.attend(query, keys, values) for query in q[first : first + S]]
            if first + S <= len(q):
                self.states.append(self.written(k[first : first + S], v[first : first + S]))
        return torch.stack(rows)

    def weight(self, name: str) -> Tensor:
        return self.weights["recurrent_layer.states." + name]

    def normal(self, states: Tensor) -> Tensor:
        return self.norm(states, "recurrent_layer.states.norm") + self.weight("places.weight")

    def of_states(self, states: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.weight("kv_proj.weight").chunk(2)
        return self.normal(states) @ key.T, self.normal(states) @ value.T

    def written(self, k: Tensor, v: Tensor) -> Tensor:
        """The states [M, E] after a block of keys and values [S, J * D]."""
        new, (keys, values) = [], self.of_states(self.states[-1])
        to_states, to_tokens = self.weight("q_proj.weight").chunk(2)
        gate = self.weight("gate")
        for state, normal in zip(self.states[-1], self.normal(self.states[-1]), strict=True):
            h = torch.cat(
                [self.attend(to_states @ normal, keys, values), self.attend(to_tokens @ normal, k, v)]
            )
            z = self.weight("update_proj.weight") @ h
            if self.config.state_gate == "fixed":
                new.append(torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * z)
                continue
            (f, i), (b_f, b_i) = self.weight("gate_proj.weight").chunk(2), gate.chunk(2)
            forget, add = torch.sigmoid(f @ h + b_f + 1), torch.sigmoid(i @ h + b_i - 1)
            new.append(forget * state + add * torch.tanh(z))
        return torch.stack(new)
