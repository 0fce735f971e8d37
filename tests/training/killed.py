"""Training runs in processes of their own, alone or several together: watched, stopped, killed.

They are forked from a server that has imported torch and started no thread: a run begins in a fraction of a second.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from tests.training.tiny import TEXT, without_seconds
from trailmark import cli
from trailmark.evaluation.needles.ask import needle_accuracy
from trailmark.processes import is_main, rank
from trailmark.training import checkpoints, running
from trailmark.training.config import RunConfig
from trailmark.training.run import CHECKPOINTS, HISTORY_FILE, Run
from trailmark.training.tensors import unwrapped_name

_server: Any = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([__name__])


# --- processes -------------------------------------------------------------------------------------------------


@dataclass
class Together:
    """Processes that were started, by rank."""

    folder: Path
    processes: list[BaseProcess]

    def wait(self, seconds: float = 180) -> list[int | None]:
        """Their exit codes; an AssertionError with what they printed if one is there still, which is then killed."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [number for number, process in enumerate(self.processes) if process.exitcode is None]
        for number in late:
            self.processes[number].kill()
            self.processes[number].join()
        assert not late, f"process {late} took over {seconds} s:\n{self.printed(late[0])}"
        return [process.exitcode for process in self.processes]

    def results(self, seconds: float = 180) -> list[Any]:
        """What the function returned in each; an AssertionError with what it printed where it did not."""
        codes = self.wait(seconds)
        for number, code in enumerate(codes):
            assert code == 0, f"process {number} ended with {code}:\n{self.printed(number)}"
        return [pickle.loads((self.folder / f"{n}.result").read_bytes()) for n in range(len(codes))]

    def printed(self, number: int = 0) -> str:
        log = self.folder / f"{number}.log"
        return log.read_text() if log.exists() else ""  # killed before it opened it

    def signal(self, number: int) -> None:
        """Send signal ``number`` to those that have not ended."""
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(cast(int, process.pid), number)

    def alive(self) -> bool:
        return any(process.exitcode is None for process in self.processes)


def begin(function: Callable[..., Any], *arguments: Any, processes: int = 1) -> Together:
    """Start ``function(*arguments)`` in each of so many processes that know of each other as torchrun tells it."""
    folder = Path(tempfile.mkdtemp(prefix="trailmark-processes-"))
    port = _free_port()
    started = [
        _server.Process(target=_enter, args=(function, arguments, number, processes, port, folder))
        for number in range(processes)
    ]
    # read once, when the server starts: a fork is safe only from a process without threads
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        for process in started:
            process.start()
    return Together(folder, started)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _enter(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    number: int,
    processes: int,
    port: int,
    folder: Path,
) -> None:
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a crash inside torch says in the log where it was
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves over
    if processes > 1:
        about = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in about.items()})
    result = pickle.dumps(function(*arguments))
    (folder / f"{number}.result").write_bytes(result)


# --- what they run ---------------------------------------------------------------------------------------------

Act = Callable[[Run], None]


def train(config: RunConfig) -> None:
    """From wherever the last process came to; what is said goes to the log."""
    Run(config, text=TEXT, say=print).train()


@dataclass
class Seen:
    """What one process saw of a run."""

    history: list[dict[str, float]]
    levels: list[int]
    batches: list[tuple[int, int, dict[str, Tensor]]]  # step, first row, rows of the global batch
    parameters: list[str]
    without_gradient: list[str]  # parameters that had none at some step
    zero_gradient: list[str]  # or one of zeros at every step
    done: bool
    step: int


def asked(config: RunConfig) -> Seen:
    """Train, asking for needles as ``trailmark train`` does."""
    return watched(
        config, evaluate=needle_accuracy(config.data.chunk_size, config.data.tokenizer, questions=4)
    )


def watched(
    config: RunConfig,
    at: dict[int, Act] | None = None,
    threshold: float | None = None,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
) -> Seen:
    """Train, doing ``at[step]`` right after that step, in every process."""
    run = Run(config, text=None if config.data.paths else TEXT, evaluate=evaluate, say=print)
    if threshold is not None:
        run.curriculum.threshold = threshold
    seen = Seen(
        [], [], [], [unwrapped_name(name) for name, _ in run.model.named_parameters()], [], [], False, 0
    )
    zero: set[str] | None = None
    make, may, done = run.task.batch, run.may_step, run.step_done

    def batch(step: int, first: int, count: int) -> dict[str, Tensor]:
        made = make(step, first, count)
        seen.batches.append((step, first, made))
        return made

    def may_step(step: int, *measured: Any) -> bool:
        nonlocal zero
        gradients = {unwrapped_name(name): p.grad for name, p in run.model.named_parameters()}
        seen.without_gradient += [name for name, x in gradients.items() if x is None]
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}
        zeros = {name for name, x in whole.items() if x is not None and not x.any()}
        zero = zeros if zero is None else zero & zeros
        return may(step, *measured)

    def step_done(step: int) -> None:
        done(step)
        (at or {}).get(step, lambda run: None)(run)

    run.task.batch, run.may_step, run.step_done = batch, may_step, step_done  # type: ignore[method-assign]
    seen.done = run.train() is not None
    seen.history, seen.levels, seen.step = run.history, run.curriculum.starts, run.step
    seen.zero_gradient = sorted(zero or ())
    return seen


def ask_to_stop(run: Run) -> None:
    """SIGTERM, to the main process alone: the others hear of it from that."""
    if is_main():
        signal.raise_signal(signal.SIGTERM)


def die_as_second(run: Run) -> None:
    if rank() == 1:
        os._exit(3)


def die_as_main(run: Run) -> None:
    if rank() == 0:
        os._exit(3)


def fail_as_second(run: Run) -> None:
    if rank() == 1:
        raise ValueError("data: a shard that only this process reads is damaged.")


def fill_the_disk(run: Run) -> None:
    """From now on nothing can be synced, in the process that writes."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = fsync


def spoil_as_second(run: Run) -> None:
    """The third step of the second process is not finite."""
    if rank() == 1:
        spoil(run, {3})


def spoil(run: Run, steps: set[int], module: str = "norm", value: float = math.nan) -> None:
    """A module's output holds ``value`` in these steps, also when they are looked into."""

    def put(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        return output.index_fill(-1, torch.tensor([0]), value) if run.step + 1 in steps else None

    run.model.get_submodule(module).register_forward_hook(put)


def terminate_twice(run: Run) -> None:
    """As a launcher and a scheduler do that both pass the signal on."""
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)


def terminate_again_later(run: Run) -> None:
    """Someone lost patience."""
    running._REPEATED = 0.0  # without the wait for later
    terminate_twice(run)


def command(arguments: list[str]) -> None:
    """``trailmark ...``, as its users start it but for the import of torch."""
    cli.main(arguments)


# --- a run that is killed again and again ----------------------------------------------------------------------


@dataclass
class Strikes:
    """What the kills met."""

    kills: int = 0
    in_saving: int = 0  # found a checkpoint, or the finished model, half-written
    with_manifest: int = 0  # of those: half-written but for its name
    lives: int = 0  # processes, or pairs of them, that were started
    runs: int = 0  # that came to their end
    survivors_left: int = 0  # of several processes, one was killed and the others ended by themselves
    survivors_waited: int = 0  # or were killed after a grace
    crashes: int = 0  # of several processes, inside torch: nobody killed them
    damaged: list[str] = field(default_factory=list)  # lines of a start that found a damaged checkpoint


class Killer:
    """Trains one configuration in processes that are killed: one life of four at any moment, the others while saving.

    Args:
        config: of the runs; each gets a folder of its own under ``folder``.
        processes: that train together; of several, one or all are killed.
    """

    def __init__(self, config: RunConfig, folder: Path, seed: int, processes: int = 1) -> None:
        self.config, self.folder, self.processes = config, folder, processes
        self.random = random.Random(seed)
        self.found = Strikes()
        self.output = folder / "undisturbed"
        begin(os.getpid).results()  # now the server runs: what it takes to start is no part of a life
        began = time.monotonic()
        begin(train, self._config(), processes=processes).results(300)
        self.life = time.monotonic() - began
        self.saving = 0.02  # seconds from a half-written folder's appearance to its end, about
        self.expected = outcome(self.output)

    def _config(self) -> RunConfig:
        return replace(self.config, output=str(self.output))

    def run(self, kills: int) -> None:
        """Kill until ``kills`` more, then let the last run end; every run that ends must equal the undisturbed one.

        Raises:
            AssertionError: a life that did not go on, a checkpoint that went lost, a run that ended otherwise.
        """
        until, most = self.found.kills + kills, self.found.lives + 20 * kills
        self._next_run()
        while True:
            assert self.found.lives < most, f"kills come too late: {self.found}"
            if self._live(kill=self.found.kills < until):
                assert outcome(self.output) == self.expected, f"{self.output}: another outcome"
                assert not half_written(self.output), half_written(self.output)
                self.found.runs += 1
                if self.found.kills >= until:
                    return
                self._next_run()

    def _next_run(self) -> None:
        self.output = self.folder / f"run-{self.found.runs}"

    def _live(self, kill: bool) -> bool:
        """One start, to its end or to its death; whether the run is done."""
        before, whole = being_saved(self.output), newest(self.output)
        together = begin(train, self._config(), processes=self.processes)
        self.found.lives += 1
        victims = list(range(self.processes))
        if self.processes > 1 and self.random.random() < 0.5:
            victims = [self.random.choice(victims)]
        struck = False
        try:
            if struck := kill and self._wait_for_the_moment(together, before):
                for victim in victims:
                    together.processes[victim].kill()
                for victim in victims:
                    together.processes[victim].join()
        finally:
            together.signal(signal.SIGCONT)
        if struck:
            self._survivors(together)
        codes = together.wait(300)
        printed = [together.printed(number) for number in range(self.processes)]
        self.found.damaged += [line for line in printed[0].splitlines() if "damaged" in line]
        killed = sum(code == -9 for code in codes)
        if killed:
            self.found.kills += 1
            if left := being_saved(self.output) - before:
                self.found.in_saving += 1
                self.found.with_manifest += any((path / "manifest.json").exists() for path in left)
        elif crashed := self._crashed(codes):
            # seen once in some 3,000 checkpoints, while gloo gathered sharded weights: the run must go on from this as
            # from a kill. A second one would be no accident
            self.found.crashes += 1
            warnings.warn(f"torch crashed: {codes}\n{printed[crashed.pop()]}", stacklevel=2)
            assert self.found.crashes == 1, f"{codes}\n" + "\n".join(printed)
        else:
            assert set(codes) == {0}, f"{codes}\n" + "\n".join(printed)
        assert newest(self.output) >= whole, "a whole checkpoint went lost"
        return set(codes) == {0} or (self.output / HISTORY_FILE).exists()

    def _crashed(self, codes: list[int | None]) -> list[int]:
        """Of several processes, those that a native crash ended."""
        signals = (-signal.SIGSEGV, -signal.SIGABRT)
        return [number for number, code in enumerate(codes) if self.processes > 1 and code in signals]

    def _wait_for_the_moment(self, together: Together, before: set[Path]) -> bool:
        """Whether it came before the run's end. If so, and it is one of saving, all processes are stopped."""
        if self.found.lives % 4 == 0:
            end = time.monotonic() + self.random.uniform(0, self.life)
            while time.monotonic() < end and together.alive():
                time.sleep(0.001)
            return together.alive()
        skipped, within = self.random.choice((0, 0, 1, 2)), self.saving
        end = time.monotonic() + 120
        while together.alive() and time.monotonic() < end:
            if not (seen := being_saved(self.output) - before):
                time.sleep(0.0003)
            elif skipped:
                skipped -= 1
                began = time.monotonic()
                while seen & being_saved(self.output) and together.alive():
                    time.sleep(0.0003)
                within = self.saving = time.monotonic() - began
            else:
                # a busy machine may wake this process long after the saving is over: what is stopped waits for it
                time.sleep(self.random.uniform(0, within))
                together.signal(signal.SIGSTOP)
                time.sleep(0.002)
                if together.alive() and seen & being_saved(self.output):
                    return True
                together.signal(signal.SIGCONT)
                within /= 2
        return False

    def _survivors(self, together: Together, grace: float = 30) -> None:
        """Those that were not killed must leave: they cannot train alone. A launcher would end those that wait."""
        end = time.monotonic() + grace
        left = [process for process in together.processes if process.exitcode != -9]
        for process in left:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                self.found.survivors_waited += 1
            else:
                self.found.survivors_left += 1


def half_written(output: Path) -> set[Path]:
    """Folders and files under names of their own until they are whole."""
    return set(output.glob(".*")) | {
        path for path in output.glob("checkpoints/*") if ".tmp-" in path.name or ".removed-" in path.name
    }


def being_saved(output: Path) -> set[Path]:
    """Of these, checkpoints (those that are being removed too) and the finished model."""
    return {path for path in half_written(output) if path.is_dir()}


def newest(output: Path) -> int:
    """The step of the newest whole checkpoint; 0: none."""
    folder, damaged = checkpoints.find_newest_whole(output / CHECKPOINTS)
    assert not damaged, damaged
    return 0 if folder is None else int(folder.name.removeprefix("step-"))


def outcome(output: Path) -> tuple[bytes, list[dict[str, float]], Any]:
    """The final weights to the bit, every logged number but times, and what else the history says."""
    history = json.loads((output / HISTORY_FILE).read_text())
    logged = without_seconds(history["steps"])
    return (output / "model.safetensors").read_bytes(), logged, (history["level_starts"], history["tokens"])
