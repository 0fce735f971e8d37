"""Every command that a document shows or a part prints is one that the real command line takes."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.commands import (
    CONFIGS,
    DOCUMENTS,
    ROOT,
    Command,
    all_options,
    fields_of_init_from,
    files_named,
    in_configuration,
    in_document,
    in_sources,
    options_named,
    overrides_named,
    parse,
    words_of,
)
from tests.report import runs
from tests.training.tiny import write_run
from trailmark.data.corpus import load_tokenizer
from trailmark.models import MODELS
from trailmark.report.page import build
from trailmark.training.config import load_run_config
from trailmark.training.run import Run

VOCABULARY = len(load_tokenizer())
SHOWN = {
    **{str(path.relative_to(ROOT)): [*in_document(path)] for path in DOCUMENTS},
    "configs/*.yaml": [command for path in CONFIGS for command in in_configuration(path)],
    "trailmark/**/*.py": [*in_sources()],
}


@pytest.mark.parametrize("place", [name for name, shown in SHOWN.items() if shown])
def test_every_command_is_one_that_the_command_line_takes(place: str) -> None:
    assert refused(SHOWN[place]) == []


def refused(shown: list[Command]) -> list[str]:
    """Each command that its program would refuse, and why."""
    found = []
    for command in dict.fromkeys(shown):
        try:
            parse(command)
        except ValueError as error:
            found.append(f"{command}: {error}")
    return found


def test_commands_are_found_where_they_are_shown() -> None:
    """A pattern that finds nothing would prove nothing."""
    counts = {place: len(shown) for place, shown in SHOWN.items()}
    assert counts["README.md"] >= 10
    assert counts["docs/evaluation.md"] >= 15
    assert counts["benchmarks/README.md"] >= 15
    assert counts["configs/README.md"] >= 10
    assert counts["configs/*.yaml"] >= 2
    messages = [str(command) for command in SHOWN["trailmark/**/*.py"] if command.whole]
    assert "trailmark/demo.py: trailmark generate X/drt --file notes.txt --prompt '~ABCD'" in messages
    assert "trailmark/cli_evaluation.py: trailmark report X -o report.html" in messages


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trailmark evaluate MODEL --suite cost --generated 128", "No such option: --generated"),
        ("trailmark evaluate MODEL --rounds many", "'--rounds': Input should be a valid integer"),
        ("trailmark evaluate MODEL --rounds 0", "'--rounds': Input should be greater than or equal to 1"),
        ("trailmark evaluate --suite cost", "Missing argument"),
        ("trailmark read MODEL book.txt", "Missing option '--memory'"),
        ("trailmark verify FOLDER ANOTHER", "unexpected extra argument"),
        ("trailmark demonstrate", "no command"),
        ("torchrun --nproc-per-node 2 -m trailmark train", "Missing argument"),
        ("torchrun --processes 2 -m trailmark train CONFIG", "torchrun refuses"),
        ("accelerate launch --num_processes 8 -m trailmark trian CONFIG", "no command 'trian'"),
        ("python benchmarks/needles.py --kills", "unrecognized arguments: --kills"),
        ("python benchmarks/needle.py", "there is no benchmarks/needle.py"),
        ("make tests", "the Makefile has no tests"),
        ("make test ARG=-x", "the Makefile has no ARG"),
    ],
)
def test_a_wrong_command_is_refused(line: str, said: str) -> None:
    (problem,) = refused([Command("here", words_of(line))])
    assert said in problem


def test_a_wrong_option_within_a_sentence_is_refused() -> None:
    named = Command("here", ("trailmark", "prepare", "xsum", "--pairs"), whole=False)
    assert refused([named]) == []
    (problem,) = refused([Command("here", (*named.words, "--generated"), whole=False)])
    assert "no option --generated" in problem


def test_every_option_that_a_document_names_exists() -> None:
    scripts = "".join(file.read_text() for file in (ROOT / "benchmarks").rglob("*.py"))
    known = all_options() | set(re.findall(r'"(--[a-z-]+)"', scripts)) | _OF_OTHER_PROGRAMS
    unknown = {path: options_named(path) - known for path in DOCUMENTS}
    assert {path: options for path, options in unknown.items() if options} == {}


def test_every_file_that_a_document_names_exists() -> None:
    named = [(path, name, place) for path in DOCUMENTS for name, place in files_named(path)]
    assert [(path, name) for path, name, place in named if not place.exists()] == []


_OF_OTHER_PROGRAMS = {
    "--durations",
    "--shutdown-timeout",
    "--max-restarts",
    "--requeue",
    "--hypothesis-profile",
    "--signal",
}


# --- what needs the network ---------------------------------------------------------------------------------

_FROM_THE_HUB = re.compile(
    r"(?<![/\w-])(?:gpt2|facebook/contriever|pg19|arxiv-math|xsum|cnn-dailymail|hub:\w)|:facebook/"
)


def test_a_document_says_beside_its_commands_which_need_the_network() -> None:
    """In the line itself, or in the paragraph before or after the commands."""
    silent = [
        (path, line)
        for path in DOCUMENTS
        for parts in [re.split(r"\n\s*\n", path.read_text())]
        for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False)
        for line in re.findall(r"^    (.*)$", part, re.M)
        if re.match(r"(?:[A-Z_]+=\S+ )?(?:trailmark|torchrun|accelerate) ", line)
        and _FROM_THE_HUB.search(line.split("#")[0])
        and not re.search(r"\bnetwork\b", before + part + after)
    ]
    assert silent == []


def test_a_configuration_says_where_it_needs_the_network() -> None:
    named = [
        (path.name, line)
        for path in CONFIGS
        for line in path.read_text().splitlines()
        if _FROM_THE_HUB.search(line) and re.match(r"\s*(?:tokenizer|embedder|init_from):", line)
    ]
    assert [(name, line) for name, line in named if "network" not in line] == []


# --- what is printed of results ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "from settings"])
@pytest.mark.usefixtures("undrawn")
def test_the_commands_of_a_report_can_be_run(kept: bool, tmp_path: Path) -> None:
    """Those that a record keeps, and those that are put together where it keeps none."""
    models = [runs.identity(name, f"/{name}", name) for name in "xy"]
    own = {"command": "trailmark evaluate 'my model' --suite needles --lengths 1024"} if kept else {}
    results = {
        "needles": [runs.needle(1024, depth=0.5, **own)],
        "perplexity": [runs.perplexity(1024)],
        "summarization": [runs.rouge()],
    }
    for suite, found in results.items():
        runs.record(tmp_path / suite / "evaluation", suite, found)
    runs.record(tmp_path / "cost", "cost", [runs.cost(["x", "y"], 4096)], models)
    runs.training(tmp_path / "run")
    runs.demo(tmp_path / "demo")
    page = build([tmp_path], tmp_path / "out" / "report.html").page.read_text()
    shown = [line for text in re.findall(r"<code>(.*?)</code>", page, re.S) for line in text.splitlines()]
    lines = [html.unescape(line) for line in shown if line.startswith("trailmark ")]
    assert {tuple(line.split()[:2]) for line in lines} == {
        ("trailmark", x) for x in ("evaluate", "train", "demo")
    }
    assert all(any(f"--suite {suite}" in line for line in lines) for suite in (*results, "cost"))
    assert refused([Command("report", words_of(line)) for line in lines]) == []


@pytest.mark.usefixtures("no_restart")
def test_what_commands_print_next_and_what_cards_show_can_be_run(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """A training, an evaluation, a reading, and the card beside the model."""
    config, text = write_run(tmp_path, "needles", steps=2, tokens_per_step=1280), tmp_path / "text.txt"
    table = ("neighbours", tmp_path / "corpus", tmp_path / "table", "--embedder", "hash", "--count", "2")
    said = []
    for words in (
        ("train", config),
        ("evaluate", tmp_path / "run", "--text", text, "--lengths", "320", "--questions", "2"),
        ("read", tmp_path / "run", text, "--memory", tmp_path / "memory"),
        ("prepare", text, "--output", tmp_path / "corpus"),
        (*table, "--context-length", "256", "--chunk-size", "16", "--architecture", "drt", "--window", "32"),
    ):
        code, out, err = command(*words)
        assert code == 0, err
        said += re.findall(r"Next: (trailmark .*)", out)
    assert [line.split()[1] for line in said] == ["evaluate", "report", "generate", "train", "train"]
    assert all(_some_configuration_takes(*_overrides(words_of(line))) for line in said[3:])
    card = (tmp_path / "run" / "README.md").read_text()
    shown = re.findall(r"^(?:    )?(trailmark .*)$", card, re.M)
    assert any("trailmark evaluate" in line for line in shown)
    assert refused([Command("said", words_of(line)) for line in (*said, *shown)]) == []


# --- configurations ----------------------------------------------------------------------------------------

# what the configurations of the papers' rows need from the hub, by what is here
_HERE = ["data.tokenizer=bytes", "init_from=null", "data.neighbours=null", "training.report_to=[]"]
_HERE += [
    "training.train=all",
    "distil.model=null",
    "distil.retrieval_weight=0",
    "distil.fit_steps=0",
    "distil.fit_retriever=teacher",
    "training.lora_rank=0",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For each task what data.paths names."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(
        "".join(f"Line {n} of a text that is long enough.\n" for n in range(30_000))
    )
    pairs = [{"document": f"Document {n}. " * 20, "summary": f"Summary {n}."} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    named = {task: [str(folder / "text.txt")] for task in ("text", "needles", "niah")}
    return named | {"summarization": [str(folder / "pairs.jsonl")]}


def make_run(path: Path, overrides: list[str], texts: dict[str, list[str]], folder: Path) -> Run:
    """The run of a configuration, with texts and an encoder that are here; and its model on no device."""
    begun = fields_of_init_from(path, overrides)
    config = load_run_config(path, [*begun, *overrides, *_HERE, f"output={folder / 'run'}"])
    config.data.paths = texts[config.data.task]
    config.data.validation = None if config.data.validation is None else texts["text"]
    if config.model.get("embedder"):
        config.model["embedder"] = "hash"
    run = Run(config)
    with torch.device("meta"):
        model = MODELS[run.model_config.model_type](run.model_config)
    assert sum(p.numel() for p in model.parameters()) > 100_000
    return run


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_makes_its_model_and_its_batches(
    path: Path, texts: dict[str, list[str]], tmp_path: Path
) -> None:
    run = make_run(path, [], texts, tmp_path)
    batch = run.task.batch(0, 0, 1)
    assert batch["input_ids"].shape[0] == 1


DOCUMENTED = [
    (command, path)
    for place in SHOWN
    for command in SHOWN[place]
    if "train" in command.words and command.whole and not place.startswith("trailmark")
    for path in [next((word for word in command.words if word.endswith(".yaml")), None)]
]


@pytest.mark.parametrize(("command", "path"), DOCUMENTED, ids=lambda part: str(part)[:60])
def test_the_overrides_of_every_documented_training_fit_its_configuration(
    command: Command,
    path: str | None,
    texts: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(_processes(command.words)))
    if path is not None and not (ROOT / path).exists():
        pytest.skip("the folder of a run that was made before")
    overrides = _overrides(command.words)
    if path is not None:
        make_run(ROOT / path, overrides, texts, tmp_path)
    else:  # of a configuration that the reader names
        assert _some_configuration_takes(*overrides)


def test_some_configuration_takes_each_setting_that_a_document_names() -> None:
    named = {(path, own) for path in DOCUMENTS for own in overrides_named(path)}
    assert {(path, own) for path, own in named if not _some_configuration_takes(own)} == set()


def _processes(words: tuple[str, ...]) -> int:
    """That a launcher is told to start, on all machines."""
    counts = ("--nproc-per-node", "--nnodes", "--num_processes")
    return math.prod(int(after) for word, after in pairwise(words) if word in counts)


def _overrides(words: tuple[str, ...]) -> list[str]:
    return [word for word in words[words.index("train") + 1 :] if "=" in word]


@cache
def _some_configuration_takes(*overrides: str) -> bool:
    """As it is, or as a row whose chunks an encoder chooses."""
    encoded = ["model.retriever=encoder", "model.embedder=hash"]
    for path, before in itertools.product(CONFIGS, ([], encoded)):
        try:
            config = load_run_config(path, [*before, *overrides])
            fields = config.model_config(VOCABULARY)
            with torch.device("meta"):
                MODELS[fields.model_type](fields)
        except ValueError:
            continue
        return True
    return False
