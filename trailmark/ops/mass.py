"""How much attention the tokens of each chunk put on those of each other chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype, require, require_shape, without_autocast

_SLAB_ELEMENTS = 1 << 22  # probabilities that stand in memory at a time: of more, a CPU's cache loses them


@without_autocast
@torch.no_grad()
def attention_mass(
    q: Tensor,
    k: Tensor,
    chunks: Tensor,
    window: int | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    on_tokens: bool = False,
) -> Tensor:
    r"""Sums of causal attention, over the heads and over the tokens of chunks.

    .. math::
        y_{nm} = \sum_h \sum_{i \in n} \sum_{j \in m,\, j \le i}
                 \mathrm{softmax}_j(\mathrm{scale} \cdot q_{ih}^\top k_{jh})

    Probabilities stand in memory for a slab of queries at a time. No gradient.

    Args:
        q: [B, T, H, D]. k: [B, T, J, D]: head h uses key head h // (H // J). As they are multiplied: rotated.
        chunks: int64 [B, T]: the chunk of each token; -1 where there is none (padding, which nobody attends to).
        window: positions that a token sees, itself included; None: all before it.
        document_ids: int64 [B, T]: attention stays inside. None: each row is one document.
        scale: None is D ** -0.5.
        on_tokens: do not sum over the tokens j.

    Returns:
        [B, N, N] in float32 or wider, N = the largest chunk's number + 1: row n what its tokens put on chunk m. With
        ``on_tokens`` [B, N, T].

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(q.dim() == 4, "q", tuple(q.shape), "shape [B, T, H, D]")
    (B, T, H, D), J = q.shape, k.shape[2] if k.dim() == 4 else 0
    require(
        J > 0 and k.shape == (B, T, J, D) and H % J == 0,
        "k",
        tuple(k.shape),
        f"shape [{B}, {T}, J, {D}], J a divisor of H = {H}",
    )
    require_shape("chunks", chunks, (B, T), "[B, T]")
    dtype = arithmetic_dtype(q, k)
    scale = D**-0.5 if scale is None else scale
    N = int(chunks.max()) + 1 if chunks.numel() else 0
    of_chunk = F.one_hot(chunks.clamp(min=0), max(N, 1)).to(dtype)[..., :N]  # [B, T, N]
    of_chunk = of_chunk * (chunks >= 0)[..., None]
    mass = q.new_zeros(B, N, T if on_tokens else N, dtype=dtype)
    keys = k.to(dtype).permute(0, 2, 3, 1)  # [B, J, D, T]
    queries = q.to(dtype).unflatten(2, (J, -1)).permute(0, 2, 3, 1, 4) * scale  # [B, J, g, T, D]
    place = torch.arange(T, device=q.device)
    step = max(1, _SLAB_ELEMENTS // max(1, B * H * T))
    for first in range(0, T, step):
        last = min(first + step, T)
        scores = (queries[..., first:last, :].flatten(2, 3) @ keys[..., :last]).unflatten(2, (H // J, -1))
        age = place[first:last, None] - place[:last]  # [t, s]
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        hidden = hidden | (chunks[:, None, :last] < 0)  # [B, t, s]
        if document_ids is not None:
            hidden = hidden | (document_ids[:, first:last, None] != document_ids[:, None, :last])
        # padding too has something to look at: itself, which counts for no chunk
        hidden = hidden & (age != 0)
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        looks = scores.softmax(-1).sum((1, 2))  # [B, t, s]
        if on_tokens:
            mass[..., :last] += of_chunk[:, first:last].mT @ looks
        else:
            mass += of_chunk[:, first:last].mT @ (looks @ of_chunk[:, :last])
    return mass
