"""Is this installation exact and as fast as it should be?"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers

from trailmark import __version__
from trailmark.models import DRTConfig, DRTForCausalLM
from trailmark.ops import grouped_cross_attention, sliding_window_attention


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
    threads = torch.get_num_threads()
    yield Check(
        "processor", True, f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads for torch"
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none; the CPU does"
    yield Check("gpu", True, device)
    yield Check("allocator", True, _allocator())
    free = shutil.disk_usage(".").free / 2**30
    yield Check("disk", free > 1, f"{free:.1f} GiB free here")
    for package, purpose in (("matplotlib", "figures"),):
        found = importlib.util.find_spec(package) is not None
        yield Check(package, True, "installed" if found else f"not installed: no {purpose}")
    yield _exactness()
    yield _reading()


def _at_least(version: str, lowest: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= lowest


def _allocator() -> str:
    if not sys.platform.startswith("linux"):
        return "the system's"
    kept = "MALLOC_TRIM_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ
    return (
        "keeps freed memory"
        if kept
        else "glibc's defaults; the other commands set better ones for themselves"
    )


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
    for fast, oracle in (window, read):
        assert isinstance(fast, torch.Tensor)
        assert isinstance(oracle, torch.Tensor)
        worst = max(worst, float((fast - oracle).abs().max()))
    return Check("exactness", worst < 1e-12, f"ops differ from their oracles by {worst:.1e} in float64")


def _reading() -> Check:
    config = DRTConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_encoder_layers=1,
        sliding_window=33,
        chunk_size=32,
    )
    model = DRTForCausalLM(config).eval()
    ids = torch.randint(384, (1, 1 << 15))
    model.read(ids, model.new_cache())
    began = time.perf_counter()
    model.read(ids, model.new_cache(num_tokens=ids.shape[1]))
    speed = ids.shape[1] / (time.perf_counter() - began)
    return Check("reading", True, f"{speed:,.0f} tokens/s with a model of the demo's size")
