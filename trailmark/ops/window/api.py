"""Causal self-attention over a sliding window of positions, with ALiBi: FlexAttention on CUDA, else in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    require,
    require_floating,
    require_grouped_heads,
    require_implementation,
    require_shape,
    values_are_checked,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.window import torch_path
from trailmark.ops.window.sinks import apart, beside
from trailmark.ops.window.torch_path import Attended, Call

SLOPE_RULES = "geometric", "interpolated"


@without_autocast
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    positions: tuple[Tensor, Tensor] | None = None,
    document_ids: tuple[Tensor, Tensor] | Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    num_sinks: int = 0,
    sink_queries: Tensor | None = None,
    windows: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Each position attends to itself, to the ``window - 1`` positions before it, and to the first ``num_sinks``.

    .. math::
        O_i = \sum_{j \in V_i}
              \mathrm{softmax}_j\!\left(\mathrm{scale} \cdot q_i^\top k_j - a_h (i - j)\right) v_j,
        \qquad V_i = \{j \le i : j > i - W \text{ or } j < n\}

    with ALiBi slopes :math:`a_h` (Press et al., 2022) where given, and n sinks (Xiao et al., 2023, arXiv 2309.17453);
    a sink inside the window is seen once. ``sink_queries`` :math:`q'_i` stand for :math:`q_i` in the scores of the
    sinks outside the window, :math:`j \le i - W`. With ``windows`` each position has a :math:`W_i \le W` of its own.
    The ``"torch"`` path cuts the positions into blocks over ``scaled_dot_product_attention``: time and extra memory
    O(T W), never O(T P). ``"flex"`` is a compiled FlexAttention kernel: time O(T W), nothing kept but the output and a
    number per row and head.

    Args:
        q: [B, T, H, D].
        k, v: [B, P, J, D], P >= T; query head h uses key/value head h // (H // J).
        window: W >= 1, the position itself included. None: all positions before.
        positions: int64 ([B, T], [B, P]), negative = absent (such a query gives zeros). None: the queries are
            the last T of P consecutive positions. Given, keys that are consecutive but for absent ones at a
            row's ends, with the queries the last T, cost the same; any other order and gaps are exact too,
            with time O(T P) and memory O(P). (``"torch"`` looks at them on a CPU alone: a GPU would be waited
            for, and ``torch.compile`` cannot. ``"flex"`` pays for the blocks that could be seen.)
        document_ids: int64 ([B, T], [B, P]), or one [B, P] for both: no attention across documents. On a CPU, one
            tensor for T = P consecutive positions with each document in one piece and a window costs about as much as
            none, and less where documents are shorter than the window; otherwise "torch" masks every block anew.
        alibi_slopes: [H]; see :func:`alibi_slopes`. They learn nothing.
        scale: None is D ** -0.5.
        return_lse: also return the log-sum-exp of the scores, [B, T, H], float32 or wider, -inf where empty.
        implementation: None, "reference", "torch" or "flex" (CUDA, D 16 ... 256, 128 in float32; on a CPU
            without gradients, slowly). None: "flex" for T > 1 where it can be used on CUDA, else "torch".
        num_sinks: n. Without ``positions`` the first n keys, with ``document_ids`` the first n of each document. With
            ``positions`` the first n keys of ``k`` are the sinks, seen from where the window ends (those inside it
            stand among the other keys too); sinks 0 ... n - 1 before keys as above cost the same.
        sink_queries: [B, T, H, D], see above; None: q. Heads are then D + n wide inside (on CUDA 2 D).
        windows: int64 [B or 1, T] of 1 to W, the window of each query, itself included. None: all W.

    Returns:
        [B, T, H, D] in the dtype of q, zeros where no key is visible; with ``return_lse`` the pair.

    Raises:
        ValueError: for shapes that do not fit together; for "flex" where it cannot be used.
    """
    require_implementation(implementation, ("reference", "torch", "flex"))
    require(q.dim() == 4, "q", tuple(q.shape), "shape [B, T, H, D]")
    require(k.dim() == 4, "k", tuple(k.shape), "shape [B, P, J, D]")
    B, T, H, D = q.shape
    P, J = k.shape[1:3]
    require_shape("k", k, (B, P, J, D), "[B, P, J, D]")
    require_shape("v", v, (B, P, J, D), "[B, P, J, D]")
    require_floating(q=q, k=k, v=v)
    if P < T:  # a message made beforehand would bind a compiled graph to this length
        require(False, "k", f"{P} keys", f"at least as many keys as the {T} queries")
    require_grouped_heads(H, J)
    require(window is None or window >= 1, "window", window, "None or at least 1 (the position itself)")
    if positions is not None:
        require_shape("positions[0]", positions[0], (B, T), "[B, T]")
        require_shape("positions[1]", positions[1], (B, P), "[B, P]")
        positions = whole_numbers("positions[0]", positions[0]), whole_numbers("positions[1]", positions[1])
    documents = None  # of queries and keys alike
    if isinstance(document_ids, Tensor):
        require_shape("document_ids", document_ids, (B, P), "[B, P]")
        documents = document_ids
        document_ids = document_ids[:, P - T :], document_ids
    if document_ids is not None:
        require_shape("document_ids[0]", document_ids[0], (B, T), "[B, T]")
        require_shape("document_ids[1]", document_ids[1], (B, P), "[B, P]")
    if alibi_slopes is not None:
        require_shape("alibi_slopes", alibi_slopes, (H,), "[H]")
        if not torch.compiler.is_compiling() and alibi_slopes.requires_grad:
            require(
                False, "alibi_slopes", "slopes that require a gradient", "some that do not", "Detach them."
            )
    scale = D**-0.5 if scale is None else scale
    require(num_sinks >= 0, "num_sinks", num_sinks, "0 or more")
    require(
        num_sinks == 0 or window is not None, "num_sinks", num_sinks, "0 without a window, which sees all"
    )
    if sink_queries is not None:
        require_shape("sink_queries", sink_queries, (B, T, H, D), "[B, T, H, D]")
        require(num_sinks > 0, "num_sinks", num_sinks, "at least 1 with sink_queries")
    if windows is not None:
        require(
            window is not None, "window", None, "at least the largest of windows", "Give it, or no windows."
        )
        require_shape("windows", windows, (1 if windows.shape[:1] == (1,) else B, T), "[B or 1, T]")
        windows = whole_numbers("windows", windows)
        if values_are_checked(windows) and windows.numel():
            least, most = torch.stack(windows.aminmax()).tolist()
            assert window is not None
            require(1 <= least <= most <= window, "windows", f"{least} to {most}", f"1 to window = {window}")
    if positions is not None:
        require(num_sinks <= P, "num_sinks", num_sinks, f"at most the {P} keys")
    else:
        num_sinks = min(num_sinks, P)

    if implementation == "reference":
        out, lse = reference.sliding_window_attention(
            q, k, v, window, positions, document_ids, alibi_slopes, scale, num_sinks, sink_queries, windows
        )
        return (out, lse) if return_lse else out
    if positions is None and windows is None and window is not None and window >= P:
        num_sinks = 0  # the window shows them
    call = Call(
        q, k, v, window, positions, document_ids, documents, alibi_slopes, scale, return_lse, windows=windows
    )
    if num_sinks:
        return _attend_with_sinks(call, num_sinks, sink_queries, implementation)
    return _attend(call, implementation)


def _attend(call: Call, implementation: str | None) -> Attended:
    if not _on_flex(call.q, call.k, call.v, implementation):
        return torch_path.attend(call)
    from trailmark.ops.window.flex import sliding_window_attention_flex

    return sliding_window_attention_flex(call)


def _on_flex(q: Tensor, k: Tensor, v: Tensor, implementation: str | None) -> bool:
    """Whether FlexAttention attends; refused where it was named and cannot."""
    (B, T), named = q.shape[:2], implementation == "flex"
    if B * T == 0 or not (named or (implementation is None and q.is_cuda and T > 1)):
        return False
    from trailmark.ops.window.flex import flex_problem

    problem = flex_problem(q, k, v)
    if problem is not None:
        require(not named, "implementation", "'flex'", "one that can be used here", f"{problem}.")
    return problem is None


def _attend_with_sinks(
    call: Call, num_sinks: int, sink_queries: Tensor | None, implementation: str | None
) -> Attended:
    q, k, v, D = call.q, call.k, call.v, call.q.shape[-1]
    positions, documents = call.positions, call.document_ids
    if not _on_flex(q, k, v, implementation):
        attended = torch_path.attend_with_sinks(call, num_sinks, sink_queries)
        if attended is not None:
            return attended
    if positions is None:
        k, v, positions, documents, num_sinks = apart(k, v, q.shape[1], num_sinks, documents)
    if sink_queries is not None:
        of_sinks = k[:, :num_sinks], v[:, :num_sinks]
        q, k, v = beside(q, k[:, num_sinks:], v[:, num_sinks:], *of_sinks, sink_queries)
    out = _attend(
        call._replace(
            q=q, k=k, v=v, positions=positions, document_ids=documents, documents=None, num_sinks=num_sinks
        ),
        implementation,
    )
    # scores that stand behind a query are wider than it may be
    if isinstance(out, Tensor):
        return out[..., :D].to(call.q.dtype)
    return out[0][..., :D].to(call.q.dtype), out[1]


def alibi_slopes(num_heads: int, dtype: torch.dtype = torch.float32, rule: str = "geometric") -> Tensor:
    r"""ALiBi's slopes of the heads, shape [H].

    - ``"geometric"``: :math:`2^{-8 (h + 1) / H}` for any H, as DRT's published code has them.
    - ``"interpolated"``, the rule of ALiBi's authors (Press et al., 2022) for an H that is no power of two: the
      geometric slopes of P heads, P the largest power of two below H, then the first, third, fifth ... of 2 P heads.
      The same where H is a power of two.

    Raises:
        ValueError: no head, or another rule.
    """
    require(num_heads >= 1, "num_heads", num_heads, "at least 1")
    require(rule in SLOPE_RULES, "rule", repr(rule), " or ".join(map(repr, SLOPE_RULES)))
    power = 1 << (num_heads.bit_length() - 1)
    if rule == "geometric" or power == num_heads:
        return _geometric(num_heads).to(dtype)
    between = _geometric(2 * power)[::2]
    return torch.cat([_geometric(power), between])[:num_heads].to(dtype)


def _geometric(num_heads: int) -> Tensor:
    return torch.exp2(-8 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)
