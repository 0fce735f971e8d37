"""The one door through which files from strangers come in: regular, bounded, of a known shape, and finite.

A manifest, a configuration or a record may come from anywhere. What is read here is a regular file (a FIFO would hang,
a device never end), no larger than what it is read as, JSON or YAML that is nested no deeper and repeated no more often
than people write it, and no number that is not finite. Every failure is a ValueError of one line that names the file.
Nothing here runs code.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO, Never

import yaml

MOST_BYTES = 256 << 20
"""Of a file that is parsed as a whole: a record of many results; a manifest has a few KiB."""
_MOST_VALUES = 1_000_000  # of a YAML file, each counted as often as aliases repeat it
_MOST_YAML_BYTES = (
    4 << 20 if hasattr(yaml, "CSafeLoader") else 256 << 10
)  # Python alone reads 50 KiB per second
_DEEPEST_YAML = 100
_MOST_DIGITS = 400
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


# --- files -----------------------------------------------------------------------------------------------------


def open_regular(path: str | Path, argument: str, links: bool = False) -> BinaryIO:
    """Open a regular file for reading, and nothing else.

    Args:
        argument: what messages begin with: the argument by which a user names the file or its folder.
        links: whether ``path`` may be a symbolic link. A user's own text may be one, as may a model's file in the cache
            of the hub; files in a folder of ours are none.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a folder, a FIFO, a device, a socket or a link; or it may not be read.
    """
    # without O_NONBLOCK the opening of a FIFO waits for a writer
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        expect_regular(path, argument, links)
        descriptor = os.open(path, flags | (0 if links else getattr(os, "O_NOFOLLOW", 0)))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{argument}: cannot read {str(path)!r} ({error.strerror or error}).") from error
    file = os.fdopen(descriptor, "rb")
    try:  # what was opened, whatever has the name by now
        _expect_kind(os.fstat(descriptor).st_mode, path, argument)
    except ValueError:
        file.close()
        raise
    return file


def expect_regular(path: str | Path, argument: str, links: bool = False) -> None:
    """Raise a ValueError where something other than a regular file has this name, for those that open it themselves.

    Raises:
        FileNotFoundError: there is nothing.
    """
    try:
        mode = os.stat(path, follow_symlinks=links).st_mode
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a loop of links; a name with a zero byte
        raise ValueError(f"{argument}: cannot read {str(path)!r} ({error}).") from error
    _expect_kind(mode, path, argument)


def files_like(folder: Path, *patterns: str) -> list[Path]:
    """The files of a folder with such names, in order; hidden ones are what other programs leave there."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("."))


def _expect_kind(mode: int, path: str | Path, argument: str) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "a device")
        raise ValueError(
            f"{argument}: expected a regular file, {str(path)!r} is {kind}. Name a file, or put the file itself there."
        )


def read_bytes(path: str | Path, argument: str, most: int = MOST_BYTES, links: bool = False) -> bytes:
    """The content of a regular file of at most ``most`` bytes; errors as :func:`open_regular`."""
    with open_regular(path, argument, links) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise ValueError(f"{argument}: cannot read {str(path)!r} ({error.strerror or error}).") from error
    if len(content) > most:
        raise ValueError(
            f"{argument}: expected at most {most:,} bytes in {str(path)!r}, there are more. It is no such file."
        )
    return content


def read_json(
    path: str | Path, argument: str, most: int = MOST_BYTES, links: bool = False, finite: bool = True
) -> Any:
    """The content of a JSON file; errors as :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_bytes(path, argument, most, links), f"{argument}: {str(path)!r}", finite)


def read_yaml(path: str | Path, argument: str, links: bool = False) -> Any:
    """The content of a YAML file; errors as :func:`read_bytes` and :func:`parse_yaml`."""
    return parse_yaml(read_bytes(path, argument, _MOST_YAML_BYTES, links), f"{argument}: {str(path)!r}")


# --- JSON and YAML -----------------------------------------------------------------------------------------------


def parse_json(content: bytes | str, what: str, finite: bool = True) -> Any:
    """Parse JSON.

    Args:
        what: what messages begin with.
        finite: whether numbers beyond float64, NaN and Infinity are refused; else they are read as Python reads them.

    Raises:
        ValueError: it is not UTF-8, no JSON, nested too deep, or holds a key twice or a number that is not finite.
    """

    def refuse(text: str) -> Never:
        raise _Refused(f"{brief(text)}, expected finite numbers")

    def finite_number(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise _Refused(f"the key {brief(twice)} twice")
        return content

    hooks: dict[str, Any] = {"object_pairs_hook": once}
    if finite:
        hooks |= {"parse_constant": refuse, "parse_float": finite_number}
    text = _decoded(content, f"{what} is no JSON")
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep to be read.") from None
    except _Refused as error:
        raise ValueError(f"{what} holds {error}.") from error
    except ValueError as error:  # also of a number of too many digits
        raise ValueError(f"{what} is no JSON: {error}.") from error


def _decoded(content: bytes | str, what: str) -> str:
    try:
        return content.decode("utf-8") if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: the byte at {error.start} is none of UTF-8 ({error.reason}).") from error


class _Refused(Exception):
    """What JSON allows and we do not: no ValueError, which json itself raises for other reasons."""


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with libyaml


def parse_yaml(content: bytes | str, what: str) -> Any:
    """Parse YAML: plain values alone, no tags that make objects.

    Raises:
        ValueError: it is not UTF-8, no YAML, nested too deep, a key stands twice in a mapping, written alike, a number
            is too long, or aliases repeat so much that it holds over a million values.
    """
    text = _decoded(content, f"{what} is no YAML")
    try:
        _expect_shallow(text)  # what composes calls itself for each level, in C without looking at how deep
        node = yaml.compose(text, Loader=_SafeLoader)
        if _values(node, {}) > _MOST_VALUES:  # before merge keys copy what they name
            raise yaml.YAMLError(f"it holds over {_MOST_VALUES:,} values, most by aliases that repeat others")
        return None if node is None else _constructed(node)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep to be read, or holds itself.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # dates and numbers that are none, too
        raise ValueError(f"{what} is no YAML: {' '.join(str(error).split()).rstrip('.')}.") from error


def _expect_shallow(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST_YAML:
            raise RecursionError


def _constructed(node: Any) -> Any:
    loader = _SafeLoader("")
    try:
        return loader.construct_document(node)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # PyYAML's, of "!!bool x" and the like
        raise yaml.YAMLError(f"a value is none of its tag ({error!r})") from error
    finally:
        loader.dispose()


def _values(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node holds; those of an alias count where it stands. RecursionError: it holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        is_int = node is not None and node.tag == "tag:yaml.org,2002:int"  # None: of an empty text
        if is_int and len(node.value) > _MOST_DIGITS:
            raise yaml.YAMLError(f"a number has {len(node.value):,} characters")  # 1:1:1 takes quadratic time
        return 1
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            _expect_keys_once(node)
        parts = (
            node.value if isinstance(node, yaml.SequenceNode) else [x for pair in node.value for x in pair]
        )
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


def _expect_keys_once(node: Any) -> None:
    seen = set()
    for key, _ in node.value:
        name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
        if name in seen and key.tag != "tag:yaml.org,2002:merge":
            raise yaml.YAMLError(f"the key {brief(key.value)} stands twice, the second time{key.start_mark}")
        seen.add(name)


# --- messages ----------------------------------------------------------------------------------------------------


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        try:
            text = str(x)
        except ValueError:  # of more digits than Python writes
            return f"a number of about {x.bit_length() * 3 // 10} digits"
        return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"


_repr = _Repr()


def first_line(error: BaseException | str) -> str:
    """What another library's error says first, at most 400 characters of it, or its kind: for a message of one line."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip().rstrip(".")
    return line if len(line) <= 400 else f"{line[:397]}..."


def brief(value: Any) -> str:
    """``repr(value)``, shortened where it is long, deep or holds itself: for messages that quote what came."""
    text = _repr.repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
