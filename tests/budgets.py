"""How far a fast path may be from its oracle, in one place: no test sets a tolerance by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]
_DRAWS = 16  # of the oracle's error, at most
# What multiplies unit normal queries so that their scores are as large as a trained model's. Those of unit normal
# vectors are so small that arithmetic in bfloat16 throughout would keep the budget; see test_budgets.py.
SHARP = 16


def assert_within_budget(fast: Tensor, oracle_same_dtype: Tensor, exact: Tensor) -> None:
    """The largest error is at most twice the oracle's in the same dtype, plus one unit of the largest output.

    ``exact`` is the float64 oracle on the same inputs, rounded as the others got them. A unit is ``eps`` of
    the dtype times the largest ``|exact|``.
    """
    assert exact.dtype == torch.float64
    assert fast.dtype == oracle_same_dtype.dtype
    assert fast.shape == oracle_same_dtype.shape == exact.shape
    unit = _unit(fast, exact)
    error, oracle_error = (_largest_error(x, exact) for x in (fast, oracle_same_dtype))
    assert _allowed(error, oracle_error, unit), _over_budget(error, oracle_error, unit)


def _unit(x: Tensor, exact: Tensor) -> float:
    """One rounding unit of the largest number in the dtype of ``x``."""
    return float(torch.finfo(x.dtype).eps * exact.abs().max()) if exact.numel() else 0.0


def _largest_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max()) if exact.numel() else 0.0


def _allowed(error: float, oracle_error: float, unit: float) -> bool:
    return error <= 2 * oracle_error + unit  # a NaN anywhere fails


def _over_budget(error: float, oracle_error: float, unit: float) -> str:
    return f"error {error:.3e}, oracle's {oracle_error:.3e}, one unit {unit:.3e}"


def assert_same_in_float64(fast: Tensor, oracle: Tensor) -> None:
    """Equal but for the order of sums: 1e-12 of the largest number, or of 1, the size of our random inputs."""
    assert fast.dtype == oracle.dtype == torch.float64
    assert fast.shape == oracle.shape
    if oracle.numel():
        assert (fast - oracle).abs().max() <= 1e-12 * (1 + oracle.abs().max())


def values_and_gradients(op: Op, *inputs: Tensor) -> list[Tensor]:
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
    fast: Op, oracle: Op, *rounded: Tensor, names: Sequence[str] | None = None
) -> None:
    """Outputs and gradients of ``fast`` keep the budget on inputs ``rounded`` to a lower dtype.

    The largest of a few numbers' errors is a matter of chance, and another processor, which sums in another order,
    draws another one. Where the oracle's error on these inputs does not suffice, it is therefore the largest of
    several draws: on inputs that differ from these by a sixteenth or less, so that everything is rounded anew while
    sizes and masks stay. The inputs of ``fast`` are always the given ones. An oracle that chooses something by its
    inputs has to be given the choice. This widens what is allowed; test_budgets.py shows what is refused all the same.

    ``names``: of the outputs and the gradients, for messages.
    """
    exact = values_and_gradients(oracle, *(x.double() for x in rounded))
    same_dtype = values_and_gradients(oracle, *rounded)
    ours = values_and_gradients(fast, *rounded)
    for mine, theirs, truth in zip(ours, same_dtype, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape == truth.shape
    errors = [_largest_error(x, truth) for x, truth in zip(ours, exact, strict=True)]
    of_oracle = [_largest_error(x, truth) for x, truth in zip(same_dtype, exact, strict=True)]
    units = [_unit(x, truth) for x, truth in zip(ours, exact, strict=True)]
    for draw in range(1, _DRAWS):
        if all(map(_allowed, errors, of_oracle, units)):
            return
        drawn = [_nearby(x, seed=draw * len(rounded) + i) for i, x in enumerate(rounded)]
        exact = values_and_gradients(oracle, *(x.double() for x in drawn))
        same_dtype = values_and_gradients(oracle, *drawn)
        redrawn = [_largest_error(x, truth) for x, truth in zip(same_dtype, exact, strict=True)]
        # a draw that overflows says nothing
        of_oracle = [max(x, y) if math.isfinite(y) else x for x, y in zip(of_oracle, redrawn, strict=True)]
    for i, (error, oracle_error, unit) in enumerate(zip(errors, of_oracle, units, strict=True)):
        name = f"{names[i]}: " if names else ""
        assert _allowed(error, oracle_error, unit), name + _over_budget(error, oracle_error, unit)


def _nearby(x: Tensor, seed: int) -> Tensor:
    """Each number times a factor from 15/16 to 17/16."""
    random = torch.Generator().manual_seed(seed)
    factor = 1 + (torch.rand(x.shape, generator=random, dtype=torch.float64) - 0.5) / 8
    return (x.double() * factor.to(x.device)).to(x.dtype)


def assert_chooses_the_best(chosen: Tensor, exact: Tensor, same_dtype: Tensor, may: Tensor) -> None:
    """Chosen [..., K] are K of the best by the oracle's scores [..., M] in float64; rounding may decide between equals.

    Where others are better, the swapped scores lie within the budget of an error, twice: two scores are compared.

    Args:
        same_dtype: the oracle's scores in the dtype that was computed in. may: bool [..., M] what may be chosen.
    """
    assert chosen.dtype == torch.int64
    M, K = exact.shape[-1], chosen.shape[-1]
    there = torch.arange(K, device=chosen.device) < may.sum(-1, keepdim=True)
    assert torch.equal(chosen >= 0, there)  # as many, -1 last
    assert ((chosen[..., 1:] > chosen[..., :-1]) | ~there[..., 1:]).all()  # ascending
    place = chosen.masked_fill(~there, M)
    one_more = torch.nn.functional.pad(may, (0, 1), value=True)
    assert one_more.gather(-1, place).all()
    scores = torch.nn.functional.pad(exact.masked_fill(~may, -torch.inf), (0, 1))
    worst = scores.gather(-1, place).masked_fill(~there, torch.inf).amin(-1)
    best_left = scores.scatter(-1, place, -torch.inf)[..., :M]
    known = exact.isfinite()
    exact, same_dtype = exact[known], same_dtype[known]
    budget = 2 * (2 * _largest_error(same_dtype, exact) + _unit(same_dtype, exact))
    assert (best_left - worst[..., None] <= budget).all()


def assert_equals_the_oracle(fast: Op, oracle: Op, *inputs: Tensor) -> None:
    """Outputs and gradients are the same in float64, but for the order of sums."""
    ours, theirs = (values_and_gradients(op, *inputs) for op in (fast, oracle))
    assert_all_same_in_float64(ours, theirs)


def assert_all_same_in_float64(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """:func:`assert_same_in_float64` of each pair."""
    for x, y in zip(ours, theirs, strict=True):
        assert_same_in_float64(x, y)


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Every tensor is bit for bit what its counterpart is."""
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), f"tensor {i} differs"


@contextmanager
def two_threads() -> Iterator[None]:
    """PyTorch computes with two, where tests have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def assert_repeats_bit_for_bit(op: Op, *inputs: Tensor) -> None:
    """Outputs and gradients on two threads."""
    with two_threads():
        first = values_and_gradients(op, *inputs)
        for _ in range(5):
            assert_same_bits(values_and_gradients(op, *inputs), first)


def assert_autocast_changes_nothing(op: Op, *inputs: Tensor) -> None:
    """Bit for bit: the precision is the op's own choice (guarantee 8)."""

    def under_autocast(*leaves: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(*leaves)

    plain = values_and_gradients(op, *inputs)
    for ours, theirs in zip(values_and_gradients(under_autocast, *inputs), plain, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def assert_widest_input_sets_the_precision(
    fast: Op,
    oracle: Op,
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
