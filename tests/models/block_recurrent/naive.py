"""The Block-Recurrent Transformer written naively, one text at a time, from its equations: block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.naive import Naive
from trailmark.models import BlockRecurrentForCausalLM


class NaiveBlockRecurrent(Naive):
    """One text [T]: ``logits`` [T, V], and ``states`` [M, E] of each block, S_0 first."""

    @torch.no_grad()
    def __init__(self, model: BlockRecurrentForCausalLM, ids: Tensor) -> None:
        super().__init__(model.config)
        self.recurrent = model.recurrent_layer.states
        x = model.embed_tokens(ids)
        for layer in (*model.lower_layers, model.recurrent_layer, *model.upper_layers):
            x = self.window_layer(layer, x)
        self.logits = model.lm_head(self.norm(model.norm, x) * self.config.logit_scale)

    def window_attention(self, attention: Any, x: Tensor, number: int = 0) -> Tensor:
        _, *asking, k, v = self.projected(attention, x)
        _, scores, _ = self.look(attention, x)
        found = [self.weigh(scores, v), *(self.recur(q, k, v) for q in asking)]
        return attention.o_proj(torch.cat(found, dim=-1))

    def heads(self, attention: Any, x: Tensor) -> list[Tensor]:
        own, *_, k, v = self.projected(attention, x)
        return [own, k, v]

    def projected(self, attention: Any, x: Tensor) -> list[Tensor]:
        """[T, heads, D]: queries, in the recurrent layer those that ask its states too, keys and values."""
        E, keys = self.config.hidden_size, self.config.num_key_value_heads * self.config.head_dim
        both = attention.qkv_proj(x)
        queries = [E] * ((both.shape[-1] - 2 * keys) // E)
        return [
            part.unflatten(-1, (-1, self.config.head_dim)) for part in both.split([*queries, keys, keys], -1)
        ]

    def recur(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What tokens read in the states of their block, [T, E]; full blocks write the next states."""
        S, rows = self.config.block_size, []
        self.states = [self.recurrent.initial.weight]
        for first in range(0, len(q), S):
            block = slice(first, first + S)
            rows.append(self.attend(q[block], *self.of_states(self.states[-1]).unbind(1), torch.zeros(1)))
            if first + S <= len(q):
                self.states.append(self.written(k[block], v[block]))
        return torch.cat(rows)

    def normal(self, states: Tensor) -> Tensor:
        return self.norm(self.recurrent.norm, states) + self.recurrent.places.weight

    def of_states(self, states: Tensor) -> Tensor:
        """Their keys and values [M, 2, J, D]."""
        return self.recurrent.kv_proj(self.normal(states)).unflatten(-1, (2, -1, self.config.head_dim))

    def written(self, k: Tensor, v: Tensor) -> Tensor:
        """The states [M, E] after a block of keys and values [S, J, D]."""
        states, own = self.states[-1], self.recurrent
        both = own.q_proj(self.normal(states)).unflatten(-1, (2, -1, self.config.head_dim))
        to_states, to_tokens = both.unbind(1)
        of_states = self.attend(to_states, *self.of_states(states).unbind(1), torch.zeros(1))
        h = torch.cat([of_states, self.attend(to_tokens, k, v, torch.zeros(1))], dim=-1)
        z = own.update_proj(h)
        if self.config.state_gate == "fixed":
            kept = torch.sigmoid(own.gate)
            return kept * states + (1 - kept) * z
        forget, add = (own.gate_proj(h) + own.gate).chunk(2, dim=-1)
        return torch.sigmoid(forget + 1) * states + torch.sigmoid(add - 1) * torch.tanh(z)
