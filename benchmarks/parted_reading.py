"""Reading one text with as many processes as there are cores, beside one process with as many threads.

    python benchmarks/parted_reading.py            # benchmarks/parted_reading.json, and the table of docs/scale.md

Commands are timed from start to end, in turn, on a machine that does nothing else; the memories that they leave are
compared byte for byte. On paper: what many processes would take for a long text, by the speeds of one that are measured
here: of reading, of tokenizing, of signing what lies on disk, and of putting landmark vectors together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from common import interleaved, keep, seconds, spread, together
from reading import models, random_text
from tables import Columns, Row, on_machine, record, table

from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.corpus import standard_library_texts
from trailmark.evaluation.parted_reading import STRETCH, PartedReader
from trailmark.evaluation.subject import load
from trailmark.files import read_json
from trailmark.machine import start_again_set_up
from trailmark.memory import hashes, manifest, saved
from trailmark.models.stretches import tokens_before_chunks, tokens_of_windows
from trailmark.report.console import duration
from trailmark.trace.texts import file_tokens

OUTPUT = Path(__file__).with_suffix(".json")
# model and tier -> tokens; tokens alone need no disk to keep up
CASES = {"demo disk": 1 << 24, "demo tokens": 1 << 24, "d512 disk": 1 << 19}
_ROUNDS = 1  # after one that does not count: each takes minutes
TOKENS, PROCESSES = 1 << 30, (1, 8, 64, 1024)  # on paper
PROBE, ENDED = 1 << 14, 1 << 23  # tokens read, and put together


def text(length: int, path: Path) -> Path:
    """So many bytes of Python's own sources, over and over."""
    whole = "".join(standard_library_texts("haystack")).encode("ascii", "replace")
    path.write_bytes((whole * (length // len(whole) + 1))[:length])
    return path


def made(size: str, folder: Path) -> Path:
    """A DRT with random weights."""
    ByteTokenizer().save_pretrained(folder)
    model = models(size)["drt"]
    model.save_pretrained(folder)
    return folder


def command(model: Path, file: Path, memory: Path, tier: str, cores: int, processes: bool) -> float:
    """Seconds of ``trailmark read``, from start to end."""
    words = [
        sys.executable,
        "-m",
        *together(cores if processes else 1),
        "trailmark",
        "read",
        str(model),
        str(file),
        "--memory",
        str(memory),
        "--memory-tier",
        tier,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1" if processes else str(cores)}
    return seconds(lambda: subprocess.run(words, check=True, capture_output=True, env=environment))


def same_bytes(one: Path, other: Path) -> bool:
    """Whether the chunks of two memories are the same bytes, by their hashes."""
    hashes = [known.chunks.sha256 for known in map(manifest.read, (one, other)) if known.chunks is not None]
    return len(hashes) == 2 and hashes[0] == hashes[1]


def measure(case: str, cores: int) -> dict[str, Any]:
    (size, tier), tokens = case.split(), CASES[case]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        model, file, number = made(size, root / "model"), text(tokens, root / "text.txt"), iter(range(1000))
        last: dict[bool, Path] = {}

        def run(processes: bool) -> float:
            if processes in last:  # gigabytes, of which each run leaves as many
                shutil.rmtree(last[processes])
            last[processes] = root / f"memory-{next(number)}"
            return command(model, file, last[processes], tier, cores, processes)

        found = interleaved({"one": lambda: run(False), "several": lambda: run(True)}, _ROUNDS)
        return {
            "size": size,
            "tier": tier,
            "tokens": tokens,
            "processes": cores,
            "seconds": {name: spread(values) for name, values in found.items()},
            "ratios": spread([one / several for one, several in zip(*found.values(), strict=True)]),
            "same_bytes": same_bytes(*last.values()),
        }


def speeds(size: str, folder: Path) -> dict[str, float]:
    """Of one process with one thread: tokens/s read to disk and tokenized, bytes a token in memory, bytes/s signed."""
    torch.set_num_threads(1)
    model = models(size)["drt"]
    cache = model.new_cache("disk", memory_folder=folder / "memory")
    model.read(random_text(model, PROBE), cache)
    read = seconds(lambda: model.read(random_text(model, PROBE, seed=2), cache))
    file, tokenizer = text(1 << 23, folder / "text.txt"), ByteTokenizer()
    tokenized = seconds(lambda: deque(file_tokens(file, tokenizer), maxlen=0))
    large = text(1 << 28, folder / "large.txt")

    def signed(by_several: bool) -> float:
        """Bytes/s; by several: as of a stretch that was read, and then as of blocks in which two stretches meet."""
        began, size = time.perf_counter(), large.stat().st_size
        with open(large, "rb") as file:
            pieces = hashes.pieces_of(file.fileno(), large)
            for begin in range(0, size, hashes.BLOCK_BYTES):
                end = begin + hashes.BLOCK_BYTES
                hashes.digest(pieces, begin, end)
                if by_several:
                    hashes.digests_of_parts(pieces, begin, [end - hashes.BLOCK_BYTES // 2, end])
        return size / (time.perf_counter() - began)

    return {
        "read": PROBE / read,
        "tokenized": file.stat().st_size / tokenized,
        "bytes": cache.memory_bytes() / cache.get_seq_length(),
        "signed": signed(False),
        "signed by several": signed(True),
    }


def costs_at_end(folder: Path) -> dict[str, float]:
    """Of the demo's model: seconds a stretch for what is asked of all, and a byte of landmark vectors for the save."""
    torch.set_num_threads(1)
    subject, file = load(made("demo", folder / "model")), text(ENDED, folder / "text.txt")
    reader = PartedReader(subject, [file], folder / "memory", 0, 1)
    with saved.hold(folder / "memory") as held:
        reader.deal([reader.whole()], [reader.count()])
        reader.read()
        asked = seconds(reader.expect_parts)
        sha256 = reader.sign(0)
        joined = seconds(lambda: reader.join(held, sha256))
    # what is said of each stretch is read by the first to see that all are there, and by all to sign
    return {
        "stretch": 2 * asked / len(reader.stretches),
        "byte": joined / ENDED / landmark_bytes(subject.model),
    }


def landmark_bytes(model: Any) -> float:
    """Of a token."""
    return model._expected_state().sizes["LE"] * 4 / model.config.chunk_size


def on_paper(size: str, at_end: dict[str, float]) -> list[dict[str, Any]]:
    """Seconds of each part for TOKENS tokens: all tokenize the text, after each has counted a share of it.

    Each then reads a run of stretches, all but the first from some tokens before on, and signs its share. The first
    puts the landmark vectors together, and saves them.
    """
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        speed = speeds(size, Path(place)) | at_end
    model = models(size)["drt"]
    landmarks, piece = TOKENS * landmark_bytes(model), model.reading_piece()
    lead = -(-tokens_before_chunks(model) // piece) * piece + tokens_of_windows(model)
    joining = TOKENS / STRETCH * speed["stretch"] + landmarks * speed["byte"]
    rows = []
    for count in PROCESSES:
        stretches = -(-TOKENS // STRETCH // count)
        tokens = TOKENS if count == 1 else stretches * STRETCH + lead
        signed = speed["signed" if count == 1 else "signed by several"] * count
        parts = {
            "tokenizing": TOKENS * (1 if count == 1 else 1 + 1 / count) / speed["tokenized"],
            "reading": tokens / speed["read"],
            "signing": TOKENS * speed["bytes"] / signed,
            "joining": 0.0 if count == 1 else joining,
        }
        own = {"size": size, "processes": count, "seconds": parts}
        rows.append(own | {"tokens": TOKENS, "lead": lead, "speed": speed})
    return rows


def paper_text() -> str:
    """The table of what many processes would take."""
    part = record("parted_reading")["paper"]
    leads = {row["size"]: f"{row['lead']:,} with `{row['size']}`" for row in part["results"]}
    alone = {row["size"]: sum(row["seconds"].values()) for row in part["results"] if row["processes"] == 1}

    def total(row: Row) -> float:
        return sum(row["seconds"].values())

    columns: Columns = {
        "model": "{size}",
        "processes": "{processes:,}",
        "tokenizing": "{seconds[tokenizing]:duration}",
        "reading": "{seconds[reading]:duration}",
        "signing": "{seconds[signing]:duration}",
        "joining": "{seconds[joining]:duration}",
        "together": lambda row: duration(total(row)),
        "times as fast": lambda row: f"{alone[row['size']] / total(row):,.1f}",
    }
    twice = f"Tokens that each process but the first begins early: {', '.join(leads.values())}."
    return on_machine(f"{table(columns, part['results'])}\n\n{twice}", part["environment"])


def commands_text() -> str:
    """The table of what was measured."""
    part = record("parted_reading")["commands"]
    columns: Columns = {
        "model": "{size}",
        "tier": "{tier}",
        "tokens": "{tokens:,}",
        "one process, s": "{seconds[one][median]:.1f}",
        "several, s": "{seconds[several][median]:.1f}",
        "processes": "{processes}",
        "times as fast": "{ratios[median]:.2f}",
        "same bytes": lambda row: "yes" if row["same_bytes"] else "no",
    }
    return on_machine(table(columns, part["results"]), part["environment"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], "commands", "paper"], help="default: both")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    start_again_set_up()  # as the commands do
    cores = os.cpu_count() or 1
    known = (read_json(options.output) or {}).get("commands", {}).get("results", [])
    found = {f"{row['size']} {row['tier']}": row for row in known}
    parts = options.parts or ["commands", "paper"]
    for case in options.cases if "commands" in parts else ():
        found[case] = measure(case, cores)
        print(found[case], flush=True)
        keep(options.output, "commands", [found[name] for name in CASES if name in found])
    if "paper" in parts:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
            at_end = costs_at_end(Path(place))
        keep(options.output, "paper", [row for size in ("demo", "d512") for row in on_paper(size, at_end)])
    print(f"Numbers: {options.output}")


if __name__ == "__main__":
    main()
