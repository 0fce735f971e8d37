"""``torchrun -m trailmark prepare`` and ``neighbours``: what several processes make together is what one makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.data.corpora import contents, prose, save_bpe
from tests.torchrun import by_processes
from trailmark.data.neighbours.build import make_table
from trailmark.data.neighbours.files import TABLE_PROGRESS, TableProgress
from trailmark.data.neighbours.table import NeighbourTable, Rule
from trailmark.data.prepare import _jobs, prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.files import read_json


def run(count: int, *words: str | Path) -> None:
    """The command by several processes, of which one speaks."""
    assert by_processes(count, *words).count("Next: trailmark train") == 1


@pytest.mark.slow
def test_several_processes_make_what_one_does(tmp_path: Path) -> None:
    text, bpe = tmp_path / "text", save_bpe(tmp_path / "bpe")
    text.mkdir()
    for number in range(12):
        (text / f"{number:02}.txt").write_text(prose(number, 20_000))
    assert len([*_jobs(parse_source([str(text)]), 0)]) > 3
    one, several = tmp_path / "by one", tmp_path / "by several"
    prepare(parse_source([str(text)]), one, bpe, processes=1)
    for _ in range(2):  # the second finds what the first made
        run(3, "prepare", text, "--output", several, "--tokenizer", bpe, "--processes", "1")
    assert contents(one) == contents(several)
    Corpus.open(several).verify()

    sizes: dict[str, Any] = {"context_length": 1024, "chunk_size": 8, "count": 2, "scores": "float32"}
    words = [x for name, size in sizes.items() for x in (f"--{name.replace('_', '-')}", str(size))]
    made = partial(make_table, [one], embedder="hash", rule=Rule(), **sizes)
    table = made(tmp_path / "table")
    assert table.windows > 5 * 4  # of 4 a block

    def stop(state: TableProgress) -> NoReturn:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        made(tmp_path / "begun by one", progress=stop)
    assert 0 < read_json(tmp_path / "begun by one" / TABLE_PROGRESS)["done"] < table.windows
    for folder in ("table of several", "begun by one"):
        run(2, "neighbours", one, tmp_path / folder, "--embedder", "hash", *words)
        found = NeighbourTable.open(tmp_path / folder)
        found.verify()
        assert found.fingerprint == table.fingerprint
