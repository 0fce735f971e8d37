"""Kinds of text that small models learn from: what they are trained on, and the held-out texts that measure them."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from common import ROOT, data_folder
from pretrained_models import chapters, held_out_books
from training_text import prepared, trained_tokenizer

from trailmark.data.corpus import files_below, read_text, standard_library_texts
from trailmark.files import write_text

VOCABULARY = 4096
_PROJECTS = ("sympy", "torch")  # that every installation of trailmark has


class Kind(NamedTuple):
    """A kind of text."""

    splits: Callable[[Path], dict[str, Path]]
    """The folders of texts that it is trained on, and watched by; written into a folder if there are none."""
    held_out: Callable[[bool], Iterator[tuple[str, list[str]]]]
    """Names and texts of what no training saw; True: what belongs together one after another."""


def _chapters(joined: bool) -> Iterator[tuple[str, list[str]]]:
    for name, own in groupby(chapters(), lambda file: file.stem.split("_")[0] if joined else file.stem):
        yield name, [read_text(file) for file in own]


def _sources(folder: Path) -> dict[str, Path]:
    """The modules of the standard library and of two projects; those of a folder are one text."""
    found = defaultdict(list)
    for project in _PROJECTS:
        (root,) = importlib.util.find_spec(project).submodule_search_locations  # type: ignore[union-attr, misc]
        for file in sorted(Path(root).rglob("*.py")):
            place = file.relative_to(Path(root).parent)
            if not any(part.startswith("test") for part in place.parts[1:]) and file.stat().st_size:
                found[".".join(place.parent.parts)].append(read_text(file))
    for name, texts in found.items():
        write_text(folder / f"{name}.txt", "\n".join(texts))
    write_text(folder / "standard-library.txt", "\n".join(standard_library_texts("train")))
    return {"train": folder}


KINDS = {
    "LaTeX": Kind(
        lambda folder: {split: data_folder("math") / split for split in ("train", "valid")}, _chapters
    ),
    "Python": Kind(_sources, lambda joined: iter([("modules", standard_library_texts("haystack"))])),
    "books": Kind(
        lambda folder: {"train": data_folder("books") / "train"},
        lambda joined: ((file.stem, [read_text(file)]) for file in held_out_books()),
    ),
}


def folder_of(kind: str) -> Path:
    """Where shards and vocabulary of a kind lie; those of LaTeX are the case study's."""
    return ROOT / "runs" / ("case-study" if kind == "LaTeX" else f"texts-{kind.lower()}")


def prepare_kind(kind: str) -> None:
    """Fit a vocabulary to the training texts, and make shards of them."""
    folder = folder_of(kind)
    splits = KINDS[kind].splits(folder / "texts")
    tokenizer = trained_tokenizer(files_below(splits["train"]), VOCABULARY, folder / "tokenizer")
    for split, texts in splits.items():
        prepared(texts, folder / split, tokenizer)


def held_out_texts(kind: str) -> Sequence[str]:
    return list(chain.from_iterable(texts for _, texts in KINDS[kind].held_out(False)))
