"""Text to shards: the same bytes by any number of processes, after any kill, and what is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trailmark
from tests.data.corpora import InPython, contents, prose, save_bpe, write_folder
from tests.disks import largest_file
from trailmark.data import prepare as preparing
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.data.encoders import Encoder, encode_in_order
from trailmark.data.pairs import prepare_pairs, verify_pairs
from trailmark.data.prepare import Progress, pieces, prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.data.sources import LocalFiles
from trailmark.data.texts import open_text
from trailmark.files import read_json
from trailmark.report.console import preparing_line

SHARD = 9000  # tokens; three or four shards of the folder below


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("text") / "text", files=24)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, folder: Path, bpe: str) -> Path:
    """The corpus of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole")
    prepare(parse_source([str(folder)]), output, bpe, processes=1, shard_tokens=SHARD)
    return output


def texts_of(folder: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())]


def documents_of(corpus: Corpus) -> list[list[int]]:
    borders = [*corpus.document_starts.tolist(), len(corpus)]
    return [corpus.read(a, b).tolist() for a, b in pairwise(borders)]


# What is made


def test_documents_and_their_ends(folder: Path, whole: Path, bpe: str) -> None:
    tokenizer, corpus = load_tokenizer(bpe), Corpus.open(whole)
    expected = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in texts_of(folder)
    ]
    assert documents_of(corpus) == expected
    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(corpus)] == texts_of(folder)
    manifest = corpus.manifest
    assert len(manifest["shards"]) >= 3
    assert all(shard["tokens"] >= SHARD for shard in manifest["shards"][:-1])
    # no document more than it takes to fill a shard
    ends = np.cumsum([len(ids) for ids in expected])
    for shard in manifest["shards"][:-1]:
        ends = ends[ends > 0]
        assert shard["tokens"] == ends[ends >= SHARD][0]
        ends = ends - shard["tokens"]
    corpus.verify()
    assert not list(whole.glob(".*")), "leftovers"


def test_the_manifest(folder: Path, whole: Path, bpe: str) -> None:
    manifest = read_json(whole / "corpus.json")
    assert list(manifest) == [
        *("format", "dtype", "tokens", "documents", "fingerprint", "tokenizer", "source"),
        *("shard_tokens", "left_out", "trailmark", "created", "shards"),
    ]
    assert manifest["dtype"] == "uint16"
    assert manifest["tokenizer"] == {
        "name": bpe,
        "fingerprint": tokenizer_fingerprint(load_tokenizer(bpe)),
        "vocab_size": 300,
        "end_of_text": 0,
    }
    assert manifest["trailmark"] == trailmark.__version__
    source = manifest["source"]
    assert (source["kind"], source["paths"], source["column"]) == ("files", [str(folder)], "text")
    assert len(source["files"]) == 24
    assert set(source["files"][0]) == {"name", "bytes", "sha256"}


def test_bytes_and_no_end_of_text(tmp_path: Path, folder: Path) -> None:
    source = parse_source([str(folder)])
    corpus = prepare(source, tmp_path / "plain", end_of_text=False)
    assert documents_of(corpus) == [[byte + 3 for byte in text.encode()] for text in texts_of(folder)]
    assert corpus.manifest["tokenizer"]["end_of_text"] is None
    ended = prepare(source, tmp_path / "ended")
    assert documents_of(ended) == [[byte + 3 for byte in text.encode()] + [1] for text in texts_of(folder)]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(70_000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("w1 w69999 w65536")
    corpus = prepare(parse_source([str(tmp_path / "a.txt")]), tmp_path / "out", str(tmp_path / "words"))
    assert corpus.manifest["dtype"] == "uint32"
    assert documents_of(corpus) == [[1, 69_999, 65_536]]


def test_a_tokenizer_without_end_of_text_and_documents_without_tokens(tmp_path: Path) -> None:
    name = save_bpe(tmp_path / "bpe", end_of_text=False)
    lines = [{"text": t} for t in ("", "a b", " ", "c")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus = prepare(parse_source([str(tmp_path / "a.jsonl")]), tmp_path / "out", name)
    assert corpus.documents == 2
    assert corpus.manifest["left_out"] == 2
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"^source: expected at least one document with text, all 1 rows"):
        prepare(parse_source([str(tmp_path / "b.jsonl")]), tmp_path / "none", name)


@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="needs GPT-2's tokenizer")
def test_gpt2(tmp_path: Path, folder: Path) -> None:
    name = str(Path(os.environ["TRAILMARK_DATA"]) / "tokenizer" / "gpt2")
    corpus, tokenizer = prepare(parse_source([str(folder)]), tmp_path / "out", name), load_tokenizer(name)
    assert corpus.manifest["dtype"] == "uint16"
    assert [tokenizer.decode(ids) for ids in documents_of(corpus)] == [
        text + "<|endoftext|>" for text in texts_of(folder)
    ]


# Long documents, and tokenizers of all kinds


@settings(max_examples=100)
@given(text=st.text(alphabet="ab\n ", max_size=60), size=st.integers(1, 20))
def test_pieces_are_the_text(text: str, size: int) -> None:
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts) or parts == [""]


@pytest.mark.parametrize("lines", ["\n", "\n\n", "\r\n  ", "   "])
def test_a_long_document_in_pieces_has_the_same_tokens(bpe: str, lines: str) -> None:
    encoder, text = Encoder(load_tokenizer(bpe)), prose(5, 3000).replace("\n", lines)
    parts = list(pieces(text, 300))
    assert len(parts) > 30
    assert np.concatenate(encoder(parts)).tolist() == encoder([text])[0].tolist()


def test_a_long_document_goes_through_in_pieces(
    tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trailmark.data.prepare.pieces", lambda text: pieces(text, 200))
    monkeypatch.setattr("trailmark.data.prepare._JOB", 500)  # a document comes in several jobs
    folder = write_folder(tmp_path / "text", files=3)
    corpus = prepare(parse_source([str(folder)]), tmp_path / "out", bpe, processes=1, shard_tokens=1)
    tokenizer = load_tokenizer(bpe)
    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(corpus)] == texts_of(folder)
    assert [shard["documents"] for shard in corpus.manifest["shards"]] == [1, 1, 1]


def test_progress_is_that_of_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one long file too; what earlier runs did is not in the time that is left."""
    monkeypatch.setattr(preparing, "pieces", lambda text: pieces(text, 100))
    monkeypatch.setattr(preparing, "_JOB", 100)
    (tmp_path / "long.txt").write_text("some words " * 100)
    source = parse_source([str(tmp_path / "long.txt")])
    done = [mark.done for marks, _ in preparing._jobs(source, 0) for mark in marks]
    assert done[0] < 250
    assert done == sorted(done)
    assert done[-1] == source.size()
    assert "1:00 left" in preparing_line(1, 9, 75, 100, 60.0, kept=50)


def test_each_kind_of_tokenizer_gives_its_own_tokens(bpe: str) -> None:
    fast, own = load_tokenizer(bpe), InPython.from_pretrained(bpe)
    marked = load_tokenizer(bpe)
    marked.split_special_tokens = True
    texts = ["the river", "ran <|endoftext|> below", ""]
    for tokenizer in (fast, own, marked, load_tokenizer()):
        expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert [ids.tolist() for ids in Encoder(tokenizer)(texts)] == expected
    assert Encoder(fast)(texts)[1].tolist() != Encoder(marked)(texts)[1].tolist()
    fast(texts, padding=True, truncation=True, max_length=2, pad_to_multiple_of=8) if fast.pad_token else None
    assert len(Encoder(fast)(texts)[0]) > 2, "a batch that was cut before must not cut this one"


def test_a_killed_tokenising_process_is_reported(bpe: str) -> None:
    jobs = ((number, [prose(number, 200)]) for number in range(100_000))
    results = encode_in_order(jobs, Encoder(load_tokenizer(bpe)), 2)
    assert next(results)[0] == 0
    for child in psutil.Process().children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
    with pytest.raises(ValueError, match=r"^processes: one of 2 tokenising processes was killed"):
        list(results)


# Kills


def _start(folder: Path, output: Path, tokenizer: str, processes: int, shard: int) -> Any:
    """In a process of its own, to be killed."""
    options = {"processes": processes, "shard_tokens": shard}
    arguments = (parse_source([str(folder)]), output, tokenizer)
    process = multiprocessing.get_context("fork").Process(target=prepare, args=arguments, kwargs=options)
    process.start()  # type: ignore[attr-defined]
    return process


def _shards(output: Path) -> int:
    return len((read_json(output / "progress.json") or {"shards": []})["shards"])


@pytest.mark.parametrize(("processes", "kills"), [(1, 8), (2, 2)])
@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, folder: Path, bpe: str, processes: int, kills: int) -> None:
    rng, output = random.Random(processes), tmp_path / "out"
    worked = 0
    for _ in range(20 * kills):
        process = _start(folder, output, bpe, processes, SHARD // 8)
        before = _shards(output)
        while process.is_alive() and _shards(output) == before and not (output / "corpus.json").exists():
            time.sleep(0.001)
        time.sleep(rng.choice([0, rng.uniform(0, 0.01), rng.uniform(0, 0.05)]))
        children = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        process.kill()
        process.join()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "tokenising processes outlive the one that was killed"
        if (output / "corpus.json").exists():  # it came too late, or there is little left to do
            if worked:
                break
            shutil.rmtree(output)
        else:
            assert process.exitcode == -signal.SIGKILL
            worked += 1
        if worked == kills:
            break
    assert worked, "no kill came in time"
    prepare(parse_source([str(folder)]), output, bpe, processes=processes, shard_tokens=SHARD // 8)
    prepare(parse_source([str(folder)]), tmp_path / "whole", bpe, processes=1, shard_tokens=SHARD // 8)
    assert contents(output) == contents(tmp_path / "whole")
    assert not _shards(output)
    Corpus.open(output).verify()


def stopping(real: Callable[..., Any], stop_at: int, after: bool) -> Callable[..., Any]:
    """The same function, but that its call number ``stop_at`` is interrupted before or after it."""
    count = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == stop_at and not after:
            raise KeyboardInterrupt
        result = real(*args, **kwargs)
        if count == stop_at:
            raise KeyboardInterrupt
        return result

    return step


def leave_unfinished(folder: Path, output: Path, bpe: str) -> None:
    """All shards, and no manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trailmark.data.prepare.make_manifest", stopping(list, 1, False))
        with pytest.raises(KeyboardInterrupt):
            prepare(parse_source([str(folder)]), output, bpe, processes=1, shard_tokens=SHARD)


@pytest.mark.parametrize("moment", ["end_document", "close", "progress", "manifest"])
def test_stopped_at_each_step(
    tmp_path: Path, folder: Path, whole: Path, bpe: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th time that this step is taken, before it or after it, for n = 1, 2, ... until a run comes through."""
    from trailmark.data import prepare as module

    owner, name = {"progress": (module, "write_json"), "manifest": (module, "make_manifest")}.get(
        moment, (module.ShardWriter, moment)
    )
    real, source = getattr(owner, name), parse_source([str(folder)])
    for after in (False, True):
        output = tmp_path / f"{moment}-{after}"
        for stop_at in (1, 9, 20) if moment == "end_document" else range(1, 12):
            monkeypatch.setattr(owner, name, stopping(real, stop_at, after))
            try:
                prepare(source, output, bpe, processes=1, shard_tokens=SHARD)
                break
            except KeyboardInterrupt:
                assert not (output / "corpus.json").exists() or name == "write_json"
            finally:
                monkeypatch.setattr(owner, name, real)
        prepare(source, output, bpe, processes=1, shard_tokens=SHARD)
        assert contents(output) == contents(whole)


def test_finished_shards_are_not_made_again(
    tmp_path: Path, folder: Path, bpe: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(state: Progress) -> None:
        if len(list(output.glob("tokens-*.bin"))) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("trailmark.data.prepare._JOB", 1)  # documents come one by one
    monkeypatch.setattr("trailmark.data.prepare._SHOW_EVERY", 0)  # and progress is told after each

    source, output = NotesBeginning([folder]), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(source, output, bpe, processes=1, shard_tokens=SHARD, progress=stop)
    assert not (output / "corpus.json").exists()
    stamps = {path.name: path.stat().st_mtime_ns for path in output.glob("*.bin")}
    assert len(stamps) == 4
    states: list[Progress] = []
    source.first = None
    corpus = prepare(source, output, bpe, processes=1, shard_tokens=SHARD, progress=states.append)
    assert source.first == sum(shard["documents"] for shard in corpus.manifest["shards"][:2])
    assert {name: (output / name).stat().st_mtime_ns for name in stamps} == stamps
    assert states[-1].done == states[-1].total
    assert (states[-1].documents, states[-1].tokens) == (corpus.documents, len(corpus))
    assert [state.tokens for state in states] == sorted(state.tokens for state in states)
    assert contents(output) == contents(whole)


class NotesBeginning(LocalFiles):
    """Notes at which row reading began."""

    first: int | None = None

    def documents(self, first: int = 0) -> Any:
        self.first = first
        return super().documents(first)


def test_a_shard_that_was_removed_is_made_again(
    tmp_path: Path, folder: Path, bpe: str, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = parse_source([str(folder)]), tmp_path / "out"
    leave_unfinished(folder, output, bpe)
    (output / "documents-00001.bin").unlink()
    for leftover in (
        ".tokens-00007.bin.part",
        ".documents-00007.bin.part",
        ".progress.json.x",
        ".corpus.json.y",
    ):
        (output / leftover).write_bytes(b"half")  # of a kill at other moments
    with caplog.at_level(logging.WARNING):
        prepare(source, output, bpe, processes=1, shard_tokens=SHARD)
    assert "tokens-00001.bin was removed or changed" in caplog.text
    assert contents(output) == contents(whole)


# One corpus, one output


def test_a_finished_corpus_is_opened_at_once(folder: Path, whole: Path, bpe: str, tmp_path: Path) -> None:
    before = contents(whole)
    states: list[Progress] = []
    source = NotesBeginning([folder])
    prepare(source, whole, bpe, shard_tokens=SHARD, progress=states.append)
    assert source.first is None, "documents were read"
    (state,) = states
    manifest = before["corpus.json"]
    assert (state.documents, state.tokens) == (manifest["documents"], manifest["tokens"])
    assert (state.done, state.seconds) == (state.total, 0.0)
    assert contents(whole) == before
    # by another path: the text and the tokenizer are the same
    folder.with_name("elsewhere").mkdir()
    same = folder.rename(folder.with_name("elsewhere") / "text")
    try:
        prepare(parse_source([str(same)]), whole, bpe, shard_tokens=SHARD)
    finally:
        same.rename(folder)


@pytest.mark.parametrize("finished", [True, False])
def test_another_source_or_other_settings_are_refused(
    tmp_path: Path, whole: Path, bpe: str, folder: Path, finished: bool
) -> None:
    output = whole
    if not finished:
        output = tmp_path / "out"
        leave_unfinished(folder, output, bpe)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    other = write_folder(tmp_path / "text", files=24)
    (other / "007.txt").write_text(prose(99, 30), encoding="utf-8")
    for source, tokenizer, options, message in (
        (
            folder,
            bpe,
            {"shard_tokens": SHARD + 1},
            rf"shard_tokens {SHARD}, this command asks for {SHARD + 1}",
        ),
        (folder, bpe, {"end_of_text": False}, r"tokenizer end_of_text 0, .* None"),
        (folder, "bytes", {}, r"tokenizer fingerprint '\w{64}', .* '\w{64}'"),
        (other, bpe, {}, r"source files .*007\.txt.* 007\.txt".replace(" 007", ".*007")),
        (
            other / "001.txt",
            bpe,
            {},
            r"source files '.*000\.txt and 23 more', this command asks for '.*001\.txt'",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^output: .* holds a corpus with {message}.*Choose another"):
            prepare(parse_source([str(source)]), output, tokenizer, **{"shard_tokens": SHARD} | options)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_folder_in_which_nothing_came_about_is_free(tmp_path: Path, folder: Path, bpe: str) -> None:
    (lines := tmp_path / "lines.jsonl").write_text('{"other": "text"}\n')
    with pytest.raises(ValueError, match=r"^column: expected 'text'"):
        prepare(parse_source([str(lines)]), tmp_path / "made", bpe, processes=1)
    assert prepare(parse_source([str(folder)]), tmp_path / "made", bpe, processes=1).documents == 24


def test_a_source_that_cannot_be_read_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for made in (tmp_path / "new", tmp_path / "old"):
        (tmp_path / "old").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"^source: expected text"):
            prepare(parse_source([str(tmp_path / "empty.txt")]), made, processes=1)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").is_dir()


def test_outputs_that_cannot_be(tmp_path: Path, folder: Path) -> None:
    source = parse_source([str(folder)])
    with pytest.raises(ValueError, match=r"^output: expected a folder outside of the source"):
        prepare(source, folder / "corpus")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output: expected a folder to write in"):
        prepare(source, tmp_path / "file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "tokens-00000.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"^output: expected a folder without shards of something else"):
        prepare(source, tmp_path / "foreign")
    for options in ({"processes": 0}, {"shard_tokens": 0}):
        with pytest.raises(ValueError, match=rf"^{next(iter(options))}: expected at least 1, got 0"):
            prepare(source, tmp_path / "out", **options)  # type: ignore[arg-type]


def test_two_at_once_are_refused(tmp_path: Path, folder: Path) -> None:
    def another(state: Progress) -> None:
        with pytest.raises(ValueError, match=r"^output: another trailmark prepare is writing in"):
            prepare(parse_source([str(folder)]), tmp_path / "out")

    prepare(parse_source([str(folder)]), tmp_path / "out", progress=another)
    prepare(parse_source([str(folder)]), tmp_path / "out")  # the lock is gone


# A full disk


def test_room_is_looked_for_before_anything_is_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    free = [2 * size]  # the tokens alone, and nothing spare
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": free[0]}))
    with pytest.raises(ValueError, match=rf"^output: expected about .* bytes free .* there are {free[0]:,}"):
        prepare(parse_source([str(folder)]), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["progress.json"]
    with pytest.raises(
        ValueError, match=r"^data: .* has no corpus\.json\. .*finishes one that was interrupted"
    ):
        open_text([tmp_path / "out"], load_tokenizer())  # what says how far it is is no text
    free[0] += 1 << 20
    prepare(parse_source([str(folder)]), tmp_path / "out")


def test_room_is_looked_for_while_writing(tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much a tokenizer makes of a text is known once some of it is tokenised."""
    lines = "".join(json.dumps({"text": "x" * 70_000}) + "\n" for _ in range(40))
    (tmp_path / "a.jsonl").write_text(lines)
    source = parse_source([str(tmp_path / "a.jsonl")])
    whole = prepare(source, tmp_path / "whole", shard_tokens=400_000)
    free = 2 * len(whole) - (1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": free}))
    with pytest.raises(ValueError, match=r"^output: expected about .* 1 whole shards are kept"):
        prepare(source, tmp_path / "out", shard_tokens=400_000)
    monkeypatch.undo()
    prepare(source, tmp_path / "out", shard_tokens=400_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_that_fills_up(tmp_path: Path, bpe: str) -> None:
    """A limit of the system on a file's size fails as a full disk does, in the middle of a write."""
    text, output = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    for number, words in enumerate((50, 60, 9000, 40)):  # a document a shard
        (text / f"{number}.txt").write_text(prose(number, words), encoding="utf-8")
    message = r"^output: the disk of .* 2 whole shards are kept; free some space and give the same command"
    with largest_file(20_000), pytest.raises(ValueError, match=message):
        prepare(parse_source([str(text)]), output, bpe, processes=1, shard_tokens=1)
    assert (
        sorted(path.name for path in output.iterdir() if "00002" in path.name or ".part" in path.name) == []
    )
    prepare(parse_source([str(text)]), output, bpe, processes=1, shard_tokens=1)
    prepare(parse_source([str(text)]), tmp_path / "whole", bpe, processes=1, shard_tokens=1)
    assert contents(output) == contents(tmp_path / "whole")
    assert len(Corpus.open(output).manifest["shards"]) == 4


# Pairs


def test_pairs_are_written_as_lines(tmp_path: Path) -> None:
    rows = [{"article": a, "highlights": h} for a, h in (("Ä\n河", "ä"), ("B", None), ("C", "c"))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = parse_source([str(tmp_path / "a.jsonl")], column="article", summary_column="highlights")
    states: list[Progress] = []
    path = prepare_pairs(source, tmp_path / "out", progress=states.append)
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"document": "Ä\n河", "summary": "ä"},
        {"document": "C", "summary": "c"},
    ]
    about = read_json(tmp_path / "out" / "pairs.json")
    assert (about["pairs"], about["left_out"], about["bytes"]) == (2, 1, path.stat().st_size)
    assert states[-1].documents == 2
    seen: list[tuple[int, int]] = []
    assert verify_pairs(tmp_path / "out", lambda done, total: seen.append((done, total))) == 2
    assert seen[-1] == (path.stat().st_size,) * 2
    stamp = path.stat().st_mtime_ns
    prepare_pairs(source, tmp_path / "out")
    assert path.stat().st_mtime_ns == stamp
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["pairs.json", "pairs.jsonl"]
    other = parse_source([str(tmp_path / "a.jsonl")], column="highlights", summary_column="article")
    with pytest.raises(
        ValueError, match=r"^output: .* source column 'article', this command asks for 'highlights'"
    ):
        prepare_pairs(other, tmp_path / "out")
    path.write_bytes(b" " + path.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"^output: .*pairs\.jsonl' was changed"):
        prepare_pairs(source, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"^data: .* is damaged: pairs\.jsonl was changed: its SHA-256 is \w{12}"
    ):
        verify_pairs(tmp_path / "out")
    path.unlink()
    with pytest.raises(ValueError, match=r"^data: .*pairs\.jsonl is missing"):
        verify_pairs(tmp_path / "out")
    (tmp_path / "out" / "pairs.json").write_text("[")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"^data: .*pairs\.json' is broken"):
        verify_pairs(tmp_path / "out")
    with pytest.raises(ValueError, match=r"^data: expected prepared pairs"):
        verify_pairs(tmp_path)
    with pytest.raises(ValueError, match=r"^summary_column: "):
        prepare_pairs(parse_source([str(tmp_path / "a.jsonl")]), tmp_path / "other")
    # the pairs are a source again
    again = parse_source([str(prepare_pairs(source, tmp_path / "new"))], column="document")
    assert [row.texts for row in again.documents()] == [("Ä\n河",), ("C",)]
