"""HTML from values: whatever is not :class:`Html` already is escaped."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


# control characters, halves of characters and what is none: no HTML, SVG or UTF-8 file may hold them
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """``text`` with a replacement character for each one that a page cannot hold."""
    return _UNSEEN.sub("\ufffd", text)


def safe(value: Any) -> Html:
    """``value`` as HTML: escaped, for an element's content and for a quoted attribute, unless it is HTML."""
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value)), quote=True))


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """``<tag name="value">content</tag>``; ``class_`` is class, ``aria_label`` is aria-label; None is left out."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{safe(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{shown}>{''.join(map(safe, content))}</{tag}>")


_LONG = 30  # characters


def table(
    caption: Any, header: Sequence[Any], rows: Sequence[Sequence[Any]], text: Sequence[int] = ()
) -> Html:
    """A table that scrolls in its own box; the first cell of a row is its header.

    Args:
        text: the columns, beside the first, that hold words and not numbers.
    """
    words = {0, *text}

    def kind(column: int, cell: Any = "") -> str | None:
        # only long words may be broken
        names = ["text"] * (column in words) + ["long"] * (len(str(cell)) > _LONG)
        return " ".join(names) or None

    head = [element("th", cell, scope="col", class_=kind(n)) for n, cell in enumerate(header)]
    body = []
    for row in rows:
        cells = [element("th", row[0], scope="row", class_="long" if len(str(row[0])) > _LONG else None)]
        for n, cell in enumerate(row[1:], 1):
            share = bar_share(cell)
            cells.append(
                element("td", cell, class_=kind(n, cell))
                if share is None
                else element("td", cell, class_="bar", style=f"--share:{share:.3f}")
            )
        body.append(element("tr", *cells))
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return element("div", inner, class_="scroll", role="region", tabindex="0", aria_label=_plain(caption))


class Share(str):
    """A number between 0 and 1 with a bar behind it."""

    value: float

    def __new__(cls, value: float, shown: str) -> Share:
        made = super().__new__(cls, shown)
        made.value = min(1.0, max(0.0, value))
        return made


def bar_share(cell: Any) -> float | None:
    return cell.value if isinstance(cell, Share) else None


def _plain(value: Any) -> str:
    return "table" if isinstance(value, Html) else str(value)


def details(summary: Any, *content: Any) -> Html:
    return element("details", element("summary", summary), *content)


def code(text: str) -> Html:
    return element("pre", element("code", text))


def paragraph(*content: Any, class_: str | None = None) -> Html:
    return element("p", *content, class_=class_)


# --- numbers for people ------------------------------------------------------------------------------------

MISSING = "-"


def number(value: Any) -> float | None:
    """``value`` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def shown(value: Any, form: str = "") -> str:
    """A number in the given format; what is no number as it is; what is not there as "-"."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if number(value) is None:
        return str(value)
    if form.endswith("d"):
        return f"{round(value):{form}}"
    return f"{value:{form}}"


def listed(words: Sequence[str]) -> str:
    """``a, b and c``"""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def count(value: Any) -> str:
    """``1,048,576``"""
    return shown(value, ",d")


def fraction(value: Any) -> str:
    """Of a share: three digits, and "1.000" and "0.000" only where it is all or nothing."""
    exact = number(value)
    if exact is None:
        return shown(value)
    text = f"{exact:.3f}"
    if (text == "1.000" and exact < 1 - 1e-12) or (text == "0.000" and exact > 1e-12):
        return ("> " if exact > 0.5 else "< ") + ("0.999" if exact > 0.5 else "0.001")
    return text


def share(value: Any) -> str:
    """A share with a bar behind it."""
    exact = number(value)
    return fraction(value) if exact is None else Share(exact, fraction(exact))


def interval(low: Any, high: Any, form: str = ".3f") -> str:
    if number(low) is None and number(high) is None:
        return MISSING
    return f"{shown(low, form)}–{shown(high, form)}"


def short_length(value: float) -> str:
    """Tokens on an axis: ``64K``, ``1M``, and ``1,000`` where it is no multiple of 1024."""
    whole = round(value)
    for size, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole:,}"
