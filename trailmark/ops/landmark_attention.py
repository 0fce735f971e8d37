"""Landmark Attention: far chunks are attended to through the gate of their landmarks (arXiv 2305.16300, Sec. 3.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops import landmark_attention_torch, reference
from trailmark.ops.arguments import (
    arithmetic_dtype,
    require,
    require_grouped_heads,
    require_implementation,
    require_shape,
    triton_problem,
    without_autocast,
)
from trailmark.ops.landmark_layout import TABLES, LandmarkLayout


@without_autocast
def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor | LandmarkLayout,
    document_ids: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    *,
    query_places: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend to the own chunk, and to every other chunk through its landmark.

    A chunk is the regular tokens since the last landmark (or since the document's beginning), closed by its
    landmark. A query, regular or landmark, attends to the regular tokens of its own chunk, and to every other
    chunk c of its document that has a landmark :math:`p_c` and a regular token; ``causal``: to what stands at or
    before it. One softmax over all these tokens, with the scores

    .. math::
        a'_{ij} = a_{ij} + \begin{cases} 0 & j \text{ in the own chunk} \\
            a_{i p_c} - \log \sum_{j' \in c} e^{a_{ij'}} & j \in c \end{cases}
        \qquad a_{ij} = \mathrm{scale} \cdot q_i^\top k_j

    Source: arXiv 2305.16300, Eq. 1 to 4, of which this is the closed form (docs/landmark.md). Landmarks' values, if
    finite, never count (NaN and infinity may spread), nor does a chunk's landmark for its own queries. Weights sum
    to one.

    Time is O(P T); "triton" keeps the inputs, the output and a number per query and head for the backward,
    "torch" the inputs alone. What an implementation makes of a layout, a ready one remembers for all layers; a
    compiled graph makes it anew in each call, forward and backward.

    Args:
        q: [B, P, H, D]; the last P of T places, unless ``query_places`` says where they stand.
        k, v: [B, T, J, D]; query head h uses key/value head h // (H // J).
        is_landmark: bool [B, T]; or a ready :class:`LandmarkLayout`, which a model makes once for all layers.
            Then ``document_ids``, ``causal`` and ``query_places`` are its own.
        document_ids: int64 [B, T]; negative: absent (padding), with no effect, not even as NaN. None: one document.
        causal: False: queries see all of their own chunk, and the chunks after it. An incomplete tail, having no
            landmark, is still invisible to other chunks.
        scale: None is D ** -0.5.
        implementation: "reference" (Eq. 1 to 4 literally, keeps [P, T] tables), "torch" or "triton" (float32,
            bfloat16 or float16, the same for q, k and v; D <= 256). None: "triton" on CUDA where it supports the
            input, else "torch".
        query_places: int64 [B, P], the place in k of each row of q; -1: absent. None: the last P.
        return_lse: also return the log-sum-exp of the scores a', [B, P, H], float32 or wider, differentiable.

    Returns:
        [B, P, H, D] in the dtype of q; where nothing is attended to, zeros with zero gradients (and -inf as
        log-sum-exp), whatever gradients come in, NaN too. With ``return_lse`` the pair.

    Raises:
        ValueError: for shapes that do not fit together, places that do not exist or leave gaps (see
            :meth:`LandmarkLayout.of`), or an implementation that cannot take the input.
    """
    require_implementation(implementation, ("reference", "torch", "triton"))
    require(q.dim() == 4, "q", tuple(q.shape), "shape [B, P, H, D]")
    require(k.dim() == 4, "k", tuple(k.shape), "shape [B, T, J, D]")
    B, _, H, D = q.shape
    T, J = k.shape[1:3]
    require_shape("k", k, (B, T, J, D), "[B, T, J, D]")
    require_shape("v", v, (B, T, J, D), "[B, T, J, D]")
    require_grouped_heads(H, J)
    require(D >= 1, "D", D, "at least 1")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.is_floating_point(), name, x.dtype, "a floating dtype", "Convert it.")
        if x.device != q.device:
            require(False, name, f"a tensor on {x.device}", f"one on {q.device}, as q", "Move it there.")
    scale = D**-0.5 if scale is None else scale
    layout = _layout(q, k, is_landmark, document_ids, causal, query_places)
    if implementation == "reference":
        out, lse = _reference(q, k, v, is_landmark, document_ids, causal, scale, query_places, layout)
        return (out, lse) if return_lse else out
    chosen = _choose(implementation, q, k, v)
    k, v, q = _in_order(k, layout.key_order), _in_order(v, layout.key_order), _in_order(q, layout.query_order)
    if torch.compiler.is_compiling():
        out, lse = _op(q, k, v, *_parts(layout), scale, chosen)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        out, lse = _Eager.apply(q, k, v, layout, scale, chosen)
    else:
        out, lse = _forward(q, k, v, layout, scale, chosen, False)
    if layout.query_order is not None:
        back = layout.query_order.argsort(1)
        out, lse = _in_order(out, back), _in_order(lse, back)
    return (out, lse) if return_lse else out


def triton_refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not take these inputs; None if they do."""
    if problem := triton_problem(q.device):
        return problem
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}. Convert them to one dtype"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}. Convert it to float32, bfloat16 or float16"
    if q.shape[-1] > 256:
        return f"D is {q.shape[-1]}, and the kernels have at most 256"
    return None


def _choose(implementation: str | None, q: Tensor, k: Tensor, v: Tensor) -> str:
    if implementation is None:
        return "triton" if q.is_cuda and triton_refuses(q, k, v) is None else "torch"
    if implementation == "triton":
        problem = triton_refuses(q, k, v)
        require(
            problem is None,
            "implementation",
            "'triton'",
            "an implementation that takes these inputs",
            f"{problem}.",
        )
    return implementation


def _layout(
    q: Tensor,
    k: Tensor,
    is_landmark: Tensor | LandmarkLayout,
    document_ids: Tensor | None,
    causal: bool,
    query_places: Tensor | None,
) -> LandmarkLayout:
    B, P, T = len(q), q.shape[1], k.shape[1]
    device = (is_landmark if isinstance(is_landmark, Tensor) else is_landmark.starts).device
    if device != q.device:
        require(False, "is_landmark", f"a tensor on {device}", f"one on {q.device}, as q", "Move it there.")
    if isinstance(is_landmark, Tensor):
        require_shape("is_landmark", is_landmark, (B, T), "[B, T]")
        layout = LandmarkLayout.of(is_landmark, document_ids, causal, query_places, P)
    else:
        layout = is_landmark
        for name, given in (("document_ids", document_ids), ("query_places", query_places)):
            require(given is None, name, "a tensor", "None with a ready LandmarkLayout", "It has its own.")
        require(causal, "causal", causal, "True with a ready LandmarkLayout", "It has its own.")
        sizes = len(layout.starts), layout.num_queries, layout.num_keys
        require(
            sizes == (B, P, T),
            "is_landmark",
            f"a layout of [B, P, T] = {sizes}",
            f"one of {(B, P, T)}, as q and k",
            "Make one with LandmarkLayout.of.",
        )
    return layout


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor | LandmarkLayout,
    document_ids: Tensor | None,
    causal: bool,
    scale: float,
    query_places: Tensor | None,
    layout: LandmarkLayout,
) -> tuple[Tensor, Tensor]:
    """From what the caller gave, not from our tables, unless tables are what was given."""
    T = layout.num_keys
    if isinstance(is_landmark, Tensor):
        if document_ids is None:
            document_ids = torch.zeros_like(is_landmark, dtype=torch.int64)
        if query_places is None:
            query_places = torch.arange(T - q.shape[1], T, device=q.device).expand(len(q), -1)
        return reference.landmark_attention(q, k, v, is_landmark, document_ids, causal, scale, query_places)
    k, v, q = _in_order(k, layout.key_order), _in_order(v, layout.key_order), _in_order(q, layout.query_order)
    landmark, document_ids, query_places, seen = layout.in_places()
    out, lse = reference.landmark_attention(
        q, k, v, landmark, document_ids, layout.causal, scale, query_places, seen, layout.own
    )
    if layout.query_order is not None:
        back = layout.query_order.argsort(1)
        out, lse = _in_order(out, back), _in_order(lse, back)
    return out, lse


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """Each row of x [B, T, ...] in its ``order`` [B, T]; None: as it is."""
    if order is None:
        return x
    B, T = order.shape
    into = (order + torch.arange(B, device=order.device)[:, None] * T).flatten()
    return x.flatten(0, 1).index_select(0, into).view(x.shape)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: LandmarkLayout, scale: float, implementation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row and head (base e)."""
    if implementation == "triton":
        from trailmark.ops import landmark_attention_triton as kernels

        return kernels.forward(q, k, v, layout, scale, keep)
    return landmark_attention_torch.forward(q, k, v, layout, scale, keep)


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    layout: LandmarkLayout,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    with torch.autocast(q.device.type, enabled=False):  # the backward runs outside the op
        if implementation == "triton":
            from trailmark.ops import landmark_attention_triton as kernels

            assert out is not None
            assert lse is not None
            return kernels.backward(grad, grad_lse, q, k, v, out, lse, layout, scale)
        return landmark_attention_torch.backward(grad, grad_lse, q, k, v, out, lse, layout, scale)


class _Eager(torch.autograd.Function):
    """Saves the inputs; for the kernels the output and the log-sum-exps too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: LandmarkLayout, scale: float, implementation: str
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, layout, scale, implementation, True)
        kept = (out, lse) if implementation == "triton" else (None, None)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.layout, ctx.scale, ctx.implementation = layout, scale, implementation
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(q) if grad is None else grad
        dq, dk, dv = _backward(grad, grad_lse, q, k, v, out, lse, ctx.layout, ctx.scale, ctx.implementation)
        return dq, dk, dv, None, None, None


# Under torch.compile the same functions are ops that it does not look into, so that its graph stays whole (with a
# ready layout: reading one off is_landmark waits for its values).


def _parts(layout: LandmarkLayout) -> tuple[Tensor, Tensor, bool, bool, int, int]:
    """What ops may take, for :func:`_whole`: tensors and numbers, so not what the layout remembers."""
    tables = torch.stack([getattr(layout, name) for name in TABLES])
    return tables, layout.far, layout.own, layout.causal, layout.max_length, layout.max_queries


def _whole(
    q: Tensor, k: Tensor, tables: Tensor, far: Tensor, own: bool, causal: bool, longest: int, most: int
) -> LandmarkLayout:
    named: dict[str, Any] = dict(zip(TABLES, tables.unbind(), strict=True))
    return LandmarkLayout(
        **named,
        far=far,
        own=own,
        causal=causal,
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        num_chunks=far.shape[1],
        max_length=longest,
        max_queries=most,
    )


@torch.library.custom_op("trailmark::landmark_attention", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    far: Tensor,
    own: bool,
    causal: bool,
    longest: int,
    most: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    layout = _whole(q, k, tables, far, own, causal, longest, most)
    out, lse = _forward(q, k, v, layout, scale, implementation, True)
    return out.contiguous(), lse.contiguous()


@_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    far: Tensor,
    own: bool,
    causal: bool,
    longest: int,
    most: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=arithmetic_dtype(q, k, v))


@torch.library.custom_op("trailmark::landmark_attention_backward", mutates_args=())
def _op_backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    tables: Tensor,
    far: Tensor,
    own: bool,
    causal: bool,
    longest: int,
    most: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _whole(q, k, tables, far, own, causal, longest, most)
    found = _backward(grad, grad_lse, q, k, v, out, lse, layout, scale, implementation)
    dq, dk, dv = (x.contiguous() for x in found)
    return dq, dk, dv


@_op_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    tables: Tensor,
    far: Tensor,
    own: bool,
    causal: bool,
    longest: int,
    most: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    kept = output if inputs[-1] == "triton" else (None, None)
    ctx.save_for_backward(*inputs[:3], *kept, *inputs[3:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    found = _op_backward(grad, grad_lse, *ctx.saved_tensors, *ctx.options)
    return *found, *[None] * 8


_op.register_autograd(_gradients, setup_context=_keep_inputs)
