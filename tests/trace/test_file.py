"""The trace beside a memory: stopped at any moment and gone on with, to the byte; what does not belong together."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.tiny import drt, hils, hsa, landmark, rpt
from tests.trace.test_trace import V, subject_of
from trailmark.evaluation import reading
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkCache, saved, verification
from trailmark.memory.manifest import Manifest
from trailmark.models import causal_lm
from trailmark.trace import file as trace_file
from trailmark.trace import tracer
from trailmark.trace.file import TraceFile
from trailmark.trace.lines import TracedChunk, TraceSource, read_trace
from trailmark.trace.tracer import Tracer

MODELS: dict[str, Callable[..., Any]] = {
    "drt": lambda: drt(2, vocab_size=V),
    "rpt": lambda: rpt(vocab_size=V),
}
MODELS |= {"landmark": lambda: landmark(vocab_size=V), "hils": lambda: hils(vocab_size=V)}
MODELS["hsa"] = lambda: hsa(vocab_size=V)
TEXTS = ("the river 😀\r\né xy", "a boat😀 on")


@pytest.fixture
def subject() -> Subject:
    return subject_of(drt(vocab_size=V).float())


@pytest.fixture
def books(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_bytes(text.encode())
    return paths


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_PIECE", 16)
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 16)


def read(subject: Subject, folder: Path, books: list[Path], trace: bool = True, **options: Any) -> Reader:
    reader = Reader(subject, folder / "memory", trace=folder / "trace" if trace else None, **options)
    for book in books:
        reader.read(book)
    return reader


def outcome(folder: Path) -> tuple[bytes, bytes]:
    """The trace, and the memory's keys and values."""
    verification.verify(folder / "memory")
    (chunks,) = (folder / "memory").glob("chunks-*.bin")
    return (folder / "trace").read_bytes(), chunks.read_bytes()


@pytest.mark.parametrize(
    "kind",
    ["drt", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("rpt", "landmark", "hils", "hsa"))],
)
def test_the_memory_is_that_of_a_reading_without_a_trace(
    kind: str, books: list[Path], tmp_path: Path
) -> None:
    """Bit for bit; only what the upper layers have seen is there, which else is computed when it is asked for."""
    model = MODELS[kind]().float()
    found = []
    for trace in (False, True):
        folder = tmp_path / str(trace)
        read(subject_of(model), folder, books, trace)
        (chunks,) = (folder / "memory").glob("chunks-*.bin")
        (state,) = (folder / "memory").glob("state-*.safetensors")
        tables = load_file(state)
        lower = [f"layers.{n}." for n in range(getattr(model.config, "num_lower_layers", 0))]
        kept = {
            name: x
            for name, x in tables.items()
            if name.startswith(("landmarks", "num_", "phases", "open_", *lower))
        }
        found.append((chunks.read_bytes(), kept))
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert any("landmarks" in name for name in found[0][1])
    for name, x in found[0][1].items():
        assert torch.equal(x, found[1][1][name]), name


def test_a_trace_names_its_files_and_ends_with_the_open_chunk(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    reader = read(subject, tmp_path, books[:1])
    first = list(read_trace(tmp_path / "trace")[1])
    assert isinstance(first[-1], TracedChunk)
    assert not first[-1].closed
    del reader
    read(subject, tmp_path, books)  # the chunk that was open goes on in the second file
    header, entries = read_trace(tmp_path / "trace")
    both = list(entries)
    assert header.model["architecture"] == "DRTForCausalLM"
    assert "".join(x.text for x in both if isinstance(x, TracedChunk)) == "".join(TEXTS)
    sources = [x for x in both if isinstance(x, TraceSource)]
    assert [x.name for x in sources] == ["0.txt", "1.txt"]
    assert sources[1].first_token == len(TEXTS[0].encode())
    read(subject, tmp_path / "once", books)
    assert outcome(tmp_path / "once") == outcome(tmp_path)


class Killed(BaseException):
    pass


class Death:
    """Comes at one of the places where a trace or a memory is written, and nothing is written afterwards."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None) -> None:
        self.at, self.count = at, 0
        for owner, name in (
            (Tracer, "feed"),
            (TraceFile, "_put"),
            (TraceFile, "save"),
            (TraceFile, "saved"),
            (TraceFile, "_mark"),
            (trace_file, "sync_file"),
            (trace_file, "sync_folder"),
            (trace_file, "sha256_of"),
            (trace_file, "_tensors"),
            (ChunkCache, "save"),
            (saved, "_write_state"),
            (Manifest, "write"),
        ):
            patch.setattr(owner, name, self.before(getattr(owner, name)))

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.at:
                raise Killed
            self.count += 1
            return call(*args, **kwargs)

        return counted


def dies(subject: Subject, folder: Path, books: list[Path], at: int | None) -> int:
    """How many such places were reached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_SAVE_SECONDS", 0.0)
        death = Death(patch, at)
        with contextlib.suppress(Killed):
            read(subject, folder, books)
    gc.collect()  # a process that is killed lets go of its locks
    return death.count


def goes_on(subject: Subject, folder: Path, books: list[Path], places: range) -> None:
    total = dies(subject, folder / "whole", books, None)
    expected = outcome(folder / "whole")
    assert total > max(places)
    for at in places:
        own = folder / f"dies at {at}"
        assert dies(subject, own, books, at) == at
        if at % 5 == 0:
            dies(subject, own, books, at % 11)  # and once more
        read(subject, own, books)
        assert outcome(own) == expected, at
        states = sorted(path.name.split("-")[0] for path in (own / "trace.state").glob("*-*"))
        assert states == ["state", "without"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_reading_killed_anywhere_goes_on(kind: str, books: list[Path], tmp_path: Path) -> None:
    subject = subject_of(MODELS[kind]().float())
    goes_on(subject, tmp_path, books, range(0, 45, 1 if kind == "drt" else 7))


def test_ctrl_c_saves_what_was_traced(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    def stop(reader: Reader) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(subject, tmp_path, books, progress=stop)
    gc.collect()
    assert sum(len(x.ids) for x in read_trace(tmp_path / "trace")[1] if isinstance(x, TracedChunk)) == 16
    read(subject, tmp_path, books)
    read(subject, tmp_path / "whole", books)
    assert outcome(tmp_path) == outcome(tmp_path / "whole")


_CHILD = """
import sys
from pathlib import Path
from tests.trace import test_file as here
here.tracer._PIECE = here.causal_lm._READ_TOKENS = 16
here.reading._SAVE_SECONDS = 0.0
folder, *books = map(Path, sys.argv[1:])
here.read(here.subject_of(here.drt(vocab_size=here.V).float()), folder, books)
"""


@pytest.mark.slow
def test_a_killed_process_goes_on(subject: Subject, tmp_path: Path) -> None:
    """SIGKILL, at moments that chance chooses, as often as the reading lets it."""
    book, rng = tmp_path / "book.txt", random.Random(0)
    book.write_bytes("".join(f"{n} {TEXTS[n % 2]}\n" for n in range(60)).encode())
    read(subject, tmp_path / "whole", [book])
    own, kills = tmp_path / "killed", 0
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(own), str(book)], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        before = (own / "trace").stat().st_size if (own / "trace").exists() else 0
        while child.poll() is None and kills < 5:
            time.sleep(0.01)
            if (own / "memory" / "memory.json").exists() and (own / "trace").stat().st_size > before + 3000:
                time.sleep(rng.uniform(0, 0.1))
                child.send_signal(signal.SIGKILL)
                break
        if child.wait() == 0:
            if kills:
                break
            shutil.rmtree(own)  # it was done before this process woke
        else:
            assert child.returncode == -signal.SIGKILL
            kills += 1
    else:
        pytest.fail(f"no kill came in time, or the reading never ended; {kills} kills")
    assert outcome(own) == outcome(tmp_path / "whole")


# --- what does not belong together -----------------------------------------------------------------------------


def refused(subject: Subject, folder: Path, books: list[Path], words: str, trace: str = "trace") -> None:
    with pytest.raises(ValueError, match=words):
        Reader(subject, folder / "memory", trace=folder / trace)
    gc.collect()


@pytest.mark.slow
def test_a_memory_that_was_read_on_without_is_refused(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    read(subject, tmp_path, books[:1])
    gc.collect()
    read(subject, tmp_path, books, trace=False)
    refused(
        subject, tmp_path, books, r"^trace: expected a memory that was traced to its end, .* read on without"
    )


@pytest.mark.slow
def test_another_trace_than_the_memorys_is_refused(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    read(subject, tmp_path, books[:1])
    gc.collect()
    refused(
        subject,
        tmp_path,
        books,
        r"^trace: cannot go on with .*other': No such file.* with the trace",
        "other",
    )
    content = (tmp_path / "trace").read_bytes()
    for changed in (content.replace(b"0.", b"1.", 1), content[:200], b""):
        (tmp_path / "trace").write_bytes(changed)
        refused(subject, tmp_path, books, r"^trace: expected .*trace' as it was when .* saved")
    (tmp_path / "trace").write_bytes(content)
    (state,) = (tmp_path / "trace.state").glob("state-*")
    kept = state.read_bytes()
    state.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    refused(subject, tmp_path, books, r"^trace: .*state-1.safetensors' is damaged")
    state.unlink()
    refused(
        subject, tmp_path, books, r"^trace: expected .*state-1.safetensors', which a reading goes on from"
    )
    state.write_bytes(kept)
    (without,) = (tmp_path / "trace.state").glob("without-*")
    without.rename(tmp_path / "elsewhere")
    refused(
        subject, tmp_path, books, r"^trace: cannot go on .*without-1'.* Keep trace.state beside the trace"
    )
    (tmp_path / "elsewhere").rename(without)
    # moved together they are the same
    (tmp_path / "trace").rename(tmp_path / "moved")
    (tmp_path / "trace.state").rename(tmp_path / "moved.state")
    Reader(subject, tmp_path / "memory", trace=tmp_path / "moved").read(books[1])
    read(subject, tmp_path / "whole", books)
    assert (tmp_path / "moved").read_bytes() == (tmp_path / "whole" / "trace").read_bytes()


def test_a_file_that_is_there_is_kept(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("mine")
    refused(subject, tmp_path, books, r"^trace: expected a file that is not there yet, .*Choose another one")
    assert (tmp_path / "trace").read_text() == "mine"
    with pytest.raises(ValueError, match=r"^trace: expected a file, '\.' is a folder"):
        Reader(subject, tmp_path / "memory", trace=Path("."))


@pytest.mark.slow
def test_the_trace_of_a_memory_that_is_gone_is_kept(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    read(subject, tmp_path, books[:1])
    (tmp_path / "memory").rename(tmp_path / "gone")
    refused(subject, tmp_path, books, r"^trace: expected a file that is not there yet, .* holds nothing")


def test_two_readings_do_not_write_one_trace(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    words = (
        r"^folder: expected a folder that nothing else writes in, another process is writing in '.*memory'"
    )
    reader = Reader(subject, tmp_path / "memory", trace=tmp_path / "trace")
    refused(subject, tmp_path, books, words)
    reader.read(books[1])
    content = (tmp_path / "trace").read_bytes()
    refused(subject, tmp_path, books, words)  # also of a memory that was saved
    assert (tmp_path / "trace").read_bytes() == content


def test_one_reading_after_the_other_in_one_process(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    for book in books:
        with Reader(subject, tmp_path / "memory", trace=tmp_path / "trace") as reader:
            reader.read(book)
    read(subject, tmp_path / "at once", books)
    assert outcome(tmp_path) == outcome(tmp_path / "at once")


@pytest.mark.slow
def test_what_a_killed_reading_wrote_too_much_is_taken_back(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    """Also where nothing is left to read."""
    read(subject, tmp_path, books)
    whole = (tmp_path / "trace").read_bytes()
    for left in (whole + b'{"chunk', whole[:-10]):
        (tmp_path / "trace").write_bytes(left)
        gc.collect()
        read(subject, tmp_path, books)
        assert (tmp_path / "trace").read_bytes() == whole


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_saved(
    subject: Subject, books: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.disks import largest_file

    read(subject, tmp_path, books[:1])
    gc.collect()
    with largest_file((tmp_path / "trace").stat().st_size + 100), pytest.raises((OSError, ValueError)):
        read(subject, tmp_path, books)
    gc.collect()
    read(subject, tmp_path, books)
    read(subject, tmp_path / "whole", books)
    assert outcome(tmp_path) == outcome(tmp_path / "whole")
