"""What tokens score past chunks by, and which they select: HiLS (arXiv 2607.02980) and MoBA (arXiv 2502.13189)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trailmark.ops.arguments import (
    arithmetic_dtype,
    require,
    require_chunk_numbers,
    require_grouped_heads,
    require_shape,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.landmark.selection import best_chunks
from trailmark.ops.selection.api import ChunkSelection

_SLAB_SCORES = 1 << 22  # scores that stand in memory at a time
_BLOCK_ELEMENTS = 1 << 18  # of landmark vectors that are copied at a time
EMPTY = -1e30
"""The score that the summary of a chunk without keys gives: finite, for it is saved, and far below any other."""


@without_autocast
def summarize_chunks(
    k: Tensor, query: Tensor | None = None, lengths: Tensor | None = None, scale: float | None = None
) -> Tensor:
    r"""Landmark vectors that say how much attention a chunk would get: HiLS' expansion, or the mean of the keys.

    With a query :math:`\mu_c` for each chunk (arXiv 2607.02980),

    .. math::
        p_{cj} = \mathrm{softmax}_j(\mathrm{scale} \cdot \mu_c^\top k_{cj}), \qquad
        k'_c = \sum_j p_{cj} k_{cj}, \qquad b_c = -\sum_j p_{cj} \ln p_{cj}

    so that :math:`\mathrm{scale} \cdot q^\top k'_c + b_c` is the first-order expansion, at :math:`q = \mu_c`, of the
    log mass :math:`\ln \sum_j e^{\mathrm{scale} \cdot q^\top k_{cj}}`. This is convex in q: the expansion is never
    above it, and meets it at :math:`\mu_c`. Without queries, :math:`k'_c` is the mean and :math:`b_c` the logarithm
    of the number of keys: the expansion at 0, MoBA's score (arXiv 2502.13189).

    Args:
        k: [B, M, S, J, D]; query head h has key head h // (H // J).
        query: [B, M, H, D]; None: see above.
        lengths: int64 [B, M]: keys of each chunk that exist; None: S.
        scale: None is D ** -0.5.

    Returns:
        [B, M, H, D + 1] (without queries [B, M, J, D + 1]), float32 or wider: :math:`k'_c`, then :math:`b_c`. A chunk
        without keys has 0, and -1e30.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(k.dim() == 5, "k", tuple(k.shape), "shape [B, M, S, J, D]")
    B, M, S, J, D = k.shape
    scale = D**-0.5 if scale is None else scale
    dtype = arithmetic_dtype(k) if query is None else arithmetic_dtype(k, query)
    keys = k.to(dtype).permute(0, 1, 3, 2, 4)  # [B, M, J, S, D]
    there = empty = None
    if lengths is not None:
        require_shape("lengths", lengths, (B, M), "[B, M]")
        lengths = lengths.clamp(0, S)
        empty = (lengths == 0)[..., None, None]  # [B, M, 1, 1]
        there = (torch.arange(S, device=k.device) < lengths[..., None])[:, :, None]  # [B, M, 1, S]
        keys = keys.masked_fill(~there[..., None], 0)
    if query is None:
        count = keys.new_full((B, M), S) if lengths is None else lengths.to(dtype)
        mean = keys.sum(3) / count.clamp(min=1)[..., None, None]
        bias = count.log().clamp(min=EMPTY)[..., None, None].expand(B, M, J, 1)
        return torch.cat([mean, bias], -1)
    H = query.shape[2] if query.dim() == 4 else 0
    require_shape("query", query, (B, M, H, D), "[B, M, H, D]")
    require_grouped_heads(H, J)
    asked = query.to(dtype).view(B, M, J, H // J, D)
    scores = (asked @ keys.transpose(-1, -2)).mul(scale)  # [B, M, J, g, S]
    if there is not None and empty is not None:
        scores = scores.masked_fill(~there[..., None, :], -torch.inf).masked_fill(empty[..., None], 0)
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    # a key that is absent has the probability 0, whose logarithm is -inf: their product is 0
    bias = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)
    if empty is not None:
        bias = bias.masked_fill(empty, EMPTY)
    return torch.cat([p @ keys, bias[..., None]], -1).view(B, M, H, D + 1)


@without_autocast
def chunk_log_mass(q: Tensor, k: Tensor, lengths: Tensor | None = None, scale: float | None = None) -> Tensor:
    r"""The log mass of each chunk for each token, :math:`\ln \sum_j e^{\mathrm{scale} \cdot q_i^\top k_{cj}}`.

    Args:
        q: [B, T, H, D]. k: [B, M, S, J, D]. lengths: int64 [B, M]: keys of each chunk that exist; None: S.
        scale: None is D ** -0.5.

    Returns:
        [B, T, H, M], float32 or wider; -inf for a chunk without keys.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(q.dim() == 4, "q", tuple(q.shape), "shape [B, T, H, D]")
    require(k.dim() == 5, "k", tuple(k.shape), "shape [B, M, S, J, D]")
    (B, T, H, D), (M, S, J) = q.shape, k.shape[1:4]
    require_shape("k", k, (B, M, S, J, D), "[B, M, S, J, D]")
    require_grouped_heads(H, J)
    if lengths is not None:
        require_shape("lengths", lengths, (B, M), "[B, M]")
    dtype = arithmetic_dtype(q, k)
    keys, absent = k.to(dtype), None
    if lengths is not None:
        absent = torch.arange(S, device=k.device) >= lengths[..., None]  # [B, M, S]
        keys = keys.masked_fill(absent[..., None, None], 0)  # what is absent may be NaN
    keys = keys.permute(0, 3, 4, 1, 2).reshape(B, J, D, M * S)
    asked = q.to(dtype).view(B, T, J, H // J, D).permute(0, 2, 1, 3, 4)  # [B, J, T, g, D]
    scale = D**-0.5 if scale is None else scale
    scores = (asked.flatten(2, 3) @ keys).mul(scale).view(B, J, T, H // J, M, S)
    if absent is not None:
        scores = scores.masked_fill(absent[:, None, None, None], -torch.inf)
    return scores.logsumexp(-1).permute(0, 2, 1, 3, 4).reshape(B, T, H, M)


@torch.no_grad()
@without_autocast
def select_for_tokens(
    query: Tensor,
    beside: Tensor,
    num_retrieved: int,
    num_candidates: Tensor,
    num_key_value_heads: int,
    landmarks: Sequence[Tensor] | None = None,
    keys: tuple[Tensor, Tensor | None] | None = None,
    first_candidate: Tensor | int = 0,
    scale: float | None = None,
    among: Tensor | None = None,
) -> tuple[ChunkSelection, Tensor]:
    r"""Select for each token and key/value head the chunks that get the largest share of its attention.

    With a chunk's score :math:`g_{ihc}` in place of its log mass, and the log-sum-exp :math:`\lambda_{ih}` of the
    window, a share and the choice of key/value head j are

    .. math::
        \rho_{ihc} = g_{ihc} - \ln\!\left(e^{\lambda_{ih}} + \sum_{c'} e^{g_{ihc'}}\right), \qquad
        I_{ij} = \mathrm{topK}_c \max_{h \in j} \rho_{ihc}

    over the candidates :math:`f_i \le c < n_i` that have keys. A chunk with several summaries scores the logarithm of
    what theirs add up to as masses. Of shares that are equal to the last bit the earlier chunk is taken; those of equal
    chunks may differ by rounding, and calls of other sizes take others of them. Scores stand in memory for a slab of
    tokens at a time. No gradient. Source: arXiv 2607.02980.

    Args:
        query: [B, T, H, D]. beside: :math:`\lambda`, [B, T, H].
        num_retrieved: K >= 1.
        num_candidates: int64 [B or 1, T]. first_candidate: int64 of the same shape, or an int.
        num_key_value_heads: J.
        landmarks: [B, M, n, H or J, D + 1], n summaries a chunk as :func:`summarize_chunks` makes them, in parts as a
            memory keeps them.
        keys: or the keys themselves [B, M, S, J, D] and their lengths [B, M] (None: S), for exact log masses.
        scale: None is D ** -0.5.
        among: int64 [B, n], each row ascending: of these chunks alone; from M on a number is no chunk. Not with keys.
            A tensor of the host saves a wait for the device.

    Returns:
        indices [B, T, J, K], scores the largest log share of the heads, weights those shares among the K; and what each
        head scores the selected with, :math:`g` [B, T, H, K], -inf where there is none.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(query.dim() == 4, "query", tuple(query.shape), "shape [B, T, H, D]")
    B, T, H, D = query.shape
    J = num_key_value_heads
    require_grouped_heads(H, J)
    require_shape("beside", beside, (B, T, H), "[B, T, H]")
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    require((landmarks is None) != (keys is None), "landmarks, keys", "both or none", "one of them")
    of_rows = 1 if num_candidates.shape[:1] == (1,) else B
    require_shape("num_candidates", num_candidates, (of_rows, T), "[B or 1, T]")
    for part in landmarks or ():
        _require_landmarks(part, B, J, H, D)
        alike = (landmarks or [part])[0].shape[2:]  # blocks are added up as those of one table
        require(
            part.shape[2:] == alike,
            "landmarks",
            tuple(part.shape),
            f"parts [B, m, {', '.join(map(str, alike))}]",
        )
    if isinstance(first_candidate, Tensor):
        require_shape("first_candidate", first_candidate, (of_rows, T), "[B or 1, T], as num_candidates")
    dtype = arithmetic_dtype(query, beside, *(landmarks or ()), *(keys or ())[:1])
    parts = [x for x in landmarks or () if x.shape[1]]
    M = keys[0].shape[1] if keys is not None else sum(x.shape[1] for x in parts)
    number = torch.arange(M, device=query.device)[None]  # [1 or B, n] of the chunks that are looked at
    if among is not None:
        require(
            keys is None, "among", "chunks beside keys", "None with keys", "Give these chunks' keys alone."
        )
        require(among.dim() == 2, "among", tuple(among.shape), "shape [B, n]")
        require_shape("among", among, (B, among.shape[1]), "[B, n]")
        among = whole_numbers("among", among).cpu()
        ascends = (among[:, 1:] > among[:, :-1]) | (among[:, 1:] >= M)
        known = bool(ascends.all()) and bool((among[:, :1] >= 0).all())
        require(known, "among", "others", "each row's chunks in ascending order from 0 on, each once")
        number = among.to(query.device)
    n = number.shape[1] if M else 0
    scale = D**-0.5 if scale is None else scale
    indices = torch.full((B, T, J, num_retrieved), -1, device=query.device)
    scores = query.new_full((B, T, J, num_retrieved), -math.inf, dtype=dtype)
    of_heads = query.new_full((B, T, H, num_retrieved), -math.inf, dtype=dtype)
    each = 1 if keys is None else keys[0].shape[2]  # a chunk's summaries are added up block by block
    block = max(16, _BLOCK_ELEMENTS // max(1, B * sum(math.prod(x.shape[2:]) for x in parts[:1])))
    slab = max(1, _SLAB_SCORES // max(1, B * H * n * each))
    for start in range(0, T if n else 0, slab):
        rows = slice(start, min(T, start + slab))
        asked = query[:, rows].to(dtype)
        if keys is not None:
            found = chunk_log_mass(asked, keys[0], keys[1], scale)
        else:
            of_blocks = [_expansion(asked, *x, scale) for x in _tables(parts, block, dtype, among)]
            found = of_blocks[0] if len(of_blocks) == 1 else torch.cat(of_blocks, -1)
        first = first_candidate if isinstance(first_candidate, int) else first_candidate[:, rows, None]
        # [B or 1, t, n]
        there = (number[:, None] < num_candidates[:, rows, None].clamp(max=M)) & (number[:, None] >= first)
        found = found.masked_fill(~there[:, :, None] | (found <= EMPTY / 2), -math.inf)
        seen = torch.logaddexp(found.logsumexp(-1), beside[:, rows].to(dtype))
        shares = found - seen.masked_fill(seen == -math.inf, 0)[..., None]
        most = shares.view(B, -1, J, H // J, n).amax(3)
        chosen = best_chunks(most, num_retrieved)
        indices[:, rows] = chosen
        if among is not None:
            of_places = number.gather(1, chosen.clamp(min=0).flatten(1)).view_as(chosen)
            indices[:, rows] = torch.where(chosen < 0, chosen, of_places)
        scores[:, rows] = most.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -math.inf)
        of_head = chosen.repeat_interleave(H // J, 2)  # [B, t, H, K]
        of_heads[:, rows] = found.gather(-1, of_head.clamp(min=0)).masked_fill(of_head < 0, -math.inf)
    weights = scores.masked_fill(indices < 0, -math.inf).softmax(-1).masked_fill(indices < 0, 0)
    return ChunkSelection(indices, weights, scores), of_heads


@without_autocast
def score_for_tokens(query: Tensor, landmarks: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
    r"""The scores :math:`g` of :func:`select_for_tokens` for chunks that are selected, with gradients.

    Args:
        query: [B, T, H, D]. landmarks: [B, M, n, H or J, D + 1]. indices: int64 [B, T, J, K]; -1 gives -inf.
        scale: None is D ** -0.5.

    Returns:
        [B, T, H, K], float32 or wider.

    Raises:
        ValueError: for shapes that do not fit together, or chunks that do not exist.
    """
    require(query.dim() == 4, "query", tuple(query.shape), "shape [B, T, H, D]")
    B, T, H, D = query.shape
    require(indices.dim() == 4, "indices", tuple(indices.shape), "shape [B, T, J, K]")
    J, K = indices.shape[2:]
    require_shape("indices", indices, (B, T, J, K), "[B, T, J, K]")
    require_grouped_heads(H, J)
    _require_landmarks(landmarks, B, J, H, D)
    M, n = landmarks.shape[1:3]
    require_chunk_numbers("indices", indices, M)
    scale = D**-0.5 if scale is None else scale
    if not M:
        return query.new_full((B, T, H, K), -math.inf, dtype=arithmetic_dtype(query, landmarks))
    if not (torch.is_grad_enabled() and (query.requires_grad or landmarks.requires_grad)):
        return _scores_of(query, landmarks, indices, scale)
    # the vectors of what is selected, K times a table's, are gathered again in the backward
    size = max(1, _SLAB_SCORES // max(1, B * J * K * n * (H // J) * D))
    slabs = zip(query.split(size, 1), indices.split(size, 1), strict=True)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(_scores_of, q, landmarks, own, scale) for q, own in slabs], 1)


def _require_landmarks(landmarks: Tensor, B: int, J: int, H: int, D: int) -> None:
    shape = tuple(landmarks.shape)
    fits = len(shape) == 5 and (shape[0], shape[4]) == (B, D + 1) and shape[3] in (H, J)
    require(fits, "landmarks", shape, f"shape [B, M, n, H or J, D + 1] = [{B}, M, n, {H} or {J}, {D + 1}]")


def _scores_of(query: Tensor, landmarks: Tensor, indices: Tensor, scale: float) -> Tensor:
    (B, T, H, D), (M, n, heads), (J, K) = query.shape, landmarks.shape[1:4], indices.shape[2:]
    dtype, none = arithmetic_dtype(query, landmarks), indices < 0
    row = torch.arange(B, device=query.device)[:, None, None, None] * (M * J)
    at = row + indices.clamp(min=0) * J + torch.arange(J, device=query.device)[:, None]
    # the vectors of a key/value head side by side
    table = landmarks.to(dtype).unflatten(3, (J, heads // J)).transpose(2, 3).reshape(B * M * J, -1)
    taken = table.index_select(0, at.flatten()).view(B, T, J, K, n, heads // J, D + 1)
    asked = query.to(dtype).view(B, T, J, 1, 1, H // J, D)
    found = (taken[..., :D] * asked).sum(-1).mul(scale) + taken[..., D]  # [B, T, J, K, n, g]
    found = found[:, :, :, :, 0] if n == 1 else found.logsumexp(4)
    return found.masked_fill(none[..., None], -math.inf).transpose(3, 4).reshape(B, T, H, K)


def _tables(
    landmarks: Sequence[Tensor], size: int, dtype: torch.dtype, among: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of ``size`` chunks of landmark vectors in any parts [B, M, n, heads, D + 1]; ``among``: of these alone.

    They are copied to one place, which stays in a cache, so that neither parts nor strides decide a bit of a product;
    what is added to a score lies apart, so that rows of D numbers are aligned.

    Yields:
        vectors [B, heads, m, n, D], and what is added to their products [B, heads, m, n].
    """
    B, _, n, heads, D = landmarks[0].shape
    M = sum(part.shape[1] for part in landmarks) if among is None else among.shape[1]
    D, most, new = D - 1, B * heads * min(size, M) * n, landmarks[0].new_empty
    place, place_of_bias = new(most * D, dtype=dtype), new(most, dtype=dtype)
    for first in range(0, M, size):
        m = min(size, M - first)
        count = B * heads * m * n
        vectors, bias = place[: count * D].view(B, heads, m, n, D), place_of_bias[:count].view(B, heads, m, n)
        if among is None:
            _copy(landmarks, first, vectors, bias)
        else:
            _pick(landmarks, among[:, first : first + m], vectors, bias)
        yield vectors, bias


def _copy(landmarks: Sequence[Tensor], first: int, vectors: Tensor, bias: Tensor) -> None:
    """Of parts the chunks from ``first`` on, as many as a block has."""
    begin, m = -first, vectors.shape[2]  # of each part, in the block
    for part in landmarks:
        end = begin + part.shape[1]
        if end > 0 and begin < m:
            low, high = max(begin, 0), min(end, m)
            own = part[:, low - begin : high - begin].permute(0, 3, 1, 2, 4)
            vectors[:, :, low:high], bias[:, :, low:high] = own[..., :-1], own[..., -1]
        begin = end


def _pick(landmarks: Sequence[Tensor], chunks: Tensor, vectors: Tensor, bias: Tensor) -> None:
    """Of parts those of ``chunks`` [B, m], where a block has them; what none of them has is left as it is."""
    for row, numbers in enumerate(chunks):
        begin = 0
        for part in landmarks:
            end = begin + part.shape[1]
            low, high = torch.searchsorted(numbers, torch.tensor([begin, end])).tolist()
            if low < high:  # several times faster than an index of two tensors
                places = (numbers[low:high] - begin).to(part.device)
                own = part[row].index_select(0, places).permute(2, 0, 1, 3)
                vectors[row, :, low:high], bias[row, :, low:high] = own[..., :-1], own[..., -1]
            begin = end


def _expansion(query: Tensor, vectors: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Scores [B, t, H, m] of queries [B, t, H, D] by what :func:`_tables` yields."""
    t, (heads, m, n) = query.shape[1], bias.shape[1:]
    asked = query.unflatten(2, (heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, heads, t g, D]
    flat, added = vectors.flatten(2, 3).transpose(-1, -2), bias.flatten(2)[:, :, None]
    of_rows = [torch.baddbmm(*x, alpha=scale) for x in zip(added, asked, flat, strict=True)]
    found = of_rows[0][None] if len(of_rows) == 1 else torch.stack(of_rows)
    if n > 1:
        found = found.unflatten(-1, (m, n)).logsumexp(-1)
    return found.unflatten(2, (t, -1)).transpose(1, 2).flatten(2, 3)
