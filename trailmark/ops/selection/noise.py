"""Gumbel noise for selection by an integer hash: any part of it has the same bits as in the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from trailmark.ops.arguments import whole_numbers


def fold_seed(seed: Tensor | int, *numbers: Tensor | int) -> Tensor:
    """Mix integers into one non-negative int64 seed by a 32-bit integer hash (guarantee 3).

    ``fold_seed(seed, step, sample, group)`` is the seed of one sample's noise in one group. Any argument may
    be a tensor; they broadcast. Only 32-bit multiplications, xors and shifts, so a kernel draws the same bits.
    """
    mixed = _mix(whole_numbers("seed", torch.as_tensor(seed)))
    for number in numbers:
        other = whole_numbers("numbers", torch.as_tensor(number))
        # what has no dimension goes where the other is
        device = mixed.device if mixed.dim() else other.device
        mixed = _mix(mixed.to(device) * 0x9E3779B1 + other.to(device) + 0x7F4A7C15)
    return mixed


def gumbel_noise(
    noise_seed: Tensor,
    first_query: int,
    num_queries: int,
    num_heads: int,
    num_chunks: int,
    first_chunk: int = 0,
) -> Tensor:
    """Standard Gumbel noise [B, N, J, M] of queries ``first_query ...`` and chunks ``first_chunk ...``.

    A hash of (seed, head, n, m): any part of it has the same bits as in the whole.
    """
    return gumbel(noise_rows(noise_seed, first_query, num_queries, num_heads), first_chunk, num_chunks)


def noise_rows(noise_seed: Tensor, first_query: int, num_queries: int, num_heads: int) -> Tensor:
    """One seed [B, N, J, 1] for each query and head."""
    n = torch.arange(first_query, first_query + num_queries, device=noise_seed.device)[:, None, None]
    head = torch.arange(num_heads, device=noise_seed.device)[:, None]
    return fold_seed(noise_seed[:, None, None, None], head, n)


def gumbel(rows: Tensor, first_chunk: int, num_chunks: int) -> Tensor:
    """Noise [..., m] of the chunks ``first_chunk ...`` for seeds [..., 1]."""
    m = torch.arange(first_chunk, first_chunk + num_chunks, device=rows.device)
    bits = _mix(rows * 0x9E3779B1 + m)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)  # inside (0, 1): both logarithms are finite
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _mix(x: Tensor) -> Tensor:
    # The finaliser of MurmurHash3 (public domain) on the low 32 bits; int64 products wrap harmlessly.
    mask = 0xFFFFFFFF
    x = (x ^ (x >> 32)).bitwise_and_(mask)  # a new tensor: the rest is in place
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(mask)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(mask)
    return x.bitwise_xor_(x >> 16)
