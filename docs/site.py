"""Hooks of the documentation's site (mkdocs.yml): pages from outside this folder, their links, and formulas as MathML.

The pages are written for the repository, where links lead to files. On the site those to pages lead to pages, and
those to other files to the repository; where it has no address (TRAILMARK_REPOSITORY), they are words alone.
"""

from __future__ import annotations

import html
import importlib
import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# of the repository's files, those that are pages and lie elsewhere
ELSEWHERE = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "configs/README.md": "configurations.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# of these every method is shown, of the others what stands first
_WHOLE = ("ChunkCache", "TrailmarkForCausalLM")
_SOURCES = {page: source for source, page in ELSEWHERE.items()}
_FENCED = re.compile(r"^(`{3,}).*?^\1`*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<to>[^)\s]+)\)")
_SOURCE = re.compile(r"(?P<name>src|srcset)=\"(?P<to>[^\"]+)\"")
_ROLE = re.compile(r":([a-z]+):`~?([^`]+)`")
_DIRECTIVE = re.compile(r"\.\. math::\n\n?((?:[ \t]+\S.*\n?|\n(?=[ \t]))+)")
_FORMULA = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)


class Docstrings(griffe.Extension):
    """Formulas and names of docstrings, which are written as Sphinx has them, in Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _DIRECTIVE.sub(
                lambda found: f"$$\n{textwrap.dedent(found[1]).strip()}\n$$\n\n", obj.docstring.value
            )
            obj.docstring.value = _ROLE.sub(
                lambda found: f"${found[2]}$" if found[1] == "math" else f"`{found[2]}`", text
            )


def reference() -> str:
    """A page of everything that is public: what packages export, by their docstrings."""
    lines = [
        "# Reference",
        "",
        "All that is public, from the docstrings: shapes, units, errors and sources.",
        "",
    ]
    for package, title in (("ops", "Ops"), ("models", "Models"), ("memory", "Memory")):
        module = importlib.import_module(f"trailmark.{package}")
        lines += [f"## {title}", "", inspect.getdoc(module) or "", ""]
        for name in sorted(getattr(module, "__all__", None) or dir(module), key=str.lower):
            member = getattr(module, name)
            if inspect.isclass(member) or inspect.isfunction(member):
                lines.append(f"::: {member.__module__}.{name}")
                if name in _WHOLE:
                    lines.append("    options: {members: true, filters: [public]}")
                lines.append("")
    return "\n".join(lines)


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "reference.md", content=reference()))
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    written = Path(_SOURCES.get(page.file.src_path, f"docs/{page.file.src_path}")).parent

    def place(to: str) -> str | None:
        """Where a link leads on the site; None: nowhere."""
        path, mark, anchor = to.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return to
        path = os.path.normpath(written / path)
        on_site = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if on_site is not None and files.get_file_from_path(on_site) is not None:
            return on_site + mark + anchor
        return f"{config.repo_url.rstrip('/')}/blob/main/{path}{mark}{anchor}" if config.repo_url else None

    def link(found: re.Match[str]) -> str:
        to = place(found["to"])
        return found["text"].strip("![]") if to is None else f"{found['text']}({to})"

    def source(found: re.Match[str]) -> str:
        return f'{found["name"]}="{place(found["to"])}"'

    done, parts = 0, []
    for code in [*_FENCED.finditer(markdown), None]:
        words = markdown[done : code.start() if code else None]
        parts.append(_SOURCE.sub(source, _LINK.sub(link, words)))
        if code:
            parts.append(code[0])
            done = code.end()
    return "".join(parts)


def on_page_content(content: str, **_: Any) -> str:
    def formula(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        if found[1] == "span":
            return convert(latex)
        # a long one is moved under its own bar, not over what stands beside
        return f'<div style="margin: 1em 0; overflow-x: auto">{convert(latex, display="block")}</div>'

    return _FORMULA.sub(formula, content)
