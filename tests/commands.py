"""Every command that the documents show and the package prints, and the real command line to parse it with."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest import mock

import typer.main
import yaml

from tests import benchmark_scripts
from trailmark import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "configs/README.md",
            "benchmarks/README.md",
            "models/smollm2-135m-reader/README.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
)
CONFIGS = tuple(sorted((ROOT / "configs").glob("*.yaml")))
_PROGRAMS = ("trailmark", "python", "make", "torchrun", "accelerate")
_NAMED = re.compile(r"trailmark ([a-z]+)\b")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@dataclass(frozen=True)
class Command:
    """One command and the place it is shown at.

    ``whole``: it stands on a line of its own, so that nothing that it needs may be missing. Else it is named within a
    sentence, and what it says of itself must be right.
    """

    place: str
    words: tuple[str, ...]
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


# --- where commands are shown ------------------------------------------------------------------------------


def words_of(line: str) -> tuple[str, ...]:
    """The words of a line as a shell splits them, without what only a reader needs: a comment, brackets, dots."""
    words = shlex.split(re.sub(r"[][]", "", line), comments=True)
    while words and (words[0] in ("$", "exec") or re.fullmatch(r"[A-Z_]+=\S*", words[0])):
        words = words[1:]
    # dots after a word: several of them; after an option: its value
    shown = [word for before, word in pairwise(["", *words]) if word != "..." or before.startswith("--")]
    return tuple(word if word == "..." else word.removesuffix("...") for word in shown)


def in_document(path: Path) -> Iterator[Command]:
    """The commands of a Markdown file: lines of its code, and code within its sentences."""
    place, text = str(path.relative_to(ROOT)), path.read_text()
    text = re.sub(r" *\\\n\s*", " ", text)  # a command that goes on in the next line
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    for line in "\n".join([*code, *re.findall(r"^    (.*)$", text, re.M)]).splitlines():
        if _is_command(line) and not line.lstrip().startswith("-"):
            yield Command(place, words_of(line))
    for line in re.findall(r"`([^`\n]+)`", re.sub(r"^    .*$", "", text, flags=re.M)):
        if _is_command(line):
            yield Command(place, words_of(line), whole=False)


def in_configuration(path: Path) -> Iterator[Command]:
    """The commands in a configuration's comments."""
    for line in re.findall(r"# .*?(trailmark [a-z]+ \S*[/=.].*)$", path.read_text(), re.M):
        yield Command(f"configs/{path.name}", words_of(line))


def in_sources() -> Iterator[Command]:
    """The commands in the strings of the package: help, messages, docstrings; X stands for what is put in.

    A command that ends a message, after "Next:", "Say:" or "with:" or on a line of its own, is whole. Of another, what
    can be told apart from the sentence around it are its options.
    """
    for path in sorted((ROOT / "trailmark").rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for text in _strings(ast.parse(path.read_text())):
            for line in text.splitlines():
                shown = re.search(r"(?:(?:Next|Say|with): |^  )(trailmark [a-z]+ .*)$", line)
                if shown and _is_command(shown[1]):
                    for alternative in re.split(r",? or (?=trailmark )", re.sub(r"(?<!\.)\.$", "", shown[1])):
                        yield Command(place, words_of(alternative))
                    continue
                for sentence in re.split(r"[.;:,] |`` ", line):
                    for match, after in pairwise([*_NAMED.finditer(sentence), None]):
                        assert match is not None
                        end = after.start() if after else len(sentence)
                        options = _OPTION.findall(sentence, match.end(), end)
                        if match[1] in commands():
                            yield Command(place, ("trailmark", match[1], *options), whole=False)


def options_named(path: Path) -> set[str]:
    """Every option that a document names in code."""
    return {
        option for code in re.findall(r"`([^`\n]+)`", path.read_text()) for option in _OPTION.findall(code)
    }


def overrides_named(path: Path) -> set[str]:
    """Every setting with a value that a document names in code, as ``model.retriever=random``."""
    setting = re.compile(r"(?:model|data|training)\.[a-z_]+=(?:\[[^]]*\]|[^\s`]+)")
    code = re.findall(r"`([^`\n]+)`", path.read_text())
    return {own for words in code for own in setting.findall(words) if "..." not in own}


def files_named(path: Path) -> Iterator[tuple[str, Path]]:
    """Every file or folder of the repository that a document names in code or links to: as it is written, and where."""
    text = path.read_text()
    for name in re.findall(r"`((?:trailmark|tests|benchmarks|configs|docs|examples)/[\w./-]*)`", text):
        yield name, ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            yield target, path.parent / target


def _is_command(line: str) -> bool:
    words = re.sub(r"^(\$ |[A-Z_]+=\S+ )+", "", line.strip()).split()
    if len(words) < 2 or words[0] not in _PROGRAMS:
        return False
    match words[0]:
        case "trailmark":
            return words[1] in commands()
        case "python":
            return words[1].startswith("benchmarks/")
        case _:
            return True


def _strings(node: ast.AST) -> Iterator[str]:
    """Every string below a node, an f-string as one."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


# --- the real command lines --------------------------------------------------------------------------------


@cache
def commands() -> dict[str, typer.main.TyperCommand]:
    """The commands of ``trailmark`` by name."""
    group = typer.main.get_command(cli.app)
    return dict(group.commands)


def all_options() -> set[str]:
    """Every option of any command of trailmark."""
    return {name for own in commands().values() for name in options_of(own)}


def options_of(command: typer.main.TyperCommand) -> set[str]:
    named = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return named | {"--help"}


def parse(command: Command) -> None:
    """Parse a command as its program would, without doing what it says.

    Raises:
        ValueError: the program would refuse it; with what it says.
    """
    program, *words = command.words
    words = [re.sub(r"\$[A-Z_]+", "1", word) for word in words]
    match program:
        case "trailmark":
            _parse_trailmark(words, command.whole)
        case "python":
            _parse_script(words)
        case "make":
            _parse_make(words)
        case "torchrun" | "accelerate":
            _parse_launcher(program, words, command.whole)
        case _:
            raise ValueError(f"expected one of {', '.join(_PROGRAMS)}, got {program!r}")


def _parse_trailmark(words: Sequence[str], whole: bool) -> None:
    """By click itself; of a command within a sentence, options must exist, and values of those that have one fit."""
    name, *rest = words
    if name not in commands():
        raise ValueError(f"trailmark has no command {name!r}")
    known = options_of(commands()[name])
    if not whole:
        if unknown := [word for word in rest if word.startswith("-") and word.split("=")[0] not in known]:
            raise ValueError(f"trailmark {name} has no option {', '.join(unknown)}")
        return
    try:
        commands()[name].make_context(name, list(rest))
    except Exception as error:
        if not type(error).__module__.startswith(("typer", "click")):
            raise
        raise ValueError(getattr(error, "format_message", error.__str__)()) from error


class _Parsed(Exception):
    """A script's arguments were accepted."""


def _parse_script(words: Sequence[str]) -> None:
    """By the script's own parser: it runs until it has parsed them."""
    script, *rest = words
    path = ROOT / script
    if not path.exists():
        raise ValueError(f"there is no {script}")
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, args: Sequence[str] | None = None) -> None:
        parse_args(self, args)
        raise _Parsed

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(f"{script}: {message}")

    with (
        mock.patch.object(sys, "path", [str(benchmark_scripts.BENCHMARKS), *sys.path]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
        mock.patch.object(sys, "argv", [str(path), *rest]),
        mock.patch.dict(os.environ),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Parsed:
            return
    raise ValueError(f"{script} parses no arguments")


def _parse_make(words: Sequence[str]) -> None:
    """Targets and variables of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    variables = set(re.findall(r"^([A-Z]+) \?=", makefile, re.M))
    for word in words:
        name, _, value = word.partition("=")
        if name not in (variables if value else targets):
            raise ValueError(f"the Makefile has no {name}")


def _parse_launcher(program: str, words: Sequence[str], whole: bool) -> None:
    """By the launcher's own parser, and what it launches by trailmark's."""
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        parser, words = get_args_parser(), list(words)
    else:
        from accelerate.commands.launch import launch_command_parser

        if words[0] != "launch":
            raise ValueError(f"expected accelerate launch, got accelerate {words[0]}")
        parser, words = launch_command_parser(), list(words[1:])
    if not whole and "-m" not in words:  # a word about its options
        words = [*words, "-m", "trailmark", "verify", "FOLDER"]
    try:
        asked = parser.parse_args(words)
    except SystemExit as error:
        raise ValueError(f"{program} refuses {shlex.join(words)}") from error
    if not asked.module or asked.training_script != "trailmark":
        raise ValueError(f"expected -m trailmark, got {asked.training_script}")
    _parse_trailmark(asked.training_script_args, whole)


def fields_of_init_from(path: Path, overrides: list[str]) -> list[str]:
    """Of the model that a run begins with, where a configuration here trains it: no folder is there yet."""
    raw = yaml.safe_load(path.read_text())
    begins = dict(own.split("=", 1) for own in overrides).get("init_from", raw.get("init_from"))
    file = path.with_name(f"{Path(begins or '').name}.yaml")
    if raw.get("model") or not file.exists():
        return []
    fields = yaml.safe_load(file.read_text())["model"]
    return [f"model.{name}={json.dumps(value)}" for name, value in fields.items()]
