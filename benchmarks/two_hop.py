"""Two hops, 16 distractors and 8 retrieved chunks: groups and landmarks that following a chain takes.

    python benchmarks/two_hop.py                    every case that benchmarks/two_hop.json lacks
    python benchmarks/two_hop.py --minutes 30       stop after so long; the same command goes on

``$AAAA=BBBB;`` and ``$BBBB=ddddd;`` are hidden among 16 needles that belong to no chain, as many of each kind. With
one landmark ``~AAAA`` stands before it and ``=ddddd;`` behind it. With two, a chunk of the cue ``=`` alone stands
between: its landmark asks with what the first one found, if a later group of layers asks. DRT of one group and of two,
each trained for each form: the same layers, texts (but for the second landmarks' chunks), steps and questions.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trailmark import demo
from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.data.files import read_json, write_json
from trailmark.data.needles import TWO_HOPS
from trailmark.evaluation import needles
from trailmark.evaluation.needles import NeedleSettings
from trailmark.evaluation.record import Record, environment
from trailmark.evaluation.subject import load
from trailmark.report.console import Progress, training_line
from trailmark.training.config import DataConfig, RunConfig, TrainingConfig
from trailmark.training.run import HISTORY_FILE, Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = Path("runs/benchmark-two-hop")
TRAIN_LENGTH = TWO_HOPS[-1].chunks * demo.CHUNK_SIZE
FACTORS = (1, 16, 256)
LENGTHS = tuple(TRAIN_LENGTH * factor for factor in FACTORS)
QUESTIONS = 200
DISTRACTORS = 16

STEPS = 3400
STARTS = (
    0,
    350,
    500,
    700,
    900,
    1150,
    1450,
    1650,
    1850,
    2200,
    2700,
)  # of the levels: for all, whatever they learn
MODEL = demo.MODELS["drt"] | {"num_hidden_layers": 3, "residual_gca": True}


@dataclass(frozen=True)
class Case:
    groups: int
    landmarks: int
    seed: int = 0

    @property
    def name(self) -> str:
        groups, landmarks = ("" if count == 1 else "s" for count in (self.groups, self.landmarks))
        return f"{self.groups} group{groups}, {self.landmarks} landmark{landmarks}"

    @property
    def folder(self) -> str:
        return f"groups-{self.groups}-landmarks-{self.landmarks}-seed-{self.seed}"


CASES = (Case(2, 2), Case(1, 2), Case(2, 1), Case(1, 1), Case(2, 2, seed=1))


def run_config(case: Case, folder: Path, steps: int) -> RunConfig:
    return RunConfig(
        output=str(folder / case.folder),
        model=MODEL | {"num_retrieval_groups": case.groups},
        data=DataConfig(
            task="needles",
            chunk_size=demo.CHUNK_SIZE,
            filler_weight=0.1,
            first_digit_weight=3.0,
            num_landmarks=case.landmarks,
        ),
        training=TrainingConfig(steps=steps, tokens_per_step=2048, seed=case.seed, save_steps=100),
    )


class Stopped(Exception):
    """The time is up."""


class Benchmark:
    """All cases in one folder; a second start goes on where the first stopped."""

    def __init__(
        self,
        folder: Path = FOLDER,
        output: Path = OUTPUT,
        cases: Sequence[Case] = CASES,
        minutes: float = math.inf,
        steps: int = STEPS,
        starts: Sequence[int] = STARTS,
        lengths: Sequence[int] = LENGTHS,
        questions: int = QUESTIONS,
    ) -> None:
        self.folder, self.output, self.cases = folder, output, cases
        self.until = time.monotonic() + 60 * minutes
        self.steps, self.starts, self.lengths, self.questions = steps, starts, lengths, questions
        self.progress = Progress()

    def run(self) -> None:
        """Raises Stopped when the minutes are over."""
        for case in self.cases:
            self._train(case)
            self._ask(case)

    # --- training ------------------------------------------------------------------------------------------

    def make_run(self, case: Case) -> Run:
        config = run_config(case, self.folder, self.steps)
        tokenizer = load_tokenizer(config.data.tokenizer)

        def show(run: Run) -> None:
            line = training_line(run.step, self.steps, run.seconds, run.averages, run.tokens_per_second)
            self.progress.show(f"{case.name}, seed {case.seed}: {line}")
            if time.monotonic() > self.until:
                run.stop_signal = signal.SIGTERM  # it saves and leaves

        run = Run(config, show, tokenize(standard_library_texts("train"), tokenizer))
        run.curriculum.levels = TWO_HOPS
        run.curriculum.begin_at(self.starts, config.training.tokens_per_step, config.data.chunk_size)
        return run

    def _train(self, case: Case) -> None:
        run = self.make_run(case)
        if not run.finished and run.train() is None:
            raise Stopped
        self.progress.clear()

    # --- questions -----------------------------------------------------------------------------------------

    def settings(self, case: Case) -> NeedleSettings:
        return NeedleSettings(
            lengths=tuple(self.lengths),
            kind="hops",
            hops=2,
            distractors=DISTRACTORS,
            landmarks=case.landmarks,
            format="marks",
            phases="end",
            questions=self.questions,
        )

    def _ask(self, case: Case) -> None:
        """The same of every case: haystacks, needles and values do not depend on the model."""
        folder = self.folder / case.folder
        subject = load(folder)
        text = tokenize(standard_library_texts("haystack"), subject.tokenizer)
        record = Record(folder / "evaluation", "needles", subject.identity())

        def show(message: str) -> None:
            self.progress.show(f"{case.name}, seed {case.seed}: {message}")
            if time.monotonic() > self.until:
                raise Stopped

        results = needles.run(subject, self.settings(case), text, record, show)
        self.progress.clear()
        for result in results:
            print(
                f"{case.name}, seed {case.seed}: {result['length']:>9,} tokens: {result['correct']} of "
                f"{result['questions']} right, found by hop: {result['recall_by_hop']}",
                flush=True,
            )
        self._keep(case, subject.model, results)

    def _keep(self, case: Case, model: Any, results: list[dict[str, Any]]) -> None:
        history = read_json(self.folder / case.folder / HISTORY_FILE)
        last = history["steps"][-1]
        found = asdict(case) | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": self.steps,
            "seconds": history["seconds"],
            "tokens_per_second": history["tokens_per_second"],
            "trained": {key: last[key] for key in ("loss", "accuracy", "recall")},
            "environment": environment(),
            "results": results,
        }
        content: dict[str, Any] = {
            "train_length": TRAIN_LENGTH,
            "distractors": DISTRACTORS,
            "model": MODEL,
            "levels": [asdict(level) for level in TWO_HOPS],
            "level_starts": list(self.starts),
            "cases": [],
        }
        kept = read_json(self.output)
        if kept is not None and {**kept, "cases": []} == content:
            content["cases"] = [c for c in kept["cases"] if _case(c) != case]
        content["cases"] = sorted([*content["cases"], found], key=lambda c: self._place(_case(c)))
        write_json(self.output, content)

    def _place(self, case: Case) -> int:
        return self.cases.index(case) if case in self.cases else len(self.cases)


def _case(found: dict[str, Any]) -> Case:
    return Case(found["groups"], found["landmarks"], found["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--case", type=int, nargs="*", choices=range(len(CASES)), help="default: all")
    arguments = parser.parse_args()
    cases = [CASES[n] for n in arguments.case or range(len(CASES))]
    try:
        Benchmark(arguments.folder, OUTPUT, cases, arguments.minutes).run()
    except Stopped:
        raise SystemExit("Stopped when the time was up; the same command goes on.") from None
    print(f"Numbers: {OUTPUT}")


if __name__ == "__main__":
    main()
