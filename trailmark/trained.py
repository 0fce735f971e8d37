"""What the files of a model say: its weights' hash, which are records, and how long its training texts were."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark import untrusted

RECORD_KIND, RECORD_FORMAT = "trailmark evaluation", 1
"""In the JSON of ``trailmark evaluate``, as "kind" and "format"."""


CONVERSION = "conversion.json"
"""The record of ``trailmark convert`` in a folder that it made."""


def weights_sha256(folder: Path) -> str | None:
    """Of the model's safetensors files, every byte; None where there is none."""
    digests = []
    for path in sorted(folder.glob("model*.safetensors")):  # a checkpoint has the optimizer's too
        untrusted.expect_regular(path, "model", links=True)
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def trained_length(model: Any, run: Any, history: Any) -> int | None:
    """Tokens of the longest training text: of needles the curriculum's longest, of other tasks the context.

    Args:
        model: the model's configuration. run: run.yaml. history: history.json. Of each what is there, whatever it is.
    """
    data, training = _mapping(_mapping(run).get("data")), _mapping(_mapping(run).get("training"))
    if data.get("task") != "needles":
        length = training.get("context_length")
        return length if isinstance(length, int) else None
    levels = _mapping(history).get("levels")
    chunks = [_mapping(level).get("chunks") for level in levels] if isinstance(levels, list) else []
    counts = [count for count in chunks if isinstance(count, int)]
    size = _mapping(model).get("chunk_size") or data.get("chunk_size")
    return max(counts) * size if counts and isinstance(size, int) else None


def base_length(conversion: Any) -> int | None:
    """Tokens of the longest text that a converted model's base was trained for, of its conversion.json."""
    length = _mapping(_mapping(conversion).get("base")).get("trained_length")
    return length if isinstance(length, int) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
