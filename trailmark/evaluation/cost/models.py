"""Models whose cost is measured: from folders, or with random weights from a YAML file, which cost the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.trained_embedders import embedder_of
from trailmark.evaluation.subject import Subject, is_sizes, load
from trailmark.models import MODELS, short_name
from trailmark.models.fields import build_config, config_class, parse_fields
from trailmark.models.size import expect_memory
from trailmark.settings import read_yaml


def load_or_build(path: Path, changes: Sequence[str] = (), seed: int = 0) -> Subject:
    """The model of a folder or hub name, of any architecture; of a YAML file, one with random weights.

    Args:
        changes: fields of its configuration to set, as "num_retrieved_chunks=4".
        seed: of random weights.

    Raises:
        ValueError: as :func:`trailmark.evaluation.subject.load` and :func:`random_subject`.
    """
    return random_subject(path, changes, seed) if is_sizes(path) else load(path, changes, any_model=True)


def random_subject(source: Path | Mapping[str, Any], changes: Sequence[str] = (), seed: int = 0) -> Subject:
    """A model with random weights: what it computes means nothing, what it costs does.

    Args:
        source: a YAML file as trailmark train reads it, of which the section ``model`` counts (and ``data.tokenizer``,
            where the model names no ``vocab_size``, or an encoder that needs one); or such a mapping.

    Raises:
        ValueError: no such section, an unknown architecture or field, a value of another type, sizes that do not fit,
            a tokenizer or an embedder that cannot be opened.
    """
    settings = read_yaml(source, "model") if isinstance(source, Path) else source
    section, data = settings.get("model"), settings.get("data")
    if not isinstance(section, Mapping):
        raise ValueError(
            f"model: expected a section 'model' with an architecture and its sizes, got {section!r}. "
            "Name a file as configs/laptop-drt-x1.yaml."
        )
    named = str(data.get("tokenizer", "bytes")) if isinstance(data, Mapping) else "bytes"
    changed = parse_fields("set", changes, config_class(section))
    sizes = {} if "vocab_size" in section else {"vocab_size": len(load_tokenizer(named))}
    config = build_config(section, sizes | changed)
    tokenizer = None if getattr(config, "embedder", None) is None else load_tokenizer(named)
    expect_memory(config, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[config.model_type](config)
    model.embedder = embedder_of(config, tokenizer)
    folder = source if isinstance(source, Path) else Path(short_name(config.model_type))
    return Subject(folder, model.eval(), tokenizer, {}, {"weights": f"random, seed {seed}"} | changed)
