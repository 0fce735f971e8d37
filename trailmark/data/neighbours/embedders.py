"""Embedders: what turns the tokens of a chunk into vectors without being trained with the model.

    hash[:DIM]                          signed hashes of tokens, square roots of their counts; needs no weights
    bm25:FILE                           BM25 as a product of vectors, by the statistics of a corpus (bm25.fit_bm25)
    transformers:FOLDER                 mean of an encoder's last hidden states, as Contriever (arXiv 2112.09118)
    sentence-transformers:FOLDER        a SentenceTransformer as it is, without prompts

Hub names serve as folders do. The last two embed the text that the language model's tokenizer decodes.
A chunk's vectors depend on its own tokens alone: see the classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trailmark.data.neighbours.bm25 import load_bm25
from trailmark.data.neighbours.text_embedders import SentenceTransformersEmbedder, TransformersEmbedder
from trailmark.data.neighbours.token_embedders import HASH_SIZE, Bm25Embedder, HashEmbedder
from trailmark.untrusted import first_line

KINDS = ("hash", "bm25", "transformers", "sentence-transformers")
_MOST = 1 << 17  # numbers of a vector: hundreds of them are in memory at a time


class Embedder(Protocol):
    """What every embedder is; models rely on the first two and the call."""

    size: int
    """d, numbers of a vector."""
    fingerprint: str
    """SHA-256 of its weights, kind, options and the language model's tokenizer."""
    spec: str
    """What :func:`open_embedder` opens it by."""
    tokenizer_fingerprint: str
    """Of the language model's tokenizer."""

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, d] and keys [n, d], float32, of chunks ids int64 [n, S] of ``lengths`` [n] tokens, on the CPU."""


def open_embedder(spec: str, tokenizer: Any, device: str | None = "cpu") -> Embedder:
    """The embedder that ``spec`` names; see the top of this file.

    Args:
        tokenizer: the language model's.
        device: where the encoders of the last two kinds compute; their vectors come back to the CPU. None: "cuda" if
            there is one, else "cpu".

    Raises:
        ValueError: an unknown kind; a size, file, folder or weights that cannot be used; statistics of another
            tokenizer; a library that is not installed; a device that is not there.
    """
    place = device_named(device)
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        hint = f" For an encoder in a folder: transformers:{spec}." if Path(spec).is_dir() else ""
        raise ValueError(
            f"embedder: expected hash, hash:DIM, bm25:FILE, transformers:FOLDER or sentence-transformers:FOLDER, got "
            f"{spec!r}.{hint}"
        )
    if kind == "hash":
        if rest and not (rest.isascii() and rest.isdecimal() and 1 <= int(rest) <= _MOST):
            raise ValueError(f"embedder: expected hash:DIM with DIM from 1 to {_MOST}, got {spec!r}.")
        return HashEmbedder(tokenizer, int(rest or HASH_SIZE))
    if not rest:
        what = "bm25:FILE" if kind == "bm25" else f"{kind}:FOLDER, or a hub name in its place"
        raise ValueError(f"embedder: expected {what}, got {spec!r}.")
    if kind == "bm25":
        return Bm25Embedder(tokenizer, load_bm25(rest), spec)
    if kind == "transformers":
        return TransformersEmbedder(rest, tokenizer, place)
    return SentenceTransformersEmbedder(rest, tokenizer, place)


def device_named(name: str | None) -> torch.device:
    """A device that can be computed on; None: CUDA's if there is one, else the CPU.

    Raises:
        ValueError: no such device, or none of its kind here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has shapes alone
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each kind fails in its own way
        raise ValueError(
            f"device: expected one to compute on, cpu or cuda, got {name!r} ({first_line(error)}). Leave it out "
            "for cuda if there is one, else the CPU."
        ) from error
    return device
