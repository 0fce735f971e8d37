"""The sections of the report that are of no one suite: the models, how to measure again, and on what was measured."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark.evaluation.suite import Column, Suite, Tile
from trailmark.evaluation.tables import Table, table_of
from trailmark.report.collect import Collected, Demo, Model, Result, Training
from trailmark.report.sections import Part, Section
from trailmark.values import grouped, in_common, setting

_MODELS = (
    Column("model", "label"),
    Column("architecture", "architecture", text=True),
    Column("parameters", "parameters", ",d"),
    Column("results", "measured", text=True),
    Column("precision", "dtype", text=True),
    Column("set", "set", text=True),
    Column("weights", "weights", text=True),
)


def overview(collected: Collected, tiles: Sequence[Tile]) -> Section:
    """The models, and the numbers that sum them up."""
    counts = Counter((id(model), result.suite) for result in collected.results for model in result.models)
    trained = {id(run.model) for run in collected.trainings}

    def row(model: Model) -> dict[str, Any]:
        measured = [f"{suite} {n}" for (own, suite), n in counts.items() if own == id(model)]
        measured += ["training"] * (id(model) in trained)
        return vars(model) | {
            "measured": ", ".join(measured) or None,
            "set": ", ".join(f"{key}={value}" for key, value in model.changes.items()) or None,
            "weights": (model.weights or "")[:8] or None,
        }

    models = table_of("Models", _MODELS, [row(model) for model in collected.models], "page")
    return Section("overview", "Overview", [Part(tables=[models])], tiles=tiles)


# --- how to measure again --------------------------------------------------------------------------------------


def reproduce(collected: Collected, known: Mapping[str, Suite]) -> Section:
    """Settings and commands, for each file of results."""
    demos = {demo.source for demo in collected.demos}
    of_records = [result for result in collected.results if result.source not in demos]
    parts = [
        _record(source, known[results[0].suite], results)
        for source, results in grouped(of_records, lambda result: result.source).items()
    ]
    parts += [_demo(demo) for demo in collected.demos]
    parts += [_training(run) for run in collected.trainings]
    return Section(
        "reproduce",
        "Settings, and how to measure again",
        parts,
        "What decides the numbers, for each file of results. A command that is run again with the same output measures "
        "only what is missing; name another --output to measure all again.",
        short="Settings",
        of_files=True,
    )


def _record(source: Path, suite: Suite, results: Sequence[Result]) -> Part:
    part = Part(str(source))
    kept = {id(result): _kept_command(result.values.get("command")) for result in results}
    part.code += dict.fromkeys(filter(None, kept.values()))
    if without := [result for result in results if not kept[id(result)]]:
        models = [model.folder or model.name for model in results[0].models]
        changes = results[0].model.changes if len(models) == 1 else {}
        part.code += suite.commands(models, [result.settings for result in without], changes)
        part.notes.append(
            "Put together from the settings below; a text or pairs of your own are named there by their fingerprint "
            "alone."
        )
    cells = f"Settings of {len(results)} cell{'s' * (len(results) != 1)}"
    part.folded[cells] = _settings([result.settings for result in results])
    return part


def _kept_command(command: Any) -> str:
    if isinstance(command, list):
        return shlex.join(map(str, command))
    return command if isinstance(command, str) else ""


def _settings(cells: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What all cells share, and for each cell the rest."""
    common, others = in_common(cells)
    tables = []
    if common:
        rows = [[name, setting(value)] for name, value in common.items()]
        tables.append(Table("The same in all", ["setting", "value"], rows, (1,)))
    if others:
        rows = [[str(n), *(setting(cell.get(name)) for name in others)] for n, cell in enumerate(cells, 1)]
        tables.append(Table("By cell", ["cell", *others], rows, range(1, len(others) + 1)))
    return tables


def _demo(demo: Demo) -> Part:
    words = ["trailmark", "demo", "--output", str(demo.source.parent)]
    settings = demo.content.get("settings")
    for name, value in (settings if isinstance(settings, dict) else {}).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", setting(value)]
    left_out = ("results", "environment", "training", "kind")
    facts = {name: value for name, value in demo.content.items() if name not in left_out}
    folded = {"Settings of the demo": _settings([_flat(facts)])}
    return Part(str(demo.source), code=[shlex.join(words)], folded=folded)


def _training(run: Training) -> Part:
    part = Part(str(run.source))
    if not run.run:
        part.notes.append("No run.yaml lies beside it: its settings are not known.")
        return part
    part.code.append(
        shlex.join(["trailmark", "train", str(run.source.parent / "run.yaml"), "output=runs/again"])
    )
    part.folded["Settings of the training"] = _settings([_flat(run.run)])
    return part


def _flat(nested: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


# --- on what it was measured -----------------------------------------------------------------------------------


def environments(collected: Collected) -> Section:
    """What the results were measured on: one column for each."""
    measured = [result for result in collected.results if result.environment is not None]
    groups = grouped(measured, lambda result: json.dumps(result.environment, sort_keys=True, default=str))
    if not groups:
        said = Part(notes=["Nothing says what these results were measured on."])
        return Section("environment", "Environment", [said])
    seen = [group[0].environment or {} for group in groups.values()]
    names = list(dict.fromkeys(name for here in seen for name in here))
    rows = [[name, *(setting(here.get(name)) for here in seen)] for name in names]
    users = [
        dict.fromkeys(f"{model.label}: {result.suite}" for result in group for model in result.models)
        for group in groups.values()
    ]
    rows.append(["measured there", *map(", ".join, users)])
    columns = ["value"] if len(seen) == 1 else [f"environment {n}" for n in range(1, len(seen) + 1)]
    table = Table("Versions, hardware and date", ["what", *columns], rows, range(1, len(seen) + 1))
    return Section("environment", "Environment", [Part(tables=[table])])
