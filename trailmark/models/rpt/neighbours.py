"""Parts of RPT: what is kept of a chunk, how chunks are found, made ready and read.

Shapes: C chunks that close, of S tokens; n neighbours of L rows each, L = S, or 2 S with the chunk after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from trailmark.models.grid import Grid
from trailmark.models.layers import (
    ChunkAttention,
    ChunkEncoderLayer,
    RMSNorm,
    SelfAttention,
    fused_linear,
    rotary_at,
    rotary_table,
    rotate,
)
from trailmark.models.rpt.config import RPTConfig
from trailmark.models.takes import Table
from trailmark.ops import block_attention, chunked_cross_attention


@dataclass(frozen=True, eq=False)
class Readers:
    """Which positions read together: RETRO's shift (arXiv 2112.04426, Sec. 2.4).

    The last token of chunk c and all but the last of chunk c + 1 read what chunk c selected. A document's first
    tokens, and a text's, read the null key alone, up to the last of their first chunk.
    """

    grid: Grid  # its chunks are the groups
    source: Table  # [b, G] the closed chunk whose neighbours a group reads; -1: none, or an earlier call's
    places: Table  # [b, P] of the query's RoPE: S - 1 for a chunk's last token, then S, S + 1, ...

    @classmethod
    def of(cls, grid: Grid) -> Readers:
        """Of the chunks of a layout; made once for each layout, as training asks for the same ones again."""
        if grid not in _READERS:
            _READERS[grid] = cls._made(grid)
        return _READERS[grid]

    @classmethod
    def _made(cls, grid: Grid) -> Readers:
        S = grid.chunk_size
        assert S is not None
        begins = grid.is_landmark.copy()
        if grid.document is not None:
            begins |= (np.diff(grid.document, axis=1, prepend=grid.document[:, :1]) != 0) & (grid.chunk >= 0)
        group = np.where(grid.chunk >= 0, begins.cumsum(1), -1)
        # a second grid for its numbers of rows and its takes; nothing closes in it
        groups = Grid(
            group, np.zeros_like(begins), grid.token, S, np.zeros_like(grid.phases), landmarks=False
        )
        source = np.full((len(group), groups.num_chunks), -1)
        row, place = np.nonzero(grid.is_landmark)
        source[row, group[row, place]] = grid.chunk[row, place]
        places = np.where(grid.is_landmark, S - 1, S + grid.chunk_slots)
        return cls(groups, Table(source), Table(places))

    def reading(
        self,
        config: RPTConfig,
        x: Tensor,  # [B, P, E] any tensor of the call
        indices: Tensor | None,
        rows: Tensor | None = None,
        present: Tensor | None = None,
        kept_k: Tensor | None = None,
        kept_v: Tensor | None = None,
    ) -> Reading:
        """What these readers read of a table; see :class:`Reading`."""
        turn = rotary_at(self.places.on(x.device), config.head_dim, config.rope_theta, x.dtype)
        return Reading(self.grid, turn, indices, kept_k, kept_v, rows, present)

    def nothing(self, config: RPTConfig, x: Tensor) -> Reading:
        """What groups read that have the null key alone."""
        none = torch.zeros(x.shape[0], self.grid.num_chunks, 0, dtype=torch.int64, device=x.device)
        return self.reading(config, x, none)

    def take(self, chosen: Tensor) -> Tensor:
        """What each closed chunk was given, [B, C, K], as its readers need it: [B, G, K]; -1 where none was."""
        B, _, K = chosen.shape
        padded = torch.cat([chosen.new_full((B, 1, K), -1), chosen], dim=1)
        source = self.source.on(chosen.device) + 1
        return padded.gather(1, source.expand(B, -1)[..., None].expand(-1, -1, K))


_READERS: WeakKeyDictionary[Grid, Readers] = WeakKeyDictionary()


class Reading(NamedTuple):
    """What the groups of a call read: K neighbours each, out of a table of M."""

    groups: Grid  # of positions that read together
    turn: Tensor  # [b, P, D / 2, 2] RoPE of their queries
    indices: Tensor | None  # [B, G, K] into the table; -1: nothing. None: the one group reads the whole table
    # the table: keys and values [B, M', L, n J, D] that earlier calls left, of the n layers that read; then rows
    kept_k: Tensor | None
    kept_v: Tensor | None
    rows: Tensor | None  # [B, M - M', L, E]
    present: Tensor | None  # bool [B, M, L] rows that exist; None: all


class NeighbourEncoder(nn.Module):
    """What is kept of a chunk: bidirectional layers over its tokens' lower states, S rows of width E."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__()
        self.config = config
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(ChunkEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows: Tensor, present: Tensor | None) -> Tensor:
        """Lower states [B, C, S, E]; ``present`` bool [B, C, S]: tokens that exist."""
        config = self.config
        rows = self.input_norm(rows)
        rotary = rotary_table(rows.shape[2], config.head_dim, config.rope_theta, rows)
        mask = None if present is None else _additive(present, rotary)
        for layer in self.layers:
            rows = layer(rows, rotary, mask)
        return self.output_norm(rows)


class ChunkRetriever(SelfAttention):
    """RPT's retriever: h + BiAttn(RMSNorm h) inside a chunk, their mean u; W_q RMSNorm_q(u) asks W_k RMSNorm_k(u)."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__(config)
        E, J = config.hidden_size, self.sizes[1]
        self.config = config
        self.attention_norm = RMSNorm(E, config.rms_norm_eps)
        # vectors of J D numbers: no matrices, which Muon would take them for
        self.null_k, self.null_v = (nn.Parameter(torch.zeros(J * self.head_dim)) for _ in range(2))
        self.query_norm, self.key_norm = (RMSNorm(E, config.rms_norm_eps) for _ in range(2))
        self.q_proj, self.k_proj = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, rows: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, C, E] of chunks with lower states [B, C, S, E]."""
        config = self.config
        q, k, v = self.heads(self.attention_norm(rows))
        table = rotary_table(rows.shape[2], config.head_dim, config.rope_theta, rows)
        out = chunked_cross_attention(
            rotate(q, table),
            rotate(k, table),
            v,
            self.null_k.view(-1, self.head_dim).to(k.dtype),
            self.null_v.view(-1, self.head_dim).to(v.dtype),
            present,
            implementation=config.implementation,
        )
        u = _mean(rows + self.o_proj(out.flatten(3)), present)
        return self.q_proj(self.query_norm(u)), self.k_proj(self.key_norm(u))


class NeighbourAugmentor(nn.Module):
    """RPT's augmentation: n <- n + BiAttn(RMSNorm n); n <- n + XAttn(RMSNorm n, RMSNorm of the asking chunk)."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__()
        E, width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.config = config
        self.attention_norm = RMSNorm(E, config.rms_norm_eps)
        self.attention = ChunkAttention(config)
        self.query_norm, self.chunk_norm = (RMSNorm(E, config.rms_norm_eps) for _ in range(2))
        self.q_proj, self.kv_proj = nn.Linear(E, E, bias=False), fused_linear(E, (width, width))
        self.o_proj = nn.Linear(E, E, bias=False)

    def forward(
        self, rows: Tensor, present: Tensor | None, asking: Tensor, asking_present: Tensor | None
    ) -> Tensor:
        """Neighbours [B, C, K, L, E] of chunks with rows ``asking`` [B, C, S, E]; the asking chunk has no places."""
        config, (B, C, K, L, _), D = self.config, rows.shape, self.config.head_dim
        rotary = rotary_table(L, D, config.rope_theta, rows)
        mask = None if present is None else _additive(present, rotary)
        rows = rows + self.attention(self.attention_norm(rows), rotary, mask)
        q = self.q_proj(self.query_norm(rows)).view(B * C, K * L, -1, D)
        k, v = self.kv_proj(self.chunk_norm(asking)).flatten(0, 1).unflatten(-1, (-1, D)).chunk(2, dim=-2)
        mask = None if asking_present is None else _additive(asking_present, rotary)
        out = block_attention(q, k, v, mask, D**-0.5)
        return rows + self.o_proj(out.reshape(rows.shape))


class NeighbourGate(nn.Module):
    """n <- (0.1 + 0.9 sigmoid(w / E)) n, w = W RMSNorm(mean n + V mean(asking chunk)).

    RPT has causal attention over all earlier neighbours instead of V: state that grows with the text, and no end to
    what a gate depends on.
    """

    def __init__(self, config: RPTConfig) -> None:
        super().__init__()
        E = config.hidden_size
        self.chunk_proj = nn.Linear(E, E, bias=False)
        self.norm = RMSNorm(E, config.rms_norm_eps)
        self.gate_proj = nn.Linear(E, 1, bias=False)

    def forward(
        self, rows: Tensor, present: Tensor | None, asking: Tensor, asking_present: Tensor | None
    ) -> Tensor:
        """As :class:`NeighbourAugmentor`."""
        asks = self.chunk_proj(_mean(asking, asking_present))[:, :, None]  # [B, C, 1, E]
        w = self.gate_proj(self.norm(_mean(rows, present) + asks))[..., None]  # [B, C, K, 1, 1]
        return rows * (0.1 + 0.9 * torch.sigmoid(w / rows.shape[-1]))


class ChunkedCrossAttention(nn.Module):
    """Cross-attention of the groups to all their neighbours' rows at once, and to a learned null key."""

    def __init__(self, config: RPTConfig) -> None:
        super().__init__()
        E, J = config.hidden_size, config.num_key_value_heads
        self.config, self.head_dim = config, config.head_dim
        self.q_proj = nn.Linear(E, E, bias=False)
        self.kv_proj = fused_linear(E, (J * self.head_dim,) * 2)
        self.o_proj = nn.Linear(E, E, bias=False)
        self.null_k, self.null_v = (nn.Parameter(torch.zeros(J * self.head_dim)) for _ in range(2))

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, M, L, J, D] of neighbours' rows [B, M, L, E]; keys stand at 0 ... L - 1."""
        k, v = self.kv_proj(rows).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)
        return rotate(k, rotary_table(rows.shape[2], self.head_dim, self.config.rope_theta, rows)), v

    def forward(
        self,
        x: Tensor,  # [B, P, E]
        groups: Grid,
        turn: Tensor,  # [b, P, D / 2, 2]
        indices: Tensor | None,  # the rest as in Reading; keys and values of this layer [B, M', L, J, D]
        kept_k: Tensor | None,
        kept_v: Tensor | None,
        rows: Tensor | None,
        present: Tensor | None,
    ) -> Tensor:
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), turn)
        q = groups.rows(q).unflatten(1, (groups.num_chunks, groups.rows_per_chunk))  # [B, G, R, H, D]
        tables = [] if rows is None else [self.project(rows)]
        if kept_k is not None and kept_v is not None:
            tables = [(kept_k, kept_v), *tables]
        if indices is None:
            keys, values = (x.flatten(1, 2)[:, None] for x in tables[0])
            mask = None if present is None else present.flatten(1)[:, None]
        elif tables:
            k, v = tables[0] if len(tables) == 1 else map(torch.cat, zip(*tables, strict=True), (1, 1))
            keys, values, mask = _gathered(indices, k, v, present)
        else:
            nothing = *q.shape[:2], 0, len(self.null_k) // self.head_dim, self.head_dim
            keys, values, mask = q.new_zeros(nothing), q.new_zeros(nothing), None
        read = chunked_cross_attention(
            q,
            keys,
            values,
            self.null_k.view(-1, self.head_dim).to(keys.dtype),
            self.null_v.view(-1, self.head_dim).to(values.dtype),
            mask,
            implementation=self.config.implementation,
        )
        return self.o_proj(groups.positions(read.flatten(1, 2).flatten(2)))


def _gathered(
    indices: Tensor, k: Tensor, v: Tensor, present: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What each group reads: keys, values [B, G, K L, J, D] and which are seen, bool [B, G, K L]."""
    (B, G, K), (M, L) = indices.shape, k.shape[1:3]
    first = torch.arange(B, device=indices.device)[:, None, None] * M
    flat = (indices.clamp(min=0) + first).flatten()
    keys, values = (x.flatten(0, 1).index_select(0, flat).view(B, G, K * L, *x.shape[3:]) for x in (k, v))
    seen = (indices >= 0)[..., None]
    if present is None:
        seen = seen.expand(B, G, K, L)
    else:
        seen = seen & present.flatten(0, 1).index_select(0, flat).view(B, G, K, L)
    return keys, values, seen.flatten(2)


def _additive(present: Tensor, like: Tensor) -> Tensor:
    """[b, 1, 1, R] for the keys of blocks with bool [..., R]; what has none sees all, since nothing looks at it."""
    present = present.flatten(0, -2)
    present = present | ~present.any(-1, keepdim=True)
    return torch.where(present, 0.0, -torch.inf).to(like)[:, None, None]


def _mean(rows: Tensor, present: Tensor | None) -> Tensor:
    """[..., R, E] -> [..., E] over the rows that exist, in float32 or wider."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if present is None:
        return wide.mean(-2).to(rows.dtype)
    total = wide.masked_fill(~present[..., None], 0).sum(-2)
    return (total / present.sum(-1, keepdim=True).clamp(min=1)).to(rows.dtype)
