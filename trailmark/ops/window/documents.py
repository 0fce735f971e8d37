"""Rows of several documents as blocks that begin with them: what attends in a band need not know of documents.

Each document is cut into blocks of C rows from its first one on, the last filled up with zeros. A block of queries
sees itself and as many blocks before it as the window reaches and the document has: blocks with equally many are
alike, and no key of another document is among theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# What copying a key and its value to where a block reads it costs, in scores of one query: between a block so
# small that keys are copied often and one so large that most of its scores are masked, or its rows filled up.
_COPY = 64


class Kind(NamedTuple):
    """Blocks that are alike."""

    before: int  # blocks before its own that a block sees
    blocks: int  # how many
    seen: Tensor  # [blocks * (before + 1)] the blocks seen, in order
    number: int  # of these blocks in their documents; so many or more, where none is nearer to its sinks
    first: Tensor  # [blocks] the first blocks of their documents


@dataclass(frozen=True)
class DocumentBlocks:
    """How the places of [B, T] stand in blocks, and which blocks are alike. n blocks in all."""

    size: int  # C
    kinds: tuple[Kind, ...]
    keys: Moves  # [B * T] places -> [n * C] rows, document by document
    queries: Moves  # [B * T] places -> [n * C] rows, kind by kind
    sinks: int = 0  # first positions of its document that a block sees too, before all others

    @staticmethod
    def of(documents: Tensor, window: int, least: int, most: int, sinks: int = 0) -> DocumentBlocks | None:
        """Cut ``documents``, int64 [B, T] on a CPU, into blocks; None if a document stands in several pieces.

        Blocks have ``least``, twice, four times ... that many rows, at most ``most``: whatever costs least. None too
        for more ``sinks`` than that.
        """
        B, T = documents.shape
        begins = torch.ones(B, T, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        row, place = begins.nonzero(as_tuple=True)
        if len(torch.stack([row, documents[row, place]]).unique(dim=1).T) < len(row):
            return None
        start = row * T + place
        lengths = torch.cat([start, torch.tensor([B * T])]).diff()
        old = min(int(lengths.max()), window) - 1
        sizes = [least]
        while sizes[-1] * 2 <= most:
            sizes.append(sizes[-1] * 2)
        C = min(reversed(sizes), key=lambda size: _cost(lengths, old, size))
        if sinks > C:
            return None
        counts = _blocks(lengths, C)
        document = torch.arange(len(lengths)).repeat_interleave(counts)
        # of a block in its document
        number = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
        offset = number[:, None] * C + torch.arange(C)
        source = torch.where(offset < lengths[document, None], start[document, None] + offset, -1)
        # with sinks, blocks that see them all outside the window are alike
        alike = number.clamp(max=-(-(old + sinks) // C) if sinks else -(-old // C))
        order = alike.argsort(stable=True)
        kinds = []
        for kind in alike.unique().tolist():
            blocks, before = (alike == kind).nonzero(), min(kind, -(-old // C))
            seen = (blocks + torch.arange(-before, 1)).flatten()
            first = (blocks - number[blocks])[:, 0]
            kinds.append(Kind(before, len(blocks), seen, kind, first))
        return DocumentBlocks(C, tuple(kinds), Moves.of(source, B * T), Moves.of(source[order], B * T), sinks)


def _blocks(lengths: Tensor, size: int) -> Tensor:
    """Of each document."""
    return (lengths + size - 1) // size


def _cost(lengths: Tensor, old: int, size: int) -> int:
    """Scores, masked ones too, and copies."""
    blocks, most = _blocks(lengths, size), -(-old // size) + 1
    early = blocks.clamp(max=most)
    seen = int((early * (early + 1) // 2 + (blocks - early) * most).sum())
    return seen * size * (size + _COPY)


@dataclass(frozen=True)
class Moves:
    """Moves rows to other places, none of them twice."""

    source: Tensor  # int64 [n] where each row comes from; any where from none
    missing: Tensor  # those rows
    back: Tensor  # int64 [m] where each place went

    @staticmethod
    def of(source: Tensor, places: int) -> Moves:
        flat = source.flatten()
        there = (flat >= 0).nonzero()[:, 0]
        back = torch.empty(places, dtype=torch.int64)
        back[flat[there]] = there
        return Moves(flat.clamp(min=0), (flat < 0).nonzero()[:, 0], back)

    def into(self, x: Tensor) -> Tensor:
        """[m, ...] -> [n, ...]; zeros from nowhere."""
        moved: Tensor = _Move.apply(x, self, True)
        return moved

    def out_of(self, x: Tensor) -> Tensor:
        """[n, ...] -> [m, ...]."""
        moved: Tensor = _Move.apply(x, self, False)
        return moved

    def moved(self, x: Tensor, into: bool) -> Tensor:
        if not into:
            return x.index_select(0, self.back)
        return x.index_select(0, self.source).index_fill_(0, self.missing, 0)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves, into: bool) -> Tensor:
        ctx.moves, ctx.into = moves, into
        return moves.moved(x, into)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.moves.moved(grad, not ctx.into), None, None


class KeysOfBlocks(torch.autograd.Function):
    """Rows [n * C, J, D] -> for each kind, what its blocks see: [blocks, sinks + (before + 1) * C, J, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: DocumentBlocks) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.size = blocks, x.shape
        whole = x.unflatten(0, (-1, blocks.size))
        seen = [whole.index_select(0, kind.seen).view(kind.blocks, -1, *x.shape[1:]) for kind in blocks.kinds]
        if blocks.sinks:
            begins = whole[:, : blocks.sinks]
            firsts = [begins.index_select(0, kind.first) for kind in blocks.kinds]
            seen = [torch.cat(pair, dim=1) for pair in zip(firsts, seen, strict=True)]
        return tuple(seen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.size)
        whole = total.unflatten(0, (-1, ctx.blocks.size))
        n = ctx.blocks.sinks
        for kind, grad in zip(ctx.blocks.kinds, grads, strict=True):
            whole.index_add_(0, kind.seen, grad[:, n:].reshape(len(kind.seen), *whole.shape[1:]))
            if n:
                whole[:, :n].index_add_(0, kind.first, grad[:, :n])
        return total, None
