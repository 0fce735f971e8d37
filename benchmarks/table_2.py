"""Table 2 of arXiv 2410.01651 at laptop size: models learn to find a passkey, and are asked under the paper's protocol.

    python benchmarks/table_2.py                          what benchmarks/table_2.json lacks
    python benchmarks/table_2.py --rows "DRT x2" --tasks single
    python benchmarks/table_2.py tables                   what was found so far

Byte models of the demo's size (the rows of compare.py's needles). Each is trained on text, then on needles in short
texts, then in those of the training length: App. D's task (data.task niah), on which nothing is learned in a tenth of
a laptop's steps, so that there are as many as it takes. The same texts and steps for all. Stopped, the same command
goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, parameters, showing, to_its_end
from compare_rows import NEEDLE_LENGTH, ROWS, folder_name, needle_config
from tables import RIGHT, Column, Columns, Row, cell, on_machine, record, table

from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.evaluation.needles.ask import measure as ask
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.statistics import wilson_interval
from trailmark.training.run import HISTORY_FILE, Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-table-2"
NAMES = (
    "DRT x2", "DRT x1", "Base", "Base, more layers", "Landmark", "RPT, MiniLM", "RPT, hash encoder", "Block-Recurrent",
)  # fmt: skip
FACTORS, QUESTIONS = (1, 4, 16, 64), 100


@dataclass(frozen=True)
class Stage:
    """A part of a training, which begins with the weights of the part before."""

    name: str
    length: int  # tokens of a text
    steps: int
    needles: bool = True


STAGES = (
    Stage("text", NEEDLE_LENGTH, 500, False),
    Stage("short", 256, 1500),
    Stage("long", NEEDLE_LENGTH, 300),
)
ANSWER_WEIGHT = 100  # an answer's tokens are one in 25 of a short text's, one in 100 of a long one's


@dataclass(frozen=True)
class Task:
    """What is hidden, and the rows that learn to find it."""

    hops: int
    landmarks: int = 1  # between question and answer; the paper's tasks have one
    rows: tuple[str, ...] = NAMES


TASKS = {
    "single": Task(1),
    "2-hop": Task(2),
    # a second group of layers sees what the first one found only a landmark later
    "2-hop, two landmarks": Task(2, 2, ("DRT x2", "DRT x1")),
}
# arXiv 2410.01651, Table 2, 2-hop NIAH at 16K and 64K, in percent; single NIAH stands in compare_rows.py
TWO_HOPS = {
    "Base": (0.71, 0.0),
    "Base, more layers": (1.06, 0.0),
    "Landmark": (86.41, 0.0),
    "DRT x1": (39.93, 38.57),
    "DRT x2": (86.21, 81.43),
}


def trained(name: str, task: str, seed: int, folder: Path, progress: Progress) -> dict[str, Path]:
    """The folder of each stage's model, by the stage."""
    made: dict[str, Path] = {}
    for stage in STAGES:
        own = folder_name(task) if stage.needles else "both"
        output = folder / f"{folder_name(name)}-{seed}-{own}-{stage.name}"
        changes = [
            f"output={output}", f"training.steps={stage.steps}", f"training.context_length={stage.length}",
            "training.save_steps=100", "training.keep_checkpoints=1", "training.precision=auto",
            "training.constant_fraction=0.8",
        ]  # fmt: skip
        if name == "Landmark":  # for the landmarks that come early, too
            changes.append("model.max_position_embeddings=1152")
        if stage.needles:
            changes += ["data.task=niah", "data.early_landmarks=0.1", f"data.hops={TASKS[task].hops}"]
            changes.append(f"data.num_landmarks={TASKS[task].landmarks}")
            changes += [f"data.answer_weight={ANSWER_WEIGHT}", f"init_from={[*made.values()][-1]}"]
        else:
            changes += ["data.task=text", "data.early_landmarks=0"]
        config = needle_config(name, seed, changes)
        to_its_end(Run(config, showing(progress, f"{name}, {task}, {stage.name}")))
        made[stage.name] = output
    return made


def learned(steps: list[Row]) -> int | None:
    """The step of a history at which half of the answers' tokens are right, as a moving average; None: at none."""
    return next((each["step"] for each in steps if each["accuracy"] >= 0.5), None)


def measure(name: str, task: str, seed: int, folder: Path, factors: Sequence[int] = FACTORS) -> Row:
    progress = Progress()
    made = trained(name, task, seed, folder, progress)
    histories = {stage: read_json(output / HISTORY_FILE) for stage, output in made.items()}
    subject = load(made["long"])
    text = tokenize(standard_library_texts("haystack"), load_tokenizer("bytes"))
    kind = "single" if TASKS[task].hops == 1 else "hops"
    results = []
    for factor in factors:
        settings = NeedleSettings(
            (factor * NEEDLE_LENGTH,), kind, landmarks=TASKS[task].landmarks, questions=QUESTIONS,
            protocol="paper-table-2", seed=seed,
        )  # fmt: skip
        (found,) = ask(subject, settings, text)
        found.pop("asked", None)
        results.append({"factor": factor} | found)
        progress.say(f"{name}, {task}, {factor}x: {found['correct']} of {found['questions']}")
    return {
        "row": name,
        "task": task,
        "seed": seed,
        "parameters": parameters(subject.model),
        "seconds": sum(history["seconds"] for history in histories.values()),
        "training_accuracy": histories["long"]["steps"][-1].get("accuracy"),
        "learned": learned(histories["short"]["steps"]),
        "environment": environment(),
        "results": results,
    }


def text() -> str:
    """The table of what was measured: questions of all seeds together, and each seed."""
    found = kept()
    if not found:
        return "Nothing was measured yet."
    found.sort(key=lambda r: ([*TASKS].index(r["task"]), NAMES.index(r["row"]), r["seed"]))
    rows: dict[tuple[str, str], Row] = {}
    for result in found:
        rows.setdefault((result["task"], result["row"]), result | {"of": []})["of"].append(result)

    def each(field: str) -> Column:
        return lambda row: ", ".join(cell(field, result) for result in row["of"])

    def asked(row: Row, factor: int) -> list[Row]:
        return [x for result in row["of"] for x in result["results"] if x["factor"] == factor]

    def right(factor: int) -> Column:
        def shown(row: Row) -> str:
            correct, questions = (
                sum(x[name] for x in asked(row, factor)) for name in ("correct", "questions")
            )
            if not questions:
                return "-"
            low, high = wilson_interval(correct, questions)
            return RIGHT.format(accuracy=correct / questions, accuracy_low=low, accuracy_high=high)

        return shown

    def by_seed(factor: int, field: str = "{accuracy:.2f}") -> Column:
        return lambda row: ", ".join(cell(field, x) for x in asked(row, factor)) or "-"

    def read(factor: int) -> Column:
        """Of each hop, by all seeds."""

        def shown(row: Row) -> str:
            hops = zip(*(x["recall_by_hop"] or () for x in asked(row, factor)), strict=True)
            return ", ".join(f"{sum(shares) / len(shares):.2f}" for shares in hops) or "-"

        return shown

    def paper(place: int) -> Column:
        def shown(row: Row) -> str:
            own = ROWS[row["row"]].paper
            single = own.needles_16k, own.needles_64k
            known = {"single": single, "2-hop": TWO_HOPS.get(row["row"])}.get(row["task"])
            value = known[place] if known else None
            return "-" if value is None else f"{value:.1f} %"

        return shown

    columns: Columns = {"task": "{task}", "row": "{row}", "parameters": "{parameters:,}"}
    columns |= {"learned at": each("{learned:,}")}
    columns |= {"in training": each("{training_accuracy:.2f}")}
    columns |= {f"{factor * NEEDLE_LENGTH:,}": right(factor) for factor in FACTORS}
    columns |= {"by seed, 1x": by_seed(1), "by seed, 64x": by_seed(64)}
    columns |= {"chunk read, 1x": read(1), "chunk read, 64x": read(64)}
    columns |= {
        "whole value, 1x": by_seed(1, "{exact_accuracy:.2f}"),
        "paper, 1x": paper(0),
        "paper, 4x": paper(1),
    }
    return on_machine(table(columns, [*rows.values()]), *(result["environment"] for result in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], "tables"])
    parser.add_argument("--rows", nargs="+", choices=NAMES, help="all by default")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--factors", type=int, nargs="+", choices=FACTORS, default=FACTORS, help="training lengths"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    names, learn = options.rows or NAMES, {name for task in options.tasks for name in TASKS[task].rows}
    if others := set(options.rows or ()) - learn:
        parser.error(
            f"--rows: {', '.join(sorted(others))} is trained for none of {', '.join(options.tasks)}."
        )
    start_again_set_up()
    for seed in options.seeds:
        for task in options.tasks if not options.part else ():
            for name in (each for each in names if each in TASKS[task].rows):
                if not any((r["row"], r["task"], r["seed"]) == (name, task, seed) for r in kept()):
                    row = measure(name, task, seed, options.folder, options.factors)
                    write_json(OUTPUT, {"results": [*kept(), row]})
    print(text())


def kept() -> list[Row]:
    return list(record("table_2").get("results", []))


if __name__ == "__main__":
    main()
