"""Reading one text with as many processes as there are cores, beside one process with as many threads.

    python benchmarks/parted_reading.py            # benchmarks/parted_reading.json, and the table of docs/scale.md

Commands are timed from start to end, in turn, on a machine that does nothing else; the memories that they leave are
compared byte for byte.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import interleaved, keep, seconds, spread
from reading import models
from tables import Columns, on_machine, record, table

from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.corpus import standard_library_texts
from trailmark.files import read_json
from trailmark.memory import manifest

OUTPUT = Path(__file__).with_suffix(".json")
# model and tier -> tokens; tokens alone need no disk to keep up
CASES = {"demo disk": 1 << 23, "demo tokens": 1 << 23, "d512 disk": 1 << 18}
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


def command(model: Path, file: Path, memory: Path, tier: str, cores: int, processes: bool) -> float:
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


def measure(case: str, cores: int) -> dict[str, Any]:
    (size, tier), tokens = case.split(), CASES[case]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        root = Path(place)
        model, file, number = made(size, root / "model"), text(tokens, root / "text.txt"), iter(range(1000))
        last: dict[bool, Path] = {}

        def run(processes: bool) -> float:
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
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    known = (read_json(options.output) or {}).get("commands", {}).get("results", [])
    found = {f"{row['size']} {row['tier']}": row for row in known}
    for case in options.cases:
        found[case] = measure(case, cores)
        print(found[case], flush=True)
        keep(options.output, "commands", [found[name] for name in CASES if name in found])
    print(f"Numbers: {options.output}")


if __name__ == "__main__":
    main()
