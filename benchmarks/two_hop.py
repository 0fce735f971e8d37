"""Two hops, 16 distractors and 8 retrieved chunks: groups and landmarks that following a chain takes.

    python benchmarks/two_hop.py                    every case; what was trained and asked already stays
    python benchmarks/two_hop.py --minutes 30       stop after so long; the same command goes on

``$AAAA=BBBB;`` and ``$BBBB=ddddd;`` are hidden among 16 needles that belong to no chain, as many of each kind. With
one landmark ``~AAAA`` stands before it and ``=ddddd;`` behind it. With two, a chunk of the cue ``=`` alone stands
between: its landmark asks with what the first one found, if a later group of layers asks. DRT of one group and of two,
each trained for each form: the same layers, texts (but for the second landmarks' chunks), steps and questions.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import parameters, showing

from trailmark import demo
from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.data.needles.curriculum_texts import Level
from trailmark.evaluation.needles import ask as needles
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.record import Record, environment
from trailmark.evaluation.subject import load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.training.config import DataConfig, RunConfig, TrainingConfig
from trailmark.training.run import HISTORY_FILE, Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = Path("runs/benchmark-two-hop")
FACTORS = (1, 16, 256)
QUESTIONS = 200
DISTRACTORS = 16


@dataclass(frozen=True)
class Stage:
    """A part of a training, which begins with the weights of the part before."""

    name: str
    chained: bool  # whether questions go along chains; else texts do not depend on the landmarks of those
    levels: tuple[Level, ...]
    starts: tuple[int, ...]  # of the levels: the same for all cases, whatever they learn
    steps: int
    tokens_per_step: int
    constant_fraction: float


def simple(chunks: int, letters: int) -> Level:
    return Level(chunks, 1.0, 1.0, 0.0, hops=0.65, letters=letters, spell=0.4)


# Keys are told apart. Second keys are read out. Chains: at first second keys are one letter, among few needles, then
# among more than are retrieved; without these the second landmark learns to find every needle that ends a chain, and
# no more. Then text.
STAGES = (
    Stage(
        "keys",
        False,
        (
            Level(8, 1.0, 1.0, 0.0, early=0.3),
            Level(16, 1.0, 1.0, 0.0, early=0.3),
            Level(32, 1.0, 1.0, 0.25, early=0.3),
        ),
        (0, 200, 400),
        700,
        4096,
        1.0,
    ),
    Stage(
        "letters",
        False,
        (Level(24, 1.0, 1.0, 0.0, hops=0.0, spell=0.6), Level(48, 1.0, 1.0, 0.1, hops=0.0, spell=0.6)),
        (0, 200),
        400,
        2048,
        1.0,
    ),
    Stage(
        "chains",
        True,
        (simple(16, 1), simple(32, 1), simple(48, 1), simple(48, 2), simple(48, 4)),
        (0, 200, 450, 700, 900),
        1200,
        2048,
        0.5,
    ),
    Stage(
        "text",
        True,
        (
            Level(64, 0.5, 0.9, 0.25, 0.2, 0.5, 0.5, hops=0.7),
            Level(64, 0.05, 0.75, 0.25, 0.5, 0.5, 0.5, hops=0.7),
        ),
        (0, 400),
        1000,
        2048,
        0.3,
    ),
)
TRAIN_LENGTH = STAGES[-1].levels[-1].chunks * demo.CHUNK_SIZE
LENGTHS = tuple(TRAIN_LENGTH * factor for factor in FACTORS)
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

    def folder(self, stage: Stage = STAGES[-1]) -> str:
        landmarks = f"-landmarks-{self.landmarks}" if stage.chained else ""
        return f"groups-{self.groups}{landmarks}-seed-{self.seed}/{stage.name}"


CASES = (Case(2, 2), Case(1, 2), Case(2, 1), Case(1, 1), Case(2, 2, seed=1))


def run_config(case: Case, stage: Stage, before: Stage | None, folder: Path) -> RunConfig:
    return RunConfig(
        output=str(folder / case.folder(stage)),
        model=MODEL | {"num_retrieval_groups": case.groups},
        init_from=None if before is None else str(folder / case.folder(before)),
        data=DataConfig(
            task="needles",
            chunk_size=demo.CHUNK_SIZE,
            filler_weight=0.1,
            first_digit_weight=3.0,
            num_landmarks=case.landmarks if stage.chained else 1,
        ),
        training=TrainingConfig(
            steps=stage.steps,
            tokens_per_step=stage.tokens_per_step,
            constant_fraction=stage.constant_fraction,
            seed=case.seed,
            save_steps=100,
        ),
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
        stages: Sequence[Stage] = STAGES,
        lengths: Sequence[int] = LENGTHS,
        questions: int = QUESTIONS,
    ) -> None:
        self.folder, self.output, self.cases = folder, output, cases
        self.until = time.monotonic() + 60 * minutes
        self.stages, self.lengths, self.questions = stages, lengths, questions
        self.progress = Progress()

    def run(self) -> None:
        """Raises Stopped when the minutes are over."""
        for case in self.cases:
            self._train(case)
            self._ask(case)

    # --- training ------------------------------------------------------------------------------------------

    def make_run(self, case: Case, stage: Stage, before: Stage | None) -> Run:
        config = run_config(case, stage, before, self.folder)
        tokenizer = load_tokenizer(config.data.tokenizer)

        line = showing(self.progress, f"{case.name}, seed {case.seed}, {stage.name}")

        def show(run: Run) -> None:
            line(run)
            if time.monotonic() > self.until:
                run.stop_signal = signal.SIGTERM  # it saves and leaves

        run = Run(config, show, tokenize(standard_library_texts("train"), tokenizer))
        run.curriculum.levels = stage.levels
        run.curriculum.begin_at(stage.starts, config.training.tokens_per_step, config.data.chunk_size)
        return run

    def _train(self, case: Case) -> None:
        for before, stage in pairwise((None, *self.stages)):
            assert stage is not None
            run = self.make_run(case, stage, before)
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
        folder = self.folder / case.folder()
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
        histories = [read_json(self.folder / case.folder(stage) / HISTORY_FILE) for stage in self.stages]
        last = histories[-1]["steps"][-1]
        found = asdict(case) | {
            "parameters": parameters(model),
            "steps": sum(stage.steps for stage in self.stages),
            "tokens": sum(history["tokens"] for history in histories),
            "seconds": sum(history["seconds"] for history in histories),
            "trained": {key: last[key] for key in ("loss", "accuracy", "recall")},
            "environment": environment(),
            # what single questions selected stays in the folder's record
            "results": [{key: value for key, value in r.items() if key != "asked"} for r in results],
        }
        content: dict[str, Any] = {
            "train_length": TRAIN_LENGTH,
            "distractors": DISTRACTORS,
            "model": MODEL,
            "stages": json.loads(json.dumps([asdict(stage) for stage in self.stages])),
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
    start_again_set_up()  # as the commands do
    cases = [CASES[n] for n in arguments.case or range(len(CASES))]
    try:
        Benchmark(arguments.folder, OUTPUT, cases, arguments.minutes).run()
    except Stopped:
        raise SystemExit("Stopped when the time was up; the same command goes on.") from None
    print(f"Numbers: {OUTPUT}")


if __name__ == "__main__":
    main()
