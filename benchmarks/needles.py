"""What decides whether the laptop demo's DRT finds its needles: one change at a time, and other seeds.

    python benchmarks/needles.py                       every case that benchmarks/needles.json lacks
    python benchmarks/needles.py "recipe's form" -s 1  one case

A case trains the demo's model (about five minutes on two cores) and asks it what the demo asks; "HiLS" and "HSA" train
those of configs/needle-hils.yaml and needle-hsa.yaml instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import CONFIGS, showing

from trailmark import demo
from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.evaluation.needles.ask import measure as ask
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.run import Run

OUTPUT = Path(__file__).with_suffix(".json")
TASKS = [*((length, 1) for length in demo.LENGTHS), *demo.MANY_NEEDLES]


def levels(**changes: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.curriculum.levels = tuple(replace(level, **changes) for level in run.curriculum.levels)

    return change


# name: (changes of the configuration's sections, change of the curriculum)
CASES: dict[str, tuple[dict[str, dict[str, Any]], Callable[[Run], None]]] = {
    "demo": ({}, lambda run: None),
    "recipe's form": (
        {
            "model": {"residual_gca": True, "softmax_off_by_one": False},
            "data": {"filler_weight": 0.0},
        },
        lambda run: None,
    ),
    "no decoys": ({}, levels(decoys=0.0)),
    # ALiBi in the window and scores that are not normalised (arXiv 2410.01651); all else is the demo's
    "as published": (
        {"model": {"window_position": "alibi", "retrieval_normalization": False, "retrieval_scale": 1.0}},
        lambda run: None,
    ),
    "HiLS": ({}, lambda run: None),
    "HSA": ({}, lambda run: None),
}
OTHER_MODELS = {"HiLS": "needle-hils", "HSA": "needle-hsa"}  # case: the file of its whole configuration
SEEDS = {"demo": (1, 2), "as published": (0, 1, 2)}  # the demo's seed 0 is benchmarks/demo.json


def configuration(name: str, seed: int, folder: Path) -> RunConfig:
    """What a case changes: the demo's, or that of another model."""
    if name not in OTHER_MODELS:
        return demo.Demo(folder, seed)._config("drt", demo.STEPS["drt"])
    path = CONFIGS / f"{OTHER_MODELS[name]}.yaml"
    return load_run_config(path, [f"output={folder / 'model'}", f"training.seed={seed}"])


def measure(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, then ask; a second start goes on."""
    changes, curriculum = CASES[name]
    config = configuration(name, seed, folder)
    config = replace(
        config,
        model=config.model | changes.get("model", {}),
        data=replace(config.data, **changes.get("data", {})),
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    progress = Progress()

    own = name in OTHER_MODELS  # trained as ``trailmark train`` does, which opens the same text itself
    train_text = None if own else tokenize(standard_library_texts("train"), tokenizer)
    run = Run(config, showing(progress, f"{name}, seed {seed}"), train_text)
    curriculum(run)
    model = type(run.model).from_pretrained(config.output) if run.finished else run.train()
    progress.clear()
    assert model is not None  # nobody asked it to stop
    text = tokenize(standard_library_texts("haystack"), tokenizer)
    asked, subject = [], Subject.of(model.eval(), tokenizer, demo.CHUNK_SIZE)
    for length, needles in TASKS:
        settings = demo.needle_settings(length, needles, demo.QUESTIONS, seed, phases="end")
        (found,) = ask(subject, settings, text)
        found.pop("asked", None)
        asked.append(found)
        print(
            f"{name}, seed {seed}: {length:,} tokens, {needles} needles: {found['accuracy']:.3f}", flush=True
        )
    return {
        "case": name,
        "seed": seed,
        "steps": config.training.steps,
        "changes": changes,
        "levels": [vars(level) for level in run.curriculum.levels],
        "environment": environment(),
        "results": asked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("-s", "--seed", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-needles"))
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    for name in arguments.cases or CASES:
        for seed in [arguments.seed] if arguments.seed is not None else SEEDS.get(name, (0,)):
            if any((r["case"], r["seed"]) == (name, seed) for r in read_json(OUTPUT) or []):
                continue
            folder = arguments.folder / f"{name.replace(' ', '-')}-{seed}"
            record = measure(name, seed, folder)
            write_json(OUTPUT, [*(read_json(OUTPUT) or []), record])
    print(f"Numbers: {OUTPUT}")


if __name__ == "__main__":
    main()
