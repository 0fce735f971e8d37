"""What this machine can do, and how a process is set up for it. Importing it imports nothing that takes time."""

from __future__ import annotations

import os
import sys
from typing import Literal

# glibc's defaults give freed memory back page by page
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "67108864",
}
# A thread of GNU's OpenMP that waits for others spins so often before it sleeps. By its default it spins on while a
# busy process holds the core that it waits for (benchmarks/waiting.py).
WAITING = {"GOMP_SPINCOUNT": "1000"}
SET_UP = KEEP_FREED_MEMORY | WAITING
# by each of these a user has said how threads wait
SPINS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
_STARTED = "TRAILMARK_STARTED"  # whatever takes variables away starts nothing twice
# of a processor, as torch names them: instructions that multiply matrices of bfloat16
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


def start_again_set_up() -> None:
    """Start this process again, once, with memory and threads set up, if the user has not done so.

    glibc and OpenMP read these settings once, when a process starts. Training in eager mode is 1.3 to 4 times faster
    with freed memory kept. Elsewhere (macOS, musl) they mean nothing.
    """
    if not sys.platform.startswith("linux") or os.environ.get(_STARTED) == str(os.getpid()):
        return
    missing: dict[str, str] = {}
    if not any(name in os.environ for name in (*KEEP_FREED_MEMORY, "GLIBC_TUNABLES")):
        missing |= KEEP_FREED_MEMORY
    if not any(name in os.environ for name in SPINS):
        missing |= WAITING
    if not missing:
        return
    # as it was started: "-m" instead of the installed script would put the user's folder on the import path
    program = sys.executable or ""
    try:
        os.execve(program, [program, *sys.orig_argv[1:]], os.environ | missing | {_STARTED: str(os.getpid())})
    except (OSError, ValueError) as error:  # an embedded Python, no right to start it, no room for two
        ways = " ".join(f"{name}={value}" for name, value in missing.items())
        print(
            f"trailmark: this Python cannot be started again ({error}) with settings that make it faster and change no "
            f"result. To have them, set {ways}",
            file=sys.stderr,
        )


def allocator() -> str:
    """What happens to freed memory, in words."""
    if not sys.platform.startswith("linux"):
        return "the system's"
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return "keeps freed memory"
    return "glibc's defaults; the other commands set better ones for themselves"


def threads() -> str:
    """How OpenMP's threads wait for each other, in words."""
    if not sys.platform.startswith("linux"):
        return "as the system's OpenMP has it"
    given = [f"{name}={os.environ[name]}" for name in SPINS if name in os.environ]
    return ", ".join(given) or "OpenMP's default; the other commands let them sleep sooner"


def bfloat16_instructions() -> list[str]:
    """Which of AMX's and AVX-512's instructions that multiply matrices of bfloat16 torch uses here."""
    import torch

    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):  # by ATEN_CPU_CAPABILITY too
        return []
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in _INSTRUCTIONS if known.get(name)]


def fast_precision(device: str | None = None) -> tuple[Literal["bfloat16", "float32"], str]:
    """The precision in which a device multiplies fastest without loss of range, and why.

    Args:
        device: "cuda" or "cpu"; None: a GPU, if there is one.
    """
    import torch

    if device == "cuda" or (device is None and torch.cuda.is_available()):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "the GPU multiplies it"
        return "float32", "the GPU has no bfloat16 of its own"
    if found := bfloat16_instructions():
        return "bfloat16", f"the processor multiplies it ({', '.join(found)})"
    return "float32", "the processor has neither AMX nor AVX-512 instructions for bfloat16"


def processor() -> str:
    """Its kind, cores, threads and what torch uses of it, in words."""
    import platform

    import torch

    vectors = torch.backends.cpu.get_cpu_capability()
    instructions = ", ".join(bfloat16_instructions()) or "neither AMX nor AVX-512 for bfloat16"
    count = torch.get_num_threads()
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {count} threads for torch, {vectors}, {instructions}"
    )
