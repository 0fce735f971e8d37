"""What the benchmarks share: where text lies, what is timed and how, lines of progress, and the JSON files.

Importing it imports neither transformers nor torch: so commands that need neither begin at once.
"""

from __future__ import annotations

import functools
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trailmark.files import read_json, write_json
from trailmark.report.console import Progress, training_line

if TYPE_CHECKING:
    from trailmark.training.run import Run

Name = TypeVar("Name")
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
sys.path.insert(
    0, str(ROOT)
)  # scripts take budgets, cases and the browser from tests: each has one definition


def data_folder(name: str) -> Path:
    """TRAILMARK_DATA/<name>."""
    if not (data := os.environ.get("TRAILMARK_DATA")):
        raise SystemExit("TRAILMARK_DATA: expected the folder of the evaluation texts, got nothing. Set it.")
    return Path(data).resolve() / name


def peak_memory() -> int:
    """Bytes that this process has had in RAM at most, Python and libraries included."""
    try:  # getrusage would count what the process that started this one had
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- times -------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th."""
    ordered = sorted(values)
    return {f"p{p}": ordered[round(p / 100 * (len(ordered) - 1))] for p in (20, 50, 80)}


def interleaved(cases: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """What each case returns, in turn, ``rounds`` times, after one that does not count."""
    found: dict[Name, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            value = case()
            if number:
                found[name].append(value)
    return found


class Timers:
    """Seconds by part, in ``seconds``: what is nested counts for the inner part alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*arguments, **options)

        return timed

    @contextmanager
    def on(self, *places: tuple[Any, str, str]) -> Iterator[None]:
        """Time the attributes (owner, attribute, name) while this lasts."""
        originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
        try:
            for owner, attribute, name in places:
                setattr(owner, attribute, self.around(name, getattr(owner, attribute)))
            yield
        finally:
            for owner, attribute, original in originals:
                setattr(owner, attribute, original)


def together(processes: int) -> list[str]:
    """What stands between ``python -m`` and a module that so many processes run; of one, nothing."""
    if processes == 1:
        return []
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]


# --- trainings ---------------------------------------------------------------------------------------------


def showing(progress: Progress, name: str = "") -> Callable[[Run], None]:
    """What a run calls after a step: a line of how far it is, after its name."""

    def show(run: Run) -> None:
        total = run.config.training.steps
        line = training_line(
            run.step, total, run.seconds, run.measured.get("step_loss"), run.averages, run.tokens_per_second
        )
        progress.show(f"{name}: {line}" if name else line)

    return show


def to_its_end(run: Run) -> None:
    """Train what is left of a run; a SystemExit where it is stopped."""
    if not run.finished and run.train() is None:
        raise SystemExit("Stopped. The same command goes on from here.")


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


# --- JSON files --------------------------------------------------------------------------------------------


def keep(path: Path, name: str, results: Any, where: dict[str, Any] | None = None) -> None:
    """Put what was found in one part into a file, with the machine it was found on."""
    from trailmark.evaluation.record import environment

    part = {"environment": where or environment(), "results": results}
    write_json(path, (read_json(path) or {}) | {name: part})


def expect_settings(name: str, path: Path, kept: dict[str, Any], settings: dict[str, Any]) -> None:
    """A SystemExit where a file holds numbers with other settings: they are not mixed."""
    if kept != settings:
        changed = [key for key in settings if kept.get(key) != settings[key]]
        raise SystemExit(
            f"{name}: {path} holds numbers with other settings ({', '.join(changed)}). "
            "Repeat those, choose another --output and --folder, or remove both."
        )
