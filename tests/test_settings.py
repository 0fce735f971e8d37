"""Settings that are declared once: what is checked, read from text, and written as the words of a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from trailmark import cli  # noqa: F401 - its commands' settings
from trailmark.evaluation.suite import suites
from trailmark.settings import (
    Settings,
    as_text,
    declared,
    from_mapping,
    from_options,
    gathered,
    kinds_of,
    override,
    parse_override,
    setting,
    words,
)


@dataclass(frozen=True)
class Some(Settings):
    place: Path = setting(help="A folder.", argument=True)
    lengths: tuple[int, ...] = setting((), "Tokens.", least=2, cell="length")
    shares: tuple[float, ...] | None = setting(None, "Shares.", least=0, most=1)
    kind: str = setting("plain", "plain or wide.", choices=lambda: ("plain", "wide"))
    names: tuple[str, ...] = setting((), "Names.", option="--name", repeated=True)
    carry: bool = setting(False, "A flag.", option="--carry")
    inner: int = setting(1, "Of programs.", on_command_line=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": (4, 1)}, "lengths: expected 2 or more, got 1"),
        ({"shares": (0.5, 1.5)}, "shares: expected 0 to 1, got 1.5"),
        ({"kind": "wid"}, "kind: expected one of 'plain', 'wide', got 'wid'. Did you mean 'wide'?"),
        ({"inner": True}, "inner: expected a whole number, got True"),
        ({"lengths": 3}, "lengths: expected a list, got 3"),
    ],
)
def test_a_value_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Some(place=Path("a"), **values)


def of_trailmark(cls: type = Settings) -> Iterator[type[Settings]]:
    """The settings of all commands and suites."""
    for below in cls.__subclasses__():
        if below.__module__.startswith("trailmark."):
            yield below
        yield from of_trailmark(below)


def choices_of(cls: type[Settings], field: Field[Any]) -> list[str]:
    given = declared(field).choices
    kind = kinds_of(cls)[field.name]
    return [str(x) for x in (given() if callable(given) else given or get_args(kind)) if isinstance(x, str)]


def test_a_help_text_that_names_a_choice_names_them_all() -> None:
    suites()  # registers those that are the package's own
    told = 0
    for cls in of_trailmark():
        for field in fields(cls):
            choices, said = choices_of(cls, field), re.findall(r"[\w-]+", declared(field).help)
            if declared(field).on_command_line and set(said) & set(choices):
                assert not set(choices) - set(said), (cls, field.name)
                told += len(choices) > 1
    assert told > 10


def test_values_take_the_type_of_their_field() -> None:
    made = from_mapping(Some, {"place": "a/b", "lengths": [2.0, 3], "shares": ["1e-1"]})
    assert made == Some(Path("a/b"), (2, 3), (0.1,))
    with pytest.raises(ValueError, match=r"run\.legnths: unknown key\. Did you mean 'lengths'\?"):
        from_mapping(Some, {"place": "a", "legnths": []}, "run")


def test_words_are_read_back_as_the_same_values() -> None:
    values = {"place": Path("a b"), "lengths": (2, 3), "names": ("x", "y"), "carry": True, "inner": 5}
    expected = ["a b", "--lengths", "2,3", "--name", "x", "--name", "y", "--carry"]
    assert words(Some, values) == expected
    given = {"place": Path("a b"), "lengths": "2,3", "names": ["x", "y"], "carry": True, "shares": None}
    assert from_options(Some, given) == {name: value for name, value in values.items() if name != "inner"}
    with pytest.raises(ValueError, match="lengths: expected numbers as 1024,16384, got '1k'"):
        from_options(Some, {"lengths": "1k"})


def test_results_that_differ_in_a_part_belong_to_one_command() -> None:
    cells = [{"length": n, "kind": kind, "text": "0f"} for kind in ("plain", "wide") for n in (2, 4, 2)]
    assert gathered(Some, cells) == [{"kind": kind, "lengths": (2, 4)} for kind in ("plain", "wide")]


def test_text_is_what_a_command_line_takes() -> None:
    assert [as_text(value) for value in (0.5, 1.0, (1, 2.0), True, Path("a"), None)] == [
        *("0.5", "1", "1,2", "true", "a", "null")
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "notes #2.txt": "notes #2.txt",  # in YAML a comment begins there,
        "010": 10,  # this is octal,
        "1:30": "1:30",  # this is ninety,
        "2024-01-01": "2024-01-01",  # and this a date
        "1_000": 1000,
        "-3e-3": -0.003,
        ".5": 0.5,
        "true": True,
        "null": None,
        "~": "~",
        "1_000.5": "1_000.5",
        "[a, 'b #2']": ["a", "b #2"],
        "{a: 1}": {"a": 1},
        "'123'": "123",
        "9" * 5000: "9" * 5000,  # more digits than Python reads
    }.items(),
)
def test_a_value_of_a_command_line_is_text_numbers_or_yaml_in_brackets(text: str, value: object) -> None:
    assert parse_override("set", f"key={text}") == ("key", value)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a b",
        "2024",
        "1e3",
        "null",
        "[1] x",
        "'x",
        " x",
        "#",
        "$HOME",
        "é",
        "[📚] x",
        "\n[",
        "\u2028",
        " a\x85b",
        "[\U000e0020",
    ],
)
def test_text_is_written_so_that_it_is_read_as_itself(text: str) -> None:
    (word,) = shlex.split(override("key", text))
    assert parse_override("set", word) == ("key", text)


@pytest.mark.parametrize("text", ["key=", "key= ", "key", "key=[a"])
def test_a_value_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^key: |^set: expected key=value"):
        parse_override("set", text)


def test_an_empty_path_is_no_current_folder(refused: Callable[..., str]) -> None:
    assert "expected a path, got an empty one" in refused("read", "model", "text", "--memory", "")
