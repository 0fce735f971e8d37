"""Chunked cross-attention: the rows of a chunk attend to all that was retrieved for it at once (RETRO, RPT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    require,
    require_floating,
    require_grouped_heads,
    require_implementation,
    require_shape,
    without_autocast,
)
from trailmark.ops.block_attention import block_attention


@without_autocast
def chunked_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    null_k: Tensor,
    null_v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    r"""One softmax over all keys that a chunk retrieved and a learned null key.

    .. math::
        O_{nr} = \frac{e^{\mathrm{scale}\, q_{nr}^\top k_\emptyset}\, v_\emptyset
                       + \sum_{l \in \mathcal{M}_n} e^{\mathrm{scale}\, q_{nr}^\top k_{nl}}\, v_{nl}}
                      {e^{\mathrm{scale}\, q_{nr}^\top k_\emptyset}
                       + \sum_{l \in \mathcal{M}_n} e^{\mathrm{scale}\, q_{nr}^\top k_{nl}}}

    with the keys :math:`\mathcal{M}_n` that the mask shows. The null key is always seen, so a chunk that retrieved
    nothing reads the null value. Unlike :func:`grouped_cross_attention`, retrieved chunks have no weights: their keys
    compete with each other. Sources: arXiv 2112.04426 (RETRO), Sec. 2.4; RPT (Rubin and Berant, 2024), Sec. 3.

    Args:
        q: [B, N, R, H, D]: row n is what chunk n reads; the caller shifts (RETRO: the last token of chunk c and all
            but the last of chunk c + 1 read what chunk c retrieved).
        k, v: [B, N, L, J, D]: the keys of all that chunk n retrieved; head h uses key/value head h // (H // J).
        null_k, null_v: [J, D].
        mask: bool [B, N, L], True is seen. None: all are. What is not seen has no effect, not even as NaN.
        scale: None is D ** -0.5.
        implementation: "reference", or "torch" (scaled_dot_product_attention); None: "torch".

    Returns:
        [B, N, R, H, D] in the dtype of q.

    Raises:
        ValueError: for shapes that do not fit together, a mask that is not bool, or another implementation.
    """
    require_implementation(implementation, ("reference", "torch"))
    require(q.dim() == 5, "q", tuple(q.shape), "shape [B, N, R, H, D]")
    require(k.dim() == 5, "k", tuple(k.shape), "shape [B, N, L, J, D]")
    (B, N, R, H, D), (L, J) = q.shape, k.shape[2:4]
    require_shape("k", k, (B, N, L, J, D), "[B, N, L, J, D]")
    require_shape("v", v, (B, N, L, J, D), "[B, N, L, J, D]")
    require_grouped_heads(H, J)
    require_shape("null_k", null_k, (J, D), "[J, D]")
    require_shape("null_v", null_v, (J, D), "[J, D]")
    require_floating(q=q, k=k, v=v, null_k=null_k, null_v=null_v)
    if mask is not None:
        require_shape("mask", mask, (B, N, L), "[B, N, L]")
        require(mask.dtype == torch.bool, "mask", mask.dtype, "bool", "True is seen.")
    scale = D**-0.5 if scale is None else scale
    if implementation == "reference":
        return reference.chunked_cross_attention(q, k, v, null_k, null_v, mask, scale)
    keys, values = (
        torch.cat([null.expand(B, N, 1, J, D), x], dim=2).flatten(0, 1)
        for null, x in ((null_k, k), (null_v, v))
    )  # [B * N, L + 1, J, D]
    seen = None
    if mask is not None:
        seen = F.pad(mask, (1, 0), value=True).view(B * N, 1, 1, L + 1)
        gone = ~seen[:, 0, 0, :, None, None]
        keys, values = keys.masked_fill_(gone, 0), values.masked_fill_(gone, 0)  # copies already, and large
    out = block_attention(q.flatten(0, 1), keys, values, seen, scale)
    return out.view(B, N, R, H, D)
