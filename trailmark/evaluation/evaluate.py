"""The suites: which a model is asked, with what settings, and where what comes out lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trailmark.data.files import expect_place
from trailmark.evaluation import cost, needles, perplexity, summarization
from trailmark.evaluation.cost_models import load_or_build
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject, expect_model

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

    Raises:
        ValueError: an unknown suite; a model, settings or a text that cannot be; no place to write.
    """
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"suite: expected {', '.join(map(repr, SUITES))}, got {suite!r}.")
    names = _names(models)
    given = {name: value for name, value in options.items() if value is not None}
    if "summarization" in suites:
        given.setdefault("pairs", ())  # the one setting without a default: its own error says what is missing
    for path in models:
        expect_model(path)  # of several, before the first one is asked
    alone = [suite for suite in suites if suite != "cost"]
    if suites:
        _settings(suites, given)
    for path in models if alone or not suites else ():
        subject = load_or_build(path, changes)
        asked = alone or _DEFAULTS.get(subject.task or "", ("perplexity",))
        if subject.tokenizer is None:
            raise ValueError(
                f"models: expected a trained model for {', '.join(asked)}, {str(subject.folder)!r} has random "
                "weights. Train it first, or ask for --suite cost alone."
            )
        settings = _settings(suites or asked, given)
        folder = _folder(subject, output, names[path])
        documents = None
        for suite in asked:
            record = Record(folder, suite, subject.identity(), say, command)
            if suite == "summarization":
                results = summarization.run(subject, settings[suite], record, progress)
            else:
                documents = documents or _open(text, subject, say)
                module = needles if suite == "needles" else perplexity
                source = documents.corpus if suite == "needles" else documents
                results = module.run(subject, settings[suite], source, record, progress)
            yield Found(suite, [subject], results, record)
    if "cost" in suites:
        subjects = [load_or_build(path, changes) for path in models]
        identities = [subject.identity() for subject in subjects]
        record = Record(_folder(subjects[0], output), "cost", identities, say, command)
        results = cost.run(subjects, _settings(suites, given)["cost"], record, progress)
        yield Found("cost", subjects, results, record)


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


def _folder(subject: Subject, output: Path | None, name: str = "") -> Path:
    """Where results go, made if need be; of a hub model or a YAML file, which have no folder, to runs/evaluation."""
    if output is None:
        own = subject.folder.is_dir()
        folder = subject.folder / "evaluation" if own else Path("runs") / "evaluation" / subject.folder.stem
    else:
        folder = output / name
    expect_place("output", folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open(text: Sequence[Path] | None, subject: Subject, say: Callable[[str], None]) -> Documents:
    if seen := subject.trained_on(text):
        say(f"Mind: the model was trained on {seen}; what it says of that tells little of other text.")
    return Documents.open(text, subject.tokenizer, getattr(subject.model.config, "vocab_size", None))
