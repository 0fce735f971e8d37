"""The main job as one story: train on a laptop, then read texts 1000 times longer than any trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.data.corpus import Tokens, load_tokenizer, standard_library_texts, tokenize
from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject
from trailmark.files import expect_writable, read_json, write_json, write_text
from trailmark.models import TrailmarkForCausalLM
from trailmark.report.console import Progress, duration, losses, training_line
from trailmark.report.page import build
from trailmark.report.tables import NEEDLE_LEGEND, legend_text, needle_table
from trailmark.settings import Settings, from_file, setting
from trailmark.training.config import DataConfig, RunConfig, TrainingConfig
from trailmark.training.forecast import measure_speed
from trailmark.training.run import Run
from trailmark.training.run_folder import read_history
from trailmark.untrusted import brief
from trailmark.values import number

CHUNK_SIZE = 32
TRAIN_LENGTH = CURRICULUM[-1].chunks * CHUNK_SIZE  # tokens of the longest training text
LENGTHS = tuple(TRAIN_LENGTH * factor for factor in (1, 4, 16, 64, 256, 1024))
MANY_NEEDLES = ((TRAIN_LENGTH, 8), (4 * TRAIN_LENGTH, 16), (64 * TRAIN_LENGTH, 32))
QUESTIONS = 300
PHASES = "any"  # where a question may end in its chunk
CHANCE = 1 / (10 * 9 * 8 * 7 * 6)  # five distinct digits

STEPS = {"drt": 2600, "window": 400}

_SHARED_MODEL: dict[str, Any] = {
    "vocab_size": 259,  # bytes and three special tokens
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "sliding_window": CHUNK_SIZE + 1,
    "window_position": "rope",
    "rope_theta": 100.0,
    "initialization": "fan_in",
    "logit_scale": 0.125,
}
MODELS: dict[str, dict[str, Any]] = {
    "drt": _SHARED_MODEL
    | {
        "architecture": "drt",
        "num_hidden_layers": 2,
        "num_lower_layers": 1,
        "num_encoder_layers": 1,
        "chunk_size": CHUNK_SIZE,
        "num_retrieved_chunks": 8,
        "retrieval_normalization": True,
        "retrieval_scale": 4.0,
    },
    "window": _SHARED_MODEL | {"architecture": "sliding_window", "num_hidden_layers": 3},
}
NAMES = {"drt": "DRT", "window": "window only"}


def needle_settings(
    length: int, needles: int, questions: int, seed: int, phases: str = PHASES
) -> NeedleSettings:
    """Ask for all of so many needles that are hidden at once in a text."""
    kind = "single" if needles == 1 else "multi-key"
    return NeedleSettings((length,), kind, "marks", needles, questions=questions, phases=phases, seed=seed)


@dataclass(frozen=True)
class _Result(Settings):
    model: str = setting(choices=tuple(MODELS))
    length: int = setting(least=1)
    needles: int = setting(least=1)
    correct: int = setting(least=0)
    questions: int = setting(least=1)


@dataclass(frozen=True)
class _Kept(Settings):
    """What ``demo.json`` must hold to be gone on with."""

    settings: dict[str, Any]
    steps: dict[str, int] | None
    training: dict[str, dict[str, Any]]
    results: list[dict[str, Any]]
    measured_seconds_per_step: dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and (set(self.steps) != set(STEPS) or min(self.steps.values()) < 1):
            raise ValueError(
                f"steps: expected a number of each of {', '.join(STEPS)}, got {brief(self.steps)}."
            )
        if self.steps is not None and set(self.measured_seconds_per_step or {}) != set(STEPS):
            raise ValueError(
                f"measured_seconds_per_step: expected a number of each of {', '.join(STEPS)}, got "
                f"{brief(self.measured_seconds_per_step)}."
            )
        for result in self.results:
            from_file(_Result, result)


class Demo:
    """The demo in one folder; a second start goes on where the first stopped."""

    def __init__(
        self,
        output: Path = Path("runs/demo"),
        seed: int = 0,
        minutes: float | None = None,
        questions: int = QUESTIONS,
        say: Callable[[str], None] = print,
    ) -> None:
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"minutes: expected a positive number, got {minutes:g}.")
        if questions < 1:
            raise ValueError(f"questions: expected at least 1, got {questions}.")
        self.output, self.say = output, say
        self.seed, self.minutes, self.questions = seed, minutes, questions
        self.progress = Progress()
        self.record_path = output / "demo.json"

    def run(self) -> None:
        expect_writable("output", self.output)
        self._open_record()
        self._announce()
        tokenizer = load_tokenizer("bytes")
        train_text = tokenize(standard_library_texts("train"), tokenizer)
        haystack = tokenize(standard_library_texts("haystack"), tokenizer)
        self._fix_steps(train_text)
        models = {name: self._train(name, train_text) for name in ("window", "drt")}
        for name in ("drt", "window"):
            self._evaluate(name, Subject.of(models[name].eval(), tokenizer, CHUNK_SIZE), haystack)
        self._report()

    # --- the record: every number, and how far the demo is -----------------------------------------------

    def _open_record(self) -> None:
        settings = {"seed": self.seed, "minutes": self.minutes, "questions": self.questions}
        kept = read_json(self.record_path)
        try:
            known = None if kept is None else from_file(_Kept, kept)
        except ValueError as error:
            raise ValueError(
                f"output: {str(self.record_path)!r} was changed after trailmark demo wrote it ({error}) Choose another "
                "--output, or remove the folder."
            ) from error
        if known is not None and known.settings != settings:
            raise ValueError(
                f"output: {str(self.output)!r} holds a demo with other settings {brief(known.settings)}. "
                "Repeat those, choose another --output, or remove the folder."
            )
        self.record: dict[str, Any] = kept or {
            "settings": settings,
            "environment": environment(),
            "models": MODELS,
            "names": NAMES,
            "train_length": TRAIN_LENGTH,
            "phases": PHASES,
            "steps": None,
            "training": {},
            "results": [],
        }
        self._save()

    def _save(self) -> None:
        write_json(self.record_path, self.record)

    def _announce(self) -> None:
        told = (
            "how long that takes is said below" if self.minutes is None else f"about {self.minutes:g} minutes"
        )
        self.say(
            f"trailmark demo: a Transformer of 200,000 parameters learns to look things up in its own past.\n"
            f"  1. Train it from scratch on texts of at most {TRAIN_LENGTH:,} tokens (bytes of Python's own\n"
            f"     source files, with needles $KEYS=12345; hidden in them), and a model with a window alone:\n"
            f"     {told}.\n"
            f"  2. Read texts of up to {LENGTHS[-1]:,} tokens, 1024 times longer, and ask both for what was\n"
            f"     hidden there, in questions that end anywhere in a chunk of {CHUNK_SIZE} tokens: about 2 minutes.\n"
            f"  Everything goes to {self.output}/. Ctrl-C stops; the same command goes on."
        )

    # --- training ------------------------------------------------------------------------------------------

    def _config(self, name: str, steps: int) -> RunConfig:
        return RunConfig(
            output=str(self.output / name),
            model=MODELS[name],
            data=DataConfig(
                task="needles",
                chunk_size=CHUNK_SIZE,
                filler_weight=0.1,
                first_digit_weight=3.0,
                # the window alone answers too few to leave the first level: it trains on the last, as DRT mostly does
                first_level=0 if name == "drt" else len(CURRICULUM) - 1,
            ),
            training=TrainingConfig(steps=steps, seed=self.seed, save_steps=250),
        )

    def _fix_steps(self, text: Tokens) -> None:
        """The recipe's steps, whatever they take; with ``minutes`` as many as fit into these. Then recorded."""

        def time_of(steps: dict[str, int], seconds: dict[str, float]) -> float:
            return sum(steps[name] * seconds[name] for name in STEPS)

        if (steps := self.record["steps"]) is not None:
            needed = time_of(steps, self.record["measured_seconds_per_step"])
            self.say(f"\nIt goes on: its {sum(steps.values()):,} steps take about {duration(needed)} in all.")
            return
        self.say("\nMeasuring the speed of this machine ...")
        seconds = {name: measure_speed(Run(self._config(name, 1), text=text)) for name in STEPS}
        needed = time_of(STEPS, seconds)
        share = 1.0 if self.minutes is None else min(1.0, self.minutes * 60 / needed)
        steps = {name: max(20, int(STEPS[name] * share)) for name in STEPS}
        self.record |= {"steps": steps, "measured_seconds_per_step": seconds}
        self._save()
        self.say(f"  The recipe's steps take about {duration(needed)} here.")
        if share < 1.0:
            self.say(
                f"  {share:.0%} of them fit into {self.minutes:g} minutes: the results may be worse than the README's. "
                "Leave --minutes out for those."
            )

    def _train(self, name: str, text: Tokens) -> TrailmarkForCausalLM:
        steps = self.record["steps"][name]
        config = self._config(name, steps)
        folder = Path(config.output)
        run = Run(config, self._show_training, text)
        count = sum(p.numel() for p in run.model.parameters())
        if run.finished:
            self.say(f"\n{NAMES[name]}: trained already, in {folder}/")
            model = type(run.model).from_pretrained(folder)
        else:
            self.record["results"] = [r for r in self.record["results"] if r["model"] != name]
            tokens = config.training.tokens_per_step
            self.say(
                f"\nTraining {NAMES[name]} ({count:,} parameters, {steps} steps of {tokens:,} tokens) ..."
            )
            model = run.train()
            self.progress.clear()
        history = read_history(folder)
        speed, last = history.tokens_per_second, history.steps[-1] if history.steps else {}
        averages = {
            key: last[key] for key in ("loss", "accuracy", "recall") if number(last.get(key)) is not None
        }
        shown = losses(last.get("step_loss"), averages)
        self.say(f"  {duration(history.seconds)}, {speed:,.0f} tokens/s; on training texts: {shown}")
        took = {"seconds": history.seconds, "tokens_per_second": speed}
        self.record["training"][name] = {"parameters": count, "steps": steps} | took | averages
        self._save()
        return model

    def _show_training(self, run: Run) -> None:
        total = run.config.training.steps
        last, speed = run.measured.get("step_loss"), run.tokens_per_second
        line = training_line(run.step, total, run.seconds, last, run.averages, speed)
        self.progress.show(f"  {line}")

    # --- evaluation ----------------------------------------------------------------------------------------

    def _evaluate(self, name: str, subject: Subject, haystack: Tokens) -> None:
        self.say(f"\nAsking {NAMES[name]} for needles ...")
        tasks = [(length, 1) for length in LENGTHS] + list(MANY_NEEDLES)
        for length, needles in tasks:
            done = [
                r
                for r in self.record["results"]
                if (r["model"], r["length"], r["needles"]) == (name, length, needles)
            ]
            if not done:
                settings = needle_settings(length, needles, self.questions, self.seed)
                (result,) = measure(subject, settings, haystack, self._show_asking)
                done = [{"model": name, "phases": PHASES} | result]
                self.record["results"] += done
                self._save()
            self.progress.clear()
            shown = done[0]
            self.say(
                f"  {length:>9,} tokens, {needles:>2} needle{'s' if needles > 1 else ' '}: "
                f"{shown['correct']} of {shown['questions']} right"
            )

    def _show_asking(self, message: str) -> None:
        self.progress.show(f"  {message}")

    # --- report --------------------------------------------------------------------------------------------

    def _report(self) -> None:
        results = self.record["results"]
        table = needle_table([r | {"model": NAMES[r["model"]]} for r in results], TRAIN_LENGTH)
        table += f"\n\n{legend_text(NEEDLE_LEGEND)}"
        write_text(self.output / "table.md", table + "\n")
        out = self.output
        self.say(
            f"\n{table}\n\n"
            f"A question ends at any place of a chunk. Chance is {CHANCE:.5f}. The intervals take questions as\n"
            f"independent, though those of one length share haystacks. tokens/s: reading the haystack, once for all\n"
            f"its questions. memory: what the model carries of a text, keys and values of its window and of all past\n"
            f"chunks.\n\n"
            f"Numbers: {self.record_path}   table: {out}/table.md"
        )
        build([out], out / "report.html", self.say, self.progress.show)
        self.say(
            f"Models:  {out}/drt  {out}/window\n\n"
            f"Next, on text of your own (source .venv/bin/activate puts trailmark on the path):\n"
            f"  trailmark evaluate {out}/drt --text my-folder --lengths 1024,65536\n"
            f"  trailmark generate {out}/drt --file notes.txt --prompt '~ABCD'   # notes.txt: ... $ABCD=48213; ...\n"
            f"  trailmark train configs/text.yaml data.paths=my-folder output=runs/mine"
        )
