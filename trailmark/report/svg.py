"""A figure's SVG as a part of the page: it follows the page's colours and fonts, and its ids are its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from trailmark.report.markup import Html, safe
from trailmark.report.theme import LIGHT

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_NAMES: Mapping[str, str] = {value: name for name, value in LIGHT.items()}


def inline(svg: str, name: str, title: str, description: str) -> Html:
    """``svg``, which matplotlib wrote with the colours of :data:`~trailmark.report.theme.LIGHT`, for the page.

    Args:
        name: of the figure, not used by another one on the page.
        title, description: what a screen reader says.

    Returns:
        An ``<svg>`` whose colours are the page's custom properties, without a background of its own.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = set()
    for node in root.iter():
        for value in node.attrib.values():
            used.update(_REFERENCE.findall(value))
        if _XLINK in node.attrib:
            used.add(node.attrib[_XLINK].removeprefix("#"))
    for node in root.iter():
        _rename(node, name, used)
        if "style" in node.attrib:
            node.set("style", _style(node.attrib["style"]))
    box = root.attrib["viewBox"]
    inner = "".join(_text(child) for child in root)
    return Html(
        f'<svg viewBox="{box}" style="--width:{float(box.split()[2]):.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-text"><title id="{name}-title">{safe(title)}</title>'
        f'<desc id="{name}-text">{safe(description)}</desc>{inner}</svg>'
    )


def _rename(node: ElementTree.Element, name: str, used: set[str]) -> None:
    number = node.attrib.pop("id", None)
    if number in used:
        node.set("id", f"{name}-{number}")
    if _XLINK in node.attrib:
        node.set("href", f"#{name}-{node.attrib.pop(_XLINK).removeprefix('#')}")
    for key, value in node.attrib.items():
        if "url(#" in value:
            node.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))


def _style(style: str) -> str:
    def named(match: re.Match[str]) -> str:
        role = _NAMES.get(match[0])
        assert role is not None, f"a figure has the colour {match[0]}, which is none of the theme's"
        return "none" if role == "paper" else f"var(--{role})"

    return _FAMILY.sub("", _COLOUR.sub(named, style)).strip()


def _text(node: ElementTree.Element) -> str:
    """As HTML reads it: without prefixes of names."""
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(node, encoding="unicode", short_empty_elements=False)
    return text.replace(f' xmlns="{_SVG}"', "")
