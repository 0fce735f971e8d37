"""What every page of ours is: one file that asks the network for nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from trailmark import __version__
from trailmark.report.markup import Html, safe
from trailmark.report.theme import style


def whole_page(title: str, css: str, body: str, script: str) -> str:
    """The HTML of a page.

    Args:
        css: added to the theme's colours.
        body: HTML of its own.
        script: runs last; its SHA-256 is the only one that the page lets run.
    """
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
        f"<style>\n{style()}{css}</style>\n</head>\n<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def file_text(name: str) -> str:
    """Of a style or a script that lies beside this module."""
    return resources.files("trailmark.report").joinpath(name).read_text(encoding="utf-8")
