"""Noise by an integer hash: the same bits in any part, Gumbel's distribution, seeds that mix."""

from __future__ import annotations

import math

import torch

from trailmark.ops import fold_seed, gumbel_noise


def test_noise_depends_on_seed_head_query_and_chunk_alone() -> None:
    seeds = torch.tensor([5, 2**40 + 5, 7])
    noise = gumbel_noise(seeds, 0, 6, 2, 10)
    assert noise.shape == (3, 6, 2, 10)
    assert torch.equal(gumbel_noise(seeds[1:2], 2, 3, 2, 7), noise[1:2, 2:5, :, :7])
    assert torch.equal(gumbel_noise(seeds, 0, 6, 1, 10), noise[:, :, :1])
    assert torch.equal(gumbel_noise(seeds, 1, 2, 2, 4, first_chunk=5), noise[:, 1:3, :, 5:9])
    assert noise.unique().numel() > 0.99 * noise.numel()


def test_noise_is_gumbel() -> None:
    x = gumbel_noise(torch.arange(4), 0, 64, 2, 512).double()
    n, variance = x.numel(), math.pi**2 / 6
    assert x.isfinite().all()
    # 4 standard errors; that of the variance follows from a kurtosis of 5.4
    assert abs(x.mean() - 0.5772156649) < 4 * math.sqrt(variance / n)
    assert abs(x.var() - variance) < 4 * variance * math.sqrt(4.4 / n)
    centred = x - x.mean()
    for dim in range(4):  # of neighbours by seed, query, head and chunk
        size = x.shape[dim] - 1
        products = centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)
        assert abs(products.mean()) < 4 * variance / math.sqrt(products.numel())


def test_fold_seed_mixes_every_number() -> None:
    seeds = fold_seed(torch.arange(20)[:, None, None], torch.arange(20)[:, None], torch.arange(20))
    assert seeds.dtype == torch.int64
    assert seeds.min() >= 0
    assert seeds.unique().numel() == 20**3
    assert fold_seed(3, 4, 5) == seeds[3, 4, 5]
