"""Whatever a stranger does to a file that a command reads: the right result, or one line. See attacks.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import huggingface_hub
import pytest

from tests import attacks
from tests.training.tiny import save_converted_llama
from trailmark import cli
from trailmark.models.conversion.additions import ADDITIONS
from trailmark.training.config import load_run_config
from trailmark.training.run import Run

pytestmark = pytest.mark.usefixtures("no_restart", "one_thread")

SEEDS = (1, 2, 3)
DRAWS, SLOW_DRAWS = 84, 3000  # of all seeds and kinds
SECONDS = 10  # of work
WAITED = 120  # seconds of nothing at all, as before a FIFO: another's work may be in the way
WORDS = ["the", "old", "river", "sees", "a", "small", "boat", "and", "sings"]
CONFIG = """\
output: run
model:
  architecture: drt
  vocab_size: 259
  hidden_size: 8
  intermediate_size: 8
  num_hidden_layers: 2
  num_lower_layers: 1
  num_encoder_layers: 1
  num_attention_heads: 2
  sliding_window: 9
  chunk_size: 20
  num_retrieved_chunks: 2
  initialization: fan_in
  logit_scale: 0.25
data:
  task: text
  paths: [texts]
training:
  steps: 2
  save_steps: 1
  tokens_per_step: 160
  context_length: 80
  warmup_steps: 1
"""
SIZES = ("--context-length", "80", "--chunk-size", "20", "--count", "2")
RPT = (
    *("model.architecture=rpt", "model.retriever=encoder", "model.exclude_visible_chunks=false"),
    *("data.neighbours=table", "data.early_landmarks=0"),
)
TRAIN = ("train", "run.yaml", "training.steps=1", "output=out/run")


@dataclass(frozen=True)
class Kind:
    """A kind of file or folder that commands read.

    Attributes:
        target: what is damaged.
        commands: one of which is run afterwards.
        told: whether a result must be the undamaged one: what has hashes. Of other files a stranger may lie.
        resign: makes hashes right again.
        unhashed: files whose content only ``verify`` compares: another command may take it as it is.
    """

    target: str
    commands: tuple[tuple[str, ...], ...]
    told: bool = False
    resign: attacks.Resign | None = None
    unhashed: str = "no file"


GENERATE = ("generate", "run", "--prompt", "the old ", "--max-new-tokens", "3")
KINDS = {
    "corpus": Kind(
        "shards",
        (
            ("verify", "shards"),
            (*TRAIN, "data.paths=[shards]"),
            ("neighbours", "shards", "out/table", "--embedder", "hash:8", *SIZES),
            ("prepare", "texts", "--output", "shards", "--processes", "1"),
        ),
        told=True,
        resign=attacks.resign_corpus,
    ),
    "pairs": Kind(
        "pairs",
        (
            ("verify", "pairs"),
            ("prepare", "pairs.jsonl", "--pairs", "--output", "pairs", "--column", "document",
             "--summary-column", "summary"),
        ),
        told=True,
    ),
    "neighbours": Kind(
        "table",
        (
            ("verify", "table"),
            (*TRAIN, "data.paths=[shards]", *RPT),
            ("neighbours", "shards", "table", "--embedder", "hash:8", *SIZES),
        ),
        told=True,
        resign=attacks.resign_files("neighbours.json"),
    ),
    "trace": Kind("trace.jsonl", (("explore", "--trace", "trace.jsonl", "-o", "out/page.html"),)),
    "traced": Kind(
        "trace.jsonl.state",
        (("read", "run", "texts/b.txt", "--memory", "memory", "--trace", "trace.jsonl"),),
    ),
    "records": Kind(
        "evaluation",
        (
            ("report", "evaluation", "-o", "out/page.html"),
            ("evaluate", "run", "-o", "evaluation", "--suite", "perplexity", "--text", "texts", "--lengths", "40"),
        ),
    ),
    "history": Kind("history", (("report", "history", "-o", "out/page.html"),)),
    "settings": Kind("run.yaml", ((*TRAIN[:2], "output=out/run", "--dry-run"),)),
    "text": Kind(
        "texts",
        (
            ("prepare", "texts", "--output", "out/shards", "--processes", "1"),
            ("prepare", "texts/a.txt", "--output", "out/shards", "--processes", "1"),
            ("generate", "run", "--file", "texts/a.txt", "--max-new-tokens", "1"),
            ("read", "run", "texts/a.txt", "--memory", "out/memory"),
            TRAIN,
        ),
    ),
    "lines": Kind(
        "pairs.jsonl",
        (("prepare", "pairs.jsonl", "--column", "document", "--output", "out/shards", "--processes", "1"),),
    ),
    "memory": Kind(
        "memory",
        (("verify", "memory"), (*GENERATE, "--memory", "memory"), ("read", "run", "texts/b.txt", "--memory", "memory")),
        told=True,
        resign=attacks.resign_memory,
        unhashed="chunks-",
    ),
    "additions": Kind(
        "learned", (("convert", "base", "-o", "out/again", "--additions", "learned/additions.safetensors"),)
    ),
    "model": Kind("run", (GENERATE, ("verify", "run")), resign=attacks.resign_run),
    "run": Kind(
        "stopped",
        (("verify", "stopped"), ("train", "run.yaml", "output=stopped", "data.paths=[texts]")),
        told=True,
        resign=attacks.resign_run,
    ),
}  # fmt: skip


# --- a good one of each ----------------------------------------------------------------------------------------


@dataclass
class Answer:
    code: int
    out: str
    err: str
    crash: str | None = None

    @property
    def line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1]


class _Hang(BaseException):
    """A command took too long."""


def answer(*words: str) -> Answer:
    """Run a command in this process."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Hang

    out, err, crash, code = io.StringIO(), io.StringIO(), None, 0
    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITED))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, seconds in clocks:
        signal.setitimer(clock, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(list(words))
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1 if stopped.code else 0
    except _Hang:
        crash = f"it took over {SECONDS} s"
    except Exception as error:
        crash = f"{type(error).__name__}: {str(error)[:200]} at {_place(error)}"
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)
    return Answer(code, out.getvalue(), err.getvalue(), crash)


def _place(error: BaseException) -> str:
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/trailmark/" in file:
            found = f"{file.rpartition('/trailmark/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def good(*words: str) -> None:
    found = answer(*words)
    assert found.crash is None, found.crash
    assert found.code == 0, found.err


@pytest.fixture(scope="module", autouse=True)
def no_hub() -> Iterator[None]:
    """A name that a damaged file gives is not asked for on the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, no_restart: None) -> Iterator[Path]:
    """A folder with one of each kind, whole."""
    place = tmp_path_factory.mktemp("good")
    with contextlib.chdir(place):
        rng = random.Random(0)
        for name in ("a", "b"):
            Path("texts").mkdir(exist_ok=True)
            Path("texts", f"{name}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(120)) + ".\n")
        pairs = [{"document": f"the {word} sings", "summary": word} for word in WORDS[:3]]
        Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        Path("run.yaml").write_text(CONFIG)
        good("prepare", "texts", "--output", "shards", "--processes", "1")
        columns = ("--column", "document", "--summary-column", "summary")
        good("prepare", "pairs.jsonl", "--pairs", "--output", "pairs", *columns)
        good("neighbours", "shards", "table", "--embedder", "hash:8", *SIZES)
        good("train", "run.yaml")
        Run(load_run_config("run.yaml", ["output=stopped"]), progress=_stop_after_one_step).train()
        good("read", "run", "texts/a.txt", "--memory", "memory", "--trace", "trace.jsonl")
        good(
            "evaluate",
            "run",
            "-o",
            "evaluation",
            "--suite",
            "perplexity",
            "--text",
            "texts",
            "--lengths",
            "40",
        )
        _learn_beside_a_base()
        Path("history").mkdir()
        for name in ("history.json", "run.yaml"):
            Path("history", name).write_bytes(Path("run", name).read_bytes())
        yield place


def _learn_beside_a_base() -> None:
    """Of a converted Llama what a training with adapters leaves, in learned/."""
    save_converted_llama(
        Path(), {"drt": ("drt", ["sliding_window=16", "chunk_size=7", "num_encoder_layers=1"])}
    )
    Path("learned.yaml").write_text("init_from: drt\nmodel: {}\n")
    settings = ("train=additions", "lora_rank=2", "steps=1", "tokens_per_step=96", "context_length=96")
    data = ("data.paths=[texts]", "data.tokenizer=drt", "output=trained")
    good("train", "learned.yaml", *data, *(f"training.{one}" for one in settings))
    Path("learned").mkdir()
    Path("trained", ADDITIONS).rename(Path("learned", ADDITIONS))
    for folder in ("drt", "trained"):
        shutil.rmtree(folder)


def _stop_after_one_step(run: Run) -> None:
    if run.step == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def results(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """What a kind's command gives where nothing is damaged, found once."""
    known: dict[tuple[str, int], Any] = {}

    def find(name: str, number: int) -> Any:
        if (name, number) not in known:
            place = attacks.copied(world, tmp_path_factory.mktemp("expected") / "world")
            with contextlib.chdir(place):
                words = KINDS[name].commands[number]
                found = answer(*words)
                assert (found.crash, found.code) == (None, 0), (words, found.err)
                known[name, number] = result(words, found)
        return known[name, number]

    return find


def result(words: tuple[str, ...], found: Answer) -> Any:
    """What a command found, without what differs from run to run."""
    match words[0]:
        case "train" if "--dry-run" not in words:
            output = next(word for word in reversed(words) if word.startswith("output=")).removeprefix(
                "output="
            )
            history = json.loads(Path(output, "history.json").read_text())
            return [[step["step"], step["loss"]] for step in history["steps"]]
        case "neighbours" if (
            words[2] != "table"
        ):  # one that is finished is compared by verify, and as it is used
            return Path(words[2], "neighbours.bin").read_bytes()
        case "generate" | "verify" | "prepare":
            return found.out
        case "read":
            return answer(
                "generate", "run", "--prompt", "the ", "--max-new-tokens", "2", "--memory", "memory"
            ).out
    return None


# --- the attacks -------------------------------------------------------------------------------------------------


def attack(name: str, draw: str, world: Path, place: Path, results: Callable[[str, int], Any]) -> str | None:
    """One draw; what is wrong about the answer, or None."""
    rng, kind = random.Random(draw), KINDS[name]
    number = rng.randrange(len(kind.commands))
    words = kind.commands[number]
    expected = results(name, number)
    attacks.copied(world, place)
    (place / "outside").mkdir()
    with contextlib.chdir(place):
        said = attacks.damaged(rng, Path(kind.target), place / "outside", kind.resign)
        own = tuple(Path(path) for path in ("out", kind.target, *_written(words)))
        before = attacks.contents(Path(), own)
        found = answer(*words)
        after = attacks.contents(Path(), own)
        about = f"{name} {draw}: {said}; {' '.join(words)}: "
        if before != after:
            changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
            return f"{about}{', '.join(changed)} changed outside"
        if found.crash:
            return about + found.crash
        if found.code:
            line = found.line
            if found.code not in (1, 2) or not line.startswith("trailmark: ") or len(line) > 3000:
                return f"{about}exit status {found.code}, {line[:300]!r}"
            return None
        free = "signed again" in said or (kind.unhashed in said and words[0] != "verify")
        if kind.told and not free and (came := result(words, found)) != expected:
            return f"{about}exit status 0 with {str(came)[:200]!r}, expected {str(expected)[:200]!r}"
    return None


def _written(words: tuple[str, ...]) -> Iterator[str]:
    """What a command writes to, by its own words."""
    for option, value in zip(words, (*words[1:], ""), strict=True):
        if option in ("--memory", "--trace") and words[0] == "read":
            yield from (value, f"{value}.state")


def attacked(
    name: str, seed: int, draws: int, world: Path, tmp_path: Path, results: Callable[[str, int], Any]
) -> None:
    """That nothing is wrong with any of so many draws."""
    wrong = []
    for number in range(draws):
        place = tmp_path / str(number)
        if (found := attack(name, f"{seed}-{number}", world, place, results)) is not None:
            wrong.append(found)
            if "it took over" in found:  # what was broken off may have left anything behind
                break
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sampled(6)
def test_what_is_damaged_is_said_in_a_line(
    name: str, seed: int, world: Path, tmp_path: Path, results: Callable[[str, int], Any]
) -> None:
    attacked(name, seed, -(-DRAWS // (len(SEEDS) * len(KINDS))), world, tmp_path, results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_damaged_is_said_in_a_line_of_many_more(
    name: str, seed: int, world: Path, tmp_path: Path, results: Callable[[str, int], Any]
) -> None:
    attacked(name, 1000 + seed, -(-SLOW_DRAWS // (len(SEEDS) * len(KINDS))), world, tmp_path, results)
