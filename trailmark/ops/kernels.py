"""What the Triton kernels of several ops share."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# float32 is multiplied as float32: TF32 has 10 bits (guarantee 8)
PRECISION = tl.constexpr("ieee")


def folded_scale(scale: float, dtype: torch.dtype) -> float:
    """Of scores in base 2, but in float32: see :func:`exp`."""
    return scale if dtype == torch.float32 else scale * math.log2(math.e)


@triton.jit
def exp(scores, EXACT: tl.constexpr):
    """e^scores, or 2^scores where the scale holds log2(e) already.

    In float32 the maximum is subtracted before log2(e) comes in, so that rounding is of a small number.
    """
    return tl.exp(scores) if EXACT else tl.exp2(scores)


@triton.jit
def add_product(total, a, b, EXACT: tl.constexpr):
    """total + a b. In float32 a tile is summed by itself: one chain of sums over all tiles rounds too often."""
    if EXACT:
        # the last argument, of no other effect here, keeps the compiler from joining the chains again
        product = tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
        total += product
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total
