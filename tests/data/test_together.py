"""``torchrun -m trailmark prepare`` and ``neighbours``: what several processes make together is what one makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import multiprocessing

from tests.data.corpora import contents, save_bpe, write_folder
from trailmark import processes
from trailmark.data.neighbours.table import NeighbourTable
from trailmark.data.shards import Corpus

SIZES = ["--context-length", "256", "--chunk-size", "16", "--count", "3"]


def run(count: int, *words: str | Path) -> str:
    """The command by so many processes: what was said."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={count}"] if count > 1 else []
    command = [sys.executable, *launch, "-m", "trailmark", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("Next: trailmark train") == 1  # one of them speaks
    return said


@pytest.mark.slow
def test_several_processes_make_what_one_does(tmp_path: Path) -> None:
    text, bpe = write_folder(tmp_path / "text", 24), save_bpe(tmp_path / "bpe")
    corpora = [tmp_path / f"corpus of {count}" for count in (1, 3)]
    for count, corpus in zip((1, 3), corpora, strict=True):
        for _ in range(2):  # the second finds what the first made
            run(count, "prepare", text, "--output", corpus, "--tokenizer", bpe, "--processes", "1")
    assert contents(corpora[0]) == contents(corpora[1])
    Corpus.open(corpora[1]).verify()
    tables = [tmp_path / f"table of {count}" for count in (1, 2)]
    for count, table in zip((1, 2), tables, strict=True):
        run(count, "neighbours", corpora[0], table, "--embedder", "bm25", "--scores", "float32", *SIZES)
    one, two = map(NeighbourTable.open, tables)
    two.verify()
    assert two.windows > 2
    assert one.fingerprint == two.fingerprint


# --- what they are made with -----------------------------------------------------------------------------


def pieces(rank: int) -> list[list[tuple[int, int]]]:
    """Of 0 to 4 pieces which process made each."""
    made = [processes.shared_out(range(count), lambda mine: ((n, rank) for n in mine)) for count in range(5)]
    return [[*of_count] for of_count in made]


def a_failure(rank: int) -> list[float]:
    return [*processes.shared_out([2, 1, 0, 4], lambda mine: (1 / n for n in mine))]


def a_difference(rank: int) -> None:
    processes.expect_agreed({"model": "m", "text": f"text {rank}"})


ACTS: dict[str, Callable[[int], object]] = {x.__name__: x for x in (pieces, a_failure, a_difference)}


def act(rank: int, count: int, folder: Path) -> None:
    """What one of ``count`` processes does: it writes down what came of each act."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    found = {}
    for name, what in ACTS.items():
        try:
            found[name] = what(rank)
        except ValueError as error:
            found[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    assert processes.part()


def test_every_process_has_all_and_hears_of_every_failure(tmp_path: Path) -> None:
    multiprocessing.spawn(act, (2, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    assert one["pieces"] == [[[n, n % 2] for n in range(count)] for count in range(5)]
    assert one["a_failure"] == "process 0: ZeroDivisionError: division by zero"
    assert one["a_difference"].startswith(
        "processes: expected the text of process 0 in all, process 1 has another"
    )
