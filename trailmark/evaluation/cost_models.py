"""Models whose cost is measured: from folders, or with random weights from a YAML file, which cost the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError

from trailmark.data.corpus import load_tokenizer
from trailmark.data.trained_embedders import embedder_of
from trailmark.evaluation.subject import Subject, load
from trailmark.models import MODELS, TrailmarkConfig, architectures, short_name
from trailmark.models.fields import field_types, parse_fields
from trailmark.settings import coerce, nearest

_SUFFIXES = (".yaml", ".yml")


def load_or_build(path: Path, changes: Sequence[str] = (), seed: int = 0) -> Subject:
    """The model of a folder or hub name, of any architecture; of a YAML file, one with random weights.

    Args:
        changes: fields of its configuration to set, as "num_retrieved_chunks=4".
        seed: of random weights.

    Raises:
        ValueError: as :func:`trailmark.evaluation.subject.load` and :func:`random_subject`.
    """
    if path.suffix.lower() in _SUFFIXES:
        return random_subject(path, changes, seed)
    return load(path, changes, any_model=True)


def random_subject(source: Path | Mapping[str, Any], changes: Sequence[str] = (), seed: int = 0) -> Subject:
    """A model with random weights: what it computes means nothing, what it costs does.

    Args:
        source: a YAML file as trailmark train reads it, of which the section ``model`` counts (and ``data.tokenizer``,
            where the model names no ``vocab_size``, or an encoder that needs one); or such a mapping.

    Raises:
        ValueError: as :func:`model_config`; a tokenizer or an embedder that cannot be opened.
    """
    settings = read_settings(source) if isinstance(source, Path) else source
    config = model_config(settings, changes)
    tokenizer = None
    if getattr(config, "embedder", None) is not None:
        tokenizer = load_tokenizer(_tokenizer_of(settings))
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = MODELS[config.model_type](config)
    finally:
        torch.random.set_rng_state(state)
    model.embedder = embedder_of(config, tokenizer)
    folder = source if isinstance(source, Path) else Path(short_name(config.model_type))
    changed = {"weights": f"random, seed {seed}"} | parse_fields("set", changes, type(config))
    return Subject(folder, model.eval(), tokenizer, {}, changed)


def model_config(settings: Mapping[str, Any], changes: Sequence[str] = ()) -> TrailmarkConfig:
    """The configuration that the section ``model`` of a training YAML describes.

    Raises:
        ValueError: no such section, an unknown architecture or field, a value of another type, sizes that do not fit.
    """
    section = settings.get("model")
    if not isinstance(section, Mapping):
        raise ValueError(
            f"model: expected a section 'model' with an architecture and its sizes, got {section!r}. "
            "Name a file as configs/laptop-drt-x1.yaml."
        )
    fields = dict(section)
    known = architectures()
    name = fields.pop("architecture", "drt")
    if name not in known:
        raise ValueError(
            f"model.architecture: expected {' or '.join(known)}, got {name!r}.{nearest(name, known)}"
        )
    cls = known[name].config_class
    hints = field_types(cls)
    for key in fields:
        if key not in hints:
            raise ValueError(f"model.{key}: unknown field of {name}.{nearest(key, hints)}")
        fields[key] = coerce(f"model.{key}", fields[key], hints[key])
    fields |= parse_fields("set", changes, cls)
    if "vocab_size" not in fields:
        fields["vocab_size"] = len(load_tokenizer(_tokenizer_of(settings)))
    try:
        return cls(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"model: {error}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """A YAML file of settings.

    Raises:
        ValueError: no file, no YAML, or no sections in it.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model: cannot read {str(path)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"model: {str(path)!r} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: expected sections in {str(path)!r}, got {type(found).__name__}.")
    return found


def _tokenizer_of(settings: Mapping[str, Any]) -> str:
    data = settings.get("data")
    return str(data.get("tokenizer", "bytes")) if isinstance(data, Mapping) else "bytes"
