"""``trailmark convert``: what it says, and that every command opens what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.conversion.bases import made, save

Command = Callable[..., tuple[int, str, str]]
DRT = ("sliding_window=24", "chunk_size=6", "num_retrieved_chunks=3")
pytestmark = pytest.mark.usefixtures("no_restart", "one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made("llama").float(), tmp_path_factory.mktemp("base") / "little-llama")


def test_a_converted_model_reads_and_generates(base: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("convert", base, "-o", tmp_path / "drt", "--to", "drt", *DRT)
    assert (code, "Traceback" in err) == (0, False)
    assert out.splitlines()[0].startswith("little-llama (llama, ")
    assert "gca_o_proj.weight (2 x, 4,608), starts as 0: what is read changes nothing yet" in out
    assert out.splitlines()[-2].startswith("What is new has learned nothing yet")
    assert out.splitlines()[-1].endswith(f"trailmark read {tmp_path / 'drt'} TEXT --memory MEMORY")
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 20)
    code, out, _ = command("read", tmp_path / "drt", tmp_path / "text.txt", "--memory", tmp_path / "memory")
    assert code == 0
    assert "The memory of 640 tokens" in out
    words = ("--prompt", "It was", "--max-new-tokens", 4)
    code, _, _ = command("generate", tmp_path / "drt", "--memory", tmp_path / "memory", *words)
    assert code == 0


def test_the_folder_names_its_tokenizer(
    base: Path, tmp_path: Path, command: Command, refused: Callable[..., str]
) -> None:
    command("convert", base, "-o", tmp_path / "window", "--to", "sliding_window")
    assert json.loads((tmp_path / "window" / "config.json").read_text())["tokenizer_fingerprint"]
    other = json.loads((tmp_path / "window" / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "window" / "tokenizer.json").write_text(json.dumps(other))
    assert "expected the tokenizer" in refused("generate", tmp_path / "window", "--prompt", "It was")


def test_a_dry_run_prints_the_report(base: Path, tmp_path: Path, command: Command) -> None:
    words = ("convert", base, "-o", tmp_path / "drt", "--to", "drt", *DRT)
    _, said, _ = command(*words, "--dry-run")
    assert not (tmp_path / "drt").exists()
    _, done, _ = command(*words)
    *lines, last = said.splitlines()
    assert last == "Nothing was written."
    assert done.splitlines()[: len(lines)] == lines


@pytest.mark.parametrize(
    ("to", "window"), [("hils", "sliding_window=24"), ("sliding_window", "sliding_window=24"), ("hils", "")]
)
@pytest.mark.sampled(3)
def test_some_layers_look_far(to: str, window: str, tmp_path: Path, command: Command) -> None:
    fields = [window] if window else []
    model = made("llama").float()
    model.config.max_position_embeddings = 4096
    base = save(model, tmp_path / "base")
    code, out, _ = command("convert", base, "-o", tmp_path / "new", "--to", to, "--far-layers", 2, *fields)
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("The 2 of 4 layers that look far most")
    # a model with windows alone, some layers of which see all, is none to read with
    following = {"hils": "trailmark read ", "sliding_window": "trailmark convert "}[to]
    assert f"Next: {following}{tmp_path / 'new'} " in out
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    kinds = config["layer_types"]
    assert [f"{n} (" in first for n in range(4)] == [kind == "full_attention" for kind in kinds]
    assert sum(kind == "full_attention" for kind in kinds) == 2
    assert (config["sliding_window"], config["num_sinks"]) == (24 if window else 512, 4)


def test_far_layers_that_cannot_be_chosen(base: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    words = ("convert", base, "-o", tmp_path / "new", "--far-layers", 2)
    assert "none with --to drt" in refused(*words, "--to", "drt", *DRT)
    assert "none with --dry-run" in refused(*words, "--to", "hils", "--dry-run")
    assert "none beside the field layer_types" in refused(*words, "--to", "hils", "layer_types=null")
    assert "trained on texts of at least" in refused(*words, "--to", "hils")
    assert "Did you mean 'sliding_window'?" in refused(*words, "--to", "hils", "slidng_window=24")
    assert refused(*words).startswith("trailmark: to: expected one of")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    there = ("convert", base, "-o", tmp_path / "there", "--to", "hils", "--far-layers", 2)
    assert "is there already" in refused(*there)
    assert "expected 1 to 4" in refused(
        "convert", base, "-o", tmp_path / "new", "--to", "hils", "--far-layers", 5
    )
    assert not (tmp_path / "new").exists()


def test_a_mistake_is_one_line(base: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    line = refused("convert", base, "-o", tmp_path / "drt", "--to", "drt", "slidng_window=24")
    assert "Did you mean 'sliding_window'?" in line
    for name in (tmp_path / "nothing", "nothing.gguf", "a/b/c"):  # none of these is asked for on the hub
        line = refused("convert", name, "-o", tmp_path / "drt", "--to", "drt")
        assert f"there is no {str(name)!r} here" in line
