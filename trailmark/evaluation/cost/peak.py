"""The most memory that a stretch of work takes: of a GPU what torch allocates, of a CPU what the process holds."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): the peak of resident memory begins anew


def peak_kind(device: torch.device) -> str | None:
    """What :func:`with_peak` counts there; None: nothing, the system does not say it."""
    if device.type == "cuda":
        return "allocated on the GPU"
    return "resident memory of the process" if _resets() else None


def with_peak(device: torch.device, work: Callable[[], Any]) -> tuple[Any, int | None]:
    """What ``work()`` gives, and the bytes that it took at most above those held when it began.

    On a CPU an estimate: allocators keep what is freed, libraries set themselves up in their first call, and pages
    count once they are touched. Freed memory is given back first, where the C library can.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = work()
        torch.cuda.synchronize(device)
        return found, torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # what earlier work left in cycles would be freed within this one
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _STATUS.exists() else None
    if trim is not None:
        trim(0)
    if not _resets():
        return work(), None
    before = _resident("VmRSS")
    found = work()
    return found, max(0, _resident("VmHWM") - before)


def _resets() -> bool:
    """Make the peak begin anew; False: not on this system."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _STATUS.exists()


def _resident(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    line = next(line for line in lines if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
