"""Is this installation exact and as fast as it should be?"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from trailmark import __version__
from trailmark.machine import allocator, fast_precision, processor, threads
from trailmark.models import MODELS
from trailmark.models.fields import build_config
from trailmark.ops import (
    alibi_slopes,
    grouped_cross_attention,
    landmark_attention,
    select_chunks,
    sliding_window_attention,
)
from trailmark.ops.arguments import triton_problem


@dataclass
class Check:
    name: str
    passed: bool
    finding: str


def examine() -> Iterator[Check]:
    """The checks, one after the other."""
    yield Check("trailmark", True, __version__)
    yield Check("python", sys.version_info >= (3, 11), platform.python_version())
    yield Check("torch", _at_least(torch.__version__, (2, 11)), torch.__version__)
    yield Check("transformers", _at_least(transformers.__version__, (5, 16)), transformers.__version__)
    yield Check("processor", True, processor())
    yield Check("gpu", True, _gpu())
    yield Check("precision: auto", True, "{}: {}".format(*fast_precision()))
    yield Check("allocator", True, allocator())
    yield Check("waiting threads", True, threads())
    free = shutil.disk_usage(".").free / 2**30
    yield Check("disk", free > 1, f"{free:.1f} GiB free here")
    found = importlib.util.find_spec("matplotlib") is not None
    yield Check("matplotlib", True, "installed" if found else "not installed: no figures")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in map(torch.device, devices):
        yield from _implementations(device)
    yield _exactness()
    for device in map(torch.device, devices):
        try:
            yield from _kernels(device)
        except Exception as error:  # a driver, a compiler, an old device: that is a finding
            yield Check(f"kernels ({device})", False, f"{type(error).__name__}: {error}")
    yield _reading()


def _at_least(version: str, lowest: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= lowest


def _gpu() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return f"not used: torch {torch.__version__} has no CUDA (https://pytorch.org/get-started has builds that do)"
    return "none; the CPU does"


def _implementations(device: torch.device) -> Iterator[Check]:
    """What ``implementation=None`` chooses on a device for a model in bfloat16, and why."""
    from trailmark.ops.window.flex import flex_problem  # imports torch's compiler

    if device.type == "cpu":
        kernels = "torch: GEMMs in slabs that stay in a core's caches; Triton's kernels need CUDA"
        window = (
            "torch: GEMMs and scaled_dot_product_attention in blocks; FlexAttention has no gradients here"
        )
    else:
        q = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16, device=device)
        problem, flex = triton_problem(device), flex_problem(q, q, q)
        kernels = "triton: fused kernels" if problem is None else f"torch: {problem}"
        window = "flex: FlexAttention, compiled when first used" if flex is None else f"torch: {flex}"
    decoding = "torch: scaled_dot_product_attention, which one query needs no blocks for"
    for use, finding in (
        ("grouped cross-attention", kernels),
        ("selection of chunks", kernels),
        ("landmark attention", kernels),
        ("window attention in training and reading", window),
        ("window attention in decoding", decoding),
    ):
        yield Check(f"{use} ({device.type})", True, finding)


def _kernels(device: torch.device) -> Iterator[Check]:
    """Fused kernels against the oracles, in float32, where they run (under TRITON_INTERPRET=1 on a CPU too)."""
    from trailmark.ops.window.flex import flex_problem

    if triton_problem(device) is not None:
        return
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    indices = torch.randint(-1, 8, (1, 6, 3), generator=generator).sort(-1, descending=True).values

    def read(implementation: str, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        chosen = indices.to(q.device)
        return grouped_cross_attention(q, k, v, chosen, weights, implementation=implementation)

    inputs = [draw(1, 6, 9, 4, 16), draw(1, 8, 8, 2, 16), draw(1, 8, 8, 2, 16), draw(1, 6, 3).softmax(-1)]
    yield _within_budget(f"exactness of GCA's kernels ({device.type})", read, "triton", device, inputs)

    is_landmark = torch.arange(40) % 8 == 7

    def attend_by_landmarks(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        marks = is_landmark[None].to(q.device)
        out = landmark_attention(q, k, v, marks, implementation=implementation)
        assert isinstance(out, Tensor)
        return out

    inputs = [draw(1, 40, 4, 16), draw(1, 40, 2, 16), draw(1, 40, 2, 16)]
    name = f"exactness of landmark attention's kernels ({device.type})"
    yield _within_budget(name, attend_by_landmarks, "triton", device, inputs)

    query, landmarks = draw(1, 40, 16).to(device), draw(1, 40, 16).to(device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    same = 0
    for recency in (0.0, 1.0):
        found, expected = (
            select_chunks(
                query,
                landmarks,
                3,
                torch.arange(40),
                noise_seed=seed,
                recency=recency,
                implementation=name,
            ).indices
            for name in ("triton", "reference")
        )
        same += int((found == expected).all(-1).sum())
    yield Check(
        f"exactness of selection's kernels ({device.type})",
        same == 80,
        f"{same} of 80 selections as the oracle's",
    )

    if (
        device.type == "cuda"
        and flex_problem(query[..., None, :], query[..., None, :], query[..., None, :]) is None
    ):

        def attend(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slopes = alibi_slopes(q.shape[2]).to(q)
            out = sliding_window_attention(q, k, v, 33, alibi_slopes=slopes, implementation=implementation)
            assert isinstance(out, Tensor)
            return out

        inputs = [draw(1, 300, 4, 16), draw(1, 300, 2, 16), draw(1, 300, 2, 16)]
        yield _within_budget("exactness of window attention's kernels (cuda)", attend, "flex", device, inputs)


def _within_budget(
    name: str, op: Callable[..., Tensor], implementation: str, device: torch.device, inputs: list[Tensor]
) -> Check:
    """Output and gradients: twice the error of the oracle in the same dtype, and one rounding unit (design)."""

    def run(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = op(implementation, *leaves)
        return [x.double() for x in (out.detach(), *torch.autograd.grad(out.sin().sum(), leaves))]

    fast, oracle = run(implementation, torch.float32), run("reference", torch.float32)
    exact = run("reference", torch.float64)
    worst = 0.0
    for ours, theirs, truth in zip(fast, oracle, exact, strict=True):
        unit = torch.finfo(torch.float32).eps * truth.abs().max()
        worst = max(worst, float((ours - truth).abs().max() / (2 * (theirs - truth).abs().max() + unit)))
    passed = worst <= 1
    return Check(name, passed, f"outputs and gradients use {worst:.0%} of their error budget in float32")


def _exactness() -> Check:
    """Fast paths against the oracles, in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    worst = 0.0
    q, k, v = draw(1, 100, 4, 16), draw(1, 120, 2, 16), draw(1, 120, 2, 16)
    window = [sliding_window_attention(q, k, v, 33, implementation=name) for name in ("torch", "reference")]
    q, k, v = draw(1, 6, 9, 4, 16), draw(1, 8, 8, 2, 16), draw(1, 8, 8, 2, 16)
    indices, weights = torch.randint(-1, 8, (1, 6, 3), generator=generator), draw(1, 6, 3).abs()
    read = [
        grouped_cross_attention(q, k, v, indices, weights, implementation=name)
        for name in ("torch", "reference")
    ]
    window_read = draw(*q.shape), draw(*q.shape[:-1])
    shared = [  # one softmax with what a window read
        grouped_cross_attention(q, k, v, indices, weights, beside=window_read, implementation=name)
        for name in ("torch", "reference")
    ]
    q, k, v = draw(1, 60, 4, 16), draw(1, 60, 2, 16), draw(1, 60, 2, 16)
    marks = torch.arange(60)[None] % 8 == 5
    far = [landmark_attention(q, k, v, marks, implementation=name) for name in ("torch", "reference")]
    for fast, oracle in (window, read, shared, far):
        assert isinstance(fast, torch.Tensor)
        assert isinstance(oracle, torch.Tensor)
        worst = max(worst, float((fast - oracle).abs().max()))
    return Check("exactness", worst < 1e-12, f"ops differ from their oracles by {worst:.1e} in float64")


def _reading() -> Check:
    sizes = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_encoder_layers": 1,
        "sliding_window": 33,
        "chunk_size": 32,
    }
    config = build_config(sizes, {})
    model = MODELS[config.model_type](config).eval()
    ids = torch.randint(384, (1, 1 << 15))
    model.read(ids, model.new_cache())
    began = time.perf_counter()
    model.read(ids, model.new_cache(num_tokens=ids.shape[1]))
    speed = ids.shape[1] / (time.perf_counter() - began)
    return Check("reading", True, f"{speed:,.0f} tokens/s with a model of the demo's size")
