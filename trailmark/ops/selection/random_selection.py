"""Past chunks at random: the retriever that every learned one is compared with (arXiv 2410.01651, Table 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from trailmark.ops.arguments import require, require_shape, values_are_checked, whole_numbers
from trailmark.ops.selection.noise import fold_seed

_MOST_CANDIDATES = 1 << 31  # their product with a hash of 32 bits stays below 2^63


def random_chunks(
    num_retrieved: int,
    num_candidates: Tensor,
    first_candidate: Tensor | int,
    asking: Tensor,
    seed: Tensor,
) -> Tensor:
    r"""For each query ``num_retrieved`` distinct chunks, every set of them equally likely.

    .. math::
        I_n \sim \mathrm{uniform}\{A \subseteq \{f_n, \dots, c_n - 1\} : |A| = K\}

    with :math:`f_n, c_n` first and number of candidates, as in :func:`trailmark.ops.select_chunks`; all of them where
    they are fewer than K. Floyd's sampling (Bentley and Floyd, 1987), K draws whatever the number of candidates: the
    k-th is a number from 0 to j = c - f - K + k; if it is chosen already, j is. A draw is an integer hash of (seed,
    asking chunk, k) alone, of 32 bits: a number of n is off by at most n / 2^32 of its probability. Not differentiable.

    Args:
        num_retrieved: K >= 1.
        num_candidates: int64 [N] or [B, N]: query n may select chunks m < num_candidates[n], below 2^31.
        first_candidate: an int or int64 of the same shapes: and m >= first_candidate[n].
        asking: int64 [N] or [B, N]: the number by which query n draws. Equal numbers draw equal places among as many
            candidates, whatever B and N are.
        seed: int64 [B].

    Returns:
        int64 [B, N, K] ascending, -1 (nothing was left) last.

    Raises:
        ValueError: shapes that do not fit together, a K below 1, more candidates than can be counted.
    """
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    require(seed.dim() == 1, "seed", tuple(seed.shape), "shape [B]")
    require(asking.dim() in (1, 2), "asking", tuple(asking.shape), "shape [N] or [B, N]")
    (B,), N, device = seed.shape, asking.shape[-1], seed.device
    bounds = []
    for name, number in (
        ("asking", asking), ("num_candidates", num_candidates), ("first_candidate", first_candidate)
    ):  # fmt: skip
        if isinstance(number, Tensor):
            letters = ("[N]", "[B, N]")[number.dim() > 1]
            require_shape(name, number, (N,) if number.dim() == 1 else (B, N), letters)
            bounds.append(whole_numbers(name, number).to(device).expand(B, N))
        else:
            bounds.append(torch.full((1, 1), number, device=device).expand(B, N))
    asks, end, first = bounds
    count = (end - first).clamp(min=0)  # [B, N]
    if count.numel() and values_are_checked(count):
        most = int(count.max())
        require(most < _MOST_CANDIDATES, "num_candidates", most, "fewer than 2^31 candidates of a query")
    slots = torch.arange(num_retrieved, device=device)
    drawn = fold_seed(seed[:, None, None], asks[..., None], slots)  # [B, N, K] of 32 bits
    last = count[..., None] - num_retrieved + slots  # j
    places = drawn.mul(last.clamp(min=0) + 1).bitwise_right_shift(32)
    taken: list[Tensor] = []
    for k in range(num_retrieved):
        place = places[..., k]
        for earlier in taken:
            place = torch.where(earlier == places[..., k], last[..., k], place)
        taken.append(place)
    chosen = torch.stack(taken, dim=-1).sort(dim=-1).values
    few = torch.where(slots < count[..., None], slots, -1)
    chosen = torch.where(count[..., None] >= num_retrieved, chosen, few)
    return torch.where(chosen >= 0, chosen + first[..., None], -1)
