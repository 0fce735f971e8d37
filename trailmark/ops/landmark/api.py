"""Landmark Attention: far chunks are attended to through the gate of their landmarks (arXiv 2305.16300, Sec. 3.1)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops import reference
from trailmark.ops.arguments import (
    arithmetic_dtype,
    attention_kernels_refuse,
    choose_implementation,
    require,
    require_device,
    require_floating,
    require_grouped_heads,
    require_implementation,
    require_shape,
    without_autocast,
)
from trailmark.ops.calls import spelled_out
from trailmark.ops.landmark import torch_path
from trailmark.ops.landmark.call import LandmarkCall
from trailmark.ops.landmark.layout import LandmarkLayout, LayoutParts


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
        implementation: "reference" (Eq. 1 to 4, keeps [P, T] tables), "torch" or "triton" (float32,
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
    B, P, H, D = q.shape
    T, J = k.shape[1:3]
    require_shape("k", k, (B, T, J, D), "[B, T, J, D]")
    require_shape("v", v, (B, T, J, D), "[B, T, J, D]")
    require_grouped_heads(H, J)
    require(D >= 1, "D", D, "at least 1")
    require_floating(q=q, k=k, v=v)
    require_device(q, k=k, v=v)
    scale = D**-0.5 if scale is None else scale
    layout = _layout(q, k, is_landmark, document_ids, causal, query_places)
    if implementation == "reference" and isinstance(is_landmark, Tensor):
        # from what the caller gave, not from our tables
        if document_ids is None:
            document_ids = torch.zeros_like(is_landmark, dtype=torch.int64)
        if query_places is None:
            query_places = torch.arange(T - P, T, device=q.device).expand(B, -1)
        given = is_landmark, document_ids, causal, scale, query_places
        out, lse = reference.landmark_attention(q, k, v, *given)
        return (out, lse) if return_lse else out
    chosen = choose_implementation(implementation, q.is_cuda, partial(attention_kernels_refuse, q, k, v))
    k, v, q = _in_order(k, layout.key_order), _in_order(v, layout.key_order), _in_order(q, layout.query_order)
    if chosen == "reference":
        landmark, documents, places, seen = layout.in_places()
        tables = landmark, documents, layout.causal, scale, places, seen, layout.own
        out, lse = reference.landmark_attention(q, k, v, *tables)
    elif torch.compiler.is_compiling():
        out, lse = _op(q, k, v, *layout.parts(), scale, chosen)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        out, lse = _Eager.apply(q, k, v, layout, scale, chosen)
    else:
        out, lse = _forward(LandmarkCall(q, k, v, layout, scale), chosen, False)
    if layout.query_order is not None:
        back = layout.query_order.argsort(1)
        out, lse = _in_order(out, back), _in_order(lse, back)
    return (out, lse) if return_lse else out


def _layout(
    q: Tensor,
    k: Tensor,
    is_landmark: Tensor | LandmarkLayout,
    document_ids: Tensor | None,
    causal: bool,
    query_places: Tensor | None,
) -> LandmarkLayout:
    B, P, T = len(q), q.shape[1], k.shape[1]
    require_device(q, is_landmark=is_landmark if isinstance(is_landmark, Tensor) else is_landmark.starts)
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


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """Each row of x [B, T, ...] in its ``order`` [B, T]; None: as it is."""
    if order is None:
        return x
    B, T = order.shape
    into = (order + torch.arange(B, device=order.device)[:, None] * T).flatten()
    return x.flatten(0, 1).index_select(0, into).view(x.shape)


def _forward(call: LandmarkCall, implementation: str, keep: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row and head (base e)."""
    if implementation == "triton":
        from trailmark.ops.landmark import triton_path

        return triton_path.forward(call, keep)
    return torch_path.forward(call, keep)


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    call: LandmarkCall,
    out: Tensor | None,
    lse: Tensor | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    with torch.autocast(grad.device.type, enabled=False):  # the backward runs outside the op
        if implementation == "triton":
            from trailmark.ops.landmark import triton_path

            assert out is not None
            assert lse is not None
            return triton_path.backward(grad, grad_lse, call, out, lse)
        return torch_path.backward(grad, grad_lse, call)


def _save(ctx: Any, tensors: tuple[Tensor, ...], output: tuple[Tensor, Tensor], implementation: str) -> None:
    """Keep the inputs; for the kernels the output and the log-sum-exps too."""
    ctx.save_for_backward(*(output if implementation == "triton" else (None, None)), *tensors)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: LandmarkLayout, scale: float, implementation: str
    ) -> tuple[Tensor, Tensor]:
        output = _forward(LandmarkCall(q, k, v, layout, scale), implementation, True)
        _save(ctx, (q, k, v), output, implementation)
        ctx.options = layout, scale
        ctx.implementation = implementation
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        grad = torch.zeros_like(tensors[0]) if grad is None else grad
        call = LandmarkCall(*tensors, *ctx.options)
        return *_backward(grad, grad_lse, call, out, lse, ctx.implementation), None, None, None


# Under torch.compile the same functions are ops that it does not look into, so that its graph stays whole (with a
# ready layout: reading one off is_landmark waits for its values).


class _Parts(NamedTuple):
    """A :class:`LandmarkCall` of tensors and numbers alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor
    far: Tensor
    own: bool
    causal: bool
    max_length: int
    max_queries: int
    scale: float

    def whole(self) -> LandmarkCall:
        layout = LandmarkLayout.of_parts(LayoutParts(*self[3:9]), self.q.shape[1], self.k.shape[1])
        return LandmarkCall(self.q, self.k, self.v, layout, self.scale)


@torch.library.custom_op("trailmark::landmark_attention", mutates_args=())
@spelled_out
def _op(parts: _Parts, implementation: str) -> tuple[Tensor, Tensor]:
    out, lse = _forward(parts.whole(), implementation, True)
    return out.contiguous(), lse.contiguous()


@_op.register_fake
@spelled_out
def _(parts: _Parts, implementation: str) -> tuple[Tensor, Tensor]:
    q = parts.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=arithmetic_dtype(q, parts.k, parts.v))


@torch.library.custom_op("trailmark::landmark_attention_backward", mutates_args=())
@spelled_out
def _op_backward(
    grad: Tensor,
    grad_lse: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    parts: _Parts,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward(grad, grad_lse, parts.whole(), out, lse, implementation)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_op_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor, out: Tensor | None, lse: Tensor | None, *parts: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in parts[:3])


def _save_compiled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *parts, implementation = inputs
    _save(ctx, tuple(parts[:5]), output, implementation)
    ctx.options = *parts[5:], implementation


def _gradients_compiled(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _op_backward(grad, grad_lse, *ctx.saved_tensors, *ctx.options)
    return *gradients, *[None] * (len(ctx.needs_input_grad) - 3)


_op.register_autograd(_gradients_compiled, setup_context=_save_compiled)
