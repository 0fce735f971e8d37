"""Three references to look at, chosen by a rule that was written before any was seen: as text and picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from case_study.measure import Row
from trailmark.trace.lines import TracedChunk

FAR = 2048  # tokens from the label to the reference, at least
CASES = 3
RULE = (
    f"Of all references at least {FAR:,} tokens after their label whose label's chunk the reading chunk reads (in any "
    "group), the one with the largest gain summed over the tokens of its name; ties: the earlier chapter by name, then "
    f"the earlier place. One of each work, the {CASES} works with the largest."
)
SHOWN = 96  # characters of a chunk that is shown in part
Chapters = Mapping[str, tuple[Sequence[Row], Sequence[TracedChunk]]]  # by the file's name


def work_of(file: str) -> str:
    """The work that a chapter belongs to: what stands before the first underscore of its name."""
    return file.partition("_")[0]


def gain(row: Row) -> float:
    return row["loss_without"] - row["loss"]


def choose(chapters: Chapters) -> list[tuple[str, Row]]:
    """By RULE: file and row of at most CASES references, the largest gain first."""
    fit = [
        (-gain(row), file, row["token"], row)
        for file, (rows, _) in chapters.items()
        for row in rows
        if row["distance"] >= FAR and row["now"]["label"][-1]
    ]
    best: dict[str, tuple[str, Row]] = {}
    for _, file, _, row in sorted(fit, key=lambda own: own[:3]):
        best.setdefault(work_of(file), (file, row))
    return list(best.values())[:CASES]


def shortened(text: str, mark: str = "", length: int = SHOWN) -> str:
    """One line of at most ``length`` characters: from its beginning, or with ``mark`` in the middle where it has it.

    White space is one space; dots stand for what is left out.
    """
    line = re.sub(r"\s+", " ", text).strip()
    at = line.find(mark) if mark else -1
    begin = max(0, min(at + len(mark) // 2 - length // 2, len(line) - length)) if at >= 0 else 0
    end = begin + length
    return ("... " if begin else "") + line[begin:end] + (" ..." if end < len(line) else "")


def told(file: str, row: Row, chunks: Sequence[TracedChunk]) -> dict[str, Any]:
    """What the page shows of one case."""
    reading, name = chunks[row["chunk"]], row["name"]
    begin = row["token"] - reading.first_token
    ends = [*reading.starts[1:].tolist(), len(reading.text)]
    tokens = [
        {
            "text": reading.text[int(reading.starts[n]) : ends[n]],
            "loss": float(reading.losses[n]),
            "loss_without": float(reading.losses_without[n]),
        }
        for n in range(begin, begin + row["tokens"])
    ]
    groups = [
        [
            {
                "chunk": int(chunk),
                "weight": float(weight),
                "distance": reading.first_token - chunks[chunk].first_token,
                "label": int(chunk) == row["label_chunk"],
                "name": name in chunks[chunk].text,
                "text": shortened(chunks[chunk].text, name),
            }
            for chunk, weight in zip(read.chunks, read.weights, strict=True)
        ]
        for read in reading.reads
    ]
    bears = np.isfinite(reading.losses)
    return {
        "file": file,
        "work": work_of(file),
        "name": name,
        "macro": row["macro"],
        "chunk": row["chunk"],
        "label_chunk": row["label_chunk"],
        "distance": row["distance"],
        "candidates": row["now"]["candidates"],
        "gain": gain(row),
        "chunk_gain": float((reading.losses_without - reading.losses)[bears].sum()),
        "ranks": row["now"]["ranks"]["label"],
        "sizes": row["now"]["sizes"],
        "tokens": tokens,
        "asking_text": chunks[row["chunk"] - 1].text,
        "reading_text": reading.text,
        "label_text": chunks[row["label_chunk"]].text,
        "groups": groups,
    }


def picture(page: Path, chunk: int, output: Path, most: int = 300_000) -> None:
    """What headless Chromium shows of an explorer's page with one chunk chosen, as PNG of at most ``most`` bytes."""
    from PIL import Image

    from tests.report.browser import chromium, windows

    with chromium() as browser, windows(browser) as open_page:
        window = open_page(page.resolve(), height=1500, fragment=f"#chunk={chunk}")
        window.wait_for_timeout(1500)
        window.screenshot(path=output)
    if output.stat().st_size > most:  # the page has few colours
        Image.open(output).convert("RGB").quantize(256).save(output, optimize=True)
    if output.stat().st_size > most:
        raise SystemExit(f"document: {output} has {output.stat().st_size:,} bytes, more than {most:,}.")
