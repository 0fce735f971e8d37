"""What an evaluation found, in files: every number with what it takes to measure it again.

A record is one JSON file for one suite of one model (or of the models that are compared in it), and beside it
``<suite>.generations.jsonl`` with what the model wrote. Each result stands with its settings and a number of
``environments``: results that were found at other times, with other options or versions, live in one file and are
told apart. A result that is there already is not measured again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from trailmark import __version__
from trailmark.data.files import expect_writable, read_json, sha256_of, write_json, write_text

KIND = "trailmark evaluation"
FORMAT = 1  # of the file; another one is not gone on with


class Record:
    """The results of one suite, kept after each.

    Args:
        folder: where ``<suite>.json`` lies or will lie.
        suite: "needles", "perplexity", "summarization", "cost".
        model: what :func:`identity` says of the model; a list of these where several are compared.
        say: told once if what lies there is of another model and makes room.

    Raises:
        ValueError: a folder that cannot be written in, a file there that is no record of this suite.
    """

    def __init__(
        self,
        folder: Path,
        suite: str,
        model: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.path = folder / f"{suite}.json"
        self.generations_path = folder / f"{suite}.generations.jsonl"
        expect_writable("output", folder)
        asked = json.loads(json.dumps(model))
        self.content: dict[str, Any] = {"kind": KIND, "format": FORMAT, "suite": suite, "model": asked}
        self.content |= {"environments": [], "results": []}
        if self.path.exists():
            kept = read_record(self.path)
            if kept["suite"] != suite:
                raise ValueError(
                    f"output: expected results of the suite {suite!r} in {str(self.path)!r}, got {kept['suite']!r}. "
                    "Choose another folder."
                )
            if kept["model"] == asked:
                self.content = kept
            else:
                say(
                    f"{self.path} holds {len(kept['results'])} results of another model: new ones replace them."
                )
        self._drop_unfinished_generations()

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.content["results"]

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result for these settings, if it was found before."""
        number = settings_id(settings)
        return next((result for result in self.results if result["id"] == number), None)

    def measure(
        self,
        settings: Mapping[str, Any],
        work: Callable[[], Mapping[str, Any]],
        generations: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
    ) -> dict[str, Any]:
        """The result for ``settings``: what was found before, else what ``work()`` gives, which is kept at once.

        Args:
            settings: all that decides the numbers, as JSON.
            work: the metrics, as JSON.
            generations: asked after ``work``: what the model wrote, one mapping for each line of the file.
        """
        if (kept := self.find(settings)) is not None:
            return kept
        began = time.perf_counter()
        found = dict(work())
        seconds = time.perf_counter() - began
        number = settings_id(settings)
        self._append_generations(number, generations())
        here = environment()
        if here not in self.content["environments"]:
            self.content["environments"].append(here)
        place = self.content["environments"].index(here)
        result = {"id": number, "settings": dict(settings), "environment": place, "seconds": seconds} | found
        self.results.append(json.loads(json.dumps(result)))
        self.save()
        return self.results[-1]

    def save(self) -> None:
        write_json(self.path, self.content)

    def generations(self, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the model wrote for one result."""
        return [line for line in self._read_generations() if line["id"] == result["id"]]

    def _append_generations(self, number: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        with open(self.generations_path, "a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps({"id": number} | dict(line), ensure_ascii=False) + "\n")

    def _read_generations(self) -> list[dict[str, Any]]:
        if not self.generations_path.is_file():
            return []
        found = []
        for line in self.generations_path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that a kill cut
                continue
        return found

    def _drop_unfinished_generations(self) -> None:
        """Lines whose result was not kept: of another model, or of work that was stopped."""
        if not self.generations_path.is_file():
            return
        known = {result["id"] for result in self.results}
        lines = self._read_generations()
        whole = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line.get("id") in known]
        write_text(self.generations_path, "".join(whole))


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record's file.

    Raises:
        ValueError: no file, no JSON, no record, or one of another format.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(
            f"{str(path)!r}: expected results that trailmark evaluate wrote, got something else. "
            "Choose another folder, or remove the file."
        )
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r}: expected results in format {FORMAT}, got {content.get('format')!r}. "
            "Evaluate again into another folder."
        )
    return content


def settings_id(settings: Mapping[str, Any]) -> str:
    """The same for equal settings, in any order of their keys."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(model: Any, folder: Path | str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What tells one model from another: its name, class, size, and hashes of its weights and configuration.

    ``changes``: fields of the configuration that were set for the evaluation.
    """
    fields = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # of the copy, not of the model
        fields.pop(name, None)
    config = json.dumps(fields, sort_keys=True, default=str)
    files = sorted(Path(folder).glob("*.safetensors"))
    weights = (
        hashlib.sha256("".join(sha256_of(file) for file in files).encode()).hexdigest() if files else None
    )
    return {
        "name": Path(folder).resolve().name,
        "folder": str(folder),
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "set": dict(changes or {}),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "weights_sha256": weights,
    }


def environment() -> dict[str, Any]:
    """What the numbers were measured on."""
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
    if torch.cuda.is_available():
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
