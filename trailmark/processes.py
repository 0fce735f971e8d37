"""Several processes of one command: who is who, and what they must agree on.

Importing it imports no torch: a corpus is prepared without.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
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
        ValueError: the main process's error, in every other process; in the main one, whatever it was.
    """
    if not connected():
        return action()
    answer: list[Any] = [None, None]
    failed: Exception | None = None
    if is_main():
        try:
            answer[0] = action()
        except Exception as error:  # the others wait for an answer
            failed = error
            # in words: an error of another class may not survive the way
            answer[1] = str(error) if isinstance(error, ValueError) else told_by(0, error)
    _distributed().broadcast_object_list(answer, src=0, device=_device())
    if failed is not None:
        raise failed
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]


def told_by(number: int, error: Exception) -> str:
    """What process ``number`` says to the others of its error."""
    return (
        f"process {number}: {error if isinstance(error, ValueError) else f'{type(error).__name__}: {error}'}"
    )


def expect_agreed(told: Mapping[str, Any]) -> None:
    """Raise a ValueError in all processes, which names one, where it was told other things than the first."""
    for number, theirs in enumerate(every := gathered(dict(told))):
        wrong = next((name for name in every[0] if theirs.get(name) != every[0][name]), None)
        if wrong is not None:
            raise ValueError(
                f"processes: expected the {wrong} of process 0 in all, process {number} has another one. Give all of "
                "them the same command, model, text and version."
            )


SHARED = ".shared-"
"""How the name of a mark begins, by which processes see that they share a folder."""


def expect_shared(name: str, folder: Path) -> None:
    """Raise a ValueError in all processes, which names one, where it does not see a folder of the first.

    Args:
        name: of the option that names the folder. folder: is made, where it is not there.
    """
    first, name_of_mark = by_main(lambda: (str(folder), f"{SHARED}{os.urandom(8).hex()}"))
    mark = folder / name_of_mark
    by_main(lambda: _touch(mark))
    lacking = [number for number, there in enumerate(gathered(mark.exists())) if not there]
    by_main(mark.unlink)
    if lacking:
        raise ValueError(
            f"{name}: expected a folder that all processes share, process {lacking[0]} does not see "
            f"{first!r} of process 0. Choose one on a file system that they share."
        )


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


# --- a command whose processes share its work ---------------------------------------------------------------

_sharing = False


@contextmanager
def together() -> Iterator[None]:
    """Inside, the processes that torchrun started know each other and share the command's work.

    Where there are several, each ends here. A command is decorated with it.
    """
    global _sharing
    connect()
    _sharing = connected()
    try:
        yield
    finally:
        _sharing = False
    if part():
        leave()


def sharing() -> bool:
    """Whether a command's processes share its work; else each that is asked for some does all of it by itself."""
    return _sharing


def by_first(action: Callable[[], Result]) -> Result:
    """What ``action`` returns: in the first process, of those that share a command's work. See :func:`by_main`."""
    return by_main(action) if sharing() else action()


def share_out(
    work: Iterable[Piece],
    make: Callable[[Iterator[Piece]], Generator[Result, None, None]],
    take: Callable[[Result], object],
) -> None:
    """Have pieces of work made, by every process that shares it every n-th, and taken by the first, in their order.

    Args:
        work: the same in all of them.
        make: gives what it makes of each piece that it is given; it is closed at the end.

    Raises:
        ValueError: what one of them raised, in every other process; in that one, whatever it was.
    """
    if not sharing():
        with closing(make(iter(work))) as all_made:
            for made in all_made:
                take(made)
        return
    with closing(make(piece for number, piece in enumerate(work) if dealt(number))) as mine:
        while _round(mine, take) == world_size():
            pass


def _round(mine: Iterator[Result], take: Callable[[Result], object]) -> int:
    """One piece of each process; returns how many there were."""
    made: list[Result] = []
    failed: Exception | None = None
    try:
        made = [*islice(mine, 1)]
    except Exception as error:  # the others wait for an answer
        failed = error
    every: Any = [None] * world_size() if is_main() else None
    _distributed().gather_object((made, failed and told_by(rank(), failed)), every)

    def take_all() -> int:
        for _, told in every:
            if told is not None:
                raise failed or ValueError(told)
        for some, _ in every:
            for x in some:
                take(x)
        return sum(len(some) for some, _ in every)

    try:
        return by_main(take_all)
    except ValueError:
        if failed is not None:
            raise failed from None
        raise


# --- pieces of work -----------------------------------------------------------------------------------------


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


def wait_for_all(meanwhile: Callable[[], object], seconds: float) -> None:
    """Wait until every process waits here; ``meanwhile`` is called every so many ``seconds``, at first more often."""
    if not connected():
        return
    import torch

    waiting = _distributed().all_reduce(torch.zeros(1, device=_device()), async_op=True)
    pause = 0.01
    while not waiting.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, seconds)
        meanwhile()
    waiting.wait()


class LauncherError(ValueError):
    """torchrun's launcher, which keeps what processes count together, has ended."""

    def __init__(self) -> None:
        super().__init__(
            "processes: expected torchrun's launcher to last as long as they do, it has ended or is out of reach. The "
            "same command goes on."
        )


class Count:
    """A number to which every process adds when it likes, and waits for none; all of them make it at once."""

    def __init__(self) -> None:
        self._name, self._alone = by_main(lambda: os.urandom(8).hex()), 0

    def add(self, amount: int) -> int:
        """Returns what all have added so far.

        Raises:
            LauncherError: nobody keeps it any more.
        """
        if not connected():
            self._alone += amount
            return self._alone
        dist = _distributed()
        try:
            return int(dist.group.WORLD.get_group_store().add(self._name, amount))
        except dist.DistError as error:
            raise LauncherError from error


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
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before Python began
            stream.flush()
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
