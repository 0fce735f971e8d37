"""Taking positions from one layout to another, with a backward that repeats bit for bit.

``torch.compile`` looks into nothing here: what a layout says is a constant of the graph (``constant`` below).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.memory.tables import Integers

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """torch.compile calls it while it traces; what it returns is a constant of the graph.

    Tensors are returned in tuples: it confuses bare ones that come from one function.
    """
    marked: Function = torch.compiler.assume_constant_result(function)
    return marked


class Table:
    """An array of a layout, as a tensor on each device that asks for it: moved once, and no inference tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self._tensors: dict[torch.device, tuple[Tensor]] = {}

    def on(self, device: torch.device) -> Tensor:
        """The array on a device."""
        return self._on(device)[0]

    @constant
    def _on(self, device: torch.device) -> tuple[Tensor]:
        if device not in self._tensors:
            with torch.inference_mode(False):  # a graph may keep it
                self._tensors[device] = (torch.from_numpy(self.array).to(device),)
        return self._tensors[device]


class Take:
    """y[b, i] = x[b, index[b, i]], zeros where the index is -1. No place is taken twice.

    Its backward takes the gradient the other way, which repeats bit for bit (guarantee 7).
    """

    def __init__(self, index: Integers, size: int) -> None:
        self.index, self.size = index, size  # [b, n] into [0, size)
        self.count = n = index.shape[1]
        self._start = int(index[0, 0]) if len(index) == 1 and n and index[0, 0] >= 0 else 0
        self._is_range = len(index) == 1 and bool((index[0] == np.arange(self._start, self._start + n)).all())
        self._alike = len(index) == 1
        self._tensors: dict[tuple[torch.device, int, bool], tuple[Tensor, Tensor | None]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[B, size, ...] -> [B, n, ...]."""
        assert x.shape[1] == self.size
        if self._is_range:
            return x if self.count == self.size else x.narrow(1, self._start, self.count)
        rows = 0 if self._alike else x.shape[0]
        source, missing = self._on(x.device, rows, False)
        if x.requires_grad and torch.is_grad_enabled():
            back, unused = self._on(x.device, rows, True)
            return _Taken.apply(x, self.count, source, missing, self.size, back, unused, self._alike)
        return _take(x, self.count, source, missing, self._alike)

    @cached_property
    def _inverse(self) -> Integers:
        back = np.full((len(self.index), self.size), -1)
        row, place = np.nonzero(self.index >= 0)
        back[row, self.index[row, place]] = place
        return back

    @constant
    def _on(self, device: torch.device, rows: int, back: bool) -> tuple[Tensor, Tensor | None]:
        """Where each place is taken from (any, where from none), and the places without a source.

        ``rows``: B, of which the places are counted through; 0: all alike.
        """
        key = (device, rows, back)
        if key not in self._tensors:
            index = self._inverse if back else self.index
            width = self.count if back else self.size
            if not self._alike:
                index = np.where(index >= 0, index + np.arange(rows)[:, None] * width, -1)
            flat = index.reshape(-1)
            gone = np.flatnonzero(flat < 0)
            with torch.inference_mode(False):  # a graph may keep them
                self._tensors[key] = (
                    torch.from_numpy(flat.clip(0)).to(device),
                    torch.from_numpy(gone).to(device) if len(gone) else None,
                )
        return self._tensors[key]


def _take(x: Tensor, count: int, source: Tensor, missing: Tensor | None, alike: bool) -> Tensor:
    """x [B, m, ...] -> [B, count, ...]; ``alike``: one row of sources and missing places serves all."""
    if not x.shape[1]:  # nothing to take
        return x.new_zeros(x.shape[0], count, *x.shape[2:])
    if alike:
        out = x.index_select(1, source)
        return out if missing is None else out.index_fill_(1, missing, 0)
    out = x.flatten(0, 1).index_select(0, source)
    if missing is not None:
        out.index_fill_(0, missing, 0)
    return out.view(x.shape[0], count, *x.shape[2:])


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        count: int,
        source: Tensor,
        missing: Tensor | None,
        size: int,
        back: Tensor,
        back_missing: Tensor | None,
        alike: bool,
    ) -> Tensor:
        ctx.save_for_backward(back, back_missing)
        ctx.size, ctx.alike = size, alike
        return _take(x, count, source, missing, alike)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back, missing = ctx.saved_tensors
        return _take(grad, ctx.size, back, missing, ctx.alike), *(None,) * 7
