"""Reading files into a memory that is kept, stopped and gone on with."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import window_model
from tests.training.tiny import prose, write_run
from trailmark.data.corpus import text_pieces, tokenize
from trailmark.evaluation import reading
from trailmark.evaluation.reading import Reader, parse_dtype
from trailmark.evaluation.subject import Subject, load
from trailmark.files import BusyError
from trailmark.memory import verification
from trailmark.models import causal_lm
from trailmark.trace import texts
from trailmark.training.config import load_run_config
from trailmark.training.run import Run


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    Run(load_run_config(write_run(folder, "needles", steps=2))).train()
    return load(folder / "run")


@pytest.fixture
def books(tmp_path: Path) -> list[Path]:
    """Two texts of several pieces each."""
    paths = []
    for name, word in (("first", "river"), ("second", "boat")):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text("\n".join(f"{n} {word} {prose(20).strip()}" for n in range(40)) + "\n")
    return paths


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(path: Path, **options: Any) -> Any:
        return text_pieces(path, size=700, **options)

    monkeypatch.setattr(texts, "text_pieces", pieces)


def answer(subject: Subject, cache: Any) -> torch.Tensor:
    """What the model predicts after what a cache has read."""
    ids = torch.from_numpy(tokenize(["the river"], subject.tokenizer)).long()[None]
    with torch.no_grad():
        logits: torch.Tensor = subject.model(ids, past_key_values=cache.branch()).logits
    return logits


def whole(subject: Subject, *paths: Path) -> torch.Tensor:
    """The same after reading the texts in one call."""
    cache = subject.model.new_cache()
    texts = [path.read_text() for path in paths]
    subject.model.read(torch.from_numpy(tokenize(texts, subject.tokenizer)).long()[None], cache)
    return answer(subject, cache)


def test_files_one_after_the_other_are_one_text(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    reader = Reader(subject, tmp_path / "memory")
    assert [reader.read(book) for book in books] == [True, True]
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, *books))
    verification.verify(tmp_path / "memory")
    lengths = [len(tokenize([book.read_text()], subject.tokenizer)) for book in books]
    assert [s["tokens"] for s in reader.sources] == lengths
    assert reader.num_tokens == reader.tokens_read == sum(lengths)


def test_a_second_run_reads_nothing_again_and_adds_what_is_new(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    first = Reader(subject, tmp_path / "memory")
    first.read(books[0])
    del first
    second = Reader(subject, tmp_path / "memory")
    assert [second.read(book) for book in books] == [False, True]
    del second
    loaded = subject.model.load_cache(tmp_path / "memory")
    torch.testing.assert_close(answer(subject, loaded), whole(subject, *books))


def test_a_memory_of_tokens_is_gone_on_with_as_one(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    for book, tier in zip(books, ("tokens", "disk"), strict=True):
        with Reader(subject, tmp_path / "memory", memory_tier=tier) as reader:
            reader.read(book)
            assert reader.cache.memory.tier == "tokens"
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, *books))
    verification.verify(tmp_path / "memory")


def test_a_model_without_chunks_is_gone_on_with_whatever_is_kept_of_chunks(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    model = window_model(vocab_size=subject.model.config.vocab_size).float().eval()
    alone = Subject.of(model, subject.tokenizer, subject.chunk_size)
    for book in books:
        with Reader(alone, tmp_path / "memory", memory_tier="tokens") as reader:
            reader.read(book)
    torch.testing.assert_close(answer(alone, reader.cache), whole(alone, *books))


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_interrupted_reading_goes_on_where_it_stopped(
    subject: Subject, books: list[Path], tmp_path: Path, pieces: int
) -> None:
    seen = []

    def stop(reader: Reader) -> None:
        seen.append(reader.num_tokens)
        if len(seen) == pieces:
            raise KeyboardInterrupt

    reader = Reader(subject, tmp_path / "memory", progress=stop)
    with pytest.raises(KeyboardInterrupt):
        reader.read(books[0])
    del reader
    verification.verify(tmp_path / "memory")
    reader = Reader(subject, tmp_path / "memory")
    assert reader.num_tokens == seen[-1]
    assert [reader.read(book) for book in books] == [True, True]
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, *books))


def test_a_long_piece_of_a_file_is_saved_and_told_on_the_way(
    subject: Subject, books: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model takes an hour for a piece of a megabyte: who is killed then has what was saved before."""
    monkeypatch.setattr(texts, "text_pieces", text_pieces)
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 256)
    monkeypatch.setattr(reading, "_SAVE_SECONDS", 0.0)
    told: list[tuple[int, int]] = []

    def killed(reader: Reader) -> None:
        told.append((reader.num_tokens, reader.tokens_left))
        if len(told) == 3:  # what lies there when the third piece of the model's own was read
            shutil.copytree(tmp_path / "memory", tmp_path / "left")

    Reader(subject, tmp_path / "memory", progress=killed).read(books[0])
    count = len(tokenize([books[0].read_text()], subject.tokenizer))
    piece = subject.model.reading_piece()
    assert [done for done, _ in told[:3]] == [piece, 2 * piece, 3 * piece]
    assert all(
        abs(done + left - count) <= count // 20 for done, left in told
    )  # a file's last line is a piece
    verification.verify(tmp_path / "left")
    reader = Reader(subject, tmp_path / "left")
    assert reader.num_tokens == 2 * piece
    assert [reader.read(book) for book in books] == [True, True]
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, *books))


@pytest.mark.parametrize("at", ["_digest", "tokens_left", "seconds"])
def test_a_stop_while_tokens_are_counted_loses_none(
    subject: Subject, books: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(texts, "text_pieces", text_pieces)
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 256)
    set_it, stops = Reader.__setattr__, [3]

    def stopped(reader: Reader, name: str, value: Any) -> None:
        if name == at and reader.cache.get_seq_length() >= 240:
            stops[0] -= 1
            if not stops[0]:
                raise KeyboardInterrupt
        set_it(reader, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "__setattr__", stopped)
        reader = Reader(subject, tmp_path / "memory")
        with pytest.raises(KeyboardInterrupt):
            reader.read(books[0])
    del reader
    verification.verify(tmp_path / "memory")
    reader = Reader(subject, tmp_path / "memory")
    assert 0 < reader.num_tokens == sum(source["tokens"] for source in reader.sources)
    assert [reader.read(book) for book in books] == [True, True]
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, *books))


def test_a_file_that_goes_while_it_is_read_is_read(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    expected = whole(subject, books[0])
    reader = Reader(subject, tmp_path / "memory", progress=lambda reader: books[0].unlink(missing_ok=True))
    assert reader.read(books[0])
    torch.testing.assert_close(answer(subject, reader.cache), expected)


@pytest.mark.parametrize("whole_text", [True, False])
def test_a_text_that_was_moved_is_known_again(
    subject: Subject, books: list[Path], tmp_path: Path, whole_text: bool
) -> None:
    def stop(reader: Reader) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        Reader(subject, tmp_path / "memory", progress=(lambda reader: None) if whole_text else stop).read(
            books[0]
        )
    moved = books[0].rename(tmp_path / "moved.txt")
    reader = Reader(subject, tmp_path / "memory")
    os.mkfifo(tmp_path / "pipe")
    for other in ("pipe", "none.txt"):  # what is no file is not looked into
        with pytest.raises(ValueError, match="file: "):
            reader.read(tmp_path / other)
    if not whole_text:
        with pytest.raises(ValueError, match="which this memory holds in part"):
            reader.read(books[1])
    assert reader.read(moved) is not whole_text
    del reader
    reader = Reader(subject, tmp_path / "memory")
    assert [source["path"] for source in reader.sources] == [str(moved.resolve())]
    copied = tmp_path / "copied.txt"
    copied.write_bytes(moved.read_bytes())  # beside the one that was read: another text
    assert [reader.read(moved), reader.read(books[1]), reader.read(copied)] == [False, True, True]
    torch.testing.assert_close(answer(subject, reader.cache), whole(subject, moved, books[1], copied))


def test_a_text_that_changed_since_is_refused(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    def stop(reader: Reader) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Reader(subject, tmp_path / "memory", progress=stop).read(books[0])
    books[0].write_text("Another" + books[0].read_text())
    with pytest.raises(ValueError, match=r"as it was when its first .* tokens were read, it has changed"):
        Reader(subject, tmp_path / "memory").read(books[0])
    with pytest.raises(ValueError, match="which this memory holds in part"):
        Reader(subject, tmp_path / "memory").read(books[1])


def test_a_memory_of_other_weights_is_refused(subject: Subject, books: list[Path], tmp_path: Path) -> None:
    Reader(subject, tmp_path / "memory").read(books[0])
    other = load(subject.folder)
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    with pytest.raises(ValueError, match="expected a memory written by this model"):
        Reader(other, tmp_path / "memory")


def test_types_of_a_memory() -> None:
    assert parse_dtype(None) is None
    assert parse_dtype("bfloat16") == torch.bfloat16


def test_a_memory_in_bfloat16_takes_half_the_bytes(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        reader = Reader(subject, tmp_path / str(dtype), dtype)
        reader.read(books[0])
        sizes.append((tmp_path / str(dtype) / "chunks-1.bin").stat().st_size)
    assert sizes[0] == 2 * sizes[1]


def test_a_first_file_below_a_chunk_keeps_the_type_that_is_asked_for(
    subject: Subject, tmp_path: Path
) -> None:
    for name, text in (("a.txt", "ab"), ("b.txt", "many words " * 40)):
        (tmp_path / name).write_text(text)
        with Reader(subject, tmp_path / "memory", torch.bfloat16) as reader:
            reader.read(tmp_path / name)
    store = subject.model.load_cache(tmp_path / "memory").memory.store
    assert store is not None
    assert store.dtype == torch.bfloat16


# --- two processes, and files that change -------------------------------------------------------------------------


def test_one_reads_into_a_folder_and_the_other_is_refused_at_once(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    """From the beginning to the end, also into a folder that is new."""
    with Reader(subject, tmp_path / "memory") as first:
        for _ in range(2):
            with pytest.raises(BusyError, match="another process is writing in"):
                Reader(subject, tmp_path / "memory")
            with pytest.raises(BusyError, match="another process is writing in"):
                subject.model.read(torch.ones(1, 9, dtype=torch.int64)).save(tmp_path / "memory")
            first.read(books[0])
    del first
    with Reader(subject, tmp_path / "memory") as second:
        assert [second.read(book) for book in books] == [False, True]
    verification.verify(tmp_path / "memory")


def test_a_folder_in_which_nothing_was_written_is_not_left(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(ValueError, match="cannot read"), Reader(subject, tmp_path / name) as reader:
            reader.read(tmp_path / "no such file")
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").exists()


@pytest.mark.parametrize("older", [False, True])
def test_a_text_that_was_rewritten_is_not_read_already(
    older: bool, subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    with Reader(subject, tmp_path / "memory") as reader:
        reader.read(books[0])
        if older:  # a memory whose notes do not say it
            del reader.sources[0]["file_sha256"]
            reader.save()
    before = books[0].read_text()
    for after in (before.replace("river", "brook", 1), before + "more\n", before[:-9]):
        books[0].write_text(after)
        words = r"has changed since it was read: .*into another --memory"
        with pytest.raises(ValueError, match=words), Reader(subject, tmp_path / "memory") as reader:
            reader.read(books[0])
    books[0].write_text(before)
    with Reader(subject, tmp_path / "memory") as reader:
        assert reader.read(books[0]) is False
        books[0].unlink()  # what was read of it is all that there is
        assert reader.read(books[0]) is False


def test_a_folder_that_is_removed_as_it_is_read_into_is_told_at_once(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    def remove(reader: Reader) -> None:
        shutil.rmtree(tmp_path / "memory")

    with (
        pytest.raises(
            ValueError, match=r"folder: expected the folder .* removed or replaced since"
        ) as caught,
        Reader(subject, tmp_path / "memory", progress=remove) as reader,
    ):
        reader.read(books[0])
    assert "it is gone" in str(caught.value.__context__)
    assert not (tmp_path / "memory").exists()


def test_a_folder_that_is_removed_before_its_first_chunk_stays_removed(
    subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    def remove_and_read(reader: Reader) -> None:
        with reader:
            shutil.rmtree(tmp_path / "memory")
            reader.read(books[0])

    reader = Reader(subject, tmp_path / "memory")
    with pytest.raises(ValueError, match=r"expected the folder .*memory'"):
        remove_and_read(reader)
    assert not (tmp_path / "memory").exists()


def test_a_manifest_that_is_a_folder_is_told_before_anything_is_read(
    subject: Subject, tmp_path: Path
) -> None:
    (tmp_path / "memory" / "memory.json").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"expected a regular file, .*memory\.json' is a folder"):
        Reader(subject, tmp_path / "memory")


@pytest.mark.parametrize(
    "sources", ["x", [1], [{"path": "x"}], [{"path": "x", "tokens": -1, "sha256": "x", "done": True}]]
)
def test_notes_that_are_none_are_told(
    sources: Any, subject: Subject, books: list[Path], tmp_path: Path
) -> None:
    cache = subject.model.read(torch.ones(1, 99, dtype=torch.int64))
    cache.notes["sources"] = sources
    cache.save(tmp_path / "memory")
    with pytest.raises(ValueError, match=r"^memory: expected the notes of trailmark read"):
        Reader(subject, tmp_path / "memory")


def test_a_byte_that_is_none_of_utf_8_is_named(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "text"
    for place in (0, 5, 699, 700, 2500):
        path.write_bytes(b"a word\n" * 400)
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\xff")
        words = rf"expected UTF-8 text, .* is not \(byte {place}\)"
        with pytest.raises(ValueError, match=words), Reader(subject, tmp_path / str(place)) as reader:
            reader.read(path)


def test_a_text_that_links_to_itself_is_told(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "text").symlink_to(tmp_path / "text")
    with pytest.raises(ValueError, match="cannot read"), Reader(subject, tmp_path / "memory") as reader:
        reader.read(tmp_path / "text")
