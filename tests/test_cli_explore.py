"""``trailmark explore``: from texts, a memory and a trace, what it says, what it refuses, how it stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.disks import largest_file
from tests.interrupted import interrupted
from tests.report.explorer.test_page import of_a_page, token_texts
from tests.trace.whole import totals
from tests.training.tiny import MODELS, prose
from trailmark import cli
from trailmark.data.corpus import load_tokenizer
from trailmark.models import DRTConfig, DRTForCausalLM, SlidingWindowConfig, SlidingWindowForCausalLM
from trailmark.trace.lines import TracedChunk, read_trace

Command = Callable[..., tuple[int, str, str]]
TEXT = prose(300) + "naïve 𝔸 日本\n"


pytestmark = pytest.mark.usefixtures("no_restart")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that retrieves in drt/, one that does not in window/, texts, and a memory of a text in memory/."""
    made = tmp_path_factory.mktemp("explore")
    kinds: dict[str, tuple[Any, Any]] = {
        "drt": (DRTConfig, DRTForCausalLM),
        "window": (SlidingWindowConfig, SlidingWindowForCausalLM),
    }
    for name, (kind_of_config, kind) in kinds.items():
        torch.manual_seed(0)
        config: PretrainedConfig = kind_of_config(
            **{field: value for field, value in MODELS[name].items() if field != "architecture"}
        )
        kind(config).save_pretrained(made / name)
        load_tokenizer("bytes").save_pretrained(made / name)
    (made / "book.txt").write_text(TEXT, encoding="utf-8")
    (made / "short.txt").write_text("a" * 39)  # chunks have 20 tokens
    cli.main(["read", str(made / "drt"), str(made / "book.txt"), "--memory", str(made / "memory")])
    return made


@pytest.mark.parametrize("which", ["page.html", "trace.jsonl"])
def test_a_disk_without_room_is_told_with_its_file(
    folder: Path, tmp_path: Path, command: Command, which: str
) -> None:
    given = ["-o", tmp_path / "page.html"]
    given += ["--keep-trace", tmp_path / which] if which != "page.html" else []
    with largest_file(2_000):
        code, _, err = command("explore", folder / "drt", folder / "book.txt", *given)
    assert code == 1
    assert err.strip().splitlines()[-1] == (
        f"trailmark: File too large ({tmp_path / which}). Raise the limit of file size (ulimit -f) and start the same "
        "command again."
    )
    assert not (tmp_path / "page.html").exists()


def test_a_page_from_a_text_a_memory_and_a_trace(folder: Path, tmp_path: Path, command: Command) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.jsonl"
    page.write_text("<!doctype html>old")
    code, out, _ = command("explore", folder / "drt", folder / "book.txt", "-o", page, "--keep-trace", trace)
    assert code == 0
    about, arrays = of_a_page(page.read_text(encoding="utf-8"))
    assert "".join(token_texts(arrays)) == TEXT
    header, entries = read_trace(trace)
    bearing, loss, without = totals([entry for entry in entries if isinstance(entry, TracedChunk)])
    assert about["bearing"] == bearing == about["tokens"] - 1
    rounding = torch.finfo(torch.float32).eps
    assert abs(about["loss"] - loss) <= loss * rounding
    assert abs(about["loss_without"] - without) <= without * rounding
    assert loss != without
    assert about["model"] == header.model
    assert about["title"] == "book.txt, read by drt"
    assert f"Loss with retrieval {loss / bearing:.4f} nats a token, without {without / bearing:.4f}" in out
    assert str(page) in out
    assert str(trace) in out
    # the same reading, whatever it was asked of
    others = tmp_path / "memory.html", tmp_path / "trace.html"
    assert command("explore", folder / "drt", "--memory", folder / "memory", "-o", others[0])[0] == 0
    assert command("explore", "--trace", trace, "-o", others[1])[0] == 0
    for other in others:
        assert other.read_bytes() == page.read_bytes()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"page.html", "trace.jsonl", "memory.html", "trace.html"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_from_a_memory_of_tokens(dtype: str, folder: Path, tmp_path: Path, command: Command) -> None:
    options = ("--memory-tier", "tokens", "--memory-dtype", dtype)
    assert (
        command("read", folder / "drt", folder / "book.txt", "--memory", tmp_path / "memory", *options)[0]
        == 0
    )
    page = tmp_path / "page.html"
    code, _, err = command("explore", folder / "drt", "--memory", tmp_path / "memory", "-o", page)
    assert (code, page.is_file()) == (0, True), err
    _, arrays = of_a_page(page.read_text(encoding="utf-8"))
    assert "".join(token_texts(arrays)) == TEXT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["window", "book.txt"], "retrieve"),
        (["drt", "short.txt"], "longer text"),
        (["drt", "none.txt"], "none.txt"),
        (["drt", "--memory", "none"], "none"),
        (["drt", "book.txt", "--memory", "memory"], "expected one of TEXT, --memory and --trace"),
        (["drt"], "expected one of TEXT, --memory and --trace"),
        (["--trace", "book.txt"], "expected a line of a trace"),
        (["drt", "book.txt", "-o", "."], "is a folder"),
        (["drt", "book.txt", "-o", "book.txt/page.html"], "output: expected a folder to write in"),
        (["drt", "book.txt", "--keep-trace", "book.txt/x"], "keep_trace: expected a folder to write in"),
        (["drt", "book.txt", "-o", "short.txt"], "output: expected a new file or one to write anew"),
        (["drt", "book.txt", "--keep-trace", "short.txt"], "keep_trace: expected a new file or one to write"),
        (["drt", "book.txt", "-o", "book.txt"], "expected another file than the one that is read"),
    ],
)  # fmt: skip
def test_what_cannot_be_explored(
    arguments: list[str],
    message: str,
    folder: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert message in refused("explore", *arguments)
    assert sorted(folder.rglob("*")) == before  # nothing was written
    assert (folder / "book.txt").read_text(encoding="utf-8") == TEXT


def test_a_memory_without_its_text(folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    model = DRTForCausalLM.from_pretrained(folder / "drt")
    cache = model.new_cache()
    model.read(torch.arange(200)[None], cache)
    cache.save(tmp_path / "made-by-hand")
    message = refused(
        "explore", folder / "drt", "--memory", tmp_path / "made-by-hand", "-o", tmp_path / "page.html"
    )
    assert "text" in message
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_the_old_page(folder: Path, tmp_path: Path) -> None:
    long, page = tmp_path / "long.txt", tmp_path / "page.html"
    long.write_text(TEXT * 2000)
    page.write_text("<!doctype html>old")
    command = ["explore", folder / "drt", long, "-o", page, "--keep-trace", tmp_path / "trace.jsonl"]

    def grows() -> bool:
        """The trace, while the text is read."""
        return any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(".trace.jsonl.*"))

    code, said = interrupted(command, grows)
    assert code == 130, said
    assert "Stopped." in said
    assert "Traceback" not in said
    assert page.read_text() == "<!doctype html>old"
    assert {path.name for path in tmp_path.iterdir()} == {"long.txt", "page.html"}
