"""The tokenizer of a base, without tokens that its model has no embedding of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trailmark import pretrained
from trailmark.files import read_json, write_json

_TOKENS, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


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
    if len(tokenizer) <= vocab_size:
        return []
    known = read_json(folder / _TOKENS) or {}
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
