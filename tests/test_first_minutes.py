"""What a newcomer meets first: how soon a command starts, what it prints of itself, what others print into it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.report import runs
from tests.training.tiny import write_run
from trailmark import __version__, cli
from trailmark.data.neighbours.build import make_table
from trailmark.data.prepare import prepare
from trailmark.data.sources import LocalFiles
from trailmark.evaluation.suite import suite_named
from trailmark.evaluation.tables import table_of
from trailmark.files import read_json
from trailmark.report.tables import result_table
from trailmark.training.neighbours import rule_for

Command = Callable[..., tuple[int, str, str]]

# --- commands that need no torch do not wait for it --------------------------------------------------------------

_HEAVY = ("torch", "transformers", "huggingface_hub", "accelerate")
_RUN = """
import sys
from trailmark import cli
try:
    cli.main(sys.argv[1:])
finally:
    print("imported:", *(name for name in {heavy} if name in sys.modules))
"""


def test_without_a_word_it_says_what_one_does_first(command: Command) -> None:
    code, out, _ = command()
    assert code == 0
    lines = [line.strip() for line in out.splitlines() if line.startswith("    trailmark ")]
    assert [line.split()[1] for line in lines] == ["demo", "convert", "read", "chat", "train"]
    assert "trailmark --help" in out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, no_restart: None) -> Path:
    """A folder with a prepared corpus, a neighbour table, a run with a checkpoint, a memory, and a record."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_run(folder, "text", "window", steps=1)
    prepare(LocalFiles([folder / "text.txt"]), folder / "corpus", processes=1)
    rule = rule_for("rpt", 16, None)
    shared = {"context_length": 256, "chunk_size": 16, "count": 2, "tokenizer": None, "device": "cpu"}
    make_table(paths=[folder / "corpus"], output=folder / "table", embedder="hash", rule=rule, **shared)
    cli.main(["train", str(config)])
    cli.main(["read", str(folder / "run"), str(folder / "text.txt"), "--memory", str(folder / "memory")])
    runs.record(folder / "evaluation", "perplexity", [runs.perplexity(1024)])
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--help"),
        ("--help",),
        ("--version",),
        ("verify", "corpus"),
        ("verify", "table"),
        ("verify", "run"),
        ("verify", "memory"),
        ("report", "evaluation", "run", "-o", "report.html"),
    ],
    ids=" ".join,
)
@pytest.mark.sampled(5)
def test_what_needs_no_torch_imports_none(words: tuple[str, ...], saved: Path) -> None:
    """Torch and transformers take seconds. Numpy is there where numbers are read."""
    heavy = _HEAVY if words[0] in ("verify", "report") else (*_HEAVY, "numpy")
    code = _RUN.format(heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=saved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def test_the_version_is_told(command: Command) -> None:
    assert command("--version") == (0, f"trailmark {__version__}\n", "")
    assert version("trailmark") == __version__


# --- a process that cannot be started again ----------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is started again")
@pytest.mark.parametrize("executable", ["'/nowhere/python'", "None", "'/etc/passwd'"])
def test_a_command_goes_on_where_it_cannot_be_started_again(executable: str, tmp_path: Path) -> None:
    """An embedded Python, a sandbox that starts no second process."""
    code = (
        f"import os, sys\nsys.executable = {executable}\nsys.argv[1:] = ['evaluate', '--suite']\n"
        "for name in [*os.environ]:\n"
        "    if name.startswith(('MALLOC_', 'GLIBC_', 'GOMP_', 'OMP_')): del os.environ[name]\n"
        "from trailmark.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "this Python cannot be started again (" in done.stderr
    assert "trailmark: Option '--suite' requires an argument." in done.stderr


# --- what a training prints ----------------------------------------------------------------------------------------


def test_the_loss_of_a_training_is_told_as_evaluate_tells_it(saved: Path, command: Command) -> None:
    """The last step's and the moving average, in nats per token; both used to be one number without a name."""
    config = write_run(saved / "again", "text", "window", steps=3, tokens_per_step=160)
    code, out, _ = command("train", config)
    assert code == 0
    told = re.search(r"loss (\S+) nats per token; moving averages: loss (\S+)", out)
    assert told is not None
    last = read_json(saved / "again" / "run" / "history.json")["steps"][-1]
    assert told.groups() == (f"{last['step_loss']:.3f}", f"{last['loss']:.3f}")
    code, out, _ = command(
        "evaluate", saved / "again" / "run", "--text", saved / "text.txt", "--lengths", "80"
    )
    assert code == 0
    assert "nats per token" in out


@pytest.mark.parametrize(
    ("value", "told"),
    [(12.3456, "12.346"), (10_000, "10,000.000"), (10_001, "9.21 nats"), (1e29, "66.77 nats"), (None, "-")],
)
def test_a_perplexity_beyond_reading_is_told_in_nats(value: float | None, told: str) -> None:
    row = {"settings": {}, "length": 128, "perplexity": 2.0, "word_perplexity": value}
    table = table_of("", suite_named("perplexity").columns, [row], "terminal")
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert shown.get("perplexity per word", "-") == told


# --- tables explain themselves --------------------------------------------------------------------------------------


def test_the_headings_that_need_it_are_explained_below_their_table() -> None:
    row = {"settings": {}, "length": 2048, "questions": 3, "correct": 3, "accuracy": 1.0, "recall": 1.0}
    told = result_table(suite_named("needles"), [row], 1024)
    assert "| × train |" in told
    assert "*× train*: tokens, as a multiple of the longest text trained on." in told
    assert "*chunk retrieved*: share of questions" in told
    assert "*memory*" not in told  # no such column here
