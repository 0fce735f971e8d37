"""What an evaluation found, in files: every number with what it takes to measure it again.

A record is one JSON file for one suite of one model (or of the models that are compared in it), and beside it
``<suite>.generations.jsonl`` with what the model wrote. Each result stands with its settings and a number of
``environments``: results that were found at other times, with other options or versions, live in one file and are
told apart. A result that is there already is not measured again. Results of another model (other weights, or other
fields of its configuration) that lie there stay, in files of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from trailmark import __version__
from trailmark.evaluation.suite import suites
from trailmark.evaluation.tables import card_table
from trailmark.files import expect_writable, lock, write_json, write_text
from trailmark.models.card.files import config_sha256
from trailmark.models.causal_lm import fingerprint
from trailmark.processes import by_main, share_out
from trailmark.settings import Settings, from_file, setting
from trailmark.trained import RECORD_FORMAT, RECORD_KIND, weights_sha256
from trailmark.untrusted import brief, parse_json, read_bytes, read_json

_SHORT = 1.0  # seconds that others write as a rule
_MOST_GENERATIONS = 4 << 30  # bytes of what a model wrote
_OF_THE_COPY = ("name", "folder")  # what changes when a model is moved: it stays the same one
_OWN_FIELDS = ("id", "settings", "environment", "seconds", "command")  # of a result: no suite's


class Part(NamedTuple):
    """One result of several: what :meth:`Record.measure` is told."""

    settings: Mapping[str, Any]
    work: Callable[[], Mapping[str, Any]]
    generations: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()


class Record:
    """The results of one suite, kept after each. Several commands may add to one.

    Of processes that measure together (``torchrun``) the main one alone reads and writes, and each knows what it found.

    Args:
        folder: where ``<suite>.json`` lies or will lie.
        suite: name of a suite, such as "needles".
        model: what :func:`identity` says of the model; a list of these where several are compared.
        say: told where results of another model lie from now on.
        command: what a shell is told to find the results again; it stands with each.
        device: where the model computes, "cpu" or "cuda"; it stands with the environment.

    Raises:
        ValueError: a folder that cannot be written in, a file there that is no record of this suite.
    """

    def __init__(
        self,
        folder: Path,
        suite: str,
        model: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        say: Callable[[str], None] = lambda message: None,
        command: str | None = None,
        device: str | None = None,
    ) -> None:
        self.command, self.device = command, device
        self.suite, self.path = suite, folder / f"{suite}.json"
        self.generations_path = _generations_of(self.path)
        self._model, self._say = _json(model), say
        self.content = by_main(self._open)

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.content["results"]

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result for these settings, if it was found before."""
        return by_main(lambda: self._known(settings))

    def measure(
        self,
        settings: Mapping[str, Any],
        work: Callable[[], Mapping[str, Any]],
        generations: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
    ) -> dict[str, Any]:
        """The result for ``settings``: what was found before, else what ``work()`` gives, which is kept at once.

        Args:
            settings: all that decides the numbers, as JSON.
            work: the metrics, as JSON; a number that is not finite is kept as null. ``seconds`` among them replaces the
                time that ``work`` took: results that are found together have a share each.
            generations: asked after ``work``: what the model wrote, one mapping for each line of the file.

        Raises:
            ValueError: the result could not be written.
        """
        if (kept := self.find(settings)) is not None:
            return kept
        made = self._made(Part(settings, work, generations))
        return by_main(lambda: self._kept(*made))

    def measure_all(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The results of parts that need nothing of each other, each kept as :meth:`measure` does.

        Processes that share a command's work (:func:`trailmark.processes.together`) take every n-th of those that are
        missing.

        Raises:
            ValueError: a result could not be written; what another process raised.
        """
        by_id = {settings_id(part.settings): part for part in parts}
        known = {result["id"] for result in by_main(lambda: self.results)}
        missing = [part for number, part in by_id.items() if number not in known]
        share_out(missing, lambda mine: (self._made(part) for part in mine), lambda made: self._kept(*made))
        found = {result["id"]: result for result in by_main(lambda: self.results)}
        return [found[settings_id(part.settings)] for part in parts]

    def generations(self, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the model wrote for one result."""
        return [line for line in _lines(self.generations_path) if line.get("id") == result["id"]]

    # --- inside ------------------------------------------------------------------------------------------------

    def _made(self, part: Part) -> tuple[Any, ...]:
        """What :meth:`_keep` takes."""
        began = time.perf_counter()
        found = _json(part.work())
        seconds = found.pop("seconds", time.perf_counter() - began)
        assert not set(_OWN_FIELDS) & set(found), sorted(found)
        lines = _json(part.generations())
        assert not any("id" in line for line in lines)
        return _json(part.settings), found, seconds, lines, environment(self.device)

    def _open(self) -> dict[str, Any]:
        expect_writable("output", self.path.parent)
        with self._alone():
            self.content = self._read()
            self._drop_unfinished_generations()
        return self.content

    def _known(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        number = settings_id(settings)
        return next((result for result in self.results if result["id"] == number), None)

    def _kept(self, *found: Any) -> dict[str, Any]:
        try:
            with self._alone():
                return self._keep(*found)
        except OSError as error:
            raise ValueError(
                f"output: cannot save in {str(self.path.parent)!r} ({error.strerror or error}). Free some space and "
                "start the same command again; what was saved before is whole."
            ) from error

    def _keep(
        self,
        settings: dict[str, Any],
        found: dict[str, Any],
        seconds: float,
        lines: list[dict[str, Any]],
        here: dict[str, Any],
    ) -> dict[str, Any]:
        self.content = self._read()  # another process may have added to it
        if (kept := self._known(settings)) is not None:
            return kept
        number, environments = settings_id(settings), list(self.content["environments"])
        if here not in environments:
            environments.append(here)
        result = {
            "id": number,
            "settings": settings,
            "environment": environments.index(here),
            "seconds": seconds,
        }
        result |= {"command": self.command} | found
        content = self.content | {"environments": environments, "results": [*self.results, result]}
        if (suite := suites().get(self.suite)) is not None:
            content |= {"card": card_table(suite, content["results"])}
        written = self.generations_path.stat().st_size if self.generations_path.exists() else 0
        try:
            if lines:
                # half of a character, which UTF-8 cannot hold, becomes JSON's own escape
                with open(self.generations_path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("".join(_line({"id": number} | line) for line in lines))
            write_json(self.path, content)
        except BaseException:
            if self.generations_path.exists():
                os.truncate(self.generations_path, written)
            raise
        self.content = content  # only what is on the disk is known
        return result

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process changes the files meanwhile: it takes milliseconds, and one waits for the other."""
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            since = time.monotonic()
            while not lock(handle):
                if time.monotonic() - since > _SHORT:
                    self._say(f"Another process writes in {self.path.parent}: this one waits for it.")
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    break
                time.sleep(_SHORT / 100)
            yield
        finally:
            os.close(handle)

    def _read(self) -> dict[str, Any]:
        """What is known of this model. Another one's files make room."""
        kept = self._of_this_suite(self.path) if self.path.exists() else None
        if kept is not None and _told_by(kept["model"]) != _told_by(self._model):
            aside = _free(self._aside(kept["model"]))
            # lines first: those of a result that is not known any more would be dropped after a kill
            if self.generations_path.exists():
                os.replace(self.generations_path, _generations_of(aside))
            os.replace(self.path, aside)
            self._say(
                f"The {len(kept['results'])} results of another model in {self.path} are in {aside} now."
            )
        own = self._aside(self._model)
        lines = _generations_of(own)
        if self.path.exists() and not own.exists() and not self.generations_path.exists() and lines.exists():
            os.replace(lines, self.generations_path)  # a kill came as they made room
        if not self.path.exists() and own.exists():
            self._of_this_suite(own)
            if lines.exists():
                os.replace(lines, self.generations_path)
            os.replace(own, self.path)
        if self.path.exists():
            return self._of_this_suite(self.path) | {"model": self._model}  # wherever it lies now
        about = {"kind": RECORD_KIND, "format": RECORD_FORMAT, "suite": self.suite, "model": self._model}
        return about | {"environments": [], "results": []}

    def _of_this_suite(self, path: Path) -> dict[str, Any]:
        content = read_record(path)
        if content["suite"] != self.suite:
            raise ValueError(
                f"output: expected results of the suite {self.suite!r} in {str(path)!r}, got {content['suite']!r}. "
                "Choose another folder."
            )
        return content

    def _aside(self, model: Any) -> Path:
        """Where results of that model lie while those of another have the suite's own name."""
        return self.path.with_name(f"{self.suite}-{settings_id({'model': _told_by(model)})[:8]}.json")

    def _drop_unfinished_generations(self) -> None:
        """Lines whose result was not kept: a kill came between."""
        if not self.generations_path.is_file():
            return
        known = {result["id"] for result in self.results}
        whole = "".join(_line(line) for line in _lines(self.generations_path) if line.get("id") in known)
        if self.generations_path.read_bytes() != (content := whole.encode(errors="backslashreplace")):
            write_text(self.generations_path, content.decode())


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record's file.

    Raises:
        ValueError: no file, no JSON, no record, or one of another format.
    """
    try:
        content = read_json(path, "output")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r}: cannot be read ({error}). Choose another folder, or remove the file."
        ) from error
    if not isinstance(content, dict) or content.get("kind") != RECORD_KIND:
        raise ValueError(
            f"{str(path)!r}: expected results that trailmark evaluate wrote, got something else. "
            "Choose another folder, or remove the file."
        )
    if content.get("format") != RECORD_FORMAT:
        raise ValueError(
            f"{str(path)!r}: expected results in format {RECORD_FORMAT}, got {brief(content.get('format'))}. "
            "Evaluate again into another folder."
        )
    try:
        known = from_file(_Content, content)
        for result in known.results:
            from_file(_Result, result)
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r}: it was changed after trailmark evaluate wrote it ({error}) Choose another folder, "
            "or remove the file."
        ) from error
    return content


@dataclass(frozen=True)
class _Content(Settings):
    """What a record must hold to be added to."""

    suite: str
    model: dict[str, Any] | list[dict[str, Any]]
    environments: list[dict[str, Any]]
    results: list[dict[str, Any]]


@dataclass(frozen=True)
class _Result(Settings):
    """What each result of a record has, beside what its suite found."""

    id: str
    settings: dict[str, Any]
    environment: int = setting(least=0)
    seconds: float | None = setting(least=0)
    command: str | None = None


def _generations_of(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix('.json')}.generations.jsonl")


def _free(path: Path) -> Path:
    """The name, or with a number where somebody's copy has it."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a file of generations holds; a line that a kill cut is none."""
    if not path.is_file():
        return []
    found = []
    # a text may hold what Python takes for other ends of a line
    for line in read_bytes(path, "output", _MOST_GENERATIONS).split(b"\n"):
        with contextlib.suppress(ValueError):
            content = parse_json(line, "a line", finite=False)
            if isinstance(content, dict):
                found.append(content)
    return found


def _json(content: Any) -> Any:
    """As JSON has it: null where a number is not finite."""
    if content is None or isinstance(content, str | bool | int):
        return content
    if isinstance(content, float):
        return float(content) if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(name): _json(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_json(value) for value in content]
    raise TypeError(f"no JSON: {type(content).__name__}")  # of a suite's own making


def _told_by(model: Any) -> Any:
    if isinstance(model, list):
        return [_told_by(one) for one in model]
    return {name: value for name, value in model.items() if name not in _OF_THE_COPY}


def settings_id(settings: Mapping[str, Any]) -> str:
    """The same for equal settings, in any order of their keys."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(model: Any, folder: Path | str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What tells one model from another: its name, class, size, and hashes of its weights and configuration.

    ``changes``: fields of the configuration that were set for the evaluation.
    """
    place = Path(folder)
    weights = weights_sha256(place)
    if weights is None and not place.is_file():  # of the hub, or in another format; a YAML file has none
        weights = fingerprint(model)
    return {
        "name": place.resolve().name,
        "folder": str(folder),
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "set": dict(changes or {}),
        "config_sha256": config_sha256(model.config.to_dict()),
        "weights_sha256": weights,
    }


def environment(device: str | None = None) -> dict[str, Any]:
    """What the numbers were measured on; ``device``: where the model computed, if that is known."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "trailmark": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device is not None:
        found["device"] = device
    if torch.cuda.is_available() and device in (None, "cuda"):  # one that stood idle explains no number
        found["gpu"] = torch.cuda.get_device_name()
    return found


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
