"""Every block of code in the README and the guides runs as it is printed; a unit of systemd names a command that is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.commands import DOCUMENTS, ROOT, parse, words_of
from tests.commands import Command as Shown
from tests.data.corpora import prose
from tests.models.tiny import drt
from tests.server.conftest import Server, serving
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.memory import ChunkCache

Command = Callable[..., tuple[int, str, str]]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WITH_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
_ADDRESS = "http://127.0.0.1:8000"


class Block(NamedTuple):
    """A block of code; its number counts those of a page from 1."""

    page: str
    number: int
    language: str
    code: str


BLOCKS = [
    Block(str(path.relative_to(ROOT)), number, *block)
    for path in DOCUMENTS
    for number, block in enumerate(
        (
            found
            for found in _FENCE.findall(path.read_text(encoding="utf-8"))
            if found[0] not in ("math", "text")
        ),
        start=1,
    )
]
_OWN = Path(__file__).read_text(encoding="utf-8")
TESTED = {  # by what stands below, or elsewhere
    *((page, int(number)) for page, number in re.findall(r'(?:run|block)\("([\w/.]+)", (\d+)', _OWN)),
    ("CONTRIBUTING.md", 1),  # make: tests/test_commands.py
    ("docs/trace.md", 1), ("docs/trace.md", 3),  # tests/test_cli_trace.py
}  # fmt: skip


def block(page: str, number: int) -> str:
    return next(one.code for one in BLOCKS if (one.page, one.number) == (page, number))


def run(page: str, number: int, **names: Any) -> dict[str, Any]:
    """What names stand for after a block, that found these."""
    exec(compile(block(page, number), page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model() -> Any:
    return drt(vocab_size=259)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_no_block_is_left_out() -> None:
    assert {(one.page, one.number) for one in BLOCKS} == TESTED


def test_the_readmes_lines(model: Any, folder: Path) -> None:
    model.float().save_pretrained(folder / "runs" / "demo" / "drt")
    with torch.no_grad():
        found = run("README.md", 1)
    chosen = found["out"].retrieval[0].indices
    assert found["cache"].num_tokens == 100_000  # the question went onto a branch
    assert (chosen >= 0).any()


@pytest.mark.slow
def test_a_corpus_is_made_and_read(folder: Path) -> None:
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("The lighthouse keeper counts ships. " * 30_000)
    ByteTokenizer().save_pretrained(folder / "gpt2")  # a folder of that name needs no network
    script = block("docs/data.md", 1) + "    assert len(corpus.read(1_000_000, 1_000_512)) == 512\n"
    (folder / "guide.py").write_text(script)
    done = subprocess.run([sys.executable, "guide.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_memory_is_read_saved_and_asked(model: Any) -> None:
    text = tokens(1, 90)
    found = run("docs/reading.md", 1, model=model, pieces=text.split(37, 1), question=text[:, :5])
    cache = found["cache"]
    assert cache.num_tokens == 90  # the memory stays as it is
    mask = torch.ones(3, 7, dtype=torch.long)
    found = run("docs/reading.md", 2, cache=cache, model=model, mask=mask, questions=tokens(3, 7))
    assert found["out"].logits.shape == (3, 7, 259)
    assert cache.num_tokens == 90


def test_texts_that_were_read_apart_are_rows_of_a_batch(model: Any) -> None:
    war, peace, mine = (model.read(tokens(1, length, length)) for length in (50, 70, 31))
    mask = torch.ones(3, 7, dtype=torch.long)
    names = {"war": war, "peace": peace, "mine": mine, "mask": mask, "tokens": tokens(3, 7)}
    found = run("docs/reading.md", 3, model=model, ChunkCache=ChunkCache, **names)
    assert found["mine"].num_tokens == 31 + 7
    assert len(found["batch"].split()) == 2


def test_a_memory_may_keep_tokens(model: Any, folder: Path) -> None:
    found = run("docs/scale.md", 1, model=model, torch=torch)
    model.read(tokens(1, 60), found["cache"])
    assert found["cache"].num_tokens == 60
    assert any((folder / "memories" / "book").iterdir())


def test_processes_share_a_text(model: Any, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    try:
        ids, seeds = tokens(2, 64), torch.arange(2)
        alone = model.train()(ids, noise_seed=seeds).logits
        found = run("docs/training.md", 1, model=model, ids=ids, seeds=seeds)
        torch.testing.assert_close(found["logits"], alone, rtol=0, atol=1e-10)
    finally:
        dist.destroy_process_group()


def test_weights_of_another_format_are_converted_once(model: Any, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    model.config.save_pretrained(folder)
    run("docs/security.md", 1)
    again = type(model).from_pretrained(folder, dtype=torch.float64)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.usefixtures("no_restart", "one_thread")
def test_a_line_of_a_trace_has_the_fields_that_are_shown(model: Any, folder: Path, command: Command) -> None:
    model.save_pretrained(folder / "drt")
    ByteTokenizer(extra_ids=0).save_pretrained(folder / "drt")
    (folder / "book.txt").write_text(prose(1, 40))
    assert command("read", "drt", "book.txt", "--memory", "book", "--trace", "book.jsonl")[0] == 0
    lines = [json.loads(line) for line in (folder / "book.jsonl").read_text().splitlines()]
    shown = json.loads(block("docs/trace.md", 2))
    chunks = [line for line in lines if "chunk" in line and line["reads"][0]["chunks"]]
    assert shown.keys() == chunks[0].keys()
    assert shown["reads"][0].keys() == chunks[0]["reads"][0].keys()


# --- serving -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a model "large", as the guide has it."""
    from tests.data.corpora import save_chat_bpe

    root = tmp_path_factory.mktemp("serving")
    tokenizer = save_chat_bpe(root / "large")
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    drt(2, chunk_size=32, **sizes).float().save_pretrained(root / "large")
    with serving({"large": root / "large"}, root / "memories") as server:
        yield server


def curl(code: str, server: Server) -> list[Any]:
    """What each command answers; of a stream its text."""
    answers = []
    for one in re.split(r"\n(?=curl )", code):
        words = [*shlex.split(one.replace(_ADDRESS, server.url)), "-sS", "--fail-with-body"]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done
        answers.append(json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout)
    return answers


def test_the_client_of_the_guide(live: Server, capsys: pytest.CaptureFixture[str]) -> None:
    live.append("book", "book.txt", prose(1, 300))
    code = block("docs/serving.md", 2)
    assert _ADDRESS in code
    names: dict[str, Any] = {}
    exec(compile(code.replace(_ADDRESS, live.url), "docs/serving.md", "exec"), names)
    assert re.search(r"^0\.\d+ \[", capsys.readouterr().out, re.MULTILINE)
    # a citation has the fields that the guide shows
    shown = json.loads(block("docs/serving.md", 3))
    read = names["answer"].choices[0].trailmark["retrieved"][0]
    assert shown.keys() == read.keys()
    assert shown["passages"][0].keys() == read["passages"][0].keys()


@_WITH_CURL
def test_a_question_by_curl(live: Server) -> None:
    live.append("book", "book.txt", prose(1, 300))
    (asked,) = curl(block("docs/serving.md", 1), live)
    assert asked["choices"][0]["trailmark"]["retrieved"]


@_WITH_CURL
def test_memories_by_curl(live: Server, folder: Path) -> None:
    (folder / "book.txt").write_text(prose(2, 40))
    live.http.delete("/v1/memories/book")
    made, _, described, _ = curl(block("docs/serving.md", 4), live)
    assert made["id"] == described["id"] == "book"
    assert described["documents"][0]["document"] == "book.txt"
    assert live.http.get("/v1/memories/book").status_code == 404


def test_a_key_is_made(folder: Path) -> None:
    line = block("docs/serving.md", 5).replace("python ", f"{shlex.quote(sys.executable)} ", 1)
    subprocess.run(["sh", "-c", line], check=True)
    assert len((folder / "keys").read_text().strip()) > 40
    assert (folder / "keys").stat().st_mode & 0o077 == 0


def test_the_unit_starts_a_command_that_there_is() -> None:
    (line,) = re.findall(r"^ExecStart=/opt/trailmark/bin/(.*)$", block("docs/serving.md", 6), re.MULTILINE)
    parse(Shown("docs/serving.md", words_of(line)))
