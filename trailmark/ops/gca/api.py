"""Grouped Cross-Attention: each chunk attends to the few chunks it retrieved (arXiv 2410.01651, Sec. 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops import reference
from trailmark.ops.arguments import (
    attention_kernels_refuse,
    choose_implementation,
    require,
    require_chunk_numbers,
    require_device,
    require_floating,
    require_grouped_heads,
    require_implementation,
    require_shape,
    values_are_checked,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.calls import spelled_out
from trailmark.ops.gca import one_reader, torch_path
from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.one_reader import OneReader, ReadAgain


@without_autocast
def grouped_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    weights: Tensor,
    lengths: Tensor | None = None,
    softmax_off_by_one: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    beside: tuple[Tensor, Tensor] | None = None,
    again: ReadAgain | None = None,
) -> Tensor:
    r"""Attend to the retrieved chunks: softmax within each, weighted sum over them.

    .. math::
        O_n = \sum_{k=1}^{K} w_{nk}\,
              \mathrm{softmax}_{1}\!\left(\mathrm{scale} \cdot Q_n K_{I_{nk}}^\top\right) V_{I_{nk}}

    where :math:`\mathrm{softmax}_1(x)_i = e^{x_i} / (1 + \sum_j e^{x_j})` (off by one: a virtual key with
    score 0 and value 0) or the plain softmax. Source: arXiv 2410.01651, Eq. 2 and 3.

    With ``beside``, the output :math:`A` and the log-sum-exp :math:`L` of an attention to something else, such as a
    window, all that is read stands in one softmax with that: the virtual key has the score :math:`L` and the value
    :math:`A`, the keys of a chunk count :math:`w` times, and what comes out is what reading changes,

    .. math::
        O_n = \sum_{k=1}^{K} \sum_s p_{nks}\,(V_{I_{nk} s} - A_n), \qquad
        p_{nks} = \frac{w_{nk}\, e^{\mathrm{scale} \cdot Q_n K_{I_{nk} s}^\top}}
                       {e^{L_n} + \sum_{k', s'} w_{nk'}\, e^{\mathrm{scale} \cdot Q_n K_{I_{nk'} s'}^\top}}

    so that :math:`A + O` with weights of 1 is attention to both.

    Gradients reach q, k, v, weights and ``beside``; through the weights, the retriever learns. Nothing K-fold is kept
    between forward and backward: "torch" gathers the chunks again, in slabs; "triton" never gathers them
    (docs/kernels.md).

    Args:
        q: [B, N, R, H, D]: row n is what chunk n reads; the caller shifts (chunk t+1 reads what t selected).
        k, v: [B, M, S, J, D]; query head h uses key/value head h // (H // J). A batch of stride 0 (``expand``)
            is shared, not copied; [B, M, J, S, D] memory seen through ``transpose(2, 3)`` is read without a copy.
        indices: int64 [B, N, K] or per key/value head [B, N, J, K]; -1 reads nothing (for "triton", last, it
            costs nothing either). That they are below M is checked on a CPU; elsewhere it would wait for the
            device, so only with the environment variable TRAILMARK_CHECK_VALUES=1, and a chunk that does not
            exist gives undefined results, in other rows' gradients too.
        weights: the same shape, any floating dtype; ignored (zero gradient) where the index is -1. With indices per
            key/value head, also per query head [B, N, H, K]. With ``beside`` at least 0, and 0 is
            as an index of -1.
        lengths: int64 [B, M]: the keys of chunk m that exist. None: all S. What lies beyond has no effect,
            not even as NaN.
        softmax_off_by_one: see above.
        scale: None is D ** -0.5.
        implementation: "reference" (gathers and keeps all), "torch" or "triton" (float32, bfloat16 or float16,
            the same for q, k and v; D <= 256). None: "triton" on CUDA where it supports the input, else "torch".
        beside: ([B, N, R, H, D], [B, N, R, H]), see above; its log-sum-exp -inf where it saw nothing. It takes the
            virtual key's place, so ``softmax_off_by_one`` must be true.
        again: what calls that differ in nothing but q and ``beside`` share, as decoding does inside a chunk. Hand one
            new ``ReadAgain()`` to all of them: on a CPU, inside ``torch.no_grad()``, the first call with N = 1 makes it
            ready, and those after it look at nothing else. k and v may be kept as they lie: write nothing into them.

    Returns:
        [B, N, R, H, D] in the dtype of q; zeros where nothing is read.

    Raises:
        ValueError: for shapes that do not fit together, chunks that do not exist, or an implementation that
            cannot take the input.
    """
    if again is not None and again.serves(q, beside, implementation):
        assert again.reader is not None
        own = (None, None) if beside is None else (beside[0], _finite(beside[1]))
        return again.reader.read(q, *own)
    require_implementation(implementation, ("reference", "torch", "triton"))
    require(q.dim() == 5, "q", tuple(q.shape), "shape [B, N, R, H, D]")
    require(k.dim() == 5, "k", tuple(k.shape), "shape [B, M, S, J, D]")
    B, N, _, H, D = q.shape
    M, S, J = k.shape[1:4]
    require_shape("k", k, (B, M, S, J, D), "[B, M, S, J, D]")
    require_shape("v", v, (B, M, S, J, D), "[B, M, S, J, D]")
    require_grouped_heads(H, J)
    K = indices.shape[-1] if indices.dim() else 0
    if indices.dim() != 4:
        require_shape("indices", indices, (B, N, K), "[B, N, K]")
    else:
        require_shape("indices", indices, (B, N, J, K), "[B, N, J, K]")
    per_query_head = indices.dim() == 4 and weights.shape == (B, N, H, K)
    if not per_query_head:
        other = f", or [B, N, H, K] = {[B, N, H, K]}" if indices.dim() == 4 else ""
        require_shape("weights", weights, tuple(indices.shape), f"of indices{other}")
    indices = whole_numbers("indices", indices)
    for name, size in (("R", q.shape[2]), ("K", K), ("S", S), ("D", D)):
        require(size >= 1, name, size, "at least 1")
    require_floating(q=q, k=k, v=v, weights=weights)
    require_device(q, k=k, v=v, indices=indices, weights=weights, lengths=lengths)
    require_chunk_numbers("indices", indices, M)
    if lengths is not None:
        require_shape("lengths", lengths, (B, M), "[B, M]")
        lengths = whole_numbers("lengths", lengths)
    scale = D**-0.5 if scale is None else scale
    out_beside = lse_beside = None
    if beside is not None:
        pair = isinstance(beside, (tuple, list)) and [isinstance(x, Tensor) for x in beside] == [True, True]
        require(pair, "beside", type(beside).__name__, "a pair of tensors: an output and its log-sum-exp")
        out_beside, lse_beside = beside
        require_shape("beside[0]", out_beside, tuple(q.shape), "of q")
        require_shape("beside[1]", lse_beside, tuple(q.shape[:4]), "[B, N, R, H]")
        require_floating(**{"beside[0]": out_beside, "beside[1]": lse_beside})
        require_device(q, **{"beside[0]": out_beside, "beside[1]": lse_beside})
        require(softmax_off_by_one, "softmax_off_by_one", False, "True with beside, which is the virtual key")
        if values_are_checked(weights) and weights.numel():
            lowest = float(weights.detach().min())
            require(not lowest < 0, "weights", lowest, "at least 0 with beside")
        lse_beside = _finite(lse_beside)
    if indices.dim() == 3:
        indices = indices[:, :, None].expand(B, N, J, K)
        weights = weights[:, :, None].expand(B, N, J, K)
    if implementation == "reference":
        present = torch.full((B, M), S, device=q.device) if lengths is None else lengths
        return reference.grouped_cross_attention(
            q, k, v, indices, weights, present, softmax_off_by_one, scale, out_beside, lse_beside
        )
    refuses = partial(triton_refuses, q, k, v, weights, out_beside, lse_beside)
    chosen = choose_implementation(implementation, q.is_cuda, refuses)
    call = CrossAttentionCall(
        q, k, v, indices, weights, lengths, out_beside, lse_beside, softmax_off_by_one, scale
    )
    tensors = (q, k, v, weights, out_beside, lse_beside)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():
        return _gca(*call, chosen, keep)[0].to(q.dtype)
    if keep:
        return _Eager.apply(*call, chosen).to(q.dtype)
    if chosen == "torch" and one_reader.takes(call):
        reader = OneReader.of(call)
        if again is not None:
            again.reader = reader
        return reader.read(q, out_beside, lse_beside)
    return _forward(call, chosen, False)[0].to(q.dtype)


def _finite(lse: Tensor) -> Tensor:
    """With a number for -inf to which e is 0, and no difference of two of which is NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min / 4)


def triton_refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    beside: Tensor | None = None,
    beside_lse: Tensor | None = None,
) -> str | None:
    """Why the kernels do not take these inputs; None if they do."""
    reason = attention_kernels_refuse(q, k, v)
    others = {"weights": weights, "beside[0]": beside, "beside[1]": beside_lse}
    for name, x in others.items():
        if reason is None and x is not None and x.dtype == torch.float64:
            reason = f"q is {q.dtype} and {name} {x.dtype}. Convert them to float32, bfloat16 or float16"
    return reason


def _forward(call: CrossAttentionCall, implementation: str, keep: bool) -> tuple[Tensor, Tensor]:
    """The output, rounded or not, and with ``keep`` what the backward needs of each row and chunk (else empty)."""
    if implementation == "triton":
        from trailmark.ops.gca import triton_path

        return triton_path.forward(call, keep)
    return torch_path.forward(call, keep)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward(
    grad: Tensor,
    call: CrossAttentionCall,
    lse: Tensor,
    out: Tensor | None,
    implementation: str,
    of_memory: bool,
) -> Gradients:
    """Those of q, k, v, weights, beside and its log-sum-exp; empty where there is none.

    Without ``of_memory`` those of k and v are empty. ``out``: of the forward, where :func:`_save` kept it.
    """
    if implementation == "triton":
        from trailmark.ops.gca import triton_path

        return triton_path.backward(grad, call, lse, out, of_memory)
    return torch_path.backward(grad, call, lse, of_memory)


def _save(ctx: Any, call: CrossAttentionCall, implementation: str, lse: Tensor, out: Tensor) -> None:
    """Keep the inputs and the log-sum-exps for :func:`_gradients`; the output where the kernels need it."""
    *tensors, off_by_one, scale = call
    keeps_out = implementation == "triton" and call.beside is not None
    ctx.save_for_backward(*tensors, lse, out if keeps_out else None)
    ctx.options, ctx.implementation = (off_by_one, scale), implementation


def _gradients(
    ctx: Any, grad: Tensor, backward: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor | None, ...]:
    """One for each input of a call and for whatever follows it; a frozen memory gets none."""
    *tensors, lse, out = ctx.saved_tensors
    of_memory = any(ctx.needs_input_grad[1:3])
    call = CrossAttentionCall(*tensors, *ctx.options)
    dq, dk, dv, dw, *of_beside = backward(grad, call, lse, out, ctx.implementation, of_memory)
    of_k, of_v = (dk, dv) if of_memory else (None, None)
    given = of_beside if call.beside is not None else (None, None)
    return dq, of_k, of_v, None, dw, None, *given, *[None] * (len(ctx.needs_input_grad) - 8)


class _Eager(torch.autograd.Function):
    """A third of the overhead of the ``torch.library`` ops below."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, implementation = arguments
        call = CrossAttentionCall(*given)
        out, lse = _forward(call, implementation, True)
        _save(ctx, call, implementation, lse, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, _backward)


# Under torch.compile the same functions are ops that it does not look into, so that its graph stays whole.


@torch.library.custom_op("trailmark::grouped_cross_attention", mutates_args=())
@spelled_out
def _gca(call: CrossAttentionCall, implementation: str, keep: bool) -> tuple[Tensor, Tensor]:
    require_chunk_numbers("indices", call.indices, call.k.shape[1])  # not seen while tracing
    return _forward(call, implementation, keep)


@_gca.register_fake
@spelled_out
def _(call: CrossAttentionCall, implementation: str, keep: bool) -> tuple[Tensor, Tensor]:
    q, indices = call.q, call.indices
    B, N, R, H, _ = q.shape
    J, K = indices.shape[2:]
    if implementation == "triton":
        from trailmark.ops.gca import triton_path

        out = q.new_empty(q.shape, dtype=triton_path.out_dtype(call))
        return out, q.new_empty(triton_path.kept_shape(call) if keep else (0,), dtype=torch.float32)
    alone = call.beside is None
    kept = (B * N, J, K if alone else 2, H // J * R) if keep else (0,)
    return q.new_empty(q.shape), q.new_empty(kept, dtype=call.dtype if alone else torch.float64)


_gca_backward = torch.library.custom_op(
    "trailmark::grouped_cross_attention_backward", spelled_out(_backward), mutates_args=()
)


@_gca_backward.register_fake
@spelled_out
def _(
    grad: Tensor,
    call: CrossAttentionCall,
    lse: Tensor,
    out: Tensor | None,
    implementation: str,
    of_memory: bool,
) -> Gradients:
    q, k, v, weights = call.q, call.k, call.v, call.weights
    B, M, S, J, D = k.shape
    of_beside, of_lse = (
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (call.beside, call.beside_lse)
    )
    if not of_memory:
        return (
            q.new_empty(q.shape),
            k.new_empty(0),
            v.new_empty(0),
            weights.new_empty(weights.shape),
            of_beside,
            of_lse,
        )
    if implementation == "triton":
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    else:  # laid out head by head
        dk, dv = (x.new_empty((B, M, J, S, D)).transpose(2, 3) for x in (k, v))
    return q.new_empty(q.shape), dk, dv, weights.new_empty(weights.shape), of_beside, of_lse


def _save_compiled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, implementation, _ = inputs
    out, lse = output
    _save(ctx, CrossAttentionCall(*given), implementation, lse, out)


def _gradients_compiled(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    def backward(grad: Tensor, call: CrossAttentionCall, *rest: Any) -> tuple[Tensor, ...]:
        return _gca_backward(grad, *call, *rest)

    return _gradients(ctx, grad, backward)


_gca.register_autograd(_gradients_compiled, setup_context=_save_compiled)
