"""What a reader of a report must know before comparing: versions, machines, weights, cells measured twice."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trailmark.report.collect import Collected, Result
from trailmark.values import grouped


def notes(collected: Collected) -> list[str]:
    """What of these results does not go together: versions, machines, weights, cells measured twice."""
    said = []
    for name in ("trailmark", "torch", "transformers"):
        said += _mixed(collected, f"versions of {name}", partial(_version, name))
    means = " Times and tokens per second are comparable within one machine only."
    said += _mixed(collected, "machines or numbers of threads", machine, means)
    for name, same in grouped(collected.models, lambda model: model.name).items():
        known = [model for model in same if model.weights]
        different = len({model.weights for model in known})
        if different > 1:
            labels = "; ".join(f"{model.label}: weights {(model.weights or '')[:8]}" for model in known)
            said.append(f"{different} models are called {name} and have other weights: {labels}.")
    if without := sorted({str(result.source) for result in collected.results if result.environment is None}):
        said.append(f"Nothing says on what these were measured: {', '.join(without)}.")
    return said + _repeated(collected)


def _version(name: str, here: Mapping[str, Any]) -> str:
    return str(here.get(name, "unknown"))


def machine(here: Mapping[str, Any]) -> str:
    """The hardware that an environment names."""
    names = [str(here[key]) for key in ("gpu", "processor") if here.get(key)]
    if here.get("cores") is not None:
        names.append(f"{here['cores']} cores")
    if here.get("threads") is not None:
        names.append(f"{here['threads']} thread{'s' * (here['threads'] != 1)}")
    return ", ".join(names) or "unknown"


def _mixed(
    collected: Collected, what: str, of: Callable[[Mapping[str, Any]], str], means: str = ""
) -> list[str]:
    users: dict[str, dict[str, None]] = defaultdict(dict)
    for result in collected.results:
        if result.environment is not None:
            names = (f"{model.label} {result.suite}" for model in result.models)
            users[of(result.environment)].update(dict.fromkeys(names))
    if len(users) < 2:
        return []
    named = "; ".join(f"{value}: {_some(list(names))}" for value, names in sorted(users.items()))
    return [f"These results were measured with {len(users)} {what}. {named}.{means}"]


def _some(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _repeated(collected: Collected) -> list[str]:
    def cell(result: Result) -> str:
        # of a demo the settings do not tell the cells apart
        told = [result.values.get(name) for name in ("length", "depth", "needles")]
        labels = [model.label for model in result.models]
        return json.dumps([result.suite, labels, result.settings, told], sort_keys=True, default=str)

    twice = [same for same in grouped(collected.results, cell).values() if len(same) > 1]
    if not twice:
        return []
    files = sorted({str(result.source) for same in twice for result in same})
    cells = "1 cell was" if len(twice) == 1 else f"{len(twice)} cells were"
    return [
        f"{cells} measured more than once ({_some(files)}): tables show each, figures the last one, of needles that "
        "with the most questions."
    ]
