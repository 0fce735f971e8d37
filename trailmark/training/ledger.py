"""Tensors without memory: what code on them would take and multiply, counted (:mod:`trailmark.training.estimate`)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trailmark.ops.slabs import counting_slabs

_LARGE = 1 << 14  # elements

# What computes ALiBi's masks and noise. Nothing else that is float32 and large is computed of numbers alone and kept by
# no cache: what has no memory must not outlive the ledger.
_aten = torch.ops.aten
_OF_MASKS = (_aten.mul.Tensor, _aten.neg.default, _aten.where.self, _aten.add.Tensor)
_NARROW = (torch.float32, torch.bfloat16)
_RESHAPING = (
    "resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapdims_", "swapaxes_",
)  # fmt: skip


class Ledger(TorchDispatchMode):
    """Runs code on tensors without memory; counts the bytes they would take, and FLOPs of matrix products.

    An operation on real tensors alone is run: integers, masks and small constants, which caches may keep. With a
    tensor without memory among them only shapes are computed; integers and booleans that come of it are real zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._within = ExitStack()

    def __enter__(self) -> Self:
        self._within.enter_context(counting_slabs(self._times))
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        self._within.close()

    @contextmanager
    def _times(self, count: int) -> Iterator[None]:
        """What runs once here is counted ``count`` times."""
        before = self.flops
        yield
        self.flops += (count - 1) * (self.flops - before)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with self.fake:
            made = torch.empty(shape, dtype=dtype)
        self.note(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        self.flops += _flops(func, args)
        if (changed := _changed_in_place(func, args, kwargs)) is not None:
            return changed
        given = _tensors((args, kwargs))
        if any(isinstance(x, FakeTensor) for x in given):
            with self.fake:
                out = func(*args, **kwargs)
            out = tree_map_only(Tensor, _with_real_integers, out)
        elif func in _OF_MASKS and _is_large(given):
            with self.fake:
                out = func(*args, **kwargs)
            if out.dtype not in _NARROW:
                out = func(*args, **kwargs)
        elif given or func.overloadpacket is torch.ops.aten.arange:
            out = func(*args, **kwargs)
        else:
            with self.fake:
                out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not (_is_number(out) and out.dim()):
                out = func(*args, **kwargs)
        for x in _tensors(out):
            self.note(x)
        return out

    def note(self, x: Tensor) -> None:
        """Count the memory behind a tensor until it ends."""
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, partial(self._ended, key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _ended(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.live -= size


def _changed_in_place(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor without memory that an operation would fill or change, whose shape is known; None: it does neither."""
    name = func.overloadpacket.__name__
    if name.endswith("_") and name[0] != "_" and name not in _RESHAPING:
        return args[0] if isinstance(args[0], FakeTensor) else None
    out = kwargs.get("out")
    return out if isinstance(out, FakeTensor) else None


def _is_large(given: list[Tensor]) -> bool:
    """Whether what is computed of these, element by element, has no memory either."""
    return math.prod(torch.broadcast_shapes(*(x.shape for x in given))) > _LARGE


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _with_real_integers(x: Tensor) -> Tensor:
    return x if _is_number(x) else torch.zeros(x.shape, dtype=x.dtype)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _flops(func: Any, args: Any) -> int:
    """Of a matrix product, two for each multiply-add; of anything else 0."""
    name = func.overloadpacket.__name__.rstrip("_")
    if name in ("mm", "bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return 4 * args[0].numel() * args[1].shape[-2]
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return 10 * args[1].numel() * args[2].shape[-2]
    return 0


def without_memory(model: nn.Module, ledger: Ledger, dtype: torch.dtype) -> None:
    """Parameters on the meta device become such on a CPU."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    ledger.empty(parameter.shape, dtype), requires_grad=parameter.requires_grad
                )
            setattr(module, name, made[id(parameter)])
