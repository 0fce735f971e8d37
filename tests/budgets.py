"""How far a fast path may be from its oracle, in one place: no test sets a tolerance by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assert_within_budget(fast: Tensor, oracle_same_dtype: Tensor, exact: Tensor) -> None:
    """The largest error is at most twice the oracle's in the same dtype, plus one unit of the largest output.

    ``exact`` is the float64 oracle on the same inputs, rounded as the others got them. A unit is ``eps`` of
    the dtype times the largest ``|exact|``.
    """
    assert exact.dtype == torch.float64
    assert fast.dtype == oracle_same_dtype.dtype
    assert fast.shape == oracle_same_dtype.shape == exact.shape
    if exact.numel() == 0:
        return
    unit = torch.finfo(fast.dtype).eps * exact.abs().max()
    error, oracle_error = ((x.double() - exact).abs().max() for x in (fast, oracle_same_dtype))
    assert error <= 2 * oracle_error + unit, (  # a NaN anywhere fails
        f"error {error:.3e}, oracle's {oracle_error:.3e}, one unit {unit:.3e}"
    )


def assert_same_in_float64(fast: Tensor, oracle: Tensor) -> None:
    """Equal but for the order of sums: 1e-12 of the largest number, or of 1, the size of our random inputs."""
    assert fast.dtype == oracle.dtype == torch.float64
    assert fast.shape == oracle.shape
    if oracle.numel():
        assert (fast - oracle).abs().max() <= 1e-12 * (1 + oracle.abs().max())


def values_and_gradients(op: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """What ``op`` returns, and its gradients in all inputs.

    The cotangent is random: odd sixteenths, exact in every dtype and never 0.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    values = (out,) if isinstance(out, Tensor) else out
    random = torch.Generator().manual_seed(len(inputs))
    cotangents = [
        (2 * torch.randint(-16, 16, x.shape, generator=random) + 1).to(x.device, x.dtype) / 16 for x in values
    ]
    # an oracle that read nothing returns constants, without a graph
    linked = [i for i, x in enumerate(values) if x.requires_grad]
    if not linked:
        return [*values, *map(torch.zeros_like, inputs)]
    gradients = torch.autograd.grad(
        [values[i] for i in linked], leaves, [cotangents[i] for i in linked], materialize_grads=True
    )
    return [*(x.detach() for x in values), *gradients]


def assert_low_precision_within_budget(
    fast: Callable[..., Tensor | tuple[Tensor, ...]],
    oracle: Callable[..., Tensor | tuple[Tensor, ...]],
    *rounded: Tensor,
) -> None:
    """Outputs and gradients of ``fast`` keep the budget on inputs ``rounded`` to a lower dtype."""
    exact = values_and_gradients(oracle, *(x.double() for x in rounded))
    same_dtype = values_and_gradients(oracle, *rounded)
    for ours, theirs, truth in zip(values_and_gradients(fast, *rounded), same_dtype, exact, strict=True):
        assert_within_budget(ours, theirs, truth)


def assert_autocast_changes_nothing(op: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> None:
    """Bit for bit: the precision is the op's own choice (design, semantics 8)."""

    def under_autocast(*leaves: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(*leaves)

    plain = values_and_gradients(op, *inputs)
    for ours, theirs in zip(values_and_gradients(under_autocast, *inputs), plain, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def assert_widest_input_sets_the_precision(
    fast: Callable[..., Tensor | tuple[Tensor, ...]],
    oracle: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: Tensor,
) -> None:
    """One input in float64 among inputs in bfloat16: all arithmetic is in float64."""
    for wide in range(len(inputs)):
        mixed = [x if i == wide else x.bfloat16() for i, x in enumerate(inputs)]
        exact = values_and_gradients(oracle, *(x.double() for x in mixed))
        for ours, truth in zip(values_and_gradients(fast, *mixed), exact, strict=True):
            if ours.dtype == torch.float64:
                assert_same_in_float64(ours, truth)
            else:  # rounded once, at the end
                assert_within_budget(ours, truth.to(ours.dtype), truth)
