"""Checks that every op shares, and the precision rule (guarantees 8 and 11)."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")
KERNEL_DTYPES = torch.float32, torch.bfloat16, torch.float16
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def require(condition: bool, argument: str, came: object, expected: str, way_out: str = "") -> None:
    """Raise a ValueError that names the argument, what came, what was expected and the way out."""
    if not condition:
        hint = f" {way_out}" if way_out else ""
        raise ValueError(f"{argument}: expected {expected}, got {came}.{hint}")


def require_shape(argument: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    """Raise a ValueError unless ``tensor`` has the ``expected`` shape, spelled with ``letters``."""
    if tuple(tensor.shape) != expected:  # a message made in vain would tie a compiled graph to these sizes
        require(False, argument, tuple(tensor.shape), f"shape {letters} = {tuple(expected)}")


def require_implementation(implementation: str | None, supported: tuple[str, ...]) -> None:
    """Refuse an implementation that this op does not have; nothing falls back silently."""
    require(
        implementation is None or implementation in supported,
        "implementation",
        repr(implementation),
        "None or one of " + ", ".join(map(repr, supported)),
        "None picks the fastest that supports the input.",
    )


def require_floating(**tensors: Tensor) -> None:
    """Refuse tensors of whole numbers, each under its argument's name."""
    for argument, tensor in tensors.items():
        require(tensor.is_floating_point(), argument, tensor.dtype, "a floating dtype", "Convert it.")


def require_device(q: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors, each under its argument's name, that do not stand where ``q`` does."""
    for argument, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            came, expected = f"a tensor on {tensor.device}", f"one on {q.device}, as q"
            require(False, argument, came, expected, "Move it there.")


def choose_implementation(
    implementation: str | None, on_cuda: bool, kernels_refuse: Callable[[], str | None]
) -> str:
    """The implementation asked for; None is "triton" on CUDA where the kernels take the inputs, else "torch".

    ``kernels_refuse`` says why they do not; asked for by name, they are refused with that reason.
    """
    if implementation is None:
        return "triton" if on_cuda and kernels_refuse() is None else "torch"
    if implementation == "triton":
        problem = kernels_refuse()
        expected = "an implementation that takes these inputs"
        require(problem is None, "implementation", "'triton'", expected, f"{problem}.")
    return implementation


def attention_kernels_refuse(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the attention kernels do not take these inputs; None if they do."""
    if problem := triton_problem(q.device):
        return problem
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}. Convert them to one dtype"
    if q.dtype not in KERNEL_DTYPES:
        return f"q is {q.dtype}. Convert it to float32, bfloat16 or float16"
    if q.shape[-1] > 256:
        return f"D is {q.shape[-1]}, and the kernels have at most 256"
    return None


def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of ``device``; None if they can."""
    if not _HAS_TRITON:
        return "Triton is not installed; CUDA builds of torch bring it, or: pip install triton"
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return (
        f"the tensors are on {device.type}, and Triton needs CUDA. Move them there, or set TRITON_INTERPRET=1 "
        "before Python starts to interpret the kernels (slow; for tests)"
    )


def values_are_checked(tensor: Tensor) -> bool:
    """Whether to look at the values of index tensors: always on a CPU; elsewhere it would wait for the device.

    The environment variable TRAILMARK_CHECK_VALUES=1 has them checked on every device (for debugging).
    """
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False  # there are none
    return tensor.device.type == "cpu" or os.environ.get("TRAILMARK_CHECK_VALUES") == "1"


def require_grouped_heads(query_heads: int, key_value_heads: int) -> None:
    """Every key/value head serves the same number of query heads (grouped-query attention)."""
    require(
        key_value_heads > 0 and query_heads % key_value_heads == 0,
        "q",
        f"{query_heads} query heads for {key_value_heads} key/value heads",
        "a number of query heads that the number of key/value heads divides",
    )


def without_autocast(op: Callable[P, R]) -> Callable[P, R]:
    """Run an op as written under any autocast: it chooses the precision of each step itself."""

    @functools.wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not torch.is_autocast_enabled(first.device.type):
            return op(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return op(*args, **kwargs)

    return run


def whole_numbers(argument: str, tensor: Tensor) -> Tensor:
    """The tensor as int64; products of narrower integers would overflow (guarantee 10)."""
    require(
        not tensor.dtype.is_floating_point and tensor.dtype != torch.bool,
        argument,
        tensor.dtype,
        "an integer tensor, int64 for choice",
    )
    return tensor.long()


def require_chunk_numbers(argument: str, indices: Tensor, M: int) -> None:
    """Chunks 0 .. M - 1, or -1 for none; see :func:`values_are_checked`."""
    if indices.numel() and values_are_checked(indices):
        low, high = map(int, indices.aminmax())
        require(high < M, argument, high, f"chunk numbers below M = {M}")
        require(low >= -1, argument, low, "chunk numbers from 0, or -1 for none")


def arithmetic_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of scores, softmax and norms: that of the inputs, never below float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
