"""How much memory an op takes while it runs, and keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most bytes of storage, and the most elements, of one tensor that any operation returns.

    Views of ``others`` do not count.
    """

    bytes = 0
    elements = 0

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
                self.elements = max(self.elements, x.numel())
        return out


def bytes_saved(op: Callable[..., Tensor], leaves: list[Tensor], *others: Tensor) -> int:
    """Of tensors that ``op(*leaves)`` keeps for its backward and that are none of its inputs."""
    known = {x.untyped_storage().data_ptr() for x in (*leaves, *others)}
    saved = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = op(*leaves)
    assert out.requires_grad
    return sum(saved.values())
