"""``trailmark prepare --pairs``: documents and their summaries, one pair a line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trailmark.data.prepare import Progress, expect_source_outside
from trailmark.data.sources import Source
from trailmark.files import (
    FileEntry,
    FolderKind,
    expect_place,
    expect_same_settings,
    made_and_locked,
    read_json,
    remove_unfinished,
    replacing,
    sha256_of,
    telling_of_a_full_disk,
    write_json,
)
from trailmark.settings import Settings, from_file, setting

PAIRS, PAIRS_MANIFEST = "pairs.jsonl", "pairs.json"
_KIND = FolderKind("data", PAIRS_MANIFEST, 1, "prepared pairs", "trailmark prepare --pairs")


@dataclass(frozen=True)
class _Pairs(Settings):
    """What ``pairs.json`` must hold to be relied on."""

    source: dict[str, Any]
    pairs: int = setting(least=1)
    bytes: int = setting(least=1)
    sha256: str = setting()


def prepare_pairs(
    source: Source, output: str | Path, *, progress: Callable[[Progress], None] | None = None
) -> Path:
    """Write a source's documents and summaries as ``pairs.jsonl``: one {"document", "summary"} a line.

    ``pairs.json`` beside it says what they are. Nothing is tokenised, so an interrupted run simply starts again.

    Returns:
        The path of ``pairs.jsonl``.

    Raises:
        ValueError: as :func:`trailmark.data.prepare.prepare`; a source without summaries.
    """
    folder, began = Path(output), time.monotonic()
    rows = source.pairs()
    expect_place("output", folder)
    expect_source_outside(source, folder)
    path, manifest_path = folder / PAIRS, folder / PAIRS_MANIFEST
    about = {"source": json.loads(json.dumps(source.description()))}
    about["source"]["summary_column"] = source.summary_column

    def show(pairs: int, done: int, seconds: float) -> None:
        if progress is not None:
            progress(Progress(pairs, 0, done, source.size(), seconds))

    with made_and_locked(folder, "trailmark prepare"):
        if (old := read_json(manifest_path)) is not None:
            expect_same_settings(folder, "pairs", old, about)
            try:
                known = from_file(_Pairs, old)
                _KIND.verify(folder, {PAIRS: FileEntry(known.bytes, known.sha256)})
            except ValueError as error:
                raise ValueError(
                    f"output: {str(path)!r} was changed or removed ({error}). Remove {manifest_path} to make it anew."
                ) from error
            show(known.pairs, source.size() or 0, 0.0)
            return path
        remove_unfinished(folder, PAIRS, PAIRS_MANIFEST)
        pairs, left_out, shown = 0, 0, began
        with (
            telling_of_a_full_disk(folder, lambda: "Free some space and start again."),
            replacing(path, durable=True) as file,
        ):
            for row in rows:
                if row.texts is None:
                    left_out += 1
                    continue
                content = dict(zip(("document", "summary"), row.texts, strict=True))
                file.write(json.dumps(content, ensure_ascii=False) + "\n")
                pairs += 1
                if (now := time.monotonic()) - shown > 0.2:
                    shown = now
                    show(pairs, row.done, now - began)
            if not pairs:
                raise ValueError(
                    f"source: expected at least one pair, all {left_out} rows are empty or left out."
                )
        about |= {"format": 1, "pairs": pairs, "left_out": left_out, "bytes": path.stat().st_size}
        write_json(manifest_path, about | {"sha256": sha256_of(path)}, durable=True)
        show(pairs, source.size() or 0, time.monotonic() - began)
    return path


def expect_as_prepared(path: Path, sha256: str) -> None:
    """Raise a ValueError if ``pairs.json`` beside a ``pairs.jsonl`` tells another hash than its own."""
    if path.name != PAIRS or not (path.parent / PAIRS_MANIFEST).exists():
        return
    _, about = _KIND.read_as(path.parent, partial(from_file, _Pairs))
    if about.sha256 != sha256:
        raise ValueError(
            f"data: expected the SHA-256 {about.sha256[:64]} that {PAIRS_MANIFEST} tells, {str(path)!r} has {sha256}: "
            f"it was changed. Remove {PAIRS_MANIFEST} and prepare the pairs again; "
            "for pairs of your own, use another name."
        )


def verify_pairs(folder: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Read every byte of the pairs in a folder of :func:`prepare_pairs`, and compare their SHA-256.

    Args:
        progress: called with bytes done and bytes in all.

    Returns:
        How many pairs there are.

    Raises:
        ValueError: no prepared pairs there, or damaged ones.
    """
    folder = Path(folder)
    _, about = _KIND.read_as(folder, partial(from_file, _Pairs))
    _KIND.verify(folder, {PAIRS: FileEntry(about.bytes, about.sha256)}, progress)
    return about.pairs
