"""Kullback-Leibler divergences: to a teacher's next token, and to the chunks that a teacher attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops.arguments import arithmetic_dtype, require, require_shape, without_autocast

_SLAB_ELEMENTS = 1 << 24  # of logits that are turned into probabilities at a time


@without_autocast
def token_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    r"""What a student's prediction of the next token lacks of its teacher's.

    .. math::
        \mathrm{KL}_t = \sum_v p_{tv} (\log p_{tv} - \log q_{tv}), \qquad
        p_t = \mathrm{softmax}(\mathrm{teacher}_t), \quad q_t = \mathrm{softmax}(\mathrm{student}_t)

    In slabs of positions, forward and backward: no tensor of the logits' size stands beside them but the gradient.

    Args:
        teacher, student: logits [..., V]. No gradient passes to the teacher.

    Returns:
        [...] in nats, float32 or wider.

    Raises:
        ValueError: for logits of other shapes than each other's.
    """
    require_shape("student", student, tuple(teacher.shape), "of teacher [..., V]")
    found: Tensor = _TokenDivergence.apply(*(x.reshape(-1, x.shape[-1]) for x in (teacher.detach(), student)))
    return found.view(teacher.shape[:-1])


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, teacher: Tensor, student: Tensor) -> Tensor:
        ctx.save_for_backward(teacher, student)
        dtype = arithmetic_dtype(teacher, student)
        parts = []
        for theirs, ours in _slabs(teacher, student):
            p, q = theirs.to(dtype).log_softmax(-1), ours.to(dtype).log_softmax(-1)
            # a token that the teacher rules out counts for nothing, whatever the student says
            parts.append((p.exp() * (p - q).masked_fill_(p == -torch.inf, 0)).sum(-1))
        return torch.cat(parts) if parts else teacher.new_zeros(0, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        teacher, student = ctx.saved_tensors
        dtype, out = arithmetic_dtype(teacher, student), torch.empty_like(student)
        first = 0
        for theirs, ours in _slabs(teacher, student):
            last = first + len(ours)
            change = ours.to(dtype).softmax(-1).sub_(theirs.to(dtype).softmax(-1))
            out[first:last] = change.mul_(grad[first:last, None])
            first = last
        return None, out


def _slabs(*tensors: Tensor) -> Any:
    rows = max(1, _SLAB_ELEMENTS // max(1, tensors[0].shape[-1]))
    return zip(*(x.split(rows) for x in tensors if len(x)), strict=True)


@without_autocast
def selection_divergence(scores: Tensor, targets: Tensor) -> Tensor:
    r"""How far the scores of chunks are from where a teacher looks.

    .. math::
        \ell_b = \frac{1}{|A_b|} \sum_{n \in A_b} \sum_m p_{nm} (\log p_{nm} - \log \mathrm{softmax}_m r_{nm}), \qquad
        p_{nm} = \frac{y_{nm}}{\sum_{m'} y_{nm'}}

    over the landmarks :math:`A_b` whose candidates have any target. What is no candidate has no part in p.

    Args:
        scores: [B, N, M], r; -inf where chunk m is no candidate of landmark n (:func:`trailmark.ops.score_chunks`).
        targets: [B, N, M], y: 0 or more each. No gradient passes to them.

    Returns:
        [B] in nats, float32 or wider; 0 for a row without targets.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(scores.dim() == 3, "scores", tuple(scores.shape), "shape [B, N, M]")
    require_shape("targets", targets, tuple(scores.shape), "of scores [B, N, M]")
    dtype = arithmetic_dtype(scores, targets)
    candidate = scores != -torch.inf
    y = targets.detach().to(dtype).masked_fill(~candidate, 0)
    total = y.sum(-1, keepdim=True)
    taught = total[..., 0] > 0  # [B, N]
    p = y / total.masked_fill(total == 0, 1)
    # a landmark without a candidate: a softmax of nothing would be NaN, and its gradient too
    r = scores.to(dtype).masked_fill(~candidate.any(-1, keepdim=True), 0).log_softmax(-1)
    terms = torch.xlogy(p, p) - p * r.masked_fill(~candidate, 0)
    return terms.sum(-1).masked_fill(~taught, 0).sum(1) / taught.sum(1).clamp(min=1)
