"""Settings that are declared once.

A suite, a run or a command declares its settings as a dataclass whose fields are made by :func:`setting`. The type,
the default, the bounds and the help text of a field stand there and nowhere else. From them derive the options of a
command (:func:`parameters`, :func:`takes`), the values of a YAML file or of ``key=value`` (:func:`from_mapping`,
:func:`parse_override`), the words of the command that repeats a result (:func:`words`), and the settings that belong to
the results of a record (:func:`gathered`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from trailmark import untrusted
from trailmark.untrusted import brief, parse_yaml

_Declared = TypeVar("_Declared")
_KEY = "trailmark"  # of a field's metadata


# --- declaring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declaration:
    """What a field says of itself, beside its name, type and default. See :func:`setting`."""

    help: str = ""
    default: str | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Sequence[Any] | Callable[[], Iterable[Any]] = ()
    option: str | None = None
    argument: bool = False
    repeated: bool = False
    on_command_line: bool = True
    cell: str | None = None
    recorded: bool = True


def setting(value: Any = dataclasses.MISSING, help: str = "", **more: Any) -> Any:
    """Declare a field of a dataclass of settings.

    Args:
        value: its default; without one the setting must be given.
        help: what it means, a phrase that ends with a full stop.
        default: the default in words, where ``value`` does not tell it; "" says nothing about it.
        least, most: the bounds of a number, or of each number of a tuple. below: instead of ``most``, where the bound
            itself is out of it.
        choices: the values that are allowed beside None, or a function that gives them where knowing them is costly.
        option: the names of its option, as "--output -o"; None: the field's name.
        argument: whether it is given by its place on the command line and not by an option.
        repeated: whether a tuple is given by repeating the option; else its parts stand between commas.
        on_command_line: False: only programs set it.
        cell: the name under which each result of a record tells which part of this tuple it is about.
        recorded: False: what stands in a record under this name cannot be given to a command.
    """
    declaration = Declaration(help, **more)
    return dataclasses.field(default=value, metadata={_KEY: declaration})


def declared(field: dataclasses.Field[Any]) -> Declaration:
    """What a field says of itself; a field that was not made by :func:`setting` says nothing."""
    found: Declaration = field.metadata.get(_KEY, Declaration())
    return found


@dataclass(frozen=True)
class Settings:
    """The base of declared settings: it checks each value against its field's type, bounds and choices.

    A subclass is a frozen dataclass. One with rules of its own extends ``__post_init__``.

    Raises:
        ValueError: a value of another type, out of its bounds, or none of the choices.
    """

    def __post_init__(self) -> None:
        kinds = kinds_of(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field, getattr(self, field.name), kinds[field.name])
            object.__setattr__(self, field.name, value)


_hints: Any = functools.cache(typing.get_type_hints)


def kinds_of(cls: type) -> dict[str, Any]:
    """The type of each field."""
    found: dict[str, Any] = _hints(cls)
    return found


def _checked(field: dataclasses.Field[Any], value: Any, kind: Any) -> Any:
    """``value`` in its field's type.

    Raises:
        ValueError: it has another type, is out of bounds, or is none of the choices.
    """
    about = declared(field)
    value = coerce(field.name, value, kind)
    for part in value if isinstance(value, tuple) else (value,):
        if part is None or isinstance(part, bool):
            continue
        if about.choices:
            _expect_choice(field.name, part, about.choices)
        if isinstance(part, int | float):
            _expect_within(field.name, part, about)
    return value


def _expect_choice(name: str, value: Any, choices: Sequence[Any] | Callable[[], Iterable[Any]]) -> None:
    allowed = list(choices() if callable(choices) else choices)
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{name}: expected one of {expected}, got {brief(value)}.{nearest(value, allowed, '')}"
        )


def _expect_within(name: str, value: float, about: Declaration) -> None:
    least, most, below = about.least, about.most, about.below
    if below is not None:
        if value >= below or (least is not None and value < least):
            raise ValueError(
                f"{name}: expected {'' if least is None else f'{least} to '}below {below}, got {brief(value)}."
            )
        return
    if (least is not None and value < least) or (most is not None and value > most):
        ends = {
            (True, False): f"{least} or more",
            (False, True): f"{most} or less",
            (True, True): f"{least} to {most}",
        }
        raise ValueError(f"{name}: expected {ends[least is not None, most is not None]}, got {brief(value)}.")


def expect_bounds(settings: Any, prefix: str) -> None:
    """Check the numbers of a dataclass whose fields may be set one by one, as those of a run are.

    Args:
        prefix: the section, which messages name.

    Raises:
        ValueError: a number out of its field's bounds.
    """
    for field in dataclasses.fields(settings):
        value, about = getattr(settings, field.name), declared(field)
        if isinstance(value, int | float):
            _expect_within(f"{prefix}.{field.name}", value, about)


# --- from text and from YAML -------------------------------------------------------------------------------------


_WHOLE = re.compile(r"[-+]?[0-9]{1,99}(_[0-9]{1,99}){0,9}")
_DECIMAL = re.compile(r"[-+]?([0-9]{1,99}\.?[0-9]{0,99}|\.[0-9]{1,99})([eE][-+]?[0-9]{1,3})?")
_YAML = ("[", "{", '"', "'")  # beginnings of it
_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


def parse_override(option: str, text: str) -> tuple[str, Any]:
    """Split ``key=value`` and read the value.

    Decimal numbers and the words for null, true and false are what YAML makes of them, and what begins with a bracket
    or a quote is read as YAML. All else is text as it stands: a "#" begins no comment, 1:30 and 2024-01-01 are no
    numbers, and 010 is ten.

    Args:
        option: named where there is no "=".

    Raises:
        ValueError: no "=", nothing after it, or a value that begins as YAML and is none.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option}: expected key=value, got {brief(text)}.")
    value = value.strip()
    if not value:
        raise ValueError(
            f"{key}: expected a value, got an empty one. Leave it out, or give null where none is meant."
        )
    if value[0] in _YAML or value.lower() in _WORDS:
        return key, parse_yaml(value, f"{key}: the value {brief(value)}")
    if _WHOLE.fullmatch(value):
        return key, int(value)
    return key, float(value) if _DECIMAL.fullmatch(value) else value


def override(key: str, text: str) -> str:
    """``key=value`` as a shell takes it, of which :func:`parse_override` reads this very text."""
    plain = (
        text[:1] not in ("", *_YAML)
        and text == text.strip()
        and parse_override(key, f"{key}={text}")[1] == text
    )
    return shlex.quote(f"{key}={text if plain else _quoted(text)}")


def _quoted(text: str) -> str:
    """In YAML's quotes, which know a letter beyond 16 bits by one number, where JSON writes two."""
    whole = json.dumps(text, ensure_ascii=False)
    return "".join(x if x.isprintable() else f"\\U{ord(x):08x}" for x in whole)


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The sections and keys of a YAML file; messages begin with ``name``.

    Raises:
        ValueError: no file, no YAML (see :func:`~trailmark.untrusted.parse_yaml`), or no mapping in it.
    """
    try:
        content = untrusted.read_yaml(path, name, links=True)
    except FileNotFoundError as error:
        raise ValueError(f"{name}: cannot read {str(path)!r}: {error.strerror}.") from error
    if not isinstance(content, dict):
        got = "nothing" if content is None else brief(content)
        raise ValueError(f"{name}: expected sections with keys in {str(path)!r}, as in configs/, got {got}.")
    return content


def from_mapping(cls: type[_Declared], raw: Any, prefix: str = "") -> _Declared:
    """Make an instance of a dataclass from the sections and keys of a YAML file.

    Args:
        prefix: the section, which messages name.

    Raises:
        ValueError: no mapping, an unknown key (with the nearest valid one), a value of another type.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{prefix or 'config'}: expected a section with keys, got {brief(raw)}.")
    kinds, values = kinds_of(cls), {}
    for key, value in raw.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in kinds:
            raise ValueError(f"{name}: unknown key.{nearest(key, kinds)}")
        values[key] = coerce(name, value, kinds[key])
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"{f'{prefix}.' if prefix else ''}{field.name}: expected a value, there is none."
            )
    return cls(**values)


def from_file(cls: type[_Declared], raw: Any) -> _Declared:
    """Make an instance of what a file of ours holds; what only a newer version wrote beside is left out.

    Raises:
        ValueError: as :func:`from_mapping`, and what the class itself checks.
    """
    known = kinds_of(cls)
    return from_mapping(
        cls, {key: value for key, value in raw.items() if key in known} if isinstance(raw, dict) else raw
    )


def parse_numbers(name: str, text: str, kind: type[int] | type[float] = int) -> tuple[Any, ...]:
    """The numbers of ``1024,16384``.

    Raises:
        ValueError: something else.
    """
    try:
        return tuple(kind(part.replace("_", "")) for part in text.split(","))
    except ValueError as error:
        example = "1024,16384" if kind is int else "0,0.5,1"
        raise ValueError(f"{name}: expected numbers as {example}, got {text!r}.") from error


def coerce(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``; YAML's 3e-3 is a string and 1 is no float, so numbers are converted.

    Raises:
        ValueError: it cannot be one.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if isinstance(value, bool) and str(value).lower() in arguments:
            return str(value).lower()  # memory_position: true
        if value in arguments:
            return value
        expected = " or ".join(map(repr, arguments))
        raise ValueError(f"{name}: expected {expected}, got {brief(value)}.{nearest(value, arguments)}")
    if origin in (typing.Union, types.UnionType):
        return _one_of(name, value, arguments)
    if origin in (list, tuple):
        alone = (str, Path, int, float) if str in arguments else (str, Path)
        parts = [value] if isinstance(value, alone) else value
        if not isinstance(parts, list | tuple):
            raise ValueError(f"{name}: expected a list, got {brief(value)}.")
        return origin(coerce(name, part, arguments[0]) for part in parts)
    if origin is dict or kind is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected a section with keys, got {brief(value)}.")
        if not arguments:
            return value
        return {
            coerce(name, key, arguments[0]): coerce(f"{name}.{brief(key)}", part, arguments[1])
            for key, part in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else from_mapping(kind, value, name)  # type: ignore[arg-type]
    return _scalar(name, value, kind)


def _one_of(name: str, value: Any, kinds: Sequence[Any]) -> Any:
    """``value`` as the first of ``kinds`` that takes it."""
    if value is None and type(None) in kinds:
        return None
    failures = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return coerce(name, value, kind)
            except ValueError as error:
                failures.append(error)
    raise failures[0]


def _scalar(name: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    elif kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif kind in (Path, str) and isinstance(value, str | Path):
        return kind(value)
    elif kind is bool and isinstance(value, bool):
        return value
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    quoted = kind in (str, Path) and isinstance(value, int | float)
    way_out = ' Put it in quotes: "..." in YAML, \'"..."\' on a command line.' if quoted else ""
    raise ValueError(f"{name}: expected {expected.get(kind, kind)}, got {brief(value)}.{way_out}")


def nearest(key: object, valid: Iterable[object], otherwise: str | None = None) -> str:
    """The end of an error's message: the name most like ``key``; where none is like it ``otherwise``, or all names."""
    names = sorted(map(str, valid))
    if close := difflib.get_close_matches(str(key), names, n=1, cutoff=0.5):
        return f" Did you mean {close[0]!r}?"
    return f" Valid: {', '.join(names)}." if otherwise is None else otherwise


# --- the command line --------------------------------------------------------------------------------------------


def parameters(cls: type, **how: Any) -> list[inspect.Parameter]:
    """The parameters of a typer command that takes these settings, those that must be given first."""
    made = [
        parameter(cls, field, **how) for field in dataclasses.fields(cls) if declared(field).on_command_line
    ]
    return sorted(made, key=lambda one: one.default is not inspect.Parameter.empty)


def parameter(
    cls: type, field: dataclasses.Field[Any], *, optional: bool = False, **shown: Any
) -> inspect.Parameter:
    """The parameter of a typer command for one field.

    Args:
        optional: it may be left out, and is None then, whatever its default. shown: what typer shall show otherwise,
            as ``help`` or ``rich_help_panel``.
    """
    import typer  # not needed by those who only check settings

    about, kind = declared(field), kinds_of(cls)[field.name]
    needed = field.default is dataclasses.MISSING and not optional
    shown = {"help": help_of(field, optional)} | shown
    given = _given(kind, about)
    if given in (int, float):
        shown |= {"min": about.least, "max": about.most}
    if given in (Path, list[Path]):
        shown = {"parser": _path} | shown
    names = (about.option or "").split()
    if about.argument:
        annotation: Any = Annotated[_or_none(given, not needed), typer.Argument(**shown)]
    elif given is bool:
        annotation = Annotated[_or_none(bool, optional), typer.Option(*names, **shown)]
    else:
        annotation = Annotated[_or_none(given, not needed), typer.Option(*names, **shown)]
    default: Any = inspect.Parameter.empty
    if not needed:
        plain = not optional and not isinstance(field.default, tuple)
        default = field.default if plain else None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _path(text: str | Path) -> Path:
    """A path of a command line. An empty one, of a variable that is not set, would name the current folder."""
    import typer

    if not str(text):
        raise typer.BadParameter("expected a path, got an empty one. Name '.' for the current folder.")
    return Path(text)


def help_of(field: dataclasses.Field[Any], optional: bool = False) -> str:
    """The help text of a field, with the default that typer does not show: one in words, or that of an option that
    is ``optional``."""
    about, default = declared(field), declared(field).default
    plain = (
        optional
        and not isinstance(field.default, bool)
        and field.default not in (None, (), dataclasses.MISSING)
    )
    if default is None and plain:
        default = as_text(field.default)
    return f"{about.help.removesuffix('.')}; default: {default}." if default else about.help


def _given(kind: Any, about: Declaration) -> Any:
    """The type that typer reads from a command line: of a tuple that stands between commas it is text."""
    kinds = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _given(kinds[0], about)
    if typing.get_origin(kind) in (tuple, list):
        return list[kinds[0]] if about.repeated or about.argument else str  # type: ignore[valid-type]
    return kind if kind in (int, float, bool, Path) else str


def _or_none(kind: Any, optional: bool) -> Any:
    return kind | None if optional else kind


def from_options(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields from what typer read for their parameters; what was left out is missing.

    Raises:
        ValueError: numbers between commas that are none.
    """
    values = {}
    for field in dataclasses.fields(cls):
        value = given.get(field.name)
        if value is None or value == []:
            continue
        if isinstance(value, str) and (kind := _of_tuple(kinds_of(cls)[field.name])) is not None:
            value = tuple(value.split(",")) if kind is str else parse_numbers(field.name, value, kind)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _of_tuple(kind: Any) -> Any:
    """The type of a tuple's parts; None where ``kind`` is no tuple."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((part for one in typing.get_args(kind) if (part := _of_tuple(one))), None)
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def takes(cls: type[_Declared]) -> Callable[[Callable[[_Declared], None]], Callable[..., None]]:
    """A decorator that makes a typer command of a function of settings: their fields are its options."""

    def decorate(function: Callable[[_Declared], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(cls(**from_options(cls, given)))

        return with_parameters(command, function, parameters(cls))

    return decorate


def with_parameters(
    command: Callable[..., None], like: Callable[..., Any], made: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """``command`` with the name and the help of ``like`` and with these parameters, as typer reads them."""
    command.__name__, command.__doc__, command.__module__ = like.__name__, like.__doc__, like.__module__
    command.__annotations__ = {one.name: one.annotation for one in made} | {"return": None}
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    return command


# --- the command that repeats a result -----------------------------------------------------------------------------


def words(cls: type, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give ``values`` to a command of these settings.

    What is None, unknown, or only set by programs is left out; a flag stands where it is true.
    """
    found: list[str] = []
    for field in dataclasses.fields(cls):
        about, value = declared(field), values.get(field.name)
        if value is None or not about.on_command_line:
            continue
        if about.argument:
            found += map(as_text, value if isinstance(value, list | tuple) else [value])
            continue
        name = (about.option or f"--{field.name.replace('_', '-')}").split()[0]
        if isinstance(value, bool):
            found += [name] if value else []
        elif isinstance(value, list | tuple) and about.repeated:
            found += [word for part in value for word in (name, as_text(part))]
        else:
            found += [name, as_text(value)]
    return found


def as_text(value: Any) -> str:
    """A value as it stands on a command line: whole numbers without a point, lists between commas."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)


def gathered(cls: type, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that lead to the results of a record, from what each of its results says it was asked.

    Results that differ in nothing but their parts of tuples (``cell``) belong to one command.
    """
    fields = [field for field in dataclasses.fields(cls) if declared(field).recorded]
    groups: dict[str, dict[str, Any]] = {}
    for cell in cells:
        parts = {f.name: cell[c] for f in fields if (c := declared(f).cell) and cell.get(c) is not None}
        shared = {f.name: cell[f.name] for f in fields if f.name not in parts and f.name in cell}
        key = json.dumps([shared, sorted(parts)], sort_keys=True, default=str)
        group = groups.setdefault(key, shared | dict.fromkeys(parts, ()))
        for name, part in parts.items():
            group[name] += (part,) if part not in group[name] else ()
    return list(groups.values())
