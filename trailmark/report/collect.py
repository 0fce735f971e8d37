"""What a report shows: the results that lie below some folders, and why others cannot be shown.

Shown are the records of ``trailmark evaluate``, the histories of finished trainings and the demo's numbers. Each is
read as it is: fields that an older or newer version did not write are missing, not guessed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from os.path import realpath
from pathlib import Path
from typing import Any

from trailmark.evaluation.suite import suites
from trailmark.settings import Settings, from_file, setting
from trailmark.trained import RECORD_FORMAT, RECORD_KIND, trained_length
from trailmark.untrusted import MOST_BYTES, open_regular, parse_json, read_bytes, read_yaml
from trailmark.values import all_visible, grouped, visible

_HEAD = 4096  # bytes in which a record says that it is one
MOST_GENERATIONS = 1000  # lines that are read of one file
_PERHAPS_UNSEEN = re.compile(r"\\[ubf]|[\x7f-\x9f\ufffe\uffff]")  # JSON that holds none is taken as it is
_SKIPPED_FOLDERS = {"checkpoints", "node_modules", "__pycache__"}


@dataclass
class Model:
    """A model that something is known of; two results are of one model only if its weights and settings agree."""

    name: str
    folder: str = ""
    weights: str | None = None  # SHA-256
    config: str | None = None  # SHA-256
    changes: Mapping[str, Any] = field(default_factory=dict)
    architecture: str | None = None
    parameters: int | None = None
    dtype: str | None = None
    train_length: int | None = None  # tokens of the longest training text
    label: str = ""  # its name in this report, no other model's
    look: int = 0  # chooses colour and marker

    @property
    def key(self) -> tuple[str, ...]:
        known = self.weights or self.folder
        return self.name, known, self.config or "", self.dtype or "", json.dumps(self.changes, sort_keys=True)


@dataclass(frozen=True)
class Result:
    """One cell that a suite measured."""

    suite: str
    models: Sequence[Model]  # one; for a suite that compares them, all that are compared
    values: Mapping[str, Any]
    source: Path
    environment: Mapping[str, Any] | None

    @property
    def model(self) -> Model:
        return self.models[0]

    @property
    def settings(self) -> Mapping[str, Any]:
        return _mapping(self.values.get("settings"))

    @property
    def train_length(self) -> Any:
        """Tokens of the longest training text, as the result, its settings or the model's training says."""
        known = self.values.get("train_length")
        return self.settings.get("train_length", self.model.train_length) if known is None else known

    def named(self, name: Any) -> Model:
        """The one of several models that a row is about: by the names that the settings give them, else their own."""
        names = self.settings.get("models")
        if isinstance(names, list) and len(names) == len(self.models) and name in names:
            return self.models[names.index(name)]
        named = next((model for model in self.models if model.name == name), None)
        return named or Model(str(name), label=str(name), look=len(self.models))


@dataclass(frozen=True)
class Training:
    """A finished training."""

    model: Model
    history: Mapping[str, Any]
    run: Mapping[str, Any]  # run.yaml
    source: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was logged of each step."""
        return [step for step in self.history["steps"] if isinstance(step, dict)]

    def part(self, name: str) -> dict[str, Any]:
        """A part of run.yaml, as "data"; empty where it is not known."""
        return _mapping(self.run.get(name))


@dataclass(frozen=True)
class Demo:
    """The numbers of a demo."""

    content: Mapping[str, Any]
    source: Path


@dataclass(frozen=True)
class NotShown:
    """A file that cannot be shown."""

    path: Path
    reason: str


@dataclass
class Collected:
    """All that a report shows."""

    models: list[Model] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    demos: list[Demo] = field(default_factory=list)
    not_shown: list[NotShown] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def of(self, suite: str) -> list[Result]:
        return [result for result in self.results if result.suite == suite]


def collect(paths: Sequence[Path], progress: Callable[[str], None] = lambda message: None) -> Collected:
    """The results in ``paths``, files or folders of any depth; a file that is named twice is read once.

    Raises:
        ValueError: a path that is not there, or no results in any of them.
    """
    reader = _Reader()
    for path in paths:
        if not path.exists():
            raise ValueError(f"runs: {str(path)!r} is not there. Name folders or files with results.")
        for number, file in enumerate(_files(path)):
            if number % 100 == 0:
                progress(f"looking for results in {path}")
            reader.read(file, asked=path.is_file())
    collected = reader.collected
    if not collected.results and not collected.trainings:
        why = "".join(f"\n  {entry.path}: {entry.reason}" for entry in collected.not_shown)
        raise ValueError(
            f"runs: expected results in {', '.join(map(str, paths)) or 'at least one path'}, found none that can be "
            f"shown.{why} Make some with: trailmark evaluate MODEL --suite needles"
        )
    _name(collected.models)
    return collected


def generations(results: Sequence[Result]) -> Iterator[tuple[Result, list[dict[str, Any]]]]:
    """What the model wrote for each result, from the files beside their records, of which the first lines are read."""
    files: dict[Path, dict[Any, list[dict[str, Any]]]] = {}
    for result in results:
        path = result.source.with_name(f"{result.source.stem}.generations.jsonl")
        if path not in files:
            files[path] = grouped(_lines(path), lambda line: str(line.get("id")))
        yield result, files[path].get(result.values.get("id"), [])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(path, "runs") as file:
            for line in islice(iter(partial(file.readline, MOST_BYTES), b""), MOST_GENERATIONS):
                try:
                    content = _parsed(line.decode("utf-8", "replace"))
                except ValueError:  # a line that a kill cut, or nobody's
                    continue
                if isinstance(content, dict):
                    yield content
    except (OSError, ValueError):  # no generations were kept
        return


def _files(path: Path) -> Iterator[Path]:
    """The files in which results may lie, in an order that does not depend on the machine."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(names):
            if name.endswith(".json") or (name == "run.yaml" and "history.json" not in names):
                yield Path(folder) / name


class _Reader:
    def __init__(self) -> None:
        self.collected = Collected()
        self._suites = tuple(suites())
        self._seen: set[str] = set()
        self._models: dict[tuple[str, ...], Model] = {}
        self._by_folder: dict[Path, Model] = {}

    def read(self, path: Path, asked: bool) -> None:
        """One file, if it holds results; ``asked``: it was named itself, so it ought to."""
        if (whole := realpath(path)) in self._seen:
            return
        self._seen.add(whole)
        if path.name == "run.yaml":
            unfinished = "a training that is not finished: the trailmark train command that began it goes on"
            self._skip(path, unfinished)
            return
        ours = {"demo.json", "history.json", *(f"{suite}.json" for suite in self._suites)}
        expected = asked or path.name in ours
        try:
            if not expected and RECORD_KIND not in _head(path):
                return  # another program's JSON
            content = _parsed(_text(read_bytes(path, "runs", links=True)))
        except (OSError, ValueError) as error:
            self._skip(path, f"not readable as JSON: {error}")
            return
        known = _mapping(content)
        is_history = path.name == "history.json" or (asked and "level_starts" in known)
        if known.get("kind") == RECORD_KIND:
            self._record(path, known)
        elif "train_length" in known and isinstance(known.get("results"), list):
            self._demo(path, known)
        elif isinstance(content, dict) and is_history:
            self._training(path, known)
        elif expected:
            self._skip(path, "holds no results that a report knows")

    def _skip(self, path: Path, reason: str) -> None:
        self.collected.not_shown.append(NotShown(path, reason))

    # --- the kinds of files --------------------------------------------------------------------------------

    def _record(self, path: Path, content: dict[str, Any]) -> None:
        suite, results = content.get("suite"), content.get("results")
        identities = content.get("model")
        identities = identities if isinstance(identities, list) else [identities]
        identities = [identity for identity in identities if isinstance(identity, dict)]
        wrong = next(filter(None, (_wrong(_Identity, identity) for identity in identities)), None)
        if content.get("format") != RECORD_FORMAT:
            self._skip(path, f"format {content.get('format')!r}, where this version reads {RECORD_FORMAT}")
        elif suite not in self._suites:
            self._skip(path, f"unknown suite {suite!r}, where this version shows {', '.join(self._suites)}")
        elif not isinstance(results, list):
            self._skip(path, "a record without a list of results")
        elif not identities:
            self._skip(path, "a record that does not say of which model")
        elif wrong is not None:
            self._skip(path, f"it was changed after it was written: {wrong}")
        elif not results:
            self._skip(path, "a record without results: the evaluation was stopped before its first")
        else:
            models = [self._identified(identity, path) for identity in identities]
            environments = content.get("environments")
            for number, values in enumerate(results):
                if not isinstance(values, dict):
                    self._skip(path, f"result {number} is no JSON object")
                elif (wrong := _wrong(_Values, values)) is not None:
                    self._skip(path, f"result {number} was changed after it was written: {wrong}")
                else:
                    here = _environment(environments, values.get("environment"))
                    self.collected.results.append(Result(suite, models, values, path, here))
            self.collected.files.append(path)

    def _demo(self, path: Path, content: dict[str, Any]) -> None:
        names, training = _mapping(content.get("names")), _mapping(content.get("training"))
        here = content.get("environment")
        for number, values in enumerate(content["results"]):
            if not isinstance(values, dict) or "model" not in values:
                self._skip(path, f"result {number} does not say of which model")
                continue
            name = str(values["model"])
            model = self._at(path.parent / name, str(names.get(name, name)))
            model.parameters = model.parameters or _mapping(training.get(name)).get("parameters")
            settings: dict[str, Any] = {"kind": "single", "format": "marks", "values": "numbers"}
            settings |= {"seed": _mapping(content.get("settings")).get("seed")}
            settings |= {"phases": content.get("phases"), "train_length": content["train_length"]}
            result = {"settings": settings} | values
            environment = here if isinstance(here, dict) else None
            self.collected.results.append(Result("needles", [model], result, path, environment))
        self.collected.demos.append(Demo(content, path))
        self.collected.files.append(path)

    def _training(self, path: Path, history: dict[str, Any]) -> None:
        if not isinstance(history.get("steps"), list):
            self._skip(path, "a training's history without a list of steps")
            return
        run: dict[str, Any] = {}
        try:
            run = _mapping(all_visible(read_yaml(path.parent / "run.yaml", "runs", links=True)))
        except FileNotFoundError:
            pass  # the curves need no settings
        except (OSError, ValueError) as error:
            self._skip(path.parent / "run.yaml", f"not readable as YAML: {error}")
        model = self._at(path.parent, path.parent.resolve().name)
        settings = run.get("model")
        model.architecture = model.architecture or _mapping(settings).get("architecture")
        model.train_length = trained_length(settings, run, history)
        self.collected.trainings.append(Training(model, history, run, path))
        self.collected.files.append(path)

    # --- models --------------------------------------------------------------------------------------------

    def _identified(self, identity: dict[str, Any], path: Path) -> Model:
        model = Model(
            name=str(identity.get("name")),
            folder=str(identity.get("folder") or ""),
            weights=identity.get("weights_sha256"),
            config=identity.get("config_sha256"),
            changes=_mapping(identity.get("set")),
            architecture=identity.get("architecture"),
            parameters=identity.get("parameters"),
            dtype=identity.get("dtype"),
        )
        place = _folder_of(model, path)
        if model.key not in self._models and not model.changes:
            known = self._by_folder.get(place)
            if known is not None and known.weights is None and known.config is None:
                # known so far from its training or the demo alone
                known.weights, known.config, known.dtype = model.weights, model.config, model.dtype
                known.architecture = model.architecture or known.architecture
                known.parameters = model.parameters or known.parameters
                self._models[model.key] = known
        kept = self._models.setdefault(model.key, model)
        if not model.changes:
            self._by_folder[place] = kept
        self._add(kept)
        return kept

    def _at(self, folder: Path, name: str) -> Model:
        """The model in a folder of which no weights are known."""
        model = self._by_folder.setdefault(folder.resolve(), Model(visible(name), str(folder)))
        self._add(model)
        return model

    def _add(self, model: Model) -> None:
        if not any(model is known for known in self.collected.models):
            self.collected.models.append(model)


@dataclass(frozen=True)
class _Identity(Settings):
    """What a record says of a model, as far as a report looks at it."""

    name: str
    folder: str | None = None
    architecture: str | None = None
    parameters: int | None = setting(None, least=0)
    dtype: str | None = None
    set: dict[str, Any] | None = None
    config_sha256: str | None = None
    weights_sha256: str | None = None


@dataclass(frozen=True)
class _Values(Settings):
    """What a result has, whatever its suite, as far as a report looks at it."""

    id: str | None = None
    seconds: float | None = None
    command: str | None = None
    settings: dict[str, Any] | None = None


def _wrong(kind: type, values: dict[str, Any]) -> str | None:
    """What in a part of a record trailmark did not write so; None: nothing is known to be."""
    try:
        from_file(kind, values)
    except ValueError as error:
        return str(error)
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parsed(text: str) -> Any:
    """JSON whose texts can stand in a page and in a figure, keys too."""
    content = parse_json(text, "it", finite=False)
    return all_visible(content) if _PERHAPS_UNSEEN.search(text) else content


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 (byte {error.start}).") from error


def _head(path: Path) -> str:
    with open_regular(path, "runs", links=True) as file:
        return file.read(_HEAD).decode("utf-8", "replace")


def _environment(environments: Any, number: Any) -> Mapping[str, Any] | None:
    known = isinstance(environments, list) and isinstance(number, int) and 0 <= number < len(environments)
    return environments[number] if known and isinstance(environments[number], dict) else None


def _folder_of(model: Model, path: Path) -> Path:
    """Where a record's model lies: its folder as the record names it is relative to a place that is not known."""
    above = path.resolve().parent
    if above.name == "evaluation" and above.parent.name == model.name:
        return above.parent
    return Path(realpath(model.folder))


def _name(models: Sequence[Model]) -> None:
    """Give each model a label of its own, and a look."""
    for name, same in grouped(models, lambda model: model.name).items():
        for model in same:
            model.label = name.removesuffix(".yaml")
        if len(same) > 1:
            _tell_apart(same)
    taken: set[str] = set()
    for look, model in enumerate(models):
        label, number = model.label, 2
        while model.label in taken:
            model.label, number = f"{label} #{number}", number + 1
        taken.add(model.label)
        model.look = look


def _tell_apart(same: list[Model]) -> None:
    """By what was set for the evaluation, by their folders, else by their weights."""
    folders = [Path(realpath(model.folder)).parts for model in same]
    depth = 2
    while depth < max(map(len, folders)) and len({parts[-depth:] for parts in folders}) < len(set(folders)):
        depth += 1
    weights = {model.weights for model in same}
    for model, parts in zip(same, folders, strict=True):
        marks = []
        if len(set(folders)) > 1:
            model.label = "/".join((*parts[-depth:-1], model.name))
        elif len(weights) > 1:
            marks.append(f"weights {(model.weights or 'unknown')[:8]}")
        elif len({other.config for other in same}) > 1 and not any(other.changes for other in same):
            marks.append(f"configuration {(model.config or 'unknown')[:8]}")
        beside = {other.dtype for other, theirs in zip(same, folders, strict=True) if theirs == parts}
        if len(beside) > 1 and model.dtype is not None:
            marks.append(model.dtype)
        marks += [f"{key}={value}" for key, value in model.changes.items()]
        if marks:
            model.label += f" ({', '.join(marks)})"
