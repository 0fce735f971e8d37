"""The suites: which a model is asked, with what settings, and where what comes out lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from trailmark.evaluation import cost, needles, perplexity, summarization
from trailmark.evaluation.cost_models import load_or_build
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.reading import parse_dtype
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject, expect_model, is_checkpoint, is_sizes, task_of
from trailmark.models.card_files import refresh_card

SUITES: dict[str, Any] = {
    "needles": needles.NeedleSettings,
    "perplexity": perplexity.PerplexitySettings,
    "summarization": summarization.SummarizationSettings,
    "cost": cost.CostSettings,
}
_DEFAULTS = {"needles": ("needles", "perplexity"), "niah": ("needles",), "summarization": ("perplexity",)}


@dataclass(frozen=True)
class Found:
    """What one suite found."""

    suite: str
    subjects: list[Subject]  # one, but for cost
    results: list[dict[str, Any]]
    record: Record


def evaluate(
    models: Sequence[Path],
    suites: Sequence[str],
    options: Mapping[str, Any],
    text: Sequence[Path] | None = None,
    changes: Sequence[str] = (),
    output: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    command: str | None = None,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[Found]:
    """Every suite of every model; each is given when it is done, and kept before.

    Args:
        models: folders or hub names; for "cost" YAML files too.
        suites: none: what each model was trained for.
        options: settings by their names in the suites' settings; None: their defaults. Those that a suite has not are
            of others.
        text: files, folders or a prepared corpus; None: sources of Python's library.
        changes: fields of the models' configurations, for this evaluation.
        output: a folder: ``output/<model>/<suite>.json``, of cost ``output/cost.json``. None: ``evaluation/`` in the
            model's own folder.
        device: where models compute; None: cuda if there is one. dtype: of their weights; None: as they were saved.

    Raises:
        ValueError: an unknown suite; a model, settings or a text that cannot be; no place to write.
    """
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"suite: expected {', '.join(map(repr, SUITES))}, got {suite!r}.")
    suites = list(dict.fromkeys(suites))
    given = {name: value for name, value in options.items() if value is not None}
    if "summarization" in suites:
        given.setdefault("pairs", ())  # the one setting without a default: its own error says what is missing
    plan: dict[Path, list[str]] = {}
    for path in models:  # of several, before the first one is asked
        expect_model(path)
        alone = [suite for suite in suites if suite != "cost"]
        plan[path] = alone if suites else list(_DEFAULTS.get(task_of(path) or "", ("perplexity",)))
        if is_sizes(path) and plan[path]:
            raise ValueError(
                f"models: expected a trained model for {', '.join(plan[path])}, {str(path)!r} has random weights. "
                "Train it first, or ask for --suite cost alone."
            )
    settings = _settings(
        suites or list(dict.fromkeys(suite for asked in plan.values() for suite in asked)), given
    )
    names = _names(list(plan))
    for path, asked in plan.items():
        if not asked:
            continue
        subject = _placed(load_or_build(path, changes), device, dtype)
        folder = _folder(subject, output, names[path])
        documents = None
        for suite in asked:
            record = Record(folder, suite, subject.identity(), say, command, subject.model.device.type)
            if suite == "summarization":
                results = summarization.run(subject, settings[suite], record, progress)
            else:
                documents = documents or _open(text, subject, say)
                if suite == "needles":
                    _say_repeated(settings[suite].lengths or subject.default_lengths(), documents.tokens, say)
                module = needles if suite == "needles" else perplexity
                source = documents.corpus if suite == "needles" else documents
                results = module.run(subject, settings[suite], source, record, progress)
            yield Found(suite, [subject], results, record)
        _refresh(subject, output)
    if "cost" in suites:
        subjects = [_placed(load_or_build(path, changes), device, dtype) for path in models]
        identities = [subject.identity() for subject in subjects]
        where = subjects[0].model.device.type
        record = Record(_folder(subjects[0], output), "cost", identities, say, command, where)
        results = cost.run(subjects, settings["cost"], record, progress)
        yield Found("cost", subjects, results, record)
        _refresh(subjects[0], output)


def parse_numbers(name: str, text: str | None, kind: type[int] | type[float] = int) -> tuple[Any, ...] | None:
    """``1024,16384`` as numbers.

    Raises:
        ValueError: something else.
    """
    if text is None:
        return None
    try:
        return tuple(kind(part.replace("_", "")) for part in text.split(","))
    except ValueError as error:
        example = "1024,16384" if kind is int else "0,0.5,1"
        raise ValueError(f"{name}: expected numbers as {example}, got {text!r}.") from error


def _names(models: Sequence[Path]) -> dict[Path, str]:
    """A folder's name for each model's results: the model's, with the path where two are called the same."""
    last = [path.resolve().name if path.exists() else path.name for path in models]
    return {
        path: name if last.count(name) == 1 else str(path).strip("./").replace("/", "--")
        for path, name in zip(models, last, strict=True)
    }


def _settings(suites: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of each suite.

    Raises:
        ValueError: an option that none of them has (what it was to change would silently stay), a value that cannot be.
    """
    known = {suite: {field.name for field in fields(SUITES[suite])} for suite in suites}
    if unused := [name for name in given if not any(name in names for names in known.values())]:
        raise ValueError(
            f"{unused[0]}: expected an option of {', '.join(suites)}, got one of another suite. Leave it out, or add "
            f"--suite {next(suite for suite, kind in SUITES.items() if unused[0] in kind.__dataclass_fields__)}."
        )
    return {
        suite: SUITES[suite](**{name: value for name, value in given.items() if name in names})
        for suite, names in known.items()
    }


def _placed(subject: Subject, device: str | None, dtype: str | None) -> Subject:
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        subject.model.to(device=torch.device(where), dtype=parse_dtype(dtype, "dtype") or subject.model.dtype)
    except (RuntimeError, AssertionError) as error:  # torch's own say what is wrong with a device
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device: expected one that torch has here, got {where!r} ({reason}).") from error
    return subject


def _folder(subject: Subject, output: Path | None, name: str = "") -> Path:
    """Where results go: what has no folder, or a checkpoint's, has them in runs/evaluation."""
    path = subject.folder
    if output is not None:
        return output / name
    if not path.is_dir():
        return Path("runs") / "evaluation" / path.stem
    if is_checkpoint(path):
        return Path("runs") / "evaluation" / f"{path.resolve().parent.parent.name}-{path.resolve().name}"
    return path / "evaluation"


def _refresh(subject: Subject, output: Path | None) -> None:
    """The model's card, where the results lie beside the model."""
    if output is None and subject.folder.is_dir():
        refresh_card(subject.folder)


def _say_repeated(lengths: Sequence[int], tokens: int, say: Callable[[str], None]) -> None:
    if max(lengths) > tokens:
        say(f"Mind: the text has {tokens:,} tokens; haystacks that are longer repeat it.")


def _open(text: Sequence[Path] | None, subject: Subject, say: Callable[[str], None]) -> Documents:
    if seen := subject.trained_on(text):
        say(f"Mind: the model was trained on {seen}; what it says of that tells little of other text.")
    return Documents.open(text, subject.tokenizer, getattr(subject.model.config, "vocab_size", None))
