"""What every page of ours is: one file that asks the network for nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from trailmark import __version__
from trailmark.report.markup import Html, safe
from trailmark.report.theme import style


def whole_page(title: str, css: str, body: str, scripts: Sequence[str]) -> str:
    """The HTML of a page.

    Args:
        css: a file beside this module, added to the theme's colours.
        body: HTML of its own.
        scripts: files beside this module, in one scope; they run last, after theme.js, and nothing else may run.
    """
    parts = map(_file_text, ("theme.js", *scripts))
    script = "\n".join(['(() => {\n"use strict";', *parts, "})();\n"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    return Html(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{safe(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="trailmark {safe(__version__)}">\n'
        f'<link rel="icon" href="data:,">\n<title>{safe(title)}</title>\n'
        f"<style>\n{style()}{_file_text(css)}</style>\n</head>\n<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _file_text(name: str) -> str:
    return resources.files("trailmark.report").joinpath(name).read_text(encoding="utf-8")
