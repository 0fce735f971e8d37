"""Fields of configurations from text: what a user may set, and as which type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_origin

from huggingface_hub.errors import StrictDataclassError

from trailmark import pretrained
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.registry import architectures, short_name
from trailmark.settings import coerce, nearest, parse_override


def field_types(cls: type[TrailmarkConfig]) -> dict[str, Any]:
    """The fields of a model's configuration that are ours, not all of transformers', and their types."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, TrailmarkConfig):
            hints |= inspect.get_annotations(base, eval_str=True)
    return {key: kind for key, kind in hints.items() if get_origin(kind) is not ClassVar}


def config_class(section: Mapping[str, Any]) -> type[TrailmarkConfig]:
    """The configuration class of the architecture that the section ``model`` of a YAML file names; by default DRT's.

    Raises:
        ValueError: there is no such architecture.
    """
    name, known = section.get("architecture", "drt"), architectures()
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"model.architecture: expected {' or '.join(known)}, got {name!r}.{nearest(name, known)}"
        )
    cls: type[TrailmarkConfig] = known[name].config_class
    return cls


def build_config(section: Mapping[str, Any], more: Mapping[str, Any]) -> TrailmarkConfig:
    """The configuration that the section ``model`` of a YAML file describes.

    Args:
        more: fields that replace those of the section.

    Raises:
        ValueError: an unknown architecture or field, a value of another type, sizes that do not fit.
    """
    cls = config_class(section)
    fields = {
        name: as_field(f"model.{name}", name, value, cls)
        for name, value in section.items()
        if name != "architecture"
    }
    try:
        return cls(**fields | dict(more))
    except StrictDataclassError as error:
        raise ValueError(f"model: {_innermost(error)}") from error


def saved_fields(folder: str) -> dict[str, Any]:
    """The section ``model`` that describes the model in a folder; empty where there is none of ours.

    Raises:
        ValueError: its config.json is none.
    """
    saved, known = pretrained.expect_readable(folder, "init_from"), architectures()
    names = [name for name, cls in known.items() if cls.config_class.model_type == saved.get("model_type")]
    if not names:
        return {}
    kinds = field_types(known[names[0]].config_class)
    own = {name: value for name, value in saved.items() if name in kinds}
    return {"architecture": names[0], **own}


def parse_fields(option: str, texts: Sequence[str], cls: type[TrailmarkConfig]) -> dict[str, Any]:
    """``field=value`` texts of a model's configuration, each as its field's type.

    Raises:
        ValueError: no such field (with the nearest valid one), a value of another type.
    """
    given = dict(parse_override(option, text) for text in texts)
    return {name: as_field(f"{option}: {name}", name, value, cls) for name, value in given.items()}


def as_field(place: str, name: str, value: Any, cls: type[TrailmarkConfig]) -> Any:
    """A value as the field's type; messages name the place that it was found in."""
    kinds = field_types(cls)
    if name not in kinds:
        raise ValueError(f"{place}: unknown field of {short_name(cls.model_type)}.{nearest(name, kinds)}")
    return coerce(place, value, kinds[name])


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1].strip()
