"""Numbers and names as people read them, in pages and in a terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
MISSING = "-"
MOST_PERPLEXITY = 10_000
"""Beyond it the loss is told instead: nobody compares numbers of thirty digits."""
# control characters, halves of characters and what is none: no HTML, SVG or UTF-8 file may hold them
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """``text`` with a replacement character for each one that a page cannot hold."""
    return _UNSEEN.sub("\ufffd", text)


def all_visible(content: Any) -> Any:
    """JSON with all its texts as :func:`visible` has them, keys too."""
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, list | tuple):
        return [all_visible(part) for part in content]
    if isinstance(content, dict):
        return {all_visible(key): all_visible(part) for key, part in content.items()}
    return content


def number(value: Any) -> float | None:
    """``value`` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def shown(value: Any, form: str = "") -> str:
    """A number is written in the given format, anything else as it is, and what is not there as "-"."""
    if value is None:
        return MISSING
    if number(value) is None:
        return str(value)
    return f"{round(value):{form}}" if form.endswith("d") else f"{value:{form}}"


def count(value: Any) -> str:
    """``1,048,576``"""
    return shown(value, ",d")


def layers_by_kind(kinds: Sequence[Any]) -> str:
    """``full_attention 7, 14; sliding_attention the other 28``: the kind that most layers have comes last."""
    numbers: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        numbers.setdefault(str(kind), []).append(number)
    *few, most = sorted(numbers, key=lambda kind: len(numbers[kind])) or [""]
    said = [f"{kind} {', '.join(map(str, numbers[kind]))}" for kind in few]
    return "; ".join([*said, f"{most} {f'the other {len(numbers[most])}' if few else 'all'}"])


def listed(words: Sequence[str]) -> str:
    """``a, b and c``"""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


class Share(str):
    """A number between 0 and 1, behind which a page draws a bar."""

    value: float


def fraction(value: Any) -> str:
    """A share has three digits; "1.000" and "0.000" stand only where it is all or nothing."""
    exact = number(value)
    if exact is None:
        return shown(value)
    text = f"{exact:.3f}"
    if (text == "1.000" and exact < 1 - 1e-12) or (text == "0.000" and exact > 1e-12):
        return "> 0.999" if exact > 0.5 else "< 0.001"
    return text


def share(value: Any) -> str:
    """As :func:`fraction`, with a bar behind it."""
    text, exact = Share(fraction(value)), number(value)
    if exact is None:
        return str(text)
    text.value = min(1.0, max(0.0, exact))
    return text


def percent(value: float) -> str:
    """``99.7%``; "100.0%" and "0.0%" stand only where it is all or nothing."""
    text = f"{value:.1%}"
    return {"100.0%": "> 99.9%", "0.0%": "< 0.1%"}.get(text, text) if 0 < value < 1 else text


def interval(low: Any, high: Any, form: str = ".3f") -> str:
    """``0.900–1.000``"""
    if number(low) is None and number(high) is None:
        return MISSING
    return f"{shown(low, form)}–{shown(high, form)}"


def times(value: Any) -> str:
    """``1.5×``"""
    return MISSING if number(value) is None else f"{value:,.4g}×"


def perplexity(value: Any) -> str:
    """``12.345``; beyond 10,000 the loss that it is the exponential of, in nats: ``67.21 nats``."""
    exact = number(value)
    if exact is None or exact <= MOST_PERPLEXITY:
        return shown(value, ",.3f")
    return f"{math.log(exact):.2f} nats"


def perplexity_interval(low: Any, high: Any) -> str:
    """``2.500–3.000``; where an end is beyond 10,000, both in nats: ``9.00–10.57 nats``."""
    ends = [end for end in (number(low), number(high)) if end is not None]
    if len(ends) == 2 and min(ends) > 0 and max(ends) > MOST_PERPLEXITY:
        return "–".join(f"{math.log(end):.2f}" for end in ends) + " nats"
    return f"{perplexity(low)}–{perplexity(high)}" if any(ends) else MISSING


def short_length(value: float) -> str:
    """Tokens on an axis: ``64K``, ``1M``, and ``1,000`` where it is no multiple of 1024."""
    whole = round(value)
    for size_of_unit, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if whole and whole % size_of_unit == 0:
            return f"{whole // size_of_unit}{unit}"
    return f"{whole:,}"


def size(value: Any) -> str:
    """Bytes: ``520 MiB``."""
    left = number(value)
    if left is None:
        return shown(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(left) < 1024:
            return f"{left:.0f} {unit}" if unit == "B" or left >= 10 else f"{left:.1f} {unit}"
        left /= 1024
    return f"{left:.1f} GiB"


def duration(seconds: float) -> str:
    """``1:05`` or ``2:01:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def setting(value: Any) -> str:
    """A setting as a command or a configuration would hold it."""
    if value is None:
        return MISSING
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """The items that have the same key, in the order in which the keys come."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def in_common(cells: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """What all cells share, and the names of what tells them apart."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    common = {
        name: cells[0][name]
        for name in names
        if all(name in cell and cell[name] == cells[0][name] for cell in cells)
    }
    return common, [name for name in names if name not in common]
