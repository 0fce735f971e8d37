"""The tokenizer of a base: opened, and saved without tokens that its model has no embedding of."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trailmark import pretrained
from trailmark.files import read_json, write_json

_TOKENS, _PIECES, _SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
_GONE = object()


def open_tokenizer(folder: Path, name: str, argument: str, options: Mapping[str, Any]) -> Any:
    """The tokenizer beside the weights of the base ``name``; ``options``: of transformers, with a .gguf file.

    Raises:
        ValueError: there is none, or a package is missing that reads it.
    """
    if not options and not pretrained.has_tokenizer(folder):
        raise ValueError(
            f"{argument}: expected a tokenizer beside the weights, {name} has none. Put its {_TOKENS} there."
        )
    alone = not options and (folder / _PIECES).is_file() and not (folder / _TOKENS).is_file()
    if alone and not all(map(_is_there, ("sentencepiece", "google.protobuf"))):
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


def without_embedding(tokenizer: Any, vocab_size: int, argument: str) -> list[str]:
    """The tokens that somebody added to a tokenizer and not to its model, most often one to pad with.

    Raises:
        ValueError: tokens that were not added have no embedding either.
    """
    if not tokenizer.is_fast:  # one of bytes, with numbers that are never used
        return []
    added = tokenizer.added_tokens_decoder
    last = max((number for number in tokenizer.get_vocab().values() if number not in added), default=0)
    if last >= vocab_size:
        raise ValueError(
            f"{argument}: expected a tokenizer of at most {vocab_size} tokens, which the model has embeddings of, its "
            f"own has {last + 1} without those that were added. Put the one there that the model was trained with."
        )
    return [str(token) for number, token in sorted(added.items()) if number >= vocab_size]


def save_tokenizer(tokenizer: Any, folder: Path, left_out: Sequence[str], argument: str) -> None:
    """Save a tokenizer without some tokens: text that spells them becomes others.

    Raises:
        ValueError: it puts one of them around every text.
    """
    tokenizer.save_pretrained(folder)
    if not left_out:
        return
    known, settings = read_json(folder / _TOKENS), read_json(folder / _SETTINGS)
    added = [token for token in known["added_tokens"] if token["content"] not in left_out]
    write_json(folder / _TOKENS, known | {"added_tokens": added, "padding": None})
    write_json(folder / _SETTINGS, _without(settings, left_out))
    kept = pretrained.load_tokenizer(folder, argument)
    if max(kept("a")["input_ids"]) > max(kept.get_vocab().values()):
        raise ValueError(
            f"{argument}: expected a tokenizer of tokens that the model has embeddings of, it puts others around each "
            f"text ({', '.join(left_out)} have none). Put the one there that the model was trained with."
        )


def _without(value: Any, out: Sequence[str]) -> Any:
    """A setting of a tokenizer without these tokens; _GONE: it was one of them."""
    if isinstance(value, list):
        return [x for x in value if _without(x, out) is not _GONE]
    if isinstance(value, dict):
        if value.get("content") in out:  # a token with how it is found in text
            return _GONE
        kept = {name: _without(own, out) for name, own in value.items()}
        return {name: x for name, x in kept.items() if x is not _GONE}
    return _GONE if isinstance(value, str) and value in out else value
