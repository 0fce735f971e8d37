"""Keys and values in eight bits: whole numbers up to 127, and a scale for each head's keys and values of a chunk.

How many bytes that takes: :func:`trailmark.memory.manifest.record_bytes`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def quantize(records: Tensor) -> Tensor:
    r"""Records [n, 2, J, S, D] as bytes [n, b]: their numbers, then their scales.

    .. math:: x \approx s \, \mathrm{round}(x / s), \qquad s = \max |x| / 127

    over a head's S D numbers in keys, or in values: none is off by more than s / 2. Of a scale's 24 bits 17 are kept,
    so that s times a number is exact, and a record that is quantized again stays the same bits. Where a number is not
    finite in float32, all that share its scale become NaN; where s would be below the smallest normal number, 0.
    """
    x = records.float()
    scales = x.abs().amax((-2, -1)) / 127  # [n, 2, J]
    finite = scales.isfinite()
    fits = finite & (scales >= torch.finfo(torch.float32).tiny)
    scales = ((scales.view(torch.int32) + 64) & ~0x7F).view(torch.float32)  # without 7 bits, rounded
    scales = scales.masked_fill(~fits, 0).masked_fill(~finite, torch.nan)
    steps = (x / scales[..., None, None]).round_()
    numbers = steps.masked_fill_(~fits[..., None, None], 0).to(torch.int8)
    return torch.cat([numbers.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def dequantize(records: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What :func:`quantize` made bytes [n, b] of, rounded: float32 [n, 2, J, S, D]."""
    count = math.prod(shape)
    scales = records[:, count:].clone(memory_format=torch.contiguous_format)  # aligned
    scales = scales.view(torch.float32).view(len(records), *shape[:-2], 1, 1)
    return records[:, :count].view(torch.int8).unflatten(1, shape) * scales
