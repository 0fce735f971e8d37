"""Loops over slabs, all of which but the last are alike: what only counts what they take need not run them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Times = Callable[[int], AbstractContextManager[None]]
_counted: ContextVar[Times | None] = ContextVar("counted", default=None)


@contextmanager
def counting_slabs(times: Times) -> Iterator[None]:
    """Slabs of tensors without memory that are alike run once, within ``times(number of them)``."""
    token = _counted.set(times)
    try:
        yield
    finally:
        _counted.reset(token)


def in_slabs(count: int, step: int, of: Tensor) -> Iterator[slice]:
    """``count`` rows of a tensor, ``step`` at a time, for passes that leave nothing but what they fill in place."""
    times = _counted.get() if isinstance(of, FakeTensor) else None
    first = 0
    if times is not None and count >= 3 * step:
        yield slice(0, step)  # the second has what the first left
        first = count // step * step
        with times(count // step - 1):
            yield slice(step, 2 * step)
    for start in range(first, count, step):
        yield slice(start, min(start + step, count))
