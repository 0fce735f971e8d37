"""What every page of ours is: one file that asks the network for nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trailmark import __version__
from trailmark.files import expect_replaceable, expect_writable
from trailmark.report.theme import style
from trailmark.values import count, visible


@functools.cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("trailmark.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["count"] = count
    return templates


def expect_page(output: Path) -> None:
    """A ValueError where a page cannot be written to ``output``, or would replace what is none: before long work."""
    if output.is_dir():
        raise ValueError(
            f"output: expected a file, {str(output)!r} is a folder. Try {str(output / 'page.html')!r}."
        )
    expect_writable("output", output.parent)
    expect_replaceable("output", output, b"<!doctype html>")


def render(template: str, css: str, scripts: Sequence[str], **values: Any) -> str:
    """The HTML of a page.

    Args:
        template: a file in templates/, made from page.html there. What it shows is escaped unless it is Markup.
        css: a file beside this module, added to base.css and the theme's colours.
        scripts: files beside this module, in one scope; they run last, after theme.js, and nothing else may run.
        values: what the template shows.
    """
    parts = map(_file_text, ("theme.js", *scripts))
    script = "\n".join(['(() => {\n"use strict";', *parts, "})();\n"])
    page = _templates().get_template(template)
    return visible(
        page.render(
            style=Markup(style() + _file_text("base.css") + _file_text(css)),
            script=Markup(script),
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            version=__version__,
            **values,
        )
    )


def _file_text(name: str) -> str:
    return resources.files("trailmark.report").joinpath(name).read_text(encoding="utf-8")
