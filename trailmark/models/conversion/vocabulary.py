"""The tokenizer of a base: opened, and saved without tokens that its model has no embedding of."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trailmark import pretrained
from trailmark.files import read_json, write_json

_TOKENS, _PIECES, _SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"


def open_tokenizer(folder: Path, name: str, argument: str, options: Mapping[str, Any]) -> Any:
    """The tokenizer beside the weights of the base ``name``; ``options``: of transformers, with a .gguf file.

    Raises:
        ValueError: there is none, or a package is missing that reads it.
    """
    if not options:
        there = {path.name for path in folder.iterdir()}
        if not there & {_TOKENS, _PIECES, _SETTINGS, "vocab.json"}:
            raise ValueError(
                f"{argument}: expected a tokenizer beside the weights, {name} has none. Put its {_TOKENS} there."
            )
        needed = [package for package in ("sentencepiece", "google.protobuf") if not _is_there(package)]
        if _TOKENS not in there and _PIECES in there and needed:
            raise ValueError(
                f"{argument}: expected a {_TOKENS} beside the weights, {name} has {_PIECES} alone, which transformers "
                "reads with other packages. pip install sentencepiece protobuf"
            )
    return pretrained.load_tokenizer(folder, argument, **options)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what it lies in is missing
        return False


def save_tokenizer(tokenizer: Any, folder: Path, vocab_size: int, argument: str) -> list[str]:
    """Save a tokenizer whose every token a model of ``vocab_size`` embeddings can read.

    Tokens that somebody added to the tokenizer and not to the model, most often one to pad with, are left out: text
    that spells them becomes other tokens.

    Returns:
        What was left out.

    Raises:
        ValueError: other tokens have no embedding either.
    """
    tokenizer.save_pretrained(folder)
    known = read_json(folder / _TOKENS)
    if len(tokenizer) <= vocab_size or known is None:  # one of bytes has none, and numbers that are never used
        return []
    added = known.get("added_tokens", [])
    out = [token["content"] for token in added if token["id"] >= vocab_size]
    write_json(folder / _TOKENS, known | {"added_tokens": [x for x in added if x["id"] < vocab_size]})
    settings = {name: _without(x, out) for name, x in (read_json(folder / _SETTINGS) or {}).items()}
    write_json(folder / _SETTINGS, {name: x for name, x in settings.items() if x is not None})
    left = len(pretrained.load_tokenizer(folder, argument))
    if left > vocab_size:
        raise ValueError(
            f"{argument}: expected a tokenizer of at most {vocab_size} tokens, which the model has embeddings of, its "
            f"own has {left} without those that were added. Put the one there that the model was trained with."
        )
    return out


def _without(value: Any, out: list[str]) -> Any:
    """A setting of a tokenizer without these tokens; None: it was one of them."""
    if isinstance(value, list):
        return [x for x in value if _without(x, out) is not None]
    if isinstance(value, dict):
        if "content" in value:  # a token with how it is found in text
            return None if value["content"] in out else value
        return {name: x for name, own in value.items() if (x := _without(own, out)) is not None}
    return None if isinstance(value, str) and value in out else value
