"""Selecting memory chunks by landmark scores in four ways: the retrieval of Landmark Attention (Sec. 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trailmark.ops.arguments import (
    require,
    require_chunk_numbers,
    require_shape,
    values_are_checked,
    whole_numbers,
    without_autocast,
)

RetrievePer = Literal["token_and_head", "token", "head", "cell"]

# Positions are walked in slabs of about this many scores. All arithmetic is elementwise or a fixed tree, so
# neither slabs nor padding nor threads change a bit of it (guarantee 7).
_SLAB_ELEMENTS = 1 << 20
_GROUP = 64  # scores that one tree sums; memory is padded to a multiple of it


class Selected(NamedTuple):
    """What positions retrieve: k columns always, ascending chunk numbers, the missing ones (-1) last."""

    indices: Tensor
    """int64 [B, N, Hs, k]. "token_and_head": N = P, Hs = H. "token": N = P, Hs = 1. "head" (Hs = H) and
    "cell" (Hs = 1): N = 1 for all positions of the call, or, causal, N = U, the most units of a row: n is
    read by unit n."""
    running: Tensor | None
    """"head" [B, H, M], "cell" [B, 1, M]: the maxima of log p over the cell so far; None for the others."""


@torch.no_grad()
@without_autocast
def select_by_landmarks(
    scores: Tensor,
    num_retrieved: int,
    num_candidates: Tensor,
    first_candidate: Tensor | int = 0,
    per: RetrievePer = "token_and_head",
    *,
    present: Tensor | None = None,
    running: Tensor | None = None,
    units: Tensor | None = None,
    continues: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Selected:
    r"""Select the ``num_retrieved`` = k memory chunks that landmarks score best, in one of four ways.

    With scores :math:`a_{thm}` of position t, head h and chunk m, the candidates
    :math:`C = \{m : f \le m < c\}` of the row (first and number of candidates), and

    .. math::
        \log p_{thm} = a_{thm} - \log \sum_{m' \in C} \exp a_{thm'}

    the chunks retrieved are

    ================  ================================================================  ===================
    ``per``           selected                                                          by
    ================  ================================================================  ===================
    "token_and_head"  :math:`I_{th} = \mathrm{topk}_{m \in C}\, a_{thm}`                each position, head
    "token"           :math:`I_t = \mathrm{topk}_{m \in C} \max_h p_{thm}`              each position
    "head"            :math:`I_h = \mathrm{topk}_{m \in C} \max_t p_{thm}`              each head
    "cell"            :math:`I = \mathrm{topk}_{m \in C} \max_{t, h} p_{thm}`           all together
    ================  ================================================================  ===================

    The maxima are taken after the softmax, which is over memory landmarks alone. Equal ones select the
    earlier chunk; fewer candidates than k are all selected. A score of -inf is no candidate's. What stands
    where no candidate or no position is may be anything, NaN too. The choice is the same bit for bit
    however far M is padded. It has no gradient. Source: arXiv 2305.16300, Sec. 3.2 (the memory) and Table 2
    (the ways).

    **Causality.** "token_and_head" and "token" are causal: a position's choice depends on its own scores.
    "head" and "cell" are two ways each:

    - The whole cell (``units`` None; the paper's): one choice serves all positions of a call, and its
      maximum runs over all of them, and over the cell's earlier calls through ``running``. So a position
      reads chunks that later positions of its call asked for: of later tokens it learns which chunks they
      wanted (never what they are), a perplexity so measured has looked ahead, and the result depends on how
      a text is cut into calls (the official code does so and does not say it: its bug B14). Fed one position
      at a time it is causal.
    - Causal (``units`` given): the positions of unit u, which starts at position :math:`s_u` of the cell,
      read

      .. math::
          I_{hu} = \mathrm{topk}_{m \in C} \max_{t \le s_u} p_{thm}

      and for "cell" the maximum over h too: no later position has a say, a whole unit still shares one
      choice, and the result does not depend on the calls, if they hand on ``running``, ``continues`` and
      ``earlier``.

    Scores are walked in slabs of positions: beside them there are two tensors of 2^20 scores, or of one
    position's.

    Args:
        scores: [B, P, H, M], float32 or wider, scaled: query position, query head, chunk of the memory.
        num_retrieved: k >= 1.
        num_candidates: int64 [B]: c, at most M. Values of this and of other index tensors are checked on a
            CPU, elsewhere only with TRAILMARK_CHECK_VALUES=1.
        first_candidate: f, an int or int64 [B].
        per: the way to select.
        present: bool [B, P]: absent positions take no part in maxima and select nothing. None: all are
            present.
        running: "head" [B, H, M], "cell" [B, 1, M], dtype of scores: what the call before returned in the
            same cell, -inf where it knew nothing. None: the call is the cell's first.
        units: int64 [B, P]: selects causally. The unit (positions of one chunk in this cell) of each
            position, numbered from 0 in each call and row, non-decreasing by steps of 0 or 1; -1: absent.
        continues: bool [B]: unit 0 of the row was begun by an earlier call. Its choice is not made again.
            None: no row's was.
        earlier: int64 [B, H or 1, k]: the choice of that unit, as the earlier call returned it; ignored in
            rows that do not continue.

    Raises:
        ValueError: for shapes that do not fit together, chunks that do not exist, or contradictory options.
    """
    ways = get_args(RetrievePer)
    require(per in ways, "per", repr(per), "one of " + ", ".join(map(repr, ways)))
    require(scores.dim() == 4, "scores", tuple(scores.shape), "shape [B, P, H, M]")
    require(
        scores.dtype in (torch.float32, torch.float64),
        "scores",
        scores.dtype,
        "float32 or float64",
        "Compute them in torch.promote_types(dtype, torch.float32).",
    )
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    B, P, H, M = scores.shape
    candidates = _candidates(num_candidates, first_candidate, scores)  # [B, M']
    if present is not None:
        require_shape("present", present, (B, P), "[B, P]")
        require(present.dtype == torch.bool, "present", present.dtype, "a bool tensor")
        present = present.to(scores.device)
    if per in ("token_and_head", "token"):
        for argument, given in (("running", running), ("units", units)):
            require(
                given is None,
                argument,
                f"a tensor with per={per!r}",
                "None",
                'Only "head" and "cell" look at more than one position.',
            )
    if units is None:
        for argument, given in (("continues", continues), ("earlier", earlier)):
            require(given is None, argument, "a tensor without units", "None", "Only units are continued.")

    if per in ("token_and_head", "token"):
        heads = H if per == "token_and_head" else 1
        chosen = scores.new_empty(B, P, heads, num_retrieved, dtype=torch.int64)
        for slab, kept in _slabs(scores, candidates, present):
            seen = kept if heads == H else _log_probabilities(kept).amax(2, keepdim=True)
            chosen[:, slab] = best_chunks(seen, num_retrieved)
        return Selected(chosen, None)

    heads = H if per == "head" else 1
    most = scores.new_full((B, heads, candidates.shape[1]), -torch.inf)  # [B, Hs, M']
    if running is not None:
        require_shape("running", running, (B, heads, M), "[B, H or 1, M]")
        require(
            running.dtype == scores.dtype, "running", running.dtype, f"the dtype of scores, {scores.dtype}"
        )
        most[..., :M] = running
        most.masked_fill_(~candidates[:, None], -torch.inf)
    if units is None:
        for _, kept in _slabs(scores, candidates, present):
            p = _log_probabilities(kept)
            torch.maximum(most, p.amax(1) if heads == H else p.amax((1, 2))[:, None], out=most)
        return Selected(best_chunks(most, num_retrieved)[:, None], most[..., :M].contiguous())

    units, present = _units(units, present, scores)
    continued = None
    if continues is not None or earlier is not None:
        continued = _continued(continues, earlier, (B, heads, num_retrieved), M, scores.device)
    chosen = _by_units(scores, most, candidates, units, present, continued, num_retrieved)
    return Selected(chosen, most[..., :M].contiguous())


@torch.no_grad()
@without_autocast
def select_for_one(
    scores: Tensor, num_retrieved: int, per: RetrievePer, running: Tensor | None, earlier: Tensor | None
) -> Selected:
    """:func:`select_by_landmarks`, bit for bit, where each row has one position and may select any chunk.

    Nothing is checked. ``scores`` [B, 1, H, M] must be this call's own; ``earlier`` [B, H or 1, k]: the choice of the
    unit that all rows continue, None: none does. A unit has one index: indices [B, 1, H or 1, k].
    """
    if per == "token_and_head":
        return Selected(best_chunks(scores, num_retrieved), None)
    B, _, H, M = scores.shape
    padded = scores.new_full((B, 1, H, max(1, -(-M // _GROUP)) * _GROUP), -torch.inf)
    padded[..., :M] = scores
    most = _log_probabilities(padded)
    if per != "head":
        most = most.amax(2, keepdim=True)
    if per == "token":
        return Selected(best_chunks(most, num_retrieved), None)
    seen = most[:, 0, :, :M]
    if running is not None:
        torch.maximum(seen, running, out=seen)
    chosen = best_chunks(most, num_retrieved) if earlier is None else earlier[:, None]
    return Selected(chosen, seen.contiguous())


def _by_units(
    scores: Tensor,
    most: Tensor,  # [B, Hs, M']: of the cell before this call; becomes that after it
    candidates: Tensor,
    units: Tensor,
    present: Tensor,
    continued: tuple[Tensor, Tensor] | None,
    k: int,
) -> Tensor:
    """The choices [B, U, Hs, k], each by the maximum up to the first position of its unit."""
    opens = units > _greatest_before(units)  # [B, P]
    U = int(units.max()) + 1 if units.numel() else 0
    chosen = torch.full((most.shape[0], U, most.shape[1], k), -1, device=scores.device)
    if continued is not None and U:
        continues, earlier = continued
        opens = opens & ~(continues[:, None] & (units == 0))
        read = continues & (units == 0).any(1)
        chosen[:, 0] = earlier.masked_fill(~read[:, None, None], -1)
    place, row = opens.T.nonzero(as_tuple=True)  # by position
    places = list(dict.fromkeys(place.tolist()))  # where some rows read the maximum so far
    for slab, kept in _slabs(scores, candidates, present):
        p = _log_probabilities(kept)
        if most.shape[1] < p.shape[2]:
            p = p.amax(2, keepdim=True)
        so_far, first = [], slab.start
        for last in (at for at in places if slab.start <= at < slab.stop):
            torch.maximum(most, p[:, first - slab.start : last + 1 - slab.start].amax(1), out=most)
            so_far.append(most[row[place == last]])  # [n, Hs, M']
            first = last + 1
        if first < slab.stop:
            torch.maximum(most, p[:, first - slab.start :].amax(1), out=most)
        if so_far:
            inside = (place >= slab.start) & (place < slab.stop)
            b, t = row[inside], place[inside]
            chosen[b, units[b, t]] = best_chunks(torch.cat(so_far), k)
    return chosen


def _greatest_before(units: Tensor) -> Tensor:
    """[B, P]: the greatest number at an earlier position, -1 if there is none."""
    return torch.nn.functional.pad(units, (1, 0), value=-1).cummax(1).values[:, :-1]


def _candidates(num_candidates: Tensor, first_candidate: Tensor | int, scores: Tensor) -> Tensor:
    """bool [B, M']: M padded to whole groups, at least to one."""
    B, M = scores.shape[0], scores.shape[3]
    end = _bound("num_candidates", num_candidates, B, M)
    first: Tensor | int = first_candidate
    if isinstance(first, Tensor):
        first = _bound("first_candidate", first, B, None).to(scores.device)[:, None]
    else:
        require(first >= 0, "first_candidate", first, "no negative chunk")
    chunk = torch.arange(max(1, -(-M // _GROUP)) * _GROUP, device=scores.device)
    return (chunk >= first) & (chunk < end.to(scores.device)[:, None])


def _bound(argument: str, bound: Tensor, B: int, most: int | None) -> Tensor:
    require_shape(argument, bound, (B,), "[B]")
    bound = whole_numbers(argument, bound)
    if B and values_are_checked(bound):
        low, high = torch.stack(bound.aminmax()).tolist()
        require(low >= 0, argument, low, "no negative chunk")
        require(most is None or high <= most, argument, high, f"at most M = {most} chunks")
    return bound


def _units(units: Tensor, present: Tensor | None, scores: Tensor) -> tuple[Tensor, Tensor]:
    """(units, -1 where absent; present), both [B, P]."""
    B, P = scores.shape[:2]
    require_shape("units", units, (B, P), "[B, P]")
    units = whole_numbers("units", units)
    checked = values_are_checked(units)
    units = units.to(scores.device)
    if present is not None:
        units = units.masked_fill(~present, -1)
    if checked and units.numel():
        step = (units - _greatest_before(units))[units >= 0]
        wrong = step[(step < 0) | (step > 1)]
        numbers = "numbers from 0 in each row that rise by steps of 1, -1 for absent"
        require(not len(wrong), "units", f"a step of {wrong[:1].tolist()} (from -1 at first)", numbers)
    return units, units >= 0


def _continued(
    continues: Tensor | None,
    earlier: Tensor | None,
    shape: tuple[int, int, int],
    M: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(bool [B], int64 [B, Hs, k])."""
    for argument, given in (("continues", continues), ("earlier", earlier)):
        require(given is not None, argument, "None", "both continues and earlier, or neither")
    assert continues is not None
    assert earlier is not None
    require_shape("continues", continues, shape[:1], "[B]")
    require(continues.dtype == torch.bool, "continues", continues.dtype, "a bool tensor")
    require_shape("earlier", earlier, shape, "[B, H or 1, k]")
    earlier = whole_numbers("earlier", earlier)
    require_chunk_numbers("earlier", earlier, M)
    return continues.to(device), earlier.to(device)


def _slabs(scores: Tensor, candidates: Tensor, present: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Slabs of positions, each a fresh [B, p, H, M'] with -inf where no candidate or no position is."""
    B, P, H, M = scores.shape
    padded = candidates.shape[1]
    step = max(1, _SLAB_ELEMENTS // max(1, B * H * padded))
    taken = candidates[:, None, None, :M]  # [B, 1, 1, M]
    nothing = scores.new_full((), -torch.inf)
    for first in range(0, P, step):
        slab = slice(first, min(first + step, P))
        kept = scores.new_empty(B, slab.stop - first, H, padded)
        here = taken if present is None else taken & present[:, slab, None, None]
        # chosen, not added to: there may be NaN
        torch.where(here, scores[:, slab], nothing, out=kept[..., :M])
        kept[..., M:] = nothing
        yield slab, kept


def _log_probabilities(kept: Tensor) -> Tensor:
    """The log-softmax over the last dimension, in place; -inf stays -inf, also where nothing else is.

    The sum is a tree whose shape and places do not depend on M: more -inf add zeros.
    """
    top = kept.amax(-1, keepdim=True)
    kept.sub_(top.masked_fill_(top == -torch.inf, 0))
    sums = kept.exp().unflatten(-1, (-1, _GROUP))  # [..., M' / 64, 64]
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, dim=-1)
        sums = low.add_(high)
    total = sums[..., 0]  # of each group
    while total.shape[-1] > 1:
        if total.shape[-1] % 2:
            total = torch.nn.functional.pad(total, (0, 1))
        total = total[..., ::2] + total[..., 1::2]
    return kept.sub_(total.clamp(min=1).log())  # the largest adds 1; without any, log 1


def best_chunks(scores: Tensor, k: int) -> Tensor:
    """The k best [..., k] of [..., M'] that are not -inf, the earlier of equals: ascending, -1 last."""
    M = scores.shape[-1]
    values, places = scores.topk(min(k + 1, M), dim=-1)  # which of equals is left open
    chosen = places[..., :k].masked_fill(values[..., :k] == -torch.inf, M)
    if k < M:
        last, following = values[..., k - 1], values[..., k]
        contested = ((last == following) & (last > -torch.inf)).nonzero()
        for rows in contested.split(max(1, _SLAB_ELEMENTS // M)) if len(contested) else ():
            at = rows.unbind(1)
            own, least = scores[at], last[at][:, None]  # [n, M'], [n, 1]
            better, equal = ~(own <= least), own == least  # NaN is the largest, as for topk
            room = k - better.sum(-1, keepdim=True)
            taken = better | (equal & (equal.cumsum(-1) <= room))
            chosen[at] = taken.nonzero()[:, 1].view(-1, k)
    chosen = torch.nn.functional.pad(chosen.sort(dim=-1).values, (0, max(0, k - M)), value=M)
    return chosen.masked_fill(chosen == M, -1)
