"""What a reader of a report must know before comparing: versions, machines, weights, cells measured twice."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trailmark.report.collect import Collected, Model, Result


def notes(found: Collected) -> list[str]:
    """What of these results does not go together: versions, machines, weights, cells measured twice."""
    said = []
    for field_name, what in (
        ("trailmark", "versions of trailmark"),
        ("torch", "versions of torch"),
        ("transformers", "versions of transformers"),
    ):
        said += _mixed(found, what, partial(_version, field_name))
    said += _mixed(
        found,
        "machines or numbers of threads",
        machine,
        " Times and tokens per second are comparable within one machine only.",
    )
    by_name: dict[str, list[Model]] = defaultdict(list)
    for model in found.models:
        by_name[model.name].append(model)
    for name, same in by_name.items():
        known = {model.weights for model in same if model.weights}
        if len(known) > 1:
            labels = "; ".join(
                f"{model.label}: weights {model.weights[:8]}" for model in same if model.weights
            )
            said.append(f"{len(known)} models are called {name} and have other weights: {labels}.")
    if without := sorted({str(r.source) for r in found.results if r.environment is None}):
        said.append(f"Nothing says on what these were measured: {', '.join(without)}.")
    return said + _repeated(found)


def _version(of: str, here: Mapping[str, Any]) -> str:
    return str(here.get(of, "unknown"))


def machine(here: Mapping[str, Any]) -> str:
    """The hardware that an environment names."""
    names = [str(here[key]) for key in ("gpu", "processor") if here.get(key)]
    if here.get("cores") is not None:
        names.append(f"{here['cores']} cores")
    if here.get("threads") is not None:
        names.append(f"{here['threads']} thread{'s' * (here['threads'] != 1)}")
    return ", ".join(names) or "unknown"


def _mixed(
    found: Collected, what: str, of: Callable[[Mapping[str, Any]], str], means: str = ""
) -> list[str]:  # fmt: skip
    users: dict[str, dict[str, None]] = defaultdict(dict)
    for result in found.results:
        if result.environment is not None:
            for model in result.models:
                users[of(result.environment)][f"{model.label} {result.suite}"] = None
    if len(users) < 2:
        return []
    named = "; ".join(f"{value}: {_some(list(names))}" for value, names in sorted(users.items()))
    return [f"These results were measured with {len(users)} {what}. {named}.{means}"]


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _repeated(found: Collected) -> list[str]:
    times: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in found.results:
        asked = json.dumps(result.settings, sort_keys=True, default=str)
        cell = tuple(str(result.get(name)) for name in ("length", "depth", "needles", "prompt", "tier"))
        times[result.suite, tuple(model.label for model in result.models), asked, cell].append(result)
    twice = {key: same for key, same in times.items() if len(same) > 1}
    if not twice:
        return []
    files = sorted({str(result.source) for same in twice.values() for result in same})
    cells = "1 cell was" if len(twice) == 1 else f"{len(twice)} cells were"
    return [
        f"{cells} measured more than once ({_some(files)}): tables show each, figures "
        "the last one, of needles that with the most questions."
    ]
