"""The commands end to end, and one plain line for everything that a user may get wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.disks import flip, largest_file, snapshot
from tests.interrupted import interrupted
from tests.training.killed import half_written
from tests.training.tiny import prose, write_run
from trailmark import cli
from trailmark.evaluation import subject
from trailmark.evaluation.subject import load, own_device
from trailmark.files import read_json
from trailmark.memory import manifest
from trailmark.report.console import size

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("no_restart")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a text and the trained needle model in run/."""
    folder = tmp_path_factory.mktemp("trained")
    cli.main(["train", str(write_run(folder, "needles"))])
    return folder


# --- the commands ------------------------------------------------------------------------------------------


def test_a_training_says_what_it_does(tmp_path: Path, command: Command) -> None:
    train = ("train", write_run(tmp_path, "needles"), "training.steps=6", "training.save_steps=3")
    code, out, err = command(*train)
    assert code == 0
    assert "Training DRTForCausalLM (" in out
    assert "6 steps of 160 tokens" in out
    assert f"The model lies in {tmp_path}/run/" in out
    assert "6/6" in err or "1/6" in err  # progress
    assert len(read_json(tmp_path / "run" / "history.json")["steps"]) == 1
    code, out, _ = command(*train)
    assert (code, "Trained already" in out) == (0, True)


@pytest.mark.parametrize("model", ["drt", "window", "landmark", "hils", "hsa"])
@pytest.mark.sampled(5)
def test_a_text_model_of_any_kind(model: str, tmp_path: Path, command: Command) -> None:
    assert command("train", write_run(tmp_path, "text", model))[0] == 0
    code, out, _ = command(
        "evaluate", tmp_path / "run", "--text", tmp_path / "text.txt", "--output", tmp_path / "found"
    )
    assert code == 0
    record = read_json(tmp_path / "found" / "run" / "perplexity.json")
    assert not (tmp_path / "run" / "evaluation").exists()
    assert not (tmp_path / "found" / "run" / "needles.json").exists()
    assert [r["length"] for r in record["results"]] == [80, 320, 1280]
    assert "| 1,280 " in out
    both = ("--suite", "needles", "--suite", "perplexity", "--lengths", "400", "--questions", "2")
    code, out, _ = command("evaluate", tmp_path / "run", "--text", tmp_path / "text.txt", *both)
    assert code == 0
    assert "| accuracy |" in out
    assert ("chunk retrieved" in out) == (model != "window")


@pytest.fixture(scope="module")
def trained_landmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``trained``; Landmark Attention with a retrieval gate."""
    folder = tmp_path_factory.mktemp("landmark")
    override = "model.gate_probability=0.5"
    cli.main(["train", str(write_run(folder, "needles", "landmark")), override])
    return folder


@pytest.mark.slow
def test_landmark_attention_through_every_command(
    trained_landmark: Path, tmp_path: Path, command: Command
) -> None:
    model, notes, memory = trained_landmark / "run", trained_landmark / "text.txt", tmp_path / "memory"
    before = snapshot(model)
    evaluate = ("evaluate", model, "--text", notes, "--lengths", "400", "--questions", "2")
    record = {}
    for name, fields in (
        ("as it is", ()),
        ("set", ("retrieve_per=token", "gate_cutoff=1", "local_length=60")),
    ):
        options = [part for field in fields for part in ("--set", field)]
        code, out, _ = command(*evaluate, *options, "--output", tmp_path / "found")
        assert code == 0
        assert ("| 100.0% |" in out.replace("  ", "")) == bool(fields)  # retrievals that the gate skipped
        record[name] = read_json(tmp_path / "found" / "run" / "perplexity.json")
    assert record["as it is"]["model"]["set"] == {}
    assert record["set"]["model"]["set"] == {"retrieve_per": "token", "gate_cutoff": 1.0, "local_length": 60}
    (before_set,), (set_,) = record["as it is"]["results"], record["set"]["results"]
    assert set_["skipped_share"] == 1
    assert set_["loss"] != before_set["loss"]
    assert snapshot(model) == before  # its files stay as they are

    assert command("read", model, notes, "--memory", memory)[0] == 0
    assert "read already" in command("read", model, notes, "--memory", memory)[1]
    generate = ("generate", model, "--prompt", "~ABCD", "--max-new-tokens", "8")
    assert command(*generate, "--memory", memory) == command(*generate, "--file", notes)
    assert command("verify", memory)[0] == 0


@pytest.mark.slow
def test_a_model_whose_tokens_choose_chunks_through_every_command(tmp_path: Path, command: Command) -> None:
    config, memory = write_run(tmp_path, "text", "hils"), tmp_path / "memory"
    model, notes = tmp_path / "run", tmp_path / "text.txt"
    assert command("train", config, "--dry-run")[0] == 0
    assert command("train", config)[0] == 0
    assert command("read", model, notes, "--memory", memory)[0] == 0
    assert "read already" in command("read", model, notes, "--memory", memory)[1]
    generate = ("generate", model, "--prompt", "the old river", "--max-new-tokens", "8")
    assert command(*generate, "--memory", memory) == command(*generate, "--file", notes)
    assert command("verify", memory)[0] == 0
    page = tmp_path / "page.html"
    assert command("explore", model, notes, "--output", page)[0] == 0
    assert page.stat().st_size > 0


def test_generation_is_that_of_the_library(trained: Path, command: Command) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "run").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "run")
    notes, prompt = (trained / "text.txt").read_text(), "~ABCD"
    ids = tokenizer(notes + prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    expected = {}
    for name, start in (("prompt", len(notes)), ("all", 0)):
        with torch.no_grad():
            made = model.generate(
                ids[:, start:], attention_mask=torch.ones_like(ids[:, start:]), max_new_tokens=8
            )
        own = bytes(token - tokenizer.offset for token in made[0, ids.shape[1] - start :].tolist())
        expected[name] = own.decode(errors="replace")
    generate = ("generate", trained / "run", "--prompt", prompt, "--max-new-tokens", "8")
    assert command(*generate)[:2] == (0, expected["prompt"] + "\n")
    assert command(*generate, "--file", trained / "text.txt")[:2] == (0, expected["all"] + "\n")


def test_read_generate_verify(trained: Path, tmp_path: Path, command: Command) -> None:
    notes, memory = trained / "text.txt", tmp_path / "memory"
    model = trained / "run"
    code, out, err = command("read", model, notes, "--memory", memory)
    assert code == 0
    assert f"{notes}: {len(notes.read_text()):,} tokens read" in out  # bytes
    assert "tokens/s" in out + err
    cache = load(model).model.load_cache(memory)
    held = size(cache.memory_bytes() + cache.window_bytes())
    assert f"lies in {memory}/ ({held})" in out
    assert "read already" in command("read", model, notes, "--memory", memory)[1]
    before = snapshot(memory)
    generate = ("generate", model, "--prompt", "~ABCD", "--max-new-tokens", "8")
    after_file = command(*generate, "--file", notes)
    assert command(*generate, "--memory", memory) == after_file
    assert snapshot(memory) == before  # asking leaves no trace
    assert command("verify", memory)[0] == 0
    # a file alone is continued at its end
    assert command("generate", model, "--file", notes, "--max-new-tokens", "2")[0] == 0


def test_a_memory_keeps_its_precision(trained: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    words = "read", trained / "run", trained / "text.txt", "--memory", tmp_path / "memory"
    cli.main([*map(str, words)])
    assert "memory_dtype: expected float32" in refused(*words, "--memory-dtype", "bfloat16")


def test_a_memory_in_eight_bits(
    trained: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]], refused: Callable[..., str]
) -> None:
    words = "read", trained / "run", trained / "text.txt", "--memory", tmp_path / "memory"
    assert command(*words, "--memory-dtype", "int8")[0] == 0
    # older versions say that they are older
    assert manifest.read(tmp_path / "memory").format == manifest.QUANTIZED
    assert command("verify", tmp_path / "memory")[0] == 0
    asked = "generate", trained / "run", "--memory", tmp_path / "memory", "--prompt", "~ABCD"
    assert command(*asked, "--max-new-tokens", "2")[0] == 0
    assert command(*words)[0] == 0  # read on as it is
    assert "memory_dtype: expected int8" in refused(*words, "--memory-dtype", "bfloat16")
    of_tokens = *words[:-1], tmp_path / "tokens", "--memory-tier", "tokens"
    assert "memory_dtype: expected float32, bfloat16 or float16 with" in refused(
        *of_tokens, "--memory-dtype", "int8"
    )
    assert not (tmp_path / "tokens").exists()


def test_a_memory_that_is_none(trained: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    model, memory = trained / "run", tmp_path / "memory"
    assert "folder" in refused("verify", memory)
    assert "folder" in refused("generate", model, "--prompt", "a", "--memory", memory)
    assert "--prompt TEXT, --file FILE or both" in refused("generate", model)
    cli.main(["read", str(model), str(trained / "text.txt"), "--memory", str(memory)])
    chunks = next(memory.glob("chunks-*.bin"))
    flip(chunks, chunks.stat().st_size // 2)
    assert chunks.name in refused("verify", memory)
    os.truncate(chunks, chunks.stat().st_size - 1)
    assert chunks.name in refused("generate", model, "--prompt", "a", "--memory", memory)


def test_sampling_is_a_function_of_its_seed(trained: Path, command: Command) -> None:
    generate = ("generate", trained / "run", "--prompt", "a", "--max-new-tokens", "30", "--temperature", "3")
    outs = [command(*generate, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


def test_help_names_every_command(command: Command) -> None:
    _, out, err = command("--help")
    for name in ("demo", "train", "evaluate", "generate", "doctor"):
        assert name in out
    assert err == ""


@pytest.mark.slow
def test_as_a_process_of_its_own(trained: Path, tmp_path: Path) -> None:
    """From the shell, with the restart that sets memory and threads up, in a folder that holds a Python file."""
    (tmp_path / "random.py").write_text("raise SystemExit('not the library')")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GOMP_", "OMP_"))}
    generate = ["generate", str(trained / "run"), "--prompt", "the small boat", "--max-new-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trailmark.cli", *generate],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


# --- mistakes ----------------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "does not exist"),
    "empty": (b"", "is empty"),
    "binary": (b"\x7fELF\0\1\2", "is binary"),
    "not UTF-8": ("schön".encode("latin-1"), "UTF-8"),
}


@pytest.mark.parametrize(("content", "message"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["train", "evaluate", "generate"])
def test_a_text_that_is_none(
    name: str, content: bytes | None, message: str, trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = tmp_path / "notes.txt"
    if content is not None:
        path.write_bytes(content)
    arguments: dict[str, tuple[str | Path, ...]] = {
        "train": (trained / "config.yaml", f"data.paths=[{path}]", f"output={tmp_path}/run"),
        "evaluate": (trained / "run", "--text", path),
        "generate": (trained / "run", "--prompt", "a", "--file", path),
    }
    if name == "generate" and content is None:
        message = "No such file"
    line = refused(name, *arguments[name])
    assert message in line
    assert "notes.txt" in line


def test_a_text_too_short(
    trained: Path, tmp_path: Path, refused: Callable[..., str], command: Command
) -> None:
    """To train on, to read windows of. As a haystack it is repeated, and that is said."""
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    line = refused("train", trained / "config.yaml", f"data.paths=[{short}]", f"output={tmp_path}/run")
    assert "data: expected more than 640 tokens to hide needles in, got 12" in line
    evaluate = ("evaluate", trained / "run", "--text", short, "-o", tmp_path / "found")
    line = refused(*evaluate, "--suite", "perplexity", "--lengths", "100")
    assert "length: expected at most the text's 12 tokens, got 100" in line
    code, out, _ = command(*evaluate, "--suite", "needles", "--lengths", "320", "--questions", "1")
    assert code == 0
    assert "Mind: the text has 12 tokens; haystacks that are longer repeat it." in out


def test_a_configuration_file_that_is_none(
    trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert "absent.yaml': No such file" in refused("train", tmp_path / "absent.yaml")
    for content in (b"", b"\x00\xff\xfe", b"a: [1\nb: }"):
        (tmp_path / "bad.yaml").write_bytes(content)
        assert "bad.yaml'" in refused("train", tmp_path / "bad.yaml")


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "set": (
        ("evaluate", "RUN", "--set", "num_retrieved_chunk=2"),
        "set: num_retrieved_chunk: unknown field of drt. Did you mean 'num_retrieved_chunks'?",
    ),
    "set to what": (("evaluate", "RUN", "--set", "chunk_size"), "set: expected key=value, got 'chunk_size'"),
    "set a word": (
        ("evaluate", "RUN", "--set", "window_position=rop"),
        "set: window_position: expected 'alibi' or 'rope', got 'rop'. Did you mean 'rope'?",
    ),
    "set a size": (
        ("evaluate", "RUN", "--set", "num_attention_heads=3"),
        "num_attention_heads: expected a divisor of hidden_size = 16, got 3",
    ),
    "set weights": (("evaluate", "RUN", "--set", "intermediate_size=32"), "weights are mismatched: "),
    "no prompt": (("generate", "RUN"), "prompt: expected --prompt TEXT, --file FILE or both, got neither"),
    "empty prompt": (("generate", "RUN", "--prompt", ""), "prompt: expected at least one character"),
    "nothing new": (
        ("generate", "RUN", "--prompt", "a", "--max-new-tokens", "0"),
        "--max-new-tokens': Input should be greater than or equal to 1",
    ),
    "cold": (
        ("generate", "RUN", "--prompt", "a", "--temperature", "-1"),
        "temperature: expected 0.0001 to 10000, or 0",
    ),
    "frozen": (
        ("generate", "RUN", "--prompt", "a", "--temperature", "1e-320"),
        "temperature: expected 0.0001 to",
    ),
    "no number": (
        ("generate", "RUN", "--prompt", "a", "--temperature", "nan"),
        "temperature: expected a number",
    ),
    "infinite": (
        ("generate", "RUN", "--prompt", "a", "--temperature", "inf"),
        "temperature: expected a number",
    ),
    "no command": (("evalute",), "No such command 'evalute'"),
    "no option": (("doctor", "--nope"), "No such option: --nope"),
    "not UTF-8": (("generate", "RUN", "--prompt", "\udcff"), "prompt: expected UTF-8 text, got"),
    "seed": (("demo", "--seed", "-1"), "--seed': Input should be greater than or equal to 0"),
    "minutes": (("demo", "--minutes", "0"), "minutes: expected a positive number, got 0"),
    "demo": (("demo", "--questions", "0"), "questions: expected at least 1, got 0"),
}


@pytest.mark.parametrize(("arguments", "message"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_cannot_be(
    arguments: tuple[str, ...],
    message: str,
    trained: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    told = [str(trained / "run") if a == "RUN" else a for a in arguments]
    if told[0] == "evaluate":
        told += ["--text", str(trained / "text.txt")]
    assert message in refused(*told)
    assert list(tmp_path.iterdir()) == []


# --- folders that hold no model ----------------------------------------------------------------------------


GONE = {"no weights": "model.safetensors", "no tokenizer": "tokenizer_config.json"}
CHANGED: dict[str, dict[str, Any]] = {  # fields of a configuration that is not that of the weights
    "other sizes": {"hidden_size": 32},
    "fewer layers": {"num_hidden_layers": 1, "num_lower_layers": 0},
}


def broken(trained: Path, tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "model"
    if kind == "missing":
        return folder
    if kind == "a file":
        folder.write_text("hello")
        return folder
    if kind == "unfinished":
        folder.mkdir()
        shutil.copy(trained / "run" / "run.yaml", folder)
        return folder
    shutil.copytree(trained / "run", folder, ignore=shutil.ignore_patterns("checkpoints"))
    if kind in GONE:
        (folder / GONE[kind]).unlink()
    elif kind in CHANGED:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | CHANGED[kind]))
    elif kind == "a broken run.yaml":
        (folder / "run.yaml").write_text("a: [")
    else:
        assert kind == "of another library"
        sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
        LlamaConfig(**sizes, vocab_size=16).save_pretrained(folder)
    return folder


KINDS = {
    "missing": "does not exist",
    "a file": "has no config.json",
    "unfinished": "is not finished",
    "of another library": "expected one of trailmark's",
    "other sizes": "weights",
    "fewer layers": "weights",
    "no weights": "cannot load",
    "no tokenizer": "tokenizer",
    "a broken run.yaml": "run.yaml",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_holds_no_model_of_ours(
    kind: str, trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = broken(trained, tmp_path, kind)
    before = snapshot(tmp_path)
    line = refused("generate", folder, "--prompt", "a")
    assert line.startswith("trailmark: model: ")
    assert str(folder) in line
    assert KINDS[kind] in line
    evaluated = refused("evaluate", folder, "--text", trained / "text.txt", "--lengths", "320")
    if kind == "of another library":  # which evaluate takes, with its own weights
        assert "expected the weights that config.json describes" in evaluated
    else:
        assert evaluated == line
    assert snapshot(tmp_path) == before


def test_a_prompt_outside_the_vocabulary(trained: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "run")
    fields = {**model.config.to_dict(), "vocab_size": 50}
    type(model)(type(model.config).from_dict(fields)).save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(trained / "run").save_pretrained(tmp_path / "run")
    line = refused("generate", tmp_path / "run", "--prompt", "a")
    assert "model: expected a tokenizer with at most the 50 tokens of the model's vocabulary" in line


# --- nowhere to write, a full disk, Ctrl-C -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["train", "evaluate", "demo"])
def test_nowhere_to_write(name: str, trained: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    taken = tmp_path / "file"
    taken.write_text("in the way")
    for place in (taken / "below", Path("/proc/nowhere")):
        arguments: dict[str, tuple[str | Path, ...]] = {
            "train": ("train", trained / "config.yaml", f"output={place}"),
            "evaluate": ("evaluate", trained / "run", "--text", trained, "--output", place),
            "demo": ("demo", "--output", place),
        }
        line = refused(*arguments[name])
        assert "output: expected a folder to write in" in line
        assert str(place) in line
    assert taken.read_text() == "in the way"


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_what_is_written_becomes_no_text(
    name: str, trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.txt").write_text(prose())
    arguments: dict[str, tuple[str | Path, ...]] = {
        "train": ("train", trained / "config.yaml", f"data.paths={texts}", f"output={texts}/run"),
        "evaluate": ("evaluate", trained / "run", "--text", texts, "--output", texts / "found"),
    }
    assert "output: expected a folder outside of the text" in refused(*arguments[name])
    assert list(texts.iterdir()) == [texts / "a.txt"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_belongs_to_others(trained: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    line = refused("train", trained / "config.yaml", f"output={tmp_path}/locked")
    assert "output: expected a folder to write in" in line


@pytest.mark.parametrize("size", [2_000, 60_000], ids=["weights", "optimizer"])
@pytest.mark.sampled(2)
def test_a_full_disk_keeps_the_last_checkpoint(size: int, tmp_path: Path, command: Command) -> None:
    """The same command goes on once there is space, and nothing is lost."""
    config = write_run(tmp_path, steps=15)
    whole = tmp_path / "whole"
    cli.main(["train", str(config), f"output={whole}"])
    cut_short(config, steps=5)
    before = snapshot(tmp_path / "run" / "checkpoints" / "step-00000005")
    with largest_file(size):
        code, _, err = command("train", config)
    assert code == 1
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("trailmark: output: cannot save in ")
    assert "File too large" in line
    assert line.endswith("the last whole checkpoint is step 5.")
    assert not half_written(tmp_path / "run")
    assert snapshot(tmp_path / "run" / "checkpoints" / "step-00000005") == before
    assert not (tmp_path / "run" / "history.json").exists()
    assert command("train", config)[0] == 0
    assert_same_weights(tmp_path / "run", whole)


def cut_short(config: Path, steps: int) -> None:
    """Trains the config's run up to a Ctrl-C after ``steps``."""
    from trailmark.training.config import load_run_config
    from trailmark.training.run import Run

    def progress(run: Run) -> None:
        if run.step == steps:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Run(load_run_config(config), progress).train()


def assert_same_weights(ours: Path, other: Path) -> None:
    weights, expected = (load_file(folder / "model.safetensors") for folder in (ours, other))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_ctrl_c_stops_a_training_that_goes_on_exactly(tmp_path: Path, command: Command) -> None:
    config = write_run(tmp_path, "needles", steps=60, save_steps=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    log = tmp_path / "log"
    code, err = interrupted(["train", config], (checkpoints / "step-00000004").exists, log)
    assert code == 130
    assert err.strip().splitlines()[-1] == "trailmark: Stopped. The same command goes on from here."
    assert "Traceback" not in err
    assert "Trained" not in log.read_text()
    assert not (tmp_path / "run" / "history.json").exists()
    assert command("train", config)[0] == 0
    assert command("train", config, f"output={tmp_path}/whole")[0] == 0
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_stops_a_generation(trained: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ["generate", trained / "run", "--prompt", "a", "--max-new-tokens", "1000000"]
    arguments += ["--temperature", "5"]  # words end now and then, and are shown
    code, err = interrupted(arguments, lambda: log.exists() and log.stat().st_size > 0, log)
    assert code == 130
    assert "Traceback" not in err
    assert "Stopped." in err


@pytest.mark.parametrize("function", ["_quiet", "app"])
def test_ctrl_c_at_any_time(function: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the libraries takes seconds in which nothing has been shown yet."""

    def press(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, function, press)
    code, _, err = command("doctor")
    assert code == 130
    assert err.strip() == "trailmark: Stopped."
    assert command("train", "config.yaml")[2].strip().endswith("Stopped. The same command goes on from here.")


def test_a_terminal_that_lacks_a_character_is_shown_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    seen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(seen, encoding="ascii"))
    cli.main(["--version"])
    print("\u2014", flush=True)
    assert seen.getvalue().endswith(b"\\u2014\n")
    # a file is not written otherwise than was meant
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    cli.main(["--version"])
    with pytest.raises(UnicodeEncodeError):
        print("\u2014", flush=True)


def test_our_own_mistakes_keep_their_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError, match="ours"):
        command("doctor")


def test_a_users_mistake_has_its_traceback_where_it_is_asked_for(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("verify", "nothing")[0] == 1
    monkeypatch.setenv("TRAILMARK_TRACEBACK", "1")
    with pytest.raises(ValueError, match="nothing"):
        command("verify", "nothing")


def test_the_written_configuration_trains_the_same_again(trained: Path) -> None:
    kept = yaml.safe_load((trained / "run" / "run.yaml").read_text())
    assert kept == yaml.safe_load((trained / "config.yaml").read_text())


# --- where models compute --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("read", "MODEL", "TEXT", "--memory", "memory"),
        ("generate", "MODEL", "--prompt", "The", "--max-new-tokens", "2"),
        ("chat", "MODEL"),
        ("serve", "MODEL"),
        ("explore", "MODEL", "TEXT", "-o", "page.html"),
    ],
    ids=lambda words: words[0],
)
def test_a_device_is_one_to_compute_on(
    words: tuple[str, ...], trained: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"MODEL": trained / "run", "TEXT": trained / "text.txt"}
    asked = [str(named.get(word, word)) for word in words]
    code, _, err = command(*asked, "--device", "meta")
    assert (code, err.splitlines()[-1].partition(", got")[0]) == (
        1,
        "trailmark: device: expected one to compute on, cpu or cuda",
    )
    assert not list(tmp_path.iterdir())
    if words[0] in ("read", "generate", "explore"):
        assert command(*asked, "--device", "cpu")[0] == 0


def test_several_processes_name_no_single_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert own_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(subject, "device_named", torch.device)  # there may be no GPU here to be looked at
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"device: expected cuda with 4 processes, .* got cuda:1"):
        own_device("cuda:1")
