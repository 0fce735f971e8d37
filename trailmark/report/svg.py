"""A figure's SVG as a part of the page: it follows the page's colours and fonts, and its ids are its own."""

from __future__ import annotations

import re

from markupsafe import Markup

from trailmark.report.theme import LIGHT

_LEFT_OUT = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")  # matplotlib escapes these two characters wherever else they stand
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')
_ID = re.compile(r' id="([^"]*)"')
_FAMILY = re.compile(r"font-family:[^;\"]*;?\s*")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_ROLES = {value: "none" if name == "paper" else f"var(--{name})" for name, value in LIGHT.items()}


def inline(svg: str, name: str, title: str, description: str) -> Markup:
    """``svg``, which matplotlib wrote with the colours of :data:`~trailmark.report.theme.LIGHT`, for the page.

    Args:
        name: of the figure, not used by another one on the page.
        title, description: what a screen reader says.

    Returns:
        An ``<svg>`` whose colours are the page's custom properties, without a background of its own.
    """
    drawing = _LEFT_OUT.sub("", svg)
    used = {match[2] for tag in _TAG.findall(drawing) for match in _REFERENCE.finditer(tag)}

    def own_id(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    def themed(match: re.Match[str]) -> str:
        tag = _ID.sub(own_id, match[0].replace("xlink:href", "href"))
        tag = _REFERENCE.sub(rf"\1{name}-\2", tag)
        return _COLOUR.sub(lambda colour: _ROLES[colour[0]], _FAMILY.sub("", tag))

    start = re.search(r"<svg[^>]*>", drawing)
    assert start is not None
    box = re.search(r'viewBox="([^"]*)"', start[0])
    assert box is not None
    # as markup: matplotlib escaped the words in it
    inner = Markup(_TAG.sub(themed, drawing[start.end() : drawing.rindex("</svg>")]))
    return Markup(
        '<svg viewBox="{box}" style="--width:{width:.0f}" role="img" aria-labelledby="{name}-title {name}-text">'
        '<title id="{name}-title">{title}</title><desc id="{name}-text">{description}</desc>{inner}</svg>'
    ).format(
        box=box[1],
        width=float(box[1].split()[2]),
        name=name,
        title=title,
        description=description,
        inner=inner,
    )
