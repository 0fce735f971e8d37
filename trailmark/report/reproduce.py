"""The last sections of the report: with which settings and commands to measure again, and on what it was measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.report.collect import Collected, Demo, Result, Training
from trailmark.report.markup import MISSING, Html, code, details, element, paragraph, table
from trailmark.report.sections import Section

# settings of a cell that trailmark evaluate takes as lists, under other names
_LISTS = {
    "needles": {"length": "lengths", "depth": "depths"},
    "perplexity": {"length": "lengths"},
    "summarization": {},
    "cost": {"prompt": "lengths", "tier": "tiers", "length": "training-lengths"},
}
_KNOWN_OPTIONS = frozenset(
    {
        *("lengths", "depths", "questions", "kind", "format", "values", "needles", "hops", "distractors"),
        *(
            "landmarks",
            "phases",
            "protocol",
            "memory-tier",
            "seed",
            "windows",
            "stride",
            "max-tokens",
            "limit",
        ),
        *("max-new-tokens", "tiers", "generate", "training-lengths"),
    }
)


def reproduce(found: Collected) -> Section:
    content: list[Html] = [
        paragraph(
            "What decides the numbers, for each file of results. A command that is run again with the same output "
            "measures only what is missing; name another ", element("code", "--output"), " to measure all again."
        )
    ]  # fmt: skip
    by_file: dict[Path, list[Result]] = {}
    demos = {demo.source for demo in found.demos}
    for result in found.results:
        if result.source not in demos:
            by_file.setdefault(result.source, []).append(result)
    for source, results in by_file.items():
        content.append(_part(str(source), *_record(source, results)))
    content += [_part(str(demo.source), *_demo(demo)) for demo in found.demos]
    content += [_part(str(run.source), *_training(run)) for run in found.trainings]
    return Section("reproduce", "Settings, and how to measure again", content, "Settings")


def _part(name: str, *content: Html) -> Html:
    return element("article", element("h3", element("code", name)), *content)


def _record(source: Path, results: Sequence[Result]) -> list[Html]:
    kept = [command for r in results if (command := _kept_command(r.values.get("command")))]
    commands = list(dict.fromkeys(kept))
    content = [code("\n".join(commands))] if commands else []
    if len(kept) < len(results):
        made = dict.fromkeys(_commands([r for r in results if not _kept_command(r.values.get("command"))]))
        content += [
            code("\n".join(made)),
            paragraph(
                "Put together from the settings below; a text or pairs of your own are named there by their "
                "fingerprint alone.",
                class_="fine",
            ),
        ]
    common, rows = _settings(results)
    content.append(
        details(
            f"Settings of {len(results)} cell{'s' * (len(results) != 1)}", *_settings_tables(common, rows)
        )
    )
    return content


def _kept_command(command: Any) -> str:
    if isinstance(command, list):
        return shlex.join(map(str, command))
    return command if isinstance(command, str) else ""


def _commands(results: Sequence[Result]) -> list[str]:
    """A command for each kind of cell, its lengths and depths together."""
    lists: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for result in results:
        options = _LISTS[result.suite]
        words = []
        for key, value in result.settings.items():
            option = key.replace("_", "-")
            if key == "carry" and value is True:
                words.append("--carry")
            elif key not in options and option in _KNOWN_OPTIONS and isinstance(value, str | int | float):
                words += [f"--{option}", _text(value)]
        if len(result.models) == 1:
            for name, value in result.model.changes.items():
                words += ["--set", f"{name}={_text(value)}"]
        models = [model.folder or model.name for model in result.models]
        several = lists.setdefault((*models, "--suite", result.suite, *words), {})
        for key, option in options.items():
            value = result.settings.get(key)
            if value is not None and (text := _text(value)) not in several.setdefault(option, []):
                several[option].append(text)
    return [
        shlex.join(
            ["trailmark", "evaluate", *words]
            + [word for option, values in several.items() for word in (f"--{option}", ",".join(values))]
        )
        for words, several in lists.items()
    ]


def _settings(results: Sequence[Result]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all cells share, and for each cell the rest."""
    settings = [dict(result.settings) for result in results]
    names = list(dict.fromkeys(name for cell in settings for name in cell))
    first = settings[0] if settings else {}
    missing = object()
    common = {
        name: first[name]
        for name in names
        if name in first and all(cell.get(name, missing) == first[name] for cell in settings)
    }
    return common, [{name: cell.get(name) for name in names if name not in common} for cell in settings]


def _settings_tables(common: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Html]:
    content = []
    if common:
        content.append(
            table("The same in all", ["setting", "value"], [[k, _text(v)] for k, v in common.items()], (1,))
        )
    names = list(rows[0]) if rows else []
    if names:
        cells = [[str(n), *(_text(row[name]) for name in names)] for n, row in enumerate(rows, 1)]
        content.append(table("By cell", ["cell", *names], cells, range(1, len(names) + 1)))
    return content or [paragraph("None recorded.")]


def _demo(demo: Demo) -> list[Html]:
    settings = demo.content.get("settings")
    words = ["trailmark", "demo", "--output", str(demo.source.parent)]
    for name, value in (settings if isinstance(settings, dict) else {}).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", _text(value)]
    facts = {
        name: value
        for name, value in demo.content.items()
        if name not in ("results", "environment", "training", "kind")
    }
    return [code(shlex.join(words)), details("Settings of the demo", *_settings_tables(_flat(facts), []))]


def _training(run: Training) -> list[Html]:
    folder = run.source.parent
    if not run.run:
        return [paragraph("No run.yaml lies beside it: its settings are not known.")]
    command = shlex.join(["trailmark", "train", str(folder / "run.yaml"), "output=runs/again"])
    return [code(command), details("Settings of the training", *_settings_tables(_flat(run.run), []))]


def _flat(nested: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def environments(found: Collected) -> Section:
    """What the results were measured on: one column for each."""
    seen: dict[str, tuple[Mapping[str, Any], dict[str, None]]] = {}
    for result in found.results:
        if result.environment is not None:
            key = json.dumps(result.environment, sort_keys=True, default=str)
            _, users = seen.setdefault(key, (result.environment, {}))
            users.update(dict.fromkeys(f"{model.label}: {result.suite}" for model in result.models))
    if not seen:
        return Section(
            "environment", "Environment", [paragraph("Nothing says what these results were measured on.")]
        )
    names = list(dict.fromkeys(name for here, _ in seen.values() for name in here))
    header = (
        ["", *(f"environment {n}" for n in range(1, len(seen) + 1))] if len(seen) > 1 else ["what", "value"]
    )
    header[0] = "what"
    rows = [[name, *(_text(here.get(name)) for here, _ in seen.values())] for name in names]
    rows.append(["measured there", *(", ".join(users) for _, users in seen.values())])
    return Section(
        "environment",
        "Environment",
        [table("Versions, hardware and date", header, rows, range(1, len(seen) + 1))],
    )
