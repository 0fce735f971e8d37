"""Several processes of one command: who is who, and what they must agree on.

Importing it imports no torch: a corpus is prepared without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Result = TypeVar("Result")
Piece = TypeVar("Piece")


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
    """Whether this process and others know each other."""
    dist = _distributed()
    return dist is not None and dist.get_world_size() > 1


def connect() -> None:
    """Let the processes that torchrun started know each other, for messages alone; they may wait for days."""
    if world_size() > 1 and _distributed() is None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(days=30))


def all_reduced(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if connected():
        _distributed().all_reduce(values)
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
    _distributed().broadcast_object_list(answer, src=0, device=_device())
    if answer[1] is not None:
        raise answer[1] if isinstance(answer[1], ValueError) else ValueError(f"process 0: {answer[1]}")
    return answer[0]


def expect_agreed(told: Mapping[str, Any]) -> None:
    """Raise a ValueError in all processes, which names one, where it was told other things than the first.

    Each value is compared; all processes give the same names.
    """
    for number, theirs in enumerate(every := gathered(dict(told))):
        wrong = next((name for name, value in theirs.items() if value != every[0][name]), None)
        if wrong is not None:
            raise ValueError(
                f"processes: expected the {wrong} of process 0 in all, process {number} has another one. Give all of "
                "them the same command, model, text and version."
            )


@contextmanager
def together() -> Iterator[bool]:
    """Inside, the processes that torchrun started know each other; each ends here if there are several.

    Gives whether this process is the one that speaks.
    """
    connect()
    yield is_main()
    if part():
        leave()


def by_each(action: Callable[[], Result]) -> list[Result]:
    """What ``action`` returns in every process, by rank, in all of them; the error of one too.

    Raises:
        ValueError: the first process's error that has one, in every process.
    """
    if not connected():
        return [action()]
    result, failed = None, None
    try:
        result = action()
    except Exception as error:  # the others wait for an answer
        failed = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    answers = gathered((result, failed))
    for number, (_, told) in enumerate(answers):
        if told is not None:
            raise ValueError(f"process {number}: {told}")
    return [result for result, _ in answers]


def shared_out(
    work: Iterable[Piece], make: Callable[[Iterator[Piece]], Generator[Result, None, None]]
) -> Generator[Result, None, None]:
    """What is made of pieces of work, in their order, in every process; each process makes every n-th.

    Args:
        work: the same in all of them.
        make: gives what it makes of each piece that it is given; it is closed where this is.

    Raises:
        ValueError: what one of them raised, in all.
    """
    with closing(make(piece for number, piece in enumerate(work) if dealt(number))) as mine:
        if not connected():
            yield from mine
            return
        while True:
            made = [x for some in by_each(lambda: list(islice(mine, 1))) for x in some]
            yield from made
            if len(made) < world_size():
                return


def dealt(number: int) -> bool:
    """Whether the piece of work with that number, from 0, is this process's."""
    return not connected() or number % world_size() == rank()


def gathered(value: Any) -> list[Any]:
    """``value`` of every process, by rank."""
    if not connected():
        return [value]
    dist = _distributed()
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def part() -> bool:
    """Let go of the other processes, at a program's end: those that just vanish are taken for dead.

    Returns:
        Whether there were others: end with :func:`leave` then.
    """
    if (dist := _distributed()) is None:
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


def _distributed() -> Any:
    """torch.distributed, where processes know each other; None: nothing was said to any."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _device() -> torch.device | None:
    import torch

    if _distributed().get_backend() != "nccl":
        return None
    return torch.device("cuda", torch.cuda.current_device())
