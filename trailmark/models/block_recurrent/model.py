"""The Block-Recurrent Transformer (arXiv 2203.07852): one layer reads states that it writes block by block.

Lower layers -> the recurrent layer -> upper layers. Blocks are the chunks of a grid without landmarks. The tokens of
block n read the states S_n; once the block is full, S_n and its tokens make S_{n+1}. Only this chain of M vectors
runs block after block: all tokens of a call read at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory import ChunkCache, Window
from trailmark.memory.schema import Expected
from trailmark.models.answers import CardFacts
from trailmark.models.block_recurrent.config import BlockRecurrentConfig
from trailmark.models.context_parallel import Stretch
from trailmark.models.costs import CacheBytes, NumberBytes, kv_width, window_slots
from trailmark.models.grid import Grid, Layouts
from trailmark.models.layered import LayeredForCausalLM
from trailmark.models.layers import MLP, Place, RMSNorm, WindowAttention, WindowLayer, fused_linear
from trailmark.models.step import Step
from trailmark.models.text import Text
from trailmark.ops import block_attention


class RecurrentAttention(WindowAttention):
    """Projections of the tokens: two queries, one for the window and one for the states, and a key and a value."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        E, (_, J, _) = config.hidden_size, self.sizes
        self.parts = (E, E, 2 * J * self.head_dim)
        self.qkv_proj = fused_linear(E, (E, E, J * self.head_dim, J * self.head_dim))
        self.o_proj = nn.Linear(2 * E, E, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, P, E] -> queries for the window and for the states, each [B, P, H * D], and kv [B, P, 2 * J * D]."""
        own, read, kv = self.qkv_proj(x).split(self.parts, dim=-1)
        return own, read, kv


class RecurrentStates(nn.Module):
    """M states of width E: what they start as, how they are read, and how a block writes them.

    With s = RMSNorm(S) + E_pos and the keys and values K, V of the block's tokens,

        h = [Attn(W_q1 s; W_k s, W_v s) || Attn(W_q2 s; K, V)],  z = W_z h
        "fixed":  S' = g * S + (1 - g) * z,        g = sigmoid(b)
        "lstm":   S' = f * S + i * tanh(z),        f = sigmoid(W_f h + b_f + 1), i = sigmoid(W_i h + b_i - 1)

    Neither positions nor a mask: a state sees all states and all tokens of the block. S and the gates are float32 or
    wider, through autocast too: they are what hundreds of blocks add to.
    """

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        E, self.head_dim = config.hidden_size, config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.is_lstm = config.state_gate == "lstm"
        # tables, not matrices: Muon leaves embeddings to AdamW
        self.initial = nn.Embedding(config.num_states, E)
        self.places = nn.Embedding(config.num_states, E)
        self.norm = RMSNorm(E, config.rms_norm_eps)
        self.kv_proj = fused_linear(E, (keys, keys))
        self.q_proj = fused_linear(E, (E, E))
        self.update_proj = nn.Linear(2 * E, E, bias=False)
        self.gate = nn.Parameter(torch.zeros(2 * E if self.is_lstm else E))
        if self.is_lstm:
            self.gate_proj = fused_linear(2 * E, (E, E))

    def begun(self, rows: int) -> Tensor:
        """S_0 [B, M, E], learned, of a document that begins."""
        initial = self.initial.weight
        return initial.to(torch.promote_types(initial.dtype, torch.float32)).expand(rows, -1, -1)

    def normal(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """s [B, M, E] of S [B, M, E], in the dtype of the tokens."""
        return (self.norm(states) + self.places.weight.to(states.dtype)).to(dtype)

    def forward(self, states: Tensor, normal: Tensor, kv: Tensor, block: Tensor) -> Tensor:
        """S' [B, M, E] from S and s [B, M, E], their kv [B, M, 2 * J * D] and that of a block [B, S, 2 * J * D]."""
        queries = self.q_proj(normal).chunk(2, dim=-1)
        read = [attend(q, seen, self.head_dim) for q, seen in zip(queries, (kv, block), strict=True)]
        h = torch.cat(read, dim=-1)
        z = self.update_proj(h).to(states.dtype)
        if not self.is_lstm:
            kept = torch.sigmoid(self.gate.to(states.dtype))
            return kept * states + (1 - kept) * z
        forget, add = (self.gate_proj(h).to(states.dtype) + self.gate.to(states.dtype)).chunk(2, dim=-1)
        return torch.sigmoid(forget + 1) * states + torch.sigmoid(add - 1) * torch.tanh(z)


def attend(q: Tensor, kv: Tensor, head_dim: int) -> Tensor:
    """Queries [b, c, H * D] to all keys of kv [b, p, 2 * J * D] -> [b, c, H * D]."""
    k, v = kv.unflatten(-1, (2, -1, head_dim)).unbind(2)
    return block_attention(q.unflatten(-1, (-1, head_dim)), k, v, None, head_dim**-0.5).flatten(2)


class RecurrentLayer(GradientCheckpointingLayer):
    """h = x + W_o [window(norm x) || Attn(W_q2 norm x; states)]; y = h + MLP(norm(h)); full blocks write the states."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        self.head_dim, self.block_size = config.head_dim, config.block_size
        self.truncation_blocks = config.truncation_blocks
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = RecurrentAttention(config)
        self.states = RecurrentStates(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # [B, P, E]
        grid: Grid,
        place: Place,
        kept: Window | None = None,
        step: Step | None = None,
    ) -> Tensor:
        own, read, kv = self.attention.project(self.attention_norm(x))
        q = own.unflatten(-1, (-1, self.head_dim))
        k, v = kv.unflatten(-1, (2, -1, self.head_dim)).unbind(2)
        seen = self.attention.attend(q, k, v, place, kept)
        if step is None:
            states = self._of_a_text(kv, grid)
        else:
            states = self._of_a_step(kv, grid, step)
        x = x + self.attention.o_proj(torch.cat([seen, self._read(read, states, grid)], dim=-1))
        return x + self.mlp(self.mlp_norm(x))

    def _read(self, q: Tensor, kv: Tensor, grid: Grid) -> Tensor:
        """What positions find in the states of their block: q [B, P, H * D], kv [B, N, M, 2 * J * D] -> as q."""
        rows = grid.rows(q)  # [B, N * R, H * D]
        read = attend(rows.reshape(-1, grid.rows_per_chunk, rows.shape[2]), kv.flatten(0, 1), self.head_dim)
        return grid.positions(read.view(rows.shape))

    def _of_a_text(self, kv: Tensor, grid: Grid) -> Tensor:
        """Keys and values [B, N, M, 2 * J * D] of the states that each block of a whole text reads.

        From those of the tokens, kv [B, P, 2 * J * D]. What the last block would write is read by none.
        """
        states, last = self.states.begun(len(kv)), grid.num_chunks - 1
        begins = grid.begins_document_on(kv.device)  # [b, N, 1]
        blocks = grid.encoder_rows(kv).unflatten(1, (-1, self.block_size)) if last else kv[:0]
        if not last and torch.is_grad_enabled():  # for its gradients: zeros, which DDP waits for
            normal = self.states.normal(states[:0], kv.dtype)
            states = states + self.states(states[:0], normal, self.states.kv_proj(normal), blocks).sum()
        states_kv = []
        for n in range(last + 1):
            normal = self.states.normal(states, kv.dtype)
            states_kv.append(self.states.kv_proj(normal))
            if n == last:
                break
            # a row that ends before writes what none of its tokens reads
            states = self._truncated(self.states(states, normal, states_kv[n], blocks[:, n]), grid, n + 1)
            if begins is not None:
                states = torch.where(begins[:, n + 1, :, None], self.states.begun(len(kv)), states)
        return torch.stack(states_kv, dim=1)

    def _truncated(self, states: Tensor, grid: Grid, block: int) -> Tensor:
        """The states [B, M, E] that a block reads, without their past where that is cut."""
        n = self.truncation_blocks
        if n is None:
            return states
        if grid.document is None:
            return states if block % n else states.detach()
        cut = torch.from_numpy((block - grid.first_chunks[:, block]) % n == 0).to(states.device)
        return torch.where(cut[:, None, None], states.detach(), states)

    def _of_a_step(self, kv: Tensor, grid: Grid, step: Step) -> Tensor:
        """The same of what a call adds to a text; the states are carried on by blocks that it completes."""
        B, C = len(kv), grid.num_closed
        if step.states is None:
            states = self.states.begun(B)
            of_states = self.states.kv_proj(self.states.normal(states, kv.dtype))
        else:
            assert step.state_kv is not None
            states, of_states = step.states, step.state_kv
        states_kv = [of_states]
        if C:
            blocks = grid.encoder_rows(step.with_open(kv)).unflatten(1, (-1, self.block_size))
            closes = None if (grid.closed == C).all() else grid.lengths_on(kv.device) > 0  # [b, C]
            normal = self.states.normal(states, kv.dtype)
            for n in range(C):
                written = self.states(states, normal, states_kv[n], blocks[:, n])
                states = written if closes is None else torch.where(closes[:, n, None, None], written, states)
                normal = self.states.normal(states, kv.dtype)
                states_kv.append(self.states.kv_proj(normal))
        if C or step.states is None:
            step.keep_states(states, states_kv[-1])
        step.keep_open(kv)
        states_kv = states_kv[: grid.num_chunks]
        return torch.stack(states_kv, dim=1) if len(states_kv) > 1 else states_kv[0][:, None]


class BlockRecurrentForCausalLM(LayeredForCausalLM):
    """Layers with a sliding window, one of them recurrent, with a language-modelling head.

    Early landmarks (``close_chunk``) mean nothing here: a block ends when it is full. A partial block writes nothing.
    """

    config_class = BlockRecurrentConfig
    config: BlockRecurrentConfig
    _no_split_modules = ["WindowLayer", "RecurrentLayer"]
    additions = ("recurrent_layer.*",)

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        lower = config.recurrent_layer - 1
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lower_layers = nn.ModuleList(WindowLayer(config) for _ in range(lower))
        self.recurrent_layer = RecurrentLayer(config)
        self.upper_layers = nn.ModuleList(
            WindowLayer(config) for _ in range(config.num_hidden_layers - lower - 1)
        )
        self._finish(RMSNorm(config.hidden_size, config.rms_norm_eps))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RecurrentStates):  # after its parts
            init.normal_(module.initial.weight, std=0.1)
            init.normal_(module.places.weight, std=1.0)  # of the size of the states after their norm
            if module.is_lstm:
                init.zeros_(module.gate)
            else:
                init.normal_(module.gate, std=0.1)

    def _run_lower(self, x: Tensor, grid: Grid, place: Place, step: Step | Stretch | None) -> Tensor:
        assert not isinstance(step, Stretch), "states go from block to block: no text is shared"
        x = super()._run_lower(x, grid, place, step)
        out: Tensor = self.recurrent_layer(x, grid, place, step and step.window(len(self.lower_layers)), step)
        return out

    def reach(self) -> int:
        """Positions before a token that can change its prediction through the upper layers."""
        assert self.config.sliding_window is not None
        return len(self.upper_layers) * (self.config.sliding_window - 1)

    # --- blocks, where others have chunks ---------------------------------------------------------------------

    def _expected_state(self) -> Expected:
        expected, config = super()._expected_state(), self.config
        kv = 2 * config.num_key_value_heads * config.head_dim
        sizes = {**expected.sizes, "N": config.num_states, "OE": kv}
        return expected._replace(sizes=sizes, kept=("open_states", "states", "state_kv"))

    def _piece_size(self) -> int:
        return self.config.block_size

    def _layouts(self) -> Layouts:
        return Layouts(self.config.block_size, landmarks=False)

    def _lay_out(self, text: Text, cache: ChunkCache | None, noise_seed: Tensor | None = None) -> Grid:
        return super()._lay_out(replace(text, close_chunk=False), cache)

    # --- answers ----------------------------------------------------------------------------------------------

    @property
    def can_be_planted(self) -> bool:
        """The states depend on all of the text before them."""
        return False

    def chunks_in_sight(self, chunk_size: int) -> int:
        assert self.config.sliding_window is not None
        # its own reach is that of the upper layers: what is below has to be read
        return -(-self.config.num_hidden_layers * (self.config.sliding_window - 1) // chunk_size)

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        config, number, kv = self.config, NumberBytes.of(self, memory_dtype), kv_width(self.config)
        assert config.sliding_window is not None
        return CacheBytes(
            window=config.num_hidden_layers * window_slots(config) * kv * number.own,
            open_chunk=config.block_size * kv * number.own,
            states=config.num_states * (config.hidden_size * number.wide + kv * number.own),
        )

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        E, M, S = self.config.hidden_size, self.config.num_states, self.config.block_size
        blocks = (length - 1) // S  # the last writes nothing
        states = 2 * E * (length * M + blocks * (M * M + M * S))
        return super().attention_multiply_adds(length) | {"states": states}

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        return CardFacts(
            "Block-Recurrent Transformer",
            "One layer reads and writes a fixed number of states, block by block.",
            (("Block-Recurrent Transformers", "2203.07852"),),
        )
