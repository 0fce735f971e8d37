"""The first positions of a text, which stay visible: one softmax over the window and the sinks outside it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype


class Sinks(NamedTuple):
    """What a band of consecutive positions sees beside itself: n keys, those of the positions 0 ... n - 1."""

    k: Tensor  # [B, n, J, D]
    v: Tensor
    q: Tensor | None  # [B, T, H, D] what scores them, if it is another query than the window's
    begins: Tensor  # int64 [B or 1]: the position of each row's first query
    least: int  # of these

    def distance(self, first: int, count: int) -> Tensor:
        """From queries ``first`` ... to the sinks, [count, n], or [B, 1, count, n] where rows begin elsewhere."""
        n, device = self.k.shape[1], self.k.device
        place = torch.arange(first, first + count, device=device)[:, None] - torch.arange(n, device=device)
        return place + (self.begins if len(self.begins) == 1 else self.begins[:, None, None, None])


def beside(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, sink_q: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, c, H, D], keys and values [b, n + p, J, D], the n sinks first.

    With queries of their own for the sinks, all are wider: behind a query stand its scores of the sinks, which meet 1
    in the sink's key and 0 in all others. Scores would be rounded where a kernel takes low precision: there, the other
    query itself stands behind, and meets the sinks' keys. The first D numbers of what comes out are the output.
    """
    if sink_q is None:
        return q, torch.cat([sink_k, k], dim=1), torch.cat([sink_v, v], dim=1)
    (b, n, J, D), dtype = sink_k.shape, arithmetic_dtype(q, sink_q, k)
    if q.device.type == "cpu" and n <= D:  # nothing is below float32 there
        of_heads = sink_q.to(dtype).unflatten(2, (J, -1)).permute(0, 2, 3, 1, 4)  # [b, J, H / J, c, D]
        asked = of_heads.flatten(2, 3) @ sink_k.to(dtype).permute(0, 2, 3, 1)  # [b, J, H / J * c, n]
        more = asked.view(b, q.shape[2], -1, n).transpose(1, 2)  # [b, c, H, n]
        own = torch.eye(n, dtype=dtype, device=q.device)[:, None].expand(b, n, J, n)
        sink_k = torch.cat([torch.zeros_like(sink_k), own], dim=-1)
    else:
        more, sink_k = sink_q.to(q.dtype), F.pad(sink_k, (D, 0))
    width = more.shape[-1]
    k, v, sink_v = F.pad(k, (0, width)), F.pad(v, (0, width)), F.pad(sink_v, (0, width))
    return torch.cat([q, more], dim=-1), torch.cat([sink_k, k], dim=1), torch.cat([sink_v, v], dim=1)


def apart(
    k: Tensor, v: Tensor, T: int, num_sinks: int, documents: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None, int]:
    """Consecutive keys [B, P, J, D] as the op takes them with positions: sinks apart, before the others.

    Keys, values, positions, documents, and how many of the keys are sinks.
    """
    B, P = k.shape[:2]
    place = torch.arange(P, device=k.device).expand(B, P)
    if documents is None:
        count, sinks = num_sinks, place[:, :num_sinks]
    else:
        count, sinks = P, place.masked_fill(rank_in_document(documents[1]) >= num_sinks, -1)
        documents = documents[0], torch.cat([documents[1], documents[1]], dim=1)
    positions = place[:, P - T :], torch.cat([sinks, place], dim=1)
    return (
        torch.cat([k[:, :count], k], dim=1),
        torch.cat([v[:, :count], v], dim=1),
        positions,
        documents,
        count,
    )


def rank_in_document(documents: Tensor) -> Tensor:
    """int64 [B, P] -> how many keys of the same document stand before each."""
    order = documents.argsort(dim=1, stable=True)
    ordered = documents.gather(1, order)
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = place.masked_fill(~begins, 0).cummax(dim=1).values
    return torch.zeros_like(documents).scatter(1, order, place - first)


def visible_pairs(distance: Tensor, key: Tensor, window: int | Tensor | None, num_sinks: int) -> Tensor:
    """Which keys a query sees by their ``distance`` [..., p] and positions ``key`` [..., p]: the sinks stand first.

    ``window``: of all queries, or of each [..., 1].
    """
    visible = (distance >= 0) & (key >= 0)
    if window is None:
        return visible
    near = distance < window
    if num_sinks:
        near[..., :num_sinks] = ~near[..., :num_sinks]
    return visible & near
