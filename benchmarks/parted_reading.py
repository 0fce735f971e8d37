"""Reading one text with as many processes as there are cores, beside one process with as many threads.

    python benchmarks/parted_reading.py            # benchmarks/parted_reading.json, and the tables of docs/scale.md

Commands are timed from start to end, in turn, on a machine that does nothing else; the memories that they leave are
compared byte for byte. What many processes would take is then reckoned from three speeds of one process with one
thread: reading, passing over text that others read, and putting chunks together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import interleaved, keep, seconds, spread
from reading import models
from tables import Columns, Row, on_machine, record, table

from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.corpus import standard_library_texts
from trailmark.evaluation.parted_reading import STRETCH, PartedReader
from trailmark.evaluation.subject import load
from trailmark.memory import manifest, saved

OUTPUT = Path(__file__).with_suffix(".json")
TOKENS = {"demo": 1 << 23, "d512": 1 << 18}
_ROUNDS = 1  # after one that does not count: each takes minutes


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


def command(model: Path, file: Path, memory: Path, cores: int, processes: bool) -> float:
    """Seconds of ``trailmark read``, from start to end."""
    launcher = (
        ["torch.distributed.run", "--standalone", f"--nproc-per-node={cores}", "-m"] if processes else []
    )
    words = [
        sys.executable,
        "-m",
        *launcher,
        "trailmark",
        "read",
        str(model),
        str(file),
        "--memory",
        str(memory),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1" if processes else str(cores)}
    return seconds(lambda: subprocess.run(words, check=True, capture_output=True, env=environment))


def same_bytes(one: Path, other: Path) -> bool:
    """Whether the chunks of two memories are the same bytes, by their hashes."""
    hashes = [known.chunks.sha256 for known in map(manifest.read, (one, other)) if known.chunks is not None]
    return len(hashes) == 2 and hashes[0] == hashes[1]


def speeds(model: Path, file: Path, memory: Path) -> dict[str, float]:
    """Of one process with one thread: tokens/s read and passed over, and bytes/s put together."""
    torch.set_num_threads(1)
    reader = PartedReader(load(model), [file], memory, 0, 1)
    passed = seconds(lambda: sum(1 for _ in reader._pieces()))
    reader.sources.clear()
    reader.read()
    began = time.perf_counter()
    with saved.hold(memory) as held:
        cache = reader.join(held)
    joined, tokens = time.perf_counter() - began, reader.read_tokens
    return {
        "read": tokens / reader.seconds,
        "passed": tokens / passed,
        "joined_bytes": cache.memory_bytes() / joined,
        "bytes_a_token": cache.memory_bytes() / tokens,
        "early": float(reader._early + reader._filling + reader.subject.model.reading_piece()),
    }


def measure(size: str, tokens: int, cores: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        model, file, number = made(size, root / "model"), text(tokens, root / "text.txt"), iter(range(1000))
        last: dict[bool, Path] = {}

        def run(processes: bool) -> float:
            last[processes] = root / f"memory-{next(number)}"
            return command(model, file, last[processes], cores, processes)

        found = interleaved({"one": lambda: run(False), "several": lambda: run(True)}, _ROUNDS)
        return {
            "size": size,
            "tokens": tokens,
            "processes": cores,
            "seconds": {name: spread(values) for name, values in found.items()},
            "ratios": spread([one / several for one, several in zip(*found.values(), strict=True)]),
            "same_bytes": same_bytes(*last.values()),
            "speeds": speeds(model, file, root / "reckoned"),
        }


def commands_text() -> str:
    """The table of what was measured."""
    part = record("parted_reading")["commands"]
    columns: Columns = {
        "model": "{size}",
        "tokens": "{tokens:,}",
        "one process, s": "{seconds[one][median]:.1f}",
        "several, s": "{seconds[several][median]:.1f}",
        "processes": "{processes}",
        "times as fast": "{ratios[median]:.2f}",
        "same bytes": lambda row: "yes" if row["same_bytes"] else "no",
    }
    return on_machine(table(columns, part["results"]), part["environment"])


def reckoned_text(tokens: int = 1 << 30) -> str:
    """What a billion tokens would take, from the speeds of one process."""
    rows: list[Row] = []
    for found in record("parted_reading")["commands"]["results"]:
        own = found["speeds"]
        for world in (1, 8, 64, 1024):
            stretches = -(-tokens // STRETCH)
            most = -(-stretches // world)  # of one process
            reading = most * (STRETCH + own["early"]) / own["read"]
            passing, joining = tokens / own["passed"], tokens * own["bytes_a_token"] / own["joined_bytes"]
            times = {
                "reading": reading,
                "passing": passing,
                "joining": joining,
                "all": reading + passing + joining,
            }
            rows.append({"size": found["size"], "world": world} | times)
    columns: Columns = {
        "model": "{size}",
        "processes": "{world:,}",
        "reading": "{reading:duration}",
        "passing over": "{passing:duration}",
        "putting together": "{joining:duration}",
        "together": "{all:duration}",
    }
    return table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    cores = os.cpu_count() or 1

    def all_sizes() -> list[dict[str, Any]]:
        results = []
        for size in options.sizes:
            results.append(measure(size, TOKENS[size], cores))
            print(results[-1], flush=True)
        return results

    keep(options.output, "commands", all_sizes())
    print(f"Numbers: {options.output}")


if __name__ == "__main__":
    main()
