"""What a conversion did, as a record and as lines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trailmark.models.conversion.parts import KINDS, Parts
from trailmark.untrusted import brief
from trailmark.values import layers_by_kind

KIND, FORMAT = "trailmark conversion", 1
_LONGEST = 256  # characters of a text that is taken over from another record
_NUMBER = re.compile(r"\.\d+(?=\.)")


def rows(parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """One for tensors that are alike but for the number of their layer or group."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, part in parts.items():
        what, start = part.what, re.sub(r"\d+", "*", part.start or "")
        row = found.setdefault(
            (_NUMBER.sub(".*", name), what, start),
            {"tensors": _NUMBER.sub(".*", name), "count": 0, "parameters": 0, "what": what},
        )
        if what == "new":
            row.setdefault("starts_as", part.start)
        row["count"] += 1
        row["parameters"] += math.prod(shapes[name])
    return list(found.values())


def origin(record: Any) -> dict[str, str]:
    """What the first base was, for the record of a conversion that goes on from what another one made.

    Args:
        record: of that one; anything that a stranger may have written.
    """
    base = record.get("base") if isinstance(record, dict) else None
    if not isinstance(base, dict):
        return {}
    before = base.get("of")
    first = before if isinstance(before, dict) else base
    known = ((name, first.get(name)) for name in ("name", "revision", "family", "sha256"))
    return {name: x for name, x in known if isinstance(x, str) and len(x) <= _LONGEST}


def lines(record: Mapping[str, Any]) -> list[str]:
    """The record of a conversion for people."""
    base, target = record["base"], record["target"]
    own, new = record["parameters"]["base"], record["parameters"]["new"]
    said = [
        f"{base['name']} ({base['family']}, {own:,} parameters) as {target}: {record['parameters']['all']:,} "
        f"parameters in {record['dtype']}, {new:,} of them new."
    ]
    for what in KINDS:
        of = [row for row in record["parts"] if row["what"] == what]
        if not of:
            continue
        said.append(f"{what}: {sum(row['parameters'] for row in of):,} parameters")
        for row in of:
            start = f", starts as {row['starts_as']}" if what == "new" else ""
            said.append(f"  {row['tensors']} ({row['count']} x, {row['parameters']:,}){start}")
    if out := base.get("tokens_left_out"):
        said.append(
            f"left out of the tokenizer, for the model has no embedding of them: {', '.join(map(brief, out))}"
        )
    said.append(
        f"set: {', '.join(f'{name} {_shown(name, value)}' for name, value in record['fields'].items())}"
    )
    return said


def _shown(name: str, value: Any) -> str:
    if name == "layer_types" and value:
        return layers_by_kind(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
