"""Grouped Cross-Attention of tokens that retrieve, chunk by chunk: on a CPU, where each chunk has many readers.

A token has as many rows as query heads share a key/value head, too few for a product to pay for fetching K chunks. So
a chunk is fetched for a *tile* of tokens that chose it, and what all of a token's tiles found for it is put together
afterwards: K times the size of its query, which stands in memory for a slab of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.rows import (
    FEW_ROWS,
    LOG2_E,
    Gradients,
    Rows,
    Table,
    numbers_of_contiguous,
    unless_unread,
)
from trailmark.ops.slabs import in_slabs

_FEW_TOKENS = 64  # fewer share too few chunks
_SMALL_CHUNK = 4  # keys of one that is smaller are no matrix to BLAS
# Rows of a tile. A token is to get the same bits in whatever place of a tile it stands, and in whose company. It does
# where the blocks of BLAS' kernels leave no row over (MKL's do not, of these), and as many products are made at once.
_TILE_ROWS = 24, 48
_TILE_TOKENS = 6  # at least, where there is such a tile
_GROUP_ELEMENTS = 1 << 19  # of the tiles that are computed at once, in a core's caches
_SLAB_ELEMENTS = 1 << 22  # of what a slab's tiles found


def pays(call: CrossAttentionCall) -> bool:
    """Whether a call is one for this module: by shapes that no neighbour's content decides, as M may be."""
    (_, N, R, H, _), (S, J) = call.q.shape, call.k.shape[2:4]
    if call.q.device.type != "cpu" or not call.k.numel():
        return False
    # where all heads read the same chunks, these are fetched whole, token by token
    shared, width = J > 1 and call.indices.stride(2) == 0, H // J * R
    return (
        not shared
        and 0 < width <= FEW_ROWS
        and tile_rows(width) > 0
        and N >= _FEW_TOKENS
        and S >= _SMALL_CHUNK
    )


def tile_rows(width: int) -> int:
    """Rows of a tile of tokens that have ``width`` rows each, the most only where fewer hold few tokens; 0: none."""
    fit = [rows for rows in _TILE_ROWS if rows % width == 0]
    return next((rows for rows in fit if rows >= _TILE_TOKENS * width), max(fit, default=0))


def forward(call: CrossAttentionCall, keep: bool) -> tuple[Tensor, Tensor]:
    """As :func:`trailmark.ops.gca.torch_path.forward`."""
    reads = _Reads(call)
    out = call.q.new_empty(reads.query_shape)
    lse = call.q.new_empty(reads.lse_shape if keep else (0,), dtype=reads.lse_dtype)
    beside = None if call.beside is None else call.beside.reshape(reads.query_shape)
    null_key = call.off_by_one and beside is None  # in each chunk's softmax
    for rows in reads.slabs():
        tiles, query = _Tiles(reads, rows), reads.fold(reads.q, rows)
        found, tops, totals = tiles.found(reads.D), tiles.found(1, -torch.inf), tiles.found(1)
        for group in tiles:
            scores = tiles.scores(tiles.of_tokens(query, group), tiles.keys(group), group)
            top = scores.amax(-1, keepdim=True)
            if null_key:
                top.clamp_(min=0)
            total = scores.sub_(_finite(top)).exp2_().sum(-1, keepdim=True)
            if null_key:
                total.add_(top.neg().exp2_())
            tiles.put(torch.bmm(scores, tiles.values(group)), group, found)
            tiles.put(top, group, tops)
            tiles.put(total, group, totals)
        top, total, share = tiles.by_chunk(tops), tiles.by_chunk(totals), reads.share_of(rows)
        null = reads.null(rows)
        if beside is None or null is None:
            total.masked_fill_(total == 0, 1)
            if keep:
                torch.add(_finite(top), total.log2(), out=lse[rows])
            out[rows] = reads.unfold(tiles.summed(found, share / total))
            continue
        # one softmax over all
        highest = top.masked_fill(share == 0, -torch.inf).amax(2, keepdim=True)
        share = top.sub_(unless_unread(highest, share)).exp2_().mul_(share)
        mass = (share * total).sum(2, keepdim=True)
        all_mass = torch.logaddexp2(highest + mass.double().log2(), null.view(mass.shape))
        of_highest = (highest - all_mass).exp2_().to(share.dtype)
        if keep:
            torch.cat([highest.double(), all_mass], 2, out=lse[rows])
        read = tiles.summed(found, share.mul_(of_highest))
        own = mass.mul_(of_highest).view(*read.shape[:2], 1)
        out[rows] = reads.unfold(read.addcmul_(own, reads.fold(beside, rows), value=-1))
    return out.view(call.q.shape), lse


def backward(
    grad: Tensor, call: CrossAttentionCall, lse: Tensor, of_memory: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`trailmark.ops.gca.torch_path.backward`."""
    reads = _Reads(call)
    S, D, dtype = reads.S, reads.D, reads.dtype
    grad = grad.reshape(reads.query_shape)
    beside = None if call.beside is None else call.beside.reshape(reads.query_shape)
    gradients = Gradients(reads, call, of_memory)
    with torch.autocast("cpu", enabled=False):  # the backward runs outside the op
        for rows in reads.slabs():
            tiles, query, out_grad = _Tiles(reads, rows), reads.fold(reads.q, rows), reads.fold(grad, rows)
            shift, share = lse[rows], reads.share_of(rows)
            if beside is not None:
                top, total = lse[rows, :, :1], lse[rows, :, 1:]
                shift = unless_unread(top.to(dtype), share)
                share = share * (top - total).exp2_().to(dtype)
                own = (out_grad * reads.fold(beside, rows)).sum(-1, keepdim=True)  # values count from it
            probabilities, products = tiles.found(S), tiles.found(S)  # P and dP of each pair
            for group in tiles:
                scores = tiles.scores(tiles.of_tokens(query, group), tiles.keys(group), group)
                p = scores.sub_(tiles.of_pairs(shift, group)).exp2_()
                # dP without the weight: dO V^T; its row sums with P give both D and the weights' gradient
                dp = torch.bmm(tiles.of_tokens(out_grad, group), tiles.values(group).transpose(1, 2))
                if beside is not None:
                    p.mul_(tiles.of_pairs(share, group))
                    dp.sub_(tiles.of_tokens(own, group))
                tiles.put(p, group, probabilities)
                tiles.put(dp, group, products)
            inner = (products * probabilities).sum(-1, keepdim=True)
            of_chunks, null = tiles.by_chunk(inner), reads.null(rows)
            if beside is None or null is None:
                gradients.weights[rows] = reads.of_weights(of_chunks)
                probabilities.mul_(tiles.in_order(share))
                ds = products.sub_(inner).mul_(probabilities)
            else:
                of_rows = of_chunks.sum(2).view(-1, reads.width, 1)
                # not 1 - the share of the virtual key: it may be tiny
                read = tiles.by_chunk(probabilities.sum(-1, keepdim=True)).sum(2).view(of_rows.shape)
                of_null = (null.view(of_rows.shape) - total.view(of_rows.shape)).exp2_().to(dtype)
                gradients.lse[rows] = reads.unfold(of_null.mul_(of_rows).neg_())
                gradients.beside[rows] = reads.unfold(out_grad * read).neg_()
                taken = of_rows.view(-1, reads.J, 1, reads.width).expand_as(of_chunks)
                ds = products.sub_(tiles.in_order(taken)).mul_(probabilities)
                by_weight = reads.of_weights(tiles.by_chunk(ds.sum(-1, keepdim=True)))
                own_weight = reads.weights[rows]
                gradients.weights[rows] = (by_weight / own_weight).masked_fill_(own_weight == 0, 0)
            of_queries = tiles.found(D)
            for group in tiles:
                own_ds, keys = tiles.taken(ds, group), tiles.keys(group)
                tiles.put(torch.bmm(own_ds, keys), group, of_queries)
                if of_memory:
                    by_key = torch.bmm(own_ds.transpose(1, 2), tiles.of_tokens(query, group))
                    by_value = torch.bmm(
                        tiles.taken(probabilities, group).transpose(1, 2), tiles.of_tokens(out_grad, group)
                    )
                    into = tiles.into[group]
                    gradients.k.index_add_(0, into, by_key.view(-1, S * D), alpha=reads.scale)
                    gradients.v.index_add_(0, into, by_value.view(-1, S * D))
            gradients.q[rows] = reads.unfold(tiles.summed(of_queries).mul_(reads.scale))
    return gradients.of_inputs()


def _finite(top: Tensor) -> Tensor:
    """What is taken from scores: their largest, or 0 where there is none."""
    return top.masked_fill(top == -torch.inf, 0)


class _Reads(Rows):
    """A call as rows, and its chunks as tables of heads."""

    def __init__(self, call: CrossAttentionCall) -> None:
        super().__init__(call)
        self.k_table, self.v_table = Table(call.k), Table(call.v)
        self.into = numbers_of_contiguous(call.indices, self.M)  # [B N, J, K]
        self.lengths = None if call.lengths is None else call.lengths.flatten()

    def slabs(self) -> Iterator[slice]:
        """Tokens whose tiles stand in memory together."""
        each = self.J * self.K * self.width * self.D
        return in_slabs(self.query_shape[0], max(1, _SLAB_ELEMENTS // each), self.q)

    def share_of(self, rows: slice) -> Tensor:
        """The weights of each row, [n, J, K, g R]."""
        own = self.weight(rows)
        return own.view(-1, self.J, self.K, own.shape[-1]).expand(-1, -1, -1, self.width)


class _Tiles:
    """Pairs of a token (and key/value head) and a chunk, ordered by chunks, and cut into tiles of ``size`` pairs.

    A pair has ``width`` rows. A chunk's last tile, which others may not fill, repeats its last pair, and whole tiles
    are repeated until all groups have as many: neither is written anywhere.
    """

    def __init__(self, reads: _Reads, rows: slice) -> None:
        self.reads, self.rows = reads, tile_rows(reads.width)
        self.size, S, D = self.rows // reads.width, reads.S, reads.D
        self.step = max(1, _GROUP_ELEMENTS // (2 * S * D + self.rows * (2 * D + S)))  # tiles of a group
        flat, nothing = reads.into[rows].flatten(), reads.nothing.where[rows].flatten()
        chunks = reads.M * reads.J * len(reads.nothing.where)  # of all rows of the batch, at most
        # stable, for dk and dv are sums in this order
        ordered, order = flat.masked_fill(nothing, chunks).sort(stable=True)
        self.count = len(flat) - int(nothing.sum())
        self.order = order[: self.count]
        number = torch.arange(len(flat), device=flat.device)
        # of each pair, in this order; behind it stands what nothing has
        self.place = torch.empty_like(order).index_copy_(0, order, number).masked_fill_(nothing, len(flat))
        chunk, counts = ordered[: self.count].unique_consecutive(return_counts=True)
        tiles = (counts + self.size - 1) // self.size
        of = number[: len(chunk)].repeat_interleave(tiles)  # the chunk of each tile
        nth = torch.arange(len(of), device=flat.device) - (tiles.cumsum(0) - tiles)[of]
        begin, end = (counts.cumsum(0) - counts)[of] + nth * self.size, counts.cumsum(0)[of]
        filled = len(of)
        if more := -filled % self.step:
            begin, end, of = (torch.cat([x, x[-1:].expand(more)]) for x in (begin, end, of))
        at = begin[:, None] + torch.arange(self.size, device=flat.device)
        self.at = at.minimum(end[:, None] - 1)  # [tiles, size], in the order of pairs
        self.left_over = at >= end[:, None]
        self.left_over[filled:] = True
        self.pairs = self.order[self.at]
        self.tokens = self.pairs // reads.K  # and heads
        self.into = chunk[of]  # [tiles]
        self._kept: dict[int, tuple[Tensor, slice]] = {}
        self.lacks = list[bool]()  # tiles of chunks that have fewer than S keys
        if reads.lengths is not None:
            self.lengths = reads.lengths[self.into // reads.J]
            self.lacks = (self.lengths < S).tolist()

    def __iter__(self) -> Iterator[slice]:
        """Tiles that are computed at once."""
        return in_slabs(len(self.into), self.step, self.reads.q)

    def keys(self, group: slice) -> Tensor:
        """[c, S, D]; zeros where there is none, which may be NaN."""
        return self._of_table(self.reads.k_table, group)

    def values(self, group: slice) -> Tensor:
        return self._of_table(self.reads.v_table, group)

    def _of_table(self, table: Table, group: slice) -> Tensor:
        number, J, M = self.into[group], self.reads.J, self.reads.M
        batch, chunk, head = number // (M * J), number // J % M, number % J
        row = batch * table.steps[0] + chunk * table.steps[1] + head * table.steps[2]
        taken = table.rows.index_select(0, row).view(-1, self.reads.S, self.reads.D).to(self.reads.dtype)
        absent = self._absent(group)
        return taken if absent is None else taken.masked_fill_(absent[..., None], 0)

    def _absent(self, group: slice) -> Tensor | None:
        """Keys [c, S] that do not exist."""
        if True not in self.lacks[group]:
            return None
        return torch.arange(self.reads.S, device=self.into.device) >= self.lengths[group, None]

    def scores(self, query: Tensor, keys: Tensor, group: slice) -> Tensor:
        """[c, rows, S] in base 2, -inf at keys that do not exist."""
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(self.reads.scale * LOG2_E)
        absent = self._absent(group)
        return scores if absent is None else scores.masked_fill_(absent[:, None], -torch.inf)

    def of_tokens(self, x: Tensor, group: slice) -> Tensor:
        """x [n * J, width, X] of the tokens of a group's tiles: [c, rows, X]."""
        return x.flatten(1).index_select(0, self.tokens[group].flatten()).view(-1, self.rows, x.shape[-1])

    def of_pairs(self, x: Tensor, group: slice) -> Tensor:
        """x [n, J, K, width] of the pairs of a group's tiles: [c, rows, 1]."""
        own = x.reshape(-1, self.reads.width).index_select(0, self.pairs[group].flatten())
        return own.view(-1, self.rows, 1)

    def found(self, X: int, nothing: float = 0) -> Tensor:
        """[pairs + 1, width, X], to be put for each pair, in their order; the last is what nothing has."""
        x = torch.empty(
            len(self.place) + 1, self.reads.width, X, dtype=self.reads.dtype, device=self.place.device
        )
        x[self.count :] = nothing
        return x

    def put(self, x: Tensor, group: slice, found: Tensor) -> None:
        """Write x [c, rows, X] of a group's tiles into ``found``."""
        if group.start not in self._kept:  # the places of a group's tiles that are kept, and what those are
            own = (~self.left_over[group]).flatten().nonzero()[:, 0]
            begin = int(self.at[group.start, 0])
            self._kept[group.start] = own, slice(begin, begin + len(own))
        own, pairs = self._kept[group.start]
        into = found[pairs].flatten(1)
        torch.index_select(x.view(-1, into.shape[1]), 0, own, out=into)

    def taken(self, found: Tensor, group: slice) -> Tensor:
        """What was put, in a group's tiles again: [c, rows, X], zeros where they repeat a pair."""
        at = self.at[group].masked_fill(self.left_over[group], len(found) - 1).flatten()
        return found.flatten(1).index_select(0, at).view(-1, self.rows, found.shape[-1])

    def in_order(self, x: Tensor) -> Tensor:
        """x [n, J, K, width] as :meth:`found` has it: [pairs + 1, width, 1]."""
        into = self.found(1)
        torch.index_select(x.reshape(-1, self.reads.width), 0, self.order, out=into[: self.count, :, 0])
        return into

    def by_chunk(self, found: Tensor) -> Tensor:
        """What was found [pairs + 1, width, 1] for each token's chunks: [n, J, K, width]."""
        own = found.flatten(1).index_select(0, self.place)
        return own.view(-1, self.reads.J, self.reads.K, self.reads.width)

    def summed(self, found: Tensor, share: Tensor | None = None) -> Tensor:
        """What was found [pairs + 1, width, X], over each token's chunks: [n * J, width, X].

        Weighed by ``share`` [n, J, K, width].
        """
        K, width = self.reads.K, self.reads.width
        row = (self.place.view(-1, 1, K) * width + torch.arange(width, device=found.device)[:, None]).flatten(
            0, 1
        )
        if share is not None:
            share = share.transpose(2, 3).reshape(row.shape)
        X = found.shape[-1]
        total = F.embedding_bag(row, found.view(-1, X), per_sample_weights=share, mode="sum")
        return total.view(-1, width, X)
