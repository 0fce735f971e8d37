"""A new suite is one object: from it come commands, records, tables, pages, cards and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.added_files import copy_of_the_package, run_program
from tests.training.tiny import prose, write_run
from trailmark import cli, cli_evaluation
from trailmark.evaluation import suite as module
from trailmark.evaluation.suite import Bars, Column, Panel, Suite, Task, Tile, register, suites
from trailmark.files import read_json
from trailmark.report.collect import collect
from trailmark.settings import Settings, from_options, setting

Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("no_restart")


# --- the whole of a suite ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToySettings(Settings):
    """Which letters are counted."""

    letters: tuple[str, ...] = setting(("e",), "Letters to count, as e,t.", cell="letter")
    share: bool = setting(False, "Tell the share of all characters too.", option="--share")
    most: int | None = setting(None, "Tokens that are read.", default="all", least=1)
    seed: int = module.seed_setting()


def run_toy(task: Task) -> list[dict[str, Any]]:
    text = task.documents()
    ids = text.read(0, min(text.tokens, task.settings.most or text.tokens))
    content = task.subject.tokenizer.decode(ids)

    def count(letter: str) -> dict[str, Any]:
        number = content.count(letter)
        return {"count": number} | ({"share": number / len(content)} if task.settings.share else {})

    shared = {
        "suite": "toy",
        "share": task.settings.share,
        "most": task.settings.most,
        "text": text.fingerprint,
    }
    cells = [shared | {"letter": letter, "seed": task.settings.seed} for letter in task.settings.letters]
    return [task.record.measure(cell, partial(count, cell["letter"])) for cell in cells]


TOY = Suite(
    name="toy",
    title="Letters",
    settings=ToySettings,
    run=run_toy,
    columns=(
        Column("letter", "letter", text=True),
        Column("how often", "count", ",d"),
        Column("part of the text", "share", ".2%"),
    ),
    charts=(Bars("letters", "letters counted", "All.", "times", (Panel("Letters", "times", "count"),)),),
    about="How often a letter stands in a text.",
    tiles=lambda rows: [Tile(str(rows[0]["count"]), f"times {rows[0]['letter']}", str(rows[0]["model"]))],
)


# --- and all that comes of it --------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    suites()  # trailmark's own are registered, and stay
    monkeypatch.setattr(module, "_registered", dict(module._registered))
    yield register(TOY)
    monkeypatch.undo()
    cli_evaluation.declare_options()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a model that was trained for it in run/."""
    folder = tmp_path_factory.mktemp("trained")
    cli.main(["train", str(write_run(folder, "text", "window", steps=1))])
    return folder


def parsed(command: str) -> dict[str, Any]:
    """What the real command line reads in a command."""
    program, name, *rest = shlex.split(command)
    assert program == "trailmark"
    cli_evaluation.declare_options()
    known: Any = typer.main.get_command(cli.app)
    given: dict[str, Any] = known.commands[name].make_context(name, rest, obj=rest).params
    return {key: value for key, value in given.items() if value not in (None, [], ())}


def test_a_new_suite_is_one_object(trained: Path, tmp_path: Path, command: Command, toy: Suite) -> None:
    ask = ("evaluate", trained / "run", "--suite", "toy", "--text", trained / "text.txt", "-o", tmp_path)
    code, out, _ = command(*ask, "--letters", "e", "--share")
    assert code == 0
    record = tmp_path / "run" / "toy.json"
    (first,) = read_json(record)["results"]
    assert first["count"] == prose().count("e")
    header, _, row = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header] == ["letter", "how often", "part of the text"]
    assert [cell.strip() for cell in row] == ["e", f"{first['count']:,}", f"{first['share']:.2%}"]
    # what was found is not measured again
    assert command(*ask, "--letters", "e,t", "--share")[0] == 0
    results = read_json(record)["results"]
    assert results[0] == first
    assert [result["settings"]["letter"] for result in results] == ["e", "t"]
    # the command that repeats both, read by the real command line, asks for the same
    (again,) = toy.commands([trained / "run"], [result["settings"] for result in results], {"alibi": True})
    given = parsed(again)
    assert given["models"] == [trained / "run"]
    assert (given["suite"], given["changes"]) == (["toy"], ["alibi=true"])
    assert from_options(ToySettings, given) == {"letters": ("e", "t"), "share": True, "seed": 0}
    # its options are refused as any others are
    assert "'--most': Input should be greater than or equal to 1" in command(*ask, "--most", "0")[2]
    assert "or add --suite toy." in command(*ask[:3], "perplexity", "--letters", "e")[2]


def test_a_page_shows_a_new_suite(trained: Path, tmp_path: Path, command: Command, toy: Suite) -> None:
    ask = ("evaluate", trained / "run", "--suite", "toy", "--text", trained / "text.txt", "-o", tmp_path)
    assert command(*ask, "--letters", "e,t")[0] == 0
    assert {result.suite for result in collect([tmp_path]).results} == {"toy"}
    assert command("report", tmp_path, "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    for shown in (TOY.title, TOY.about, "how often", "letters counted", "times e", "--letters e,t"):
        assert shown in page, shown


def test_a_card_shows_a_new_suite(trained: Path, command: Command, toy: Suite) -> None:
    ask = ("evaluate", trained / "run", "--suite", "toy", "--text", trained / "text.txt")
    assert command(*ask)[0] == 0
    card = (trained / "run" / "README.md").read_text()
    assert "### Letters" in card
    assert "how often" in card


# --- the suites that there are -------------------------------------------------------------------------------------

CELLS: dict[str, list[tuple[Mapping[str, Any], dict[str, Any]]]] = {
    "needles": [
        (
            {"length": length, "depth": depth, "kind": "hops", "hops": 2, "needles": 3, "format": "marks",
             "questions": 7, "values": "numbers", "distractors": 0, "landmarks": 2, "phases": "any",
             "protocol": None, "seed": 3, "memory_tier": "host", "memory_dtype": "bfloat16", "straddle": False,
             "chunk_size": 32, "text": "ab"},
            {"lengths": (400, 800), "depths": (0.0, 0.5), "kind": "hops", "hops": 2, "needles": 3, "format": "marks",
             "questions": 7, "values": "numbers", "distractors": 0, "landmarks": 2, "phases": "any", "seed": 3,
             "memory_tier": "host", "memory_dtype": "bfloat16"},
        )
        for length, depth in ((400, 0), (400, 0.5), (800, 0), (800, 0.5))
    ],
    "perplexity": [
        (
            {"length": length, "windows": "sliding", "stride": 40, "carry": False, "max_tokens": 65536,
             "protocol": None, "by_position": True, "set": {}, "text": "ab", "seed": 0},
            {"lengths": (80, 160), "windows": "sliding", "stride": 40, "max_tokens": 65536, "seed": 0},
        )
        for length in (80, 160)
    ],
    "summarization": [
        (
            {"protocol": None, "pairs": "0f", "prompt": "document|Summary*:", "max_new_tokens": 9, "temperature": 1.0,
             "top_k": 2, "context_length": 64, "stemmer": True, "batch_size": 8, "seed": 1, "block": None},
            {"max_new_tokens": 9, "temperature": 1.0, "top_k": 2, "context_length": 64, "seed": 1},
        )
    ],
    "cost": [
        (
            {"protocol": "cost: generation", "prompt": prompt, "generate": 4, "tier": tier, "rounds": 2, "seed": 0,
             "only_memories": False, "memory_dtype": "float16", "models": ["a"], "device": "x", "threads": 1},
            {"lengths": (40, 80), "tiers": ("device", "host"), "generate": 4, "rounds": 2, "seed": 0,
             "memory_dtype": "float16"},
        )
        for prompt in (40, 80) for tier in ("device", "host")
    ] + [
        (
            {"protocol": "cost: training", "length": 64, "batch_tokens": 64, "models": ["a"], "rounds": 2, "seed": 0},
            {"training_lengths": (64,), "rounds": 2, "seed": 0},
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_the_command_that_repeats_results_asks_for_them(name: str) -> None:
    """Every option that it has is one of the command, and gives the settings that the results say they have."""
    suite = suites()[name]
    expected = list({str(values): values for _, values in CELLS[name]}.values())
    commands = suite.commands(["runs/model"], [cell for cell, _ in CELLS[name]], {"chunk_size": 8})
    for command, values in zip(commands, expected, strict=True):
        given = parsed(command)
        assert given.pop("models") == [Path("runs/model")]
        assert (given.pop("suite"), given.pop("changes")) == ([name], ["chunk_size=8"])
        assert from_options(suite.settings, given).keys() == given.keys()
        more = {"pairs": ("some.jsonl",)} if name == "summarization" else {}
        assert suite.settings(**from_options(suite.settings, given), **more) == suite.settings(
            **values, **more
        )


def test_the_files_of_a_suite_and_of_a_tier_are_found(tmp_path: Path) -> None:
    """Nobody imports them; a folder beside them that holds no suite is none."""
    package = copy_of_the_package(tmp_path)
    (package / "evaluation/letters").mkdir()
    (package / "evaluation/letters/suite.py").write_text(
        "from trailmark.evaluation.suite import Suite, register\n"
        "from trailmark.settings import Settings\n"
        "register(Suite(name='letters', title='Letters', settings=Settings, run=lambda task: [], columns=()))\n"
    )
    (package / "evaluation/helpers").mkdir()
    (package / "memory/tiers/squeezed.py").write_text(
        "from trailmark.memory.tiers.base import register_tier\n"
        "from trailmark.memory.tiers.resident import HostStore\n"
        "@register_tier\n"
        "class SqueezedStore(HostStore):\n"
        "    tier = 'squeezed'\n"
    )
    printed = run_program(
        "from trailmark.evaluation.suite import suites\n"
        "from trailmark.memory.tiers.base import TIERS\n"
        "print(*suites())\n"
        "print(*TIERS)",
        tmp_path,
    )
    found, tiers = printed.splitlines()
    ours = ["needles", "perplexity", "retrieval", "summarization", "cost", "lm-eval"]
    assert found.split() == [*ours, "letters", "yardstick"]
    assert tiers.split() == ["device", "host", "disk", "squeezed", "tokens"]
