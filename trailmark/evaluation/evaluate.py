"""Ask models with suites: which model is asked what, with which settings, and where what comes out lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trailmark.data.texts import expect_outside_text
from trailmark.evaluation.cost.models import load_or_build
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.reading import parse_dtype
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import (
    Subject,
    expect_model,
    is_checkpoint,
    is_sizes,
    names_of,
    own_device,
    task_of,
)
from trailmark.evaluation.suite import Request, Suite, Task, suite_named, suites
from trailmark.models.card.files import refresh_card
from trailmark.processes import is_main, sharing, world_size
from trailmark.settings import Settings, kinds_of


@dataclass(frozen=True)
class Found:
    """What one suite found."""

    suite: Suite
    subjects: list[Subject]  # one, unless the suite compares models
    names: list[str]  # of these, as they are told apart
    results: list[dict[str, Any]]
    record: Record


def evaluate(
    request: Request,
    options: Mapping[str, Any],
    command: str | None = None,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[Found]:
    """Measure every suite of every model; what one suite found is given when it is done, and kept before.

    Results lie in ``output/<model>/<suite>.json``, of suites that compare models in ``output/<suite>.json``. Several
    processes share the work inside :func:`trailmark.processes.together`.

    Args:
        options: settings by their names in the suites' settings; None: their defaults. A suite takes those that it has.
        command: what a shell is told to find the results again; it stands with each.
        say: is told what stays on the screen. progress: is told a line about what is under way, often.

    Raises:
        ValueError: an unknown suite; a model, settings or a text that cannot be; no place to write.
    """
    models = request.models
    groups = _groups(models, [suite_named(name) for name in dict.fromkeys(request.suite)])
    _expect_divided([suite for _, chosen in groups for suite in chosen])
    settings = _settings([suite for _, chosen in groups for suite in chosen], options)
    names = dict(zip(models, names_of(models), strict=True))
    for path in models:
        expect_outside_text(_folder(path, request.output, ""), request.text)
    device = own_device(request.device)
    for paths, chosen in groups:
        subjects = [_placed(load_or_build(path, request.changes), device, request) for path in paths]
        alone = not chosen[0].compares
        name = names[paths[0]].replace("/", "--") if alone else ""
        folder = _folder(paths[0], request.output, name)
        identities = [subject.identity() for subject in subjects]

        @cache
        def documents(subject: Subject = subjects[0]) -> Documents:
            return _open(request.text, subject, say)

        for suite in chosen:
            identity = identities[0] if alone else identities
            record = Record(folder, suite.name, identity, say, command, subjects[0].model.device.type)
            task = Task(subjects, settings[suite.name], record, documents, say, progress)
            yield Found(suite, subjects, [names[path] for path in paths], suite.run(task), record)
        if folder == paths[0] / "evaluation" and is_main():  # the results lie beside the model
            refresh_card(paths[0])


def _groups(models: Sequence[Path], chosen: Sequence[Suite]) -> list[tuple[list[Path], list[Suite]]]:
    """Models that are loaded together, and the suites that ask them: each model alone, then all that are compared.

    Raises:
        ValueError: a path that can be no model; a suite that needs trained weights and a model that has none.
    """
    groups: list[tuple[list[Path], list[Suite]]] = []
    for path in dict.fromkeys(models):
        expect_model(path)
        task = task_of(path)
        alone = [suite for suite in chosen or suites().values() if not suite.compares]
        if not chosen:
            alone = [suite for suite in alone if suite.asked_of(task)]
        if trained := [suite.name for suite in alone if is_sizes(path) and not suite.random_weights]:
            raise ValueError(
                f"models: expected a trained model for {', '.join(trained)}, {str(path)!r} has random weights. "
                "Train it first, or ask for --suite cost alone."
            )
        if alone:
            groups.append(([path], alone))
    return groups + [(list(models), [suite]) for suite in chosen if suite.compares]


def _expect_divided(chosen: Sequence[Suite]) -> None:
    """Raise a ValueError where several processes would all measure the same."""
    if world_size() == 1:
        return
    if alone := [suite.name for suite in chosen if not suite.divided]:
        shared = ", ".join(suite.name for suite in suites().values() if suite.divided)
        raise ValueError(
            f"suite: expected one of {shared} with {world_size()} processes, got {alone[0]}, which one measures. "
            "Start trailmark evaluate without torchrun for it."
        )
    if not sharing():
        raise ValueError(
            f"processes: expected one, or several that share the work, got {world_size()} that do not. Call evaluate "
            "inside trailmark.processes.together()."
        )


def _settings(chosen: Sequence[Suite], options: Mapping[str, Any]) -> dict[str, Settings]:
    """The settings of each suite.

    Raises:
        ValueError: an option that none of them has (what it was to change would silently stay), a value that cannot be.
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = {suite.name: kinds_of(suite.settings) for suite in chosen}
    if unused := [name for name in given if not any(name in names for names in known.values())]:
        others = [
            suite.name for suite in suites().values() if unused[0] in suite.settings.__dataclass_fields__
        ]
        raise ValueError(
            f"{unused[0]}: expected an option of {', '.join(known)}, got one of another suite. Leave it out, or add "
            f"--suite {others[0]}."
        )
    return {
        suite.name: suite.settings(**{name: given[name] for name in given if name in known[suite.name]})
        for suite in chosen
    }


def _placed(subject: Subject, device: torch.device, request: Request) -> Subject:
    subject.model.to(device=device, dtype=parse_dtype(request.dtype) or subject.model.dtype)
    return subject


def _folder(path: Path, output: Path | None, name: str) -> Path:
    """Where results go: those of a checkpoint into its run, of what is no folder of the user's to runs/evaluation.

    Args:
        name: of the model among those that are asked; "" where it is compared with others.
    """
    if output is not None:
        return output / name
    if not path.is_dir():
        return Path("runs") / "evaluation" / (name or names_of([path])[0])
    if is_checkpoint(path):
        return path.resolve().parent.parent / "evaluation" / path.resolve().name
    return path / "evaluation"


def _open(text: Sequence[Path], subject: Subject, say: Callable[[str], None]) -> Documents:
    if seen := subject.trained_on(text):
        say(f"Mind: the model was trained on {seen}; what it says of that tells little of other text.")
    return Documents.open(text, subject.tokenizer, getattr(subject.model.config, "vocab_size", None))
