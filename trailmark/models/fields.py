"""Fields of configurations from text: what a user may set, and as which type."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import yaml

from trailmark.models.configuration import TrailmarkConfig


def field_types(cls: type[TrailmarkConfig]) -> dict[str, Any]:
    """The fields of a model's configuration that are ours, not all of transformers', and their types."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, TrailmarkConfig):
            hints |= inspect.get_annotations(base, eval_str=True)
    return {
        key: kind for key, kind in hints.items() if key not in ("model_type", "keys_to_ignore_at_inference")
    }


def parse_fields(option: str, texts: Sequence[str], cls: type[TrailmarkConfig]) -> dict[str, Any]:
    """``field=value`` texts of a model's configuration (values are YAML), each as its field's type.

    Raises:
        ValueError: no such field (with the nearest valid one), a value of another type.
    """
    hints, fields = field_types(cls), {}
    for text in texts:
        key, value = parse_override(option, text)
        if key not in hints:
            kind = cls.model_type.removeprefix("trailmark_")
            raise ValueError(f"{option}: {key}: unknown field of {kind}.{nearest(key, hints)}")
        fields[key] = coerce(f"{option}: {key}", value, hints[key])
    return fields


def parse_override(option: str, text: str) -> tuple[str, Any]:
    """``key=value``, the value read as YAML; ``option`` is named where there is no "="."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option}: expected key=value, got {text!r}.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{key}: expected a YAML value, got {value!r}.") from error


def coerce(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``; YAML's 3e-3 is a string and 1 is no float, so numbers are converted."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if isinstance(value, bool) and str(value).lower() in arguments:
            return str(value).lower()  # memory_position: true
        if value in arguments:
            return value
        expected = " or ".join(map(repr, arguments))
        raise ValueError(f"{name}: expected {expected}, got {value!r}.{nearest(value, arguments)}")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        failures = []
        for option in arguments:
            if option is not type(None):
                try:
                    return coerce(name, value, option)
                except ValueError as error:
                    failures.append(error)
        raise failures[0]
    if origin is list:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            return [coerce(name, item, arguments[0]) for item in value]
        raise ValueError(f"{name}: expected a list, got {value!r}.")
    if origin is dict or kind is dict:
        if isinstance(value, dict):
            return value
        raise ValueError(f"{name}: expected a section with keys, got {value!r}.")
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
    elif kind in (bool, str) and isinstance(value, kind):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ValueError(f"{name}: expected {names.get(kind, kind)}, got {value!r}.")


def nearest(key: object, valid: Iterable[str]) -> str:
    """The end of an error message: the name most like ``key``, or all of them."""
    close = difflib.get_close_matches(str(key), [str(v) for v in valid], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Valid: {', '.join(sorted(map(str, valid)))}."
