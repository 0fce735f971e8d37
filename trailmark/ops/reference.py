"""The equations as oracles: naive, dense, exact in float64. Read them beside docs/math.md and the paper.

They gather and keep everything, so they are for tests and small inputs. Shapes and semantics are those of
the public functions of the same name, which check the arguments first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype


def sliding_window_attention(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, P, J, D]
    v: Tensor,  # [B, P, J, D]
    window: int | None,
    positions: tuple[Tensor, Tensor] | None,
    document_ids: tuple[Tensor, Tensor] | None,
    alibi_slopes: Tensor | None,
    scale: float,
    num_sinks: int = 0,
    sink_queries: Tensor | None = None,  # [B, T, H, D]
    windows: Tensor | None = None,  # [B or 1, T]
) -> tuple[Tensor, Tensor]:
    """Causal attention over the last ``window`` positions, by a dense [T, P] mask: (output, log-sum-exp).

    Beyond them, over sinks (arXiv 2309.17453), scored by ``sink_queries``.
    """
    dtype = arithmetic_dtype(q, k, v)
    batch, T, H, _ = q.shape
    P, J = k.shape[1:3]
    k, v = (x.repeat_interleave(H // J, dim=2) for x in (k, v))
    sink = torch.arange(P, device=q.device).expand(batch, P) < num_sinks  # [B, P]
    apart = sink if positions is not None else torch.zeros_like(sink)  # keys that are sinks alone
    if positions is None and document_ids is not None:
        same = document_ids[1][:, :, None] == document_ids[1][:, None, :]
        sink = same.tril(-1).sum(2) < num_sinks
    if positions is None:
        last = torch.arange(P, device=q.device).expand(batch, P)
        positions = last[:, P - T :], last
    query, key = positions[0][:, :, None], positions[1][:, None, :]
    visible = (key >= 0) & (query >= 0) & (key <= query)  # [B, T, P]
    outside = torch.zeros_like(visible)
    if window is not None:
        outside = key <= query - (window if windows is None else windows[:, :, None])
        visible = visible & torch.where(outside, sink[:, None], ~apart[:, None])
    if document_ids is not None:
        visible = visible & (document_ids[0][:, :, None] == document_ids[1][:, None, :])
    scores = torch.einsum("bthd,bphd->bhtp", q.to(dtype), k.to(dtype)) * scale
    if sink_queries is not None:
        of_sinks = torch.einsum("bthd,bphd->bhtp", sink_queries.to(dtype), k.to(dtype)) * scale
        scores = torch.where(outside[:, None], of_sinks, scores)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * (query - key)[:, None].to(dtype)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    empty = ~visible.any(-1)[:, None, :, None]  # [B, 1, T, 1]
    probabilities = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    out = torch.einsum("bhtp,bphd->bthd", probabilities, v.to(dtype))
    return out.to(q.dtype), scores.logsumexp(-1).transpose(1, 2)


def select_chunks(
    query: Tensor,  # [B, N, J, E]
    landmarks: Tensor,  # [B, M, J, E]
    num_retrieved: int,
    num_candidates: Tensor,  # [B, N]
    first_candidate: Tensor,  # [B, N]
    noise: Tensor | None,  # [B, N, J, M]
    scale: float,
    recency: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score all chunks, sort all (the earlier of equals first), keep K: (indices, weights, scores)."""
    dtype = arithmetic_dtype(query, landmarks)
    M = landmarks.shape[1]
    scores = torch.einsum("bnje,bmje->bnjm", query.to(dtype), landmarks.to(dtype)) * scale
    chunk = torch.arange(M, device=query.device)
    candidate = (chunk >= first_candidate[..., None]) & (chunk < num_candidates[..., None])  # [B, N, M]
    age = (num_candidates[..., None] - chunk).clamp(min=1).double()  # 1 for the last that may be selected
    scores = scores - (recency * age.log()).to(dtype)[:, :, None]
    noisy = scores.detach() if noise is None else scores.detach() + noise
    noisy = noisy.masked_fill(~candidate[:, :, None], -torch.inf)
    order = noisy.sort(dim=-1, descending=True, stable=True).indices[..., :num_retrieved]
    kept = candidate[:, :, None].expand_as(scores).gather(-1, order)
    order = order.masked_fill(~kept, M).sort(dim=-1).values  # ascending, nothing last
    kept = order < M
    chosen = scores.gather(-1, order.clamp(max=max(M - 1, 0)))
    chosen = chosen.masked_fill(~kept, -torch.inf)
    none = ~kept.any(-1, keepdim=True)
    weights = chosen.masked_fill(none, 0).softmax(-1).masked_fill(~kept, 0)
    missing = (0, num_retrieved - order.shape[-1])
    pad = torch.nn.functional.pad
    return (
        pad(order.masked_fill(~kept, -1), missing, value=-1),
        pad(weights, missing),
        pad(chosen, missing, value=-torch.inf),
    )


def weigh_chunks(scores: Tensor, kind: str, decay: Tensor | None = None) -> Tensor:
    """See :func:`trailmark.ops.weigh_chunks`; scores [..., K]."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    count = (scores > -torch.inf).sum(-1)
    if kind == "softmax":  # the same of all
        scores = scores - torch.where(count > 0, scores.amax(-1), 0)[..., None]
    weights = [torch.zeros_like(scores[..., 0]) for _ in range(scores.shape[-1])]
    left = torch.ones_like(scores[..., 0])  # of the stick
    for k in reversed(range(scores.shape[-1])):  # the most recent first
        there = k < count
        score = torch.where(there, scores[..., k], 0)
        if kind == "stick_breaking":
            share = torch.where(there, score.sigmoid(), 0)
            weights[k], left = left * share, left * (1 - share)
            continue
        age = count - 1 - k
        grown = (score if decay is None else score + decay * age).exp()
        weights[k] = torch.where(there, grown, 0)
    stacked = torch.stack(weights, -1)
    if kind == "stick_breaking":
        return stacked
    total = stacked.sum(-1, keepdim=True)
    return stacked / torch.where(total == 0, 1, total)


def grouped_cross_attention(
    q: Tensor,  # [B, N, R, H, D]
    k: Tensor,  # [B, M, S, J, D]
    v: Tensor,  # [B, M, S, J, D]
    indices: Tensor,  # [B, N, J, K]
    weights: Tensor,  # [B, N, J or H, K]
    lengths: Tensor,  # [B, M]
    softmax_off_by_one: bool,
    scale: float,
    beside: Tensor | None = None,  # [B, N, R, H, D]
    beside_lse: Tensor | None = None,  # [B, N, R, H]
) -> Tensor:
    """Paper (arXiv 2410.01651) Eq. 2 and 3: softmax within each retrieved chunk, weighted sum over chunks.

    With ``beside``, one softmax over all of them and a virtual key, which has its output as a value and its log-sum-exp
    as a score; a chunk's keys count as often as its weight says, and that output is taken from what comes out.
    """
    given = [x for x in (q, k, v, weights, beside, beside_lse) if x is not None]
    dtype = arithmetic_dtype(*given)
    batch, N, R, H, D = q.shape
    M, S, J = k.shape[1:4]
    if M == 0:
        nothing = [x[..., :0].to(q.dtype).sum() for x in given]  # a gradient of zeros, not none
        return torch.zeros_like(q) + torch.stack(nothing).sum()
    chunk = indices.clamp(min=0)
    row = torch.arange(batch, device=q.device)[:, None, None, None]
    head = torch.arange(J, device=q.device)[:, None]
    absent = torch.arange(S, device=q.device) >= lengths[row, chunk][..., None]  # [B, N, J, K, S]
    used = weights.to(dtype).view(
        batch, N, J, weights.shape[2] // J, weights.shape[3]
    )  # [B, N, J, g or 1, K]
    used = used.masked_fill(indices[:, :, :, None] < 0, 0).expand(-1, -1, -1, H // J, -1)
    unread = indices < 0 if beside is None else (indices < 0) | (used == 0).all(3)
    absent = absent | unread[..., None]
    keys, values = (
        x.to(dtype).transpose(2, 3)[row, chunk, head].masked_fill(absent[..., None], 0) for x in (k, v)
    )  # [B, N, J, K, S, D]
    queries = q.to(dtype).view(batch, N, R, J, H // J, D)
    scores = torch.einsum("bnrjgd,bnjksd->bnjgrks", queries, keys) * scale
    scores = scores.masked_fill(absent[:, :, :, None, None], -torch.inf)
    if beside is not None and beside_lse is not None:
        weight = used[:, :, :, :, None, :, None]
        counted = scores + weight.masked_fill(weight == 0, 1).log()
        counted = counted.masked_fill(weight == 0, -torch.inf)
        null = beside_lse.to(dtype).view(batch, N, R, J, H // J).permute(0, 1, 3, 4, 2)[..., None]
        probabilities = torch.cat([counted.flatten(-2), null], dim=-1).softmax(-1)
        probabilities = probabilities[..., :-1].view_as(scores)
        out = torch.einsum("bnjgrks,bnjksd->bnrjgd", probabilities, values)
        share = probabilities.sum((-2, -1)).permute(0, 1, 4, 2, 3)[..., None]
        return (out - share * beside.to(dtype).view(out.shape)).reshape(q.shape).to(q.dtype)
    if softmax_off_by_one:  # a virtual key with score 0 and value 0
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], dim=-1)
        probabilities = scores.softmax(-1)[..., :-1]
    else:
        empty = absent.all(-1)[:, :, :, None, None, :, None]
        probabilities = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    out = torch.einsum("bnjgk,bnjgrks,bnjksd->bnrjgd", used, probabilities, values)
    return out.reshape(q.shape).to(q.dtype)


def landmark_attention(
    q: Tensor,  # [B, P, H, D]
    k: Tensor,  # [B, T, J, D]
    v: Tensor,  # [B, T, J, D]
    is_landmark: Tensor,  # [B, T] bool
    document_ids: Tensor,  # [B, T]
    causal: bool,
    scale: float,
    query_places: Tensor,  # [B, P]
    seen: Tensor | None = None,  # [B, T] bool: other landmarks are masked; None: all are seen
    own: bool = True,
    literal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Paper (arXiv 2305.16300) Eq. 1 to 4, by dense [P, T] groups: (output, log-sum-exp of each query's group).

    Beside them, a landmark whose chunk shows the query no regular token is masked: its weight would be lost, and
    the weights not sum to one. ``literal`` leaves it in, as the equations and the published code have it.
    """
    dtype = arithmetic_dtype(q, k, v)
    (B, P, H, _), (T, J) = q.shape, k.shape[1:3]
    if T == 0:
        return torch.zeros_like(q), q.new_full((B, P, H), -torch.inf, dtype=dtype)
    place = torch.arange(T, device=q.device)
    present = document_ids >= 0
    together = (document_ids[:, :, None] == document_ids[:, None]) & present[:, None]  # [B, T, T]
    # p: the landmark of each place's chunk, itself for a landmark; T: none
    closing = together & is_landmark[:, None] & (place >= place[:, None])
    p = torch.where(closing, place, T).amin(-1)  # [B, T]
    row, i = torch.arange(B, device=q.device)[:, None], query_places.clamp(min=0)
    visible = together[row, i] & present[row, i][..., None] & (query_places >= 0)[..., None]  # [B, P, T]
    if causal:
        visible = visible & (place <= i[..., None])
    p_i, p_j, landmark = p[row, i][..., None], p[:, None], is_landmark[:, None]
    if not own:
        visible = visible & (landmark | (p_j != p_i))
    if not literal:
        counts = torch.zeros((B, P, T + 1), dtype=torch.int64, device=q.device)
        counts.scatter_add_(2, p_j.expand_as(visible), (visible & ~landmark).long())
        visible = visible & (~landmark | (counts[..., :T] > 0))
    if seen is not None:
        visible = visible & (~landmark | seen[:, None])
    G = torch.where(landmark, torch.where(p_i == place, -1, p_i), p_j)  # Eq. 2
    visible = (visible & (G >= 0))[:, None]  # [B, 1, P, T]
    group = G.clamp(min=0)[:, None].expand(B, H, P, T)

    # what is absent is not multiplied either: NaN times 0 is NaN
    asks = (visible[:, 0].any(-1))[..., None, None]
    k, v = (x.to(dtype).masked_fill(~present[..., None, None], 0) for x in (k, v))
    k, v = (x.repeat_interleave(H // J, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype).masked_fill(~asks, 0), k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    top = torch.full((B, H, P, T + 1), -torch.inf, dtype=dtype, device=q.device)
    top = top.scatter_reduce(3, group, scores.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    exponentials = (scores - top.gather(3, group)).exp()
    total = torch.zeros_like(top).scatter_add(3, group, exponentials)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    S = exponentials / total.gather(3, group)  # Eq. 1 and 3
    # Eq. 4; a landmark i is in the group of its chunk's tokens: its own landmark is all that it ignores
    gate = torch.nn.functional.pad(S, (0, 1)).gather(3, p_j[:, None].expand(B, H, P, T))
    weights = torch.where((p_j == p_i)[:, None], S, S * gate).masked_fill(landmark[:, None], 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    own_group = p_i[:, None].expand(B, H, P, 1)
    lse = (top + total.log()).masked_fill(empty, -torch.inf).gather(3, own_group)[..., 0].transpose(1, 2)
    # they are 0; now their gradients, even NaN, go nowhere
    out = out.masked_fill((lse == -torch.inf)[..., None], 0)
    return out.to(q.dtype), lse


def landmark_memory_attention(
    q: Tensor,  # [B, U, Y, R, D]
    keys: Tensor,  # [B, U, Y, k, S + 1, D]
    values: Tensor,  # [B, U, Y, k, S, D]
    turns: Tensor,  # [B, U, Y or 1, k, D / 2, 2]
    present: Tensor,  # [B, U, Y, k] bool
    lengths: Tensor | None = None,  # [B, U, Y, k]
) -> tuple[Tensor, Tensor, Tensor]:
    """Paper (arXiv 2305.16300) Sec. 3.2: a softmax over landmarks, times one inside each chunk; queries turn (RoPE)."""
    S = values.shape[-2]
    even, odd = q[..., None, :, 0::2], q[..., None, :, 1::2]  # [B, U, Y, 1, R, D / 2]
    cos, sin = turns[..., None, :, 0], turns[..., None, :, 1]  # [B, U, Y, k, 1, D / 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    scores = torch.einsum("buykrd,buyksd->buykrs", turned, keys) * q.shape[-1] ** -0.5
    gates = scores[..., S].masked_fill(~present[..., None], -torch.inf)  # [B, U, Y, k, R]
    inside = scores[..., :S]
    if lengths is not None:
        row = torch.arange(S, device=q.device)
        inside = inside.masked_fill(row >= lengths[..., None, None], -torch.inf)
    nothing = ~present.any(-1)[..., None, None]
    chunk = gates.masked_fill(nothing, 0).softmax(-2).masked_fill(nothing, 0)
    out = torch.einsum("buykr,buykrs,buyksd->buyrd", chunk, inside.softmax(-1), values)
    return out, gates.logsumexp(-2), gates.transpose(-1, -2)


def summarize_chunks(
    k: Tensor,  # [B, M, S, J, D]
    query: Tensor | None,  # [B, M, H, D]
    lengths: Tensor,  # [B, M]
    scale: float,
) -> Tensor:
    """Paper (arXiv 2607.02980): k' and b of a chunk, the expansion of its log mass at its query; None: at 0."""
    dtype = arithmetic_dtype(k) if query is None else arithmetic_dtype(k, query)
    B, M, S, J, D = k.shape
    mu = k.new_zeros(B, M, J, D, dtype=dtype) if query is None else query.to(dtype)
    absent = (torch.arange(S, device=k.device) >= lengths[..., None])[:, :, None]  # [B, M, 1, S]
    keys = k.to(dtype).transpose(2, 3).repeat_interleave(mu.shape[2] // J, dim=2)  # [B, M, H, S, D]
    keys = keys.masked_fill(absent[..., None], 0)
    scores = torch.einsum("bmhd,bmhsd->bmhs", mu, keys) * scale
    empty = (lengths == 0)[..., None, None]
    scores = scores.masked_fill(absent, -torch.inf).masked_fill(empty, 0)
    p, log_p = scores.softmax(-1), scores.log_softmax(-1).masked_fill(absent, 0)
    b = -(p * log_p).sum(-1, keepdim=True)
    return torch.cat([torch.einsum("bmhs,bmhsd->bmhd", p, keys), b.masked_fill(empty, -1e30)], -1)


def chunk_log_mass(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, M, S, J, D]
    lengths: Tensor,  # [B, M]
    scale: float,
) -> Tensor:
    """Paper (arXiv 2607.02980): ln Z_c(q_i), what the keys of a chunk add up to in a softmax, [B, T, H, M]."""
    dtype, (S, J) = arithmetic_dtype(q, k), k.shape[2:4]
    absent = torch.arange(S, device=k.device) >= lengths[..., None]  # [B, M, S]
    keys = k.to(dtype).masked_fill(absent[..., None, None], 0).repeat_interleave(q.shape[2] // J, dim=3)
    scores = torch.einsum("bthd,bmshd->bthms", q.to(dtype), keys) * scale
    return scores.masked_fill(absent[:, None, None], -torch.inf).logsumexp(-1)


def score_for_tokens(
    query: Tensor,  # [B, T, H, D]
    landmarks: Tensor,  # [B, M, n, H or J, D + 1]
    indices: Tensor,  # [B, T, J, K]
    scale: float,
) -> Tensor:
    """Paper (arXiv 2607.02980): g = q . k' + b of selected chunks, [B, T, H, K]; several of a chunk add up."""
    dtype = arithmetic_dtype(query, landmarks)
    H, M = query.shape[2], landmarks.shape[1]
    table = landmarks.to(dtype).repeat_interleave(H // landmarks.shape[3], dim=3)  # [B, M, n, H, D + 1]
    scores = torch.einsum("bthd,bmnhd->bthmn", query.to(dtype), table[..., :-1]) * scale
    scores = (scores + table[..., -1].permute(0, 3, 1, 2)[:, None]).logsumexp(-1)
    of_head = indices.repeat_interleave(H // indices.shape[2], dim=2)  # [B, T, H, K]
    scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    return scores.gather(-1, of_head.masked_fill(of_head < 0, M))


def select_for_tokens(
    scores: Tensor,  # [B, T, H, M]
    beside: Tensor,  # [B, T, H]
    num_retrieved: int,
    num_candidates: Tensor,  # [B, T]
    first_candidate: Tensor,  # [B, T]
    num_key_value_heads: int,
) -> tuple[Tensor, Tensor]:
    """Paper (arXiv 2607.02980): the K largest rho of each key/value head, and rho itself, [B, T, J, M]; -inf if none.

    ``scores``: g of all chunks, -inf for one without keys.
    """
    M = scores.shape[-1]
    chunk = torch.arange(M, device=scores.device)
    candidate = (chunk >= first_candidate[..., None]) & (chunk < num_candidates[..., None])  # [B, T, M]
    scores = scores.masked_fill(~candidate[:, :, None], -torch.inf)
    seen = torch.cat([scores, beside[..., None].to(scores.dtype)], -1).logsumexp(-1, keepdim=True)
    shares = (scores - seen).masked_fill(scores == -torch.inf, -torch.inf)
    shares = shares.unflatten(2, (num_key_value_heads, -1)).amax(3)
    order = shares.sort(dim=-1, descending=True, stable=True).indices[..., :num_retrieved]
    order = order.masked_fill(shares.gather(-1, order) == -torch.inf, M).sort(dim=-1).values
    missing = (0, num_retrieved - order.shape[-1])
    return torch.nn.functional.pad(order.masked_fill(order == M, -1), missing, value=-1), shares


def chunked_cross_attention(
    q: Tensor,  # [B, N, R, H, D]
    k: Tensor,  # [B, N, L, J, D]
    v: Tensor,  # [B, N, L, J, D]
    null_k: Tensor,  # [J, D]
    null_v: Tensor,  # [J, D]
    mask: Tensor | None,  # [B, N, L]
    scale: float,
) -> Tensor:
    """RETRO (arXiv 2112.04426) Sec. 2.4 with RPT's null key: dense scores, one softmax."""
    dtype = arithmetic_dtype(q, k, v, null_k, null_v)
    groups = q.shape[3] // k.shape[3]
    if mask is not None:
        k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (k, v))
    k, v, null_k, null_v = (x.to(dtype).repeat_interleave(groups, dim=-2) for x in (k, v, null_k, null_v))
    queries = q.to(dtype)
    scores = torch.einsum("bnrhd,bnlhd->bnrhl", queries, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None, None], -torch.inf)
    null = torch.einsum("bnrhd,hd->bnrh", queries, null_k) * scale
    probabilities = torch.cat([null[..., None], scores], dim=-1).softmax(-1)
    out = probabilities[..., :1] * null_v + torch.einsum("bnrhl,bnlhd->bnrhd", probabilities[..., 1:], v)
    return out.to(q.dtype)
