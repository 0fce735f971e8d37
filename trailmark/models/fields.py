"""Fields of configurations from text: what a user may set, and as which type."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from trailmark.models.configuration import TrailmarkConfig
from trailmark.settings import coerce, nearest, parse_override


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
