"""The blocks that models are made of. Norms, scores and softmax are never below float32 (guarantee 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from trailmark.memory.tables import Integers
from trailmark.memory.window import Window, WindowCall
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.layout import Grid
from trailmark.models.rope import Rope, attention_factor, inverse_frequencies
from trailmark.models.takes import constant
from trailmark.ops import alibi_slopes, block_attention, sliding_window_attention


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps, self.weight)


def rms_normalize(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / rms(x) (* weight) over the last dimension, computed in float32 or wider, in the dtype of x."""
    if torch.is_grad_enabled():
        return _RMSNormalize.apply(x, weight, eps)
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)  # autocast may widen it
    return _rms_forward(x, weight, eps)[0]


def _rms_forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    out = wide * scale
    return (out if weight is None else out.mul_(weight)).to(x.dtype), scale


class _RMSNormalize(torch.autograd.Function):
    """``F.rms_norm`` with a backward of its own: torch differentiates it op by op on a CPU, 3x slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        out, scale = _rms_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        weight_grad = None
        if weight is not None:
            weight_grad = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
            grad = grad * weight
        inner = (grad * normal).mean(-1, keepdim=True)
        return ((grad - normal.mul_(inner)).mul_(scale)).to(x.dtype), weight_grad, None


class LayerNorm(nn.Module):
    """(x - mean) / std * weight over the last dimension, in float32 or wider; no bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, eps=self.eps).to(x.dtype)


def fused_linear(fan_in: int, fan_outs: tuple[int, ...], bias: bool = False) -> nn.Linear:
    """Several matrices that read the same input as one; ``block_rows`` tells the optimizer where they part."""
    linear = nn.Linear(fan_in, sum(fan_outs), bias=bias)
    setattr(linear, "block_rows", fan_outs)  # noqa: B010 - a module's declared attributes are tensors
    return linear


class MLP(nn.Module):
    """SwiGLU: W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, config: TrailmarkConfig) -> None:
        super().__init__()
        self.gate_up_proj = fused_linear(config.hidden_size, (config.intermediate_size,) * 2)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GELUMLP(nn.Module):
    """W_down gelu(W_up x), as GPT-2 has it, without biases."""

    def __init__(self, config: TrailmarkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


def make_norm(config: TrailmarkConfig) -> nn.Module:
    """The norm of what a branch reads, as ``norm`` says where an architecture has that field."""
    layer = getattr(config, "norm", "rms") == "layer"
    return (LayerNorm if layer else RMSNorm)(config.hidden_size, config.rms_norm_eps)


def make_mlp(config: TrailmarkConfig) -> nn.Module:
    """The MLP, as ``mlp`` says where an architecture has that field."""
    return (GELUMLP if getattr(config, "mlp", "swiglu") == "gelu" else MLP)(config)


class SelfAttention(nn.Module):
    """Projections around attention; the subclass says which positions see which.

    q, k and v may have biases and, before they are turned by their positions, norms (``attention_bias``, ``qk_norm``).
    """

    def __init__(self, config: TrailmarkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        H, J = config.num_attention_heads, config.num_key_value_heads
        self.sizes = (H, J, J)
        sizes = tuple(n * self.head_dim for n in self.sizes)
        self.qkv_proj = fused_linear(config.hidden_size, sizes, config.attention_bias)
        self.o_proj = nn.Linear(config.attention_width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (head_norm(config, heads) for heads in (H, J))
        # yarn's factor of the turned queries and keys, all of it on the queries: a key may be turned in several steps
        self.query_factor = attention_factor(config.rope_scaling) ** 2

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, E] -> q [..., T, H, D] and k, v [..., T, J, D]."""
        return self.normal(*self.projected(x))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``heads`` before their norms."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=-2)
        return q, k, v

    def normal(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``heads`` of what was projected."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.query_factor != 1:
            q = q * self.query_factor
        return q, k, v


class HeadNorm(RMSNorm):
    """An RMS norm over all heads at once: x [..., heads, D] as one vector of heads * D."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view(x.shape)


def head_norm(config: TrailmarkConfig, heads: int) -> RMSNorm | None:
    """Of queries or keys [..., heads, D]; None: they have none."""
    if config.qk_norm is None:
        return None
    if config.qk_norm == "head":
        return RMSNorm(config.head_dim, config.rms_norm_eps)
    return HeadNorm(heads * config.head_dim, config.rms_norm_eps)


class Asking(NamedTuple):
    """Landmarks that nobody attends to: they see the tokens before them, by queries apart from the tokens' own."""

    grid: Grid
    # int64 [b, C, n + W - 1] where the sinks and the tokens before each landmark stand among the keys, [b, C] the
    # landmarks' numbers, -1 if absent, and [b, C, n + W - 1] those of the keys. None: nobody uses what landmarks see
    sight: tuple[Tensor, Tensor, Tensor] | None = None
    windows: Tensor | None = None  # int64 [b, C] of each landmark its own; None: W

    @classmethod
    def of(
        cls,
        config: TrailmarkConfig,
        grid: Grid,
        call: WindowCall | None,
        device: torch.device,
        window: int,
        windows: Integers | None = None,
    ) -> Asking:
        if not config.asks_landmarks:
            return cls(grid)
        sinks, own = config.num_sinks, None
        if windows is not None:
            at = np.broadcast_to(grid.landmark_places, (len(windows), grid.num_closed))
            own = torch.from_numpy(np.take_along_axis(windows, at.clip(0), 1)).to(device)
        if call is None:
            return cls(grid, grid.asking(window, sinks, device), own)
        number = np.where(grid.landmark_numbers < 0, -1, call.first[:, None] + grid.landmark_numbers)
        before = number[..., None] - window + np.arange(1, window)
        place = np.where(number[..., None] < 0, -1, call.places(before))
        first = np.broadcast_to(np.arange(sinks), (*number.shape, sinks))
        index = np.concatenate([first, place], 2)
        key = np.concatenate([first, np.where(place < 0, -1, before)], 2)
        places, query, keys = (torch.from_numpy(x).to(device) for x in (index, number, key))
        return cls(grid, (places, query, keys), own)


@dataclass(frozen=True)
class Place:
    """Where the positions of a call stand in their text, for one stage of layers."""

    rotary: Tensor | None  # [P, D / 2, 2] or [B, P, D / 2, 2]; None: ALiBi
    call: WindowCall | None = None  # what earlier calls left in the windows; None: nothing
    documents: Tensor | None = None  # int64 [B, P]: attention stays inside; None: each row is one document
    sink_rotary: Tensor | None = None  # as ``rotary``, of the queries that ask sinks; None: no others
    asking: Asking | None = None  # the landmarks, where windows do not show them; None: they do
    # nothing that is trained moves the tokens' states here, only those of the landmarks
    fixed_tokens: bool = False
    windows: Tensor | None = (
        None  # int64 [b, n] of what windows count, each one's own; None: all have the layer's
    )

    @classmethod
    def of(
        cls,
        config: TrailmarkConfig,
        grid: Grid,
        x: Tensor,
        call: WindowCall | None = None,
        known: Place | None = None,
        window: int | None = None,
        windows: Integers | None = None,
    ) -> Place:
        """Of positions x [B, P, E] of a layout; ``known``: of the same positions in another stage.

        Distances alone count, so no document begins at 0 anew.

        Args:
            window: that of the layers; None: ``sliding_window``.
            windows: [b, P] of each position its own, at most that. None: all see as far.
        """
        window = config.sliding_window if window is None else window
        documents = grid.documents_on(x.device)
        assert call is None or documents is None
        asking = None
        if not grid.counts_landmarks:
            assert window is not None
            asking = Asking.of(config, grid, call, x.device, window, windows)
        own = None
        if windows is not None:
            counted = grid.tokens.index
            index = np.broadcast_to(counted, (len(windows), counted.shape[1]))
            seen = np.where(index < 0, 1, np.take_along_axis(windows, index.clip(0), 1))
            own = torch.from_numpy(seen).to(x.device)
        if known is not None:
            return cls(known.rotary, call, None, known.sink_rotary, asking, windows=own)
        if documents is not None:
            documents = documents.expand(x.shape[0], -1)
        if config.window_position != "rope":
            return cls(None, call, documents, None, asking, windows=own)
        first = None if call is None else call.first_positions
        # of the tokens after landmarks too
        numbers = None if grid.counts_landmarks else grid.numbers_on(x.device)
        length = x.shape[1] if numbers is None else grid.num_counted + 1
        table = rotary_table(length, config.head_dim, config.rope, x, first)
        sink_rotary = None
        if (most := config.max_sink_distance) is not None:
            if first is None:
                capped = grid.capped_on(most, x.device)
                sink_rotary = None if capped is None else _rows(table, capped)
            elif int(first.max()) + grid.num_counted > most:
                at = first[:, None] + grid.numbers_on(x.device)
                sink_rotary = rotary_at(at.clamp(max=most), config.head_dim, config.rope, x.dtype)
        rotary = table if numbers is None else _rows(table, numbers)
        return cls(rotary, call, documents, sink_rotary, asking, windows=own)

    def apart(self, compute: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """``compute`` of positions [B, P, ...], each of which it takes by itself; of fixed tokens without a graph."""
        assert self.asking is not None
        grid = self.asking.grid
        with torch.no_grad():
            tokens = compute(*map(grid.tokens, parts))
        return grid.from_parts(torch.cat([tokens, compute(*map(grid.landmarks, parts))], dim=1))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [b, P] of a table [n, D / 2, 2] or [B, n, D / 2, 2] -> [P, D / 2, 2] or [B, P, D / 2, 2]."""
    if table.dim() == 3 or len(table) == 1:
        table = table.view(-1, *table.shape[-2:])
        rows = table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])
        return rows[0] if len(rows) == 1 else rows
    row = torch.arange(len(table), device=table.device)[:, None]
    return table[row, index.expand(len(table), -1)]


Attended = tuple[Tensor, Tensor | None]
"""What positions attended to [B, P, H, D], and where that is wanted the log-sum-exp of their scores [B, P, H]."""


class WindowAttention(SelfAttention):
    """Sliding-window self-attention with ALiBi or RoPE; keys are kept as they are rotated."""

    watch: Callable[[Tensor, Tensor], None] | None = None
    """Is shown the queries [B, P, H, D] and keys [B, P, J, D] of each call: see :mod:`trailmark.models.watching`."""

    def __init__(self, config: TrailmarkConfig, number: int = 0) -> None:
        super().__init__(config)
        self.window = config.windows[number]
        self.sinks = 0 if self.window is None else config.num_sinks
        self.implementation = config.implementation
        self.rope, self.slopes = config.window_position == "rope", config.alibi_slopes

    def forward(self, x: Tensor, place: Place, kept: Window | None = None) -> Tensor:
        """x [B, P, E]; ``kept`` is this layer's window, taken further by ``place.call``."""
        return self.o_proj(self.attend(*self.heads(x), place, kept))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, kept: Window | None = None) -> Tensor:
        """Heads q [B, P, H, D] and k, v [B, P, J, D] of positions -> [B, P, H * D]."""
        return self._attend(q, k, v, place, kept, False)[0].flatten(2)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, kept: Window | None = None
    ) -> tuple[Tensor, Tensor]:
        """As ``attend``, heads apart [B, P, H, D], and the log-sum-exp of each one's scores [B, P, H]."""
        out, lse = self._attend(q, k, v, place, kept, True)
        assert lse is not None
        return out, lse

    def keep(self, k: Tensor, v: Tensor, place: Place, kept: Window) -> None:
        """What ``attend`` leaves of k and v [B, P, J, D] in this layer's window, where nobody asks what it gives."""
        assert place.call is not None
        if place.rotary is not None:
            k = rotate(k, place.rotary)
        if place.asking is not None:
            k, v = place.asking.grid.tokens(k), place.asking.grid.tokens(v)
        kept.update(k.transpose(1, 2), v.transpose(1, 2), place.call)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, kept: Window | None, with_lse: bool
    ) -> Attended:
        sink_q = None if place.sink_rotary is None or not self.sinks else rotate(q, place.sink_rotary)
        if place.rotary is not None:
            q, k = rotate(q, place.rotary), rotate(k, place.rotary)
        if place.asking is None:
            return self._windows(q, k, v, sink_q, place, kept, with_lse)[0]
        grid = place.asking.grid
        q_tokens, k, v = grid.tokens(q), grid.tokens(k), grid.tokens(v)
        sink_q_tokens = None if sink_q is None else grid.tokens(sink_q)
        if place.fixed_tokens:
            q_tokens, k, v = (part.detach() for part in (q_tokens, k, v))
            sink_q_tokens = None if sink_q_tokens is None else sink_q_tokens.detach()
        (out, lse), k, v = self._windows(q_tokens, k, v, sink_q_tokens, place, kept, with_lse)
        if grid.num_closed:
            sink_q = None if sink_q is None else grid.landmarks(sink_q)
            asked, its_lse = self._ask(grid.landmarks(q), k, v, sink_q, place.asking, with_lse)
            out = torch.cat([out, asked], dim=1)
            if with_lse:
                assert lse is not None
                assert its_lse is not None
                lse = torch.cat([lse, its_lse], dim=1)
        return grid.from_parts(out), None if lse is None else grid.from_parts(lse)

    def _windows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_q: Tensor | None,
        place: Place,
        kept: Window | None,
        with_lse: bool,
    ) -> tuple[Attended, Tensor, Tensor]:
        """Every position sees its window and the sinks, and the keys and values that were there."""
        positions = None
        if place.call is not None:
            assert kept is not None
            joined = kept.update(k.transpose(1, 2), v.transpose(1, 2), place.call)
            k, v = (part.transpose(1, 2) for part in joined)
            # one query that sees every key: where distances have no part in scores, the order has none
            any_order = self.rope and place.windows is None and place.call.shows_all
            positions = None if any_order else place.call.positions
        if self.watch is not None:
            self.watch(q, k)
        out = sliding_window_attention(
            q,
            k,
            v,
            self.window,
            positions,
            place.documents,
            alibi_slopes=None if self.rope else slopes_like(q, self.slopes),
            return_lse=with_lse,
            implementation=self.implementation,
            num_sinks=self.sinks,
            sink_queries=sink_q,
            windows=place.windows,
        )
        return _attended(out), k, v

    def _ask(
        self, q: Tensor, k: Tensor, v: Tensor, sink_q: Tensor | None, asking: Asking, with_lse: bool
    ) -> Attended:
        """Landmarks q [B, C, H, D] see the window of the next token, but for that token."""
        (B, C, H, D), P = q.shape, k.shape[1]
        if asking.sight is None:
            return torch.zeros_like(q), q.new_zeros(B, C, H, dtype=torch.float32) if with_lse else None
        places, query, key = asking.sight
        index = places.clamp(0, P - 1)
        if len(index) == 1:
            k, v = (x.index_select(1, index.flatten()) for x in (k, v))
        else:
            flat = (index + torch.arange(B, device=q.device)[:, None, None] * P).flatten()
            k, v = (x.flatten(0, 1).index_select(0, flat) for x in (k, v))
        k, v = (x.reshape(B * C, -1, *x.shape[-2:]) for x in (k, v))
        query, key = (x.expand(B, *x.shape[1:]).flatten(0, 1) for x in (query, key))
        windows = None if asking.windows is None else asking.windows.expand(B, C).reshape(B * C, 1)
        out, lse = _attended(
            sliding_window_attention(
                q.reshape(B * C, 1, H, D),
                k,
                v,
                self.window,
                (query[:, None], key),
                alibi_slopes=None if self.rope else slopes_like(q, self.slopes),
                return_lse=with_lse,
                implementation=self.implementation,
                num_sinks=self.sinks,
                sink_queries=None if sink_q is None else sink_q.reshape(B * C, 1, H, D),
                windows=windows,
            )
        )
        return out.view(B, C, H, D), None if lse is None else lse.view(B, C, H)


def _attended(out: Tensor | tuple[Tensor, Tensor]) -> Attended:
    return (out, None) if isinstance(out, Tensor) else out


def slopes_like(q: Tensor, rule: str = "geometric") -> Tensor:
    """ALiBi's slopes [H] by a rule for q [..., H, D], in float32 or wider, on its device."""
    return _slopes(q.shape[-2], torch.promote_types(q.dtype, torch.float32), q.device, rule)[0]


@constant
def _slopes(num_heads: int, dtype: torch.dtype, device: torch.device, rule: str) -> tuple[Tensor]:
    return _known_slopes(num_heads, dtype, device, rule)


@lru_cache(maxsize=64)
def _known_slopes(num_heads: int, dtype: torch.dtype, device: torch.device, rule: str) -> tuple[Tensor]:
    """No buffer of a module: its ``to`` and ``bfloat16`` would round them."""
    with torch.inference_mode(False):  # they are used in training too
        return (alibi_slopes(num_heads, dtype, rule).to(device),)


class ChunkAttention(SelfAttention):
    """Bidirectional attention inside each chunk, with rotary positions 0 .. S."""

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None, wanted: slice = slice(None)) -> Tensor:
        """What the ``wanted`` of rows x [..., R, E] see of all; the chunks are the batch."""
        b = x.shape[:-2]
        q, k, v = self.projected(x)
        q, k, v = self.normal(q[..., wanted, :, :], k, v)
        q, k = rotate(q, rotary[wanted]), rotate(k, rotary)
        q, k, v = (part.flatten(0, -4) for part in (q, k, v))  # [b, R, heads, D]
        out = block_attention(q, k, v, mask, self.head_dim**-0.5)
        return self.o_proj(out.flatten(2).unflatten(0, b))


class WindowLayer(GradientCheckpointingLayer):
    """h = x + attention(norm(x)); y = h + MLP(norm(h)). Its ``number`` says which window it has, where they differ."""

    def __init__(self, config: TrailmarkConfig, number: int = 0) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = WindowAttention(config, number)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, place: Place, kept: Window | None = None) -> Tensor:
        if place.fixed_tokens:
            q, k, v = place.apart(self._heads, x).split(self.attention.sizes, dim=-2)
            return place.apart(self._after, x, self.attention.attend(q, k, v, place, kept))
        x = x + self.attention(self.attention_norm(x), place, kept)
        return x + self.mlp(self.mlp_norm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return torch.cat(self.attention.heads(self.attention_norm(x)), dim=-2)

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attention.o_proj(attended)
        return x + self.mlp(self.mlp_norm(x))


class ChunkEncoderLayer(GradientCheckpointingLayer):
    """A bidirectional layer over the rows of one chunk; it computes the ``wanted`` of them."""

    attends = "chunks"  # see trailmark.models.answers.LayerKind

    def __init__(self, config: TrailmarkConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = ChunkAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None, wanted: slice = slice(None)) -> Tensor:
        x = x[..., wanted, :] + self.attention(self.attention_norm(x), rotary, mask, wanted)
        return x + self.mlp(self.mlp_norm(x))


def encode_chunks(
    config: Any, layers: nn.ModuleList, norm: nn.Module, rows: Tensor, grid: Grid, keeps_kv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks through layers of class ChunkEncoderLayer: their tokens, and what sums each up as ``chunk_summary`` says.

    Args:
        config: of a model with ``chunk_summary``. norm: after the layers.
        rows: [B, C, S + 1, E] of the chunks of ``grid``, the landmark last.
        keeps_kv: whether keys and values are made of the tokens. If not, and a landmark sums its chunk up, the last
            layer runs on the landmarks alone.

    Returns:
        [B, C, S, E], 0 for tokens that do not exist, or [B, C, 0, E] where the landmarks were alone; [B, C, E]; how
        many tokens exist, [B, C].
    """
    B, C, R = rows.shape[:3]
    rotary = rotary_table(R, config.head_dim, config.rope, rows)
    lengths = grid.lengths_on(rows.device).expand(B, C)
    absent = torch.arange(R - 1, device=rows.device) >= lengths[..., None]  # [B, C, S]
    mask = None
    if grid.has_short_chunks:
        mask = torch.where(F.pad(absent, (0, 1)), -torch.inf, 0.0).to(rotary).reshape(B * C, 1, 1, R)
    alone = not keeps_kv and config.chunk_summary == "landmark"
    for number, layer in enumerate(layers, 1):
        rows = layer(rows, rotary, mask, slice(-1, None) if alone and number == len(layers) else slice(None))
    rows = norm(rows)
    tokens, summary = rows[:, :, :-1], rows[:, :, -1]
    if mask is not None and not alone:  # what does not exist has no part in the scales of a memory in int8
        tokens = tokens.masked_fill(absent[..., None], 0)
    if config.chunk_summary == "mean":
        summary = tokens.sum(2) / lengths[..., None].clamp(min=1)
    return tokens, summary, lengths


def rotary_table(length: int, head_dim: int, rope: Rope, like: Tensor, first: Tensor | None = None) -> Tensor:
    """(cos, sin) of the angles p f [P, D / 2, 2] of positions p = 0 ... P - 1, float32 or wider, computed in float64.

    ``first`` int64 [B]: of positions p = first[b] ... first[b] + P - 1, [B, P, D / 2, 2].
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    if first is None:
        return _rotary_from_zero(length, head_dim, rope, wide, like.device)[0]
    table, frequency = _rotary_table(_rounded(length), head_dim, rope, like.device)
    angle = first[:, None, None] * frequency
    return torch.view_as_real(table[:length] * torch.polar(torch.ones_like(angle), angle)).to(wide)


def rotary_where_a_window_ends(q: Tensor, window: int, rope: Rope) -> Tensor:
    """(cos, sin) [P, D / 2, 2] for queries q [B, P, H, D] that meet keys a window back, wherever those stand."""
    return rotary_table(window + 1, q.shape[-1], rope, q)[-1:].expand(q.shape[1], -1, -1)


def rotary_at(positions: Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> Tensor:
    """(cos, sin) [..., D / 2, 2] of the angles p f of any positions [...], float32 or wider, computed in float64."""
    frequency = _rotary_table(64, head_dim, rope, positions.device)[1]
    angle = positions[..., None].to(torch.float64) * frequency
    return torch.stack([angle.cos(), angle.sin()], -1).to(torch.promote_types(dtype, torch.float32))


def _rounded(length: int) -> int:
    """Few tables serve all lengths."""
    return 1 << max(6, (length - 1).bit_length())


@constant
def _rotary_from_zero(
    length: int, head_dim: int, rope: Rope, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor]:
    table, _ = _rotary_table(_rounded(length), head_dim, rope, device)
    with torch.inference_mode(False):
        return (torch.view_as_real(table[:length]).to(dtype),)


@lru_cache(maxsize=32)
def _rotary_table(length: int, head_dim: int, rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of positions 0 ... length - 1, complex128 [length, D / 2], and the frequencies [D / 2]."""
    with torch.inference_mode(False):  # it is used in training too
        frequency = inverse_frequencies(head_dim, rope)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        return torch.polar(torch.ones_like(angle), angle).to(device), frequency.to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE (Su et al., 2021) of x [..., T, heads, D]: neighbours (x_2i, x_2i+1) turn by their position's angle."""
    if torch.compiler.is_compiling():  # inductor has no code for complex numbers
        return _rotate_op(x, table, False)
    return _rotate(x, table, False)


def _rotate(x: Tensor, table: Tensor, back: bool) -> Tensor:
    x, dtype = x.to(table.dtype), x.dtype
    pairs = torch.view_as_complex((x.contiguous() if back else x).unflatten(-1, (-1, 2)))
    turn = torch.view_as_complex(table)[..., None, :]
    return torch.view_as_real(pairs * (turn.conj() if back else turn)).flatten(-2).to(dtype)


@torch.library.custom_op("trailmark::rotate", mutates_args=())
def _rotate_op(x: Tensor, table: Tensor, back: bool) -> Tensor:
    return _rotate(x, table, back).contiguous()


@_rotate_op.register_fake
def _(x: Tensor, table: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep_table(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _rotate_op(grad, *ctx.saved_tensors, True), None, None


_rotate_op.register_autograd(_rotate_back, setup_context=_keep_table)
