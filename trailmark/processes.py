"""Several processes of one command: who is who, and what they must agree on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


def world_size() -> int:
    """Processes of this run, by torchrun's or accelerate's environment: also before they know each other."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def beside_each_other(pieces: int) -> int:
    """Processes of this machine that have one of so many pieces of work each."""
    return min(pieces, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if connected() else 1


def is_main() -> bool:
    """Whether this process writes files and shows progress."""
    return rank() == 0


def connected() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def connect() -> None:
    """Let the processes that torchrun started know each other, for messages alone; they may wait for days."""
    if world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=30))


def all_reduced(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if connected():
        dist.all_reduce(values)
    return values


def by_main(action: Callable[[], Result]) -> Result:
    """What ``action`` returns in the main process, in all of them; its error too: nobody waits for the dead.

    Raises:
        ValueError: the main process's error, in every process.
    """
    if not connected():
        return action()
    answer: list[Any] = [None, None]
    if is_main():
        try:
            answer[0] = action()
        except Exception as error:  # the others wait for an answer
            answer[1] = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, src=0, device=_device())
    if answer[1] is not None:
        raise answer[1] if isinstance(answer[1], ValueError) else ValueError(f"process 0: {answer[1]}")
    return answer[0]


def dealt(number: int) -> bool:
    """Whether the piece of work with that number, from 0, is this process's."""
    return not connected() or number % world_size() == rank()


def gathered(value: Any) -> list[Any]:
    """``value`` of every process, by rank."""
    if not connected():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def part() -> bool:
    """Let go of the other processes, at a program's end: those that just vanish are taken for dead.

    Returns:
        Whether there were others: end with :func:`leave` then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.destroy_process_group()
    return True


def leave() -> NoReturn:
    """End this process, which has parted from others, with code 0.

    At once: objects that still hold a group of processes are taken apart in any order when the interpreter ends, and
    now and then its threads abort the process then ("terminate called"), which launchers take for a failed training.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
