"""Several processes read a text: the memory is that of one, byte for byte."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.evaluation.reading_together import kill, start
from tests.memory.tiers.test_tokens import LAST, MODELS
from tests.models.tiny import block_recurrent, drt, hils, landmark, window_model
from tests.torchrun import by_processes
from tests.training.tiny import prose
from trailmark import cli, processes
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation import parted_reading
from trailmark.evaluation.parted_reading import PartedReader, parts_of, read_with_all
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import Subject, load
from trailmark.files import BusyError, NoSpaceError, sha256_of
from trailmark.memory import ChunkCache, hashes, manifest, saved
from trailmark.memory.parts import FILE, header_of, records_of
from trailmark.memory.verification import verify
from trailmark.models import causal_lm
from trailmark.models.stretches import (
    begin_at,
    tokens_before_chunks,
    tokens_before_end,
    tokens_of_windows,
)
from trailmark.processes import SHARED, LauncherError
from trailmark.report.console import Progress

# of which more than the last layer chooses
MODELS = MODELS | {
    f"hils, {kind}": lambda kind=kind: hils(
        layer_types=["full_attention", kind, "sliding_attention"],
        reading="windows",
        far_position="window" if kind == "full_attention" else "true",
        summary_tokens=2,
        num_sinks=3,
    )
    for kind in ("full_attention", "sliding_attention")
}
MODELS |= {"hils, sinks": lambda: hils(**LAST, far_position="window", num_sinks=6)}
pytestmark = pytest.mark.usefixtures("one_thread", "no_restart")
BYTES = ByteTokenizer(extra_ids=0)
SEED = int(os.environ.get("TRAILMARK_FUZZ_SEED", "0"))  # others draw other moments


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 16)
    monkeypatch.setattr(hashes, "BLOCK_BYTES", 5000)  # no whole records, and not of one stretch alone


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Texts whose tokens are no whole chunks."""
    names = [tmp_path / f"{name}.txt" for name in "abc"]
    for name, text in zip(names, (prose(80), "Few.\n", prose(40)[:-3]), strict=True):
        name.write_text(text)
    return names


def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    model = MODELS[name]()
    if model.config.vocab_size < len(BYTES):
        model = type(model)(type(model.config)(**model.config.to_diff_dict() | {"vocab_size": len(BYTES)}))
        model = model.double().eval()
    return Subject.of(model, BYTES, model.config.chunk_size)


def load_subject(folder: Path) -> Subject:
    """As the command reads with it."""
    return load(folder, device="cpu")


def readers(
    subject: Subject, files: list[Path], folder: Path, world: int, **options: Any
) -> list[PartedReader]:
    options = {"stretch": 64} | options
    made = [PartedReader(subject, files, folder, rank, world, **options) for rank in range(world)]
    found, counted = [reader.whole() for reader in made], [reader.count() for reader in made]
    for reader in made:
        reader.deal(found, counted)
    return made


def read_with(
    subject: Subject, files: list[Path], folder: Path, world: int, **options: Any
) -> list[PartedReader]:
    made = readers(subject, files, folder, world, **options)
    for reader in reversed(made):
        reader.read()
    with saved.hold(folder) as held:
        join(made, held)
    assert not made[0].parts.exists()
    return made


def join(made: list[PartedReader], held: Any) -> None:
    made[0].expect_parts()
    signed = [reader.sign(number) for number, reader in enumerate(made)]
    made[0].join(held, {block: digest for own in signed for block, digest in own.items()})


def read_alone(subject: Subject, files: list[Path], folder: Path, **options: Any) -> None:
    with Reader(subject, folder, **options) as reader:
        for file in files:
            reader.read(file)


def assert_same_memory(one: Path, other: Path) -> None:
    known, found = manifest.read(one), manifest.read(other)
    assert known.header == found.header
    content = [
        None if x.chunks is None else (folder / x.chunks.file).read_bytes()
        for folder, x in ((one, known), (other, found))
    ]
    assert content[0] == content[1]
    tensors, others = (
        safetensors.torch.load_file(x / y.state.file) for x, y in ((one, known), (other, found))
    )
    assert tensors.keys() == others.keys()
    different = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert not different


@pytest.mark.parametrize(("name", "world"), [*((name, 3) for name in MODELS), ("drt", 1)])
@pytest.mark.sampled(8)
def test_the_memory_is_that_of_one_process_byte_for_byte(
    name: str, world: int, files: list[Path], tmp_path: Path
) -> None:
    subject = subject_of(name)
    read_alone(subject, files, tmp_path / "alone")
    made = read_with(subject, files, tmp_path / "together", world)
    assert len(made[0].stretches) > 6
    assert sum(reader.read_tokens for reader in made) == sum(source["tokens"] for source in made[0].sources)
    assert made[0].read_twice == 0  # it begins with the text, and the last one keeps the end
    assert_same_memory(tmp_path / "alone", tmp_path / "together")
    verify(tmp_path / "together")
    # and it is read on
    more = tmp_path / "more.txt"
    more.write_text(prose(5)[:300])
    for folder in ("alone", "together"):
        read_alone(subject, [*files, more], tmp_path / folder)
    assert_same_memory(tmp_path / "alone", tmp_path / "together")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(8)
def test_a_run_is_begun_several_pieces_early_where_they_are_short(
    name: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece does not hold what a chunk depends on."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 1)  # a chunk
    subject = subject_of(name)
    assert tokens_before_chunks(subject.model) > subject.model.reading_piece() or not name.startswith("drt")
    read_alone(subject, files[:1], tmp_path / "alone")
    read_with(subject, files[:1], tmp_path / "together", 4)
    assert_same_memory(tmp_path / "alone", tmp_path / "together")


def test_without_what_stands_before_a_stretch_it_would_be_another(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("drt")
    read_alone(subject, files, tmp_path / "alone")

    def cold(own: PartedReader, end: int, tokens: int) -> ChunkCache:
        cache: ChunkCache = subject.model.new_cache()
        begin_at(cache, end // 4 * 4, subject.model.config, None)
        return cache

    with monkeypatch.context() as patch:
        patch.setattr(PartedReader, "_begun_before", cold)
        read_with(subject, files, tmp_path / "late", 2)
    with pytest.raises(AssertionError):
        assert_same_memory(tmp_path / "alone", tmp_path / "late")


@pytest.mark.parametrize(
    "options",
    [{"memory_tier": "tokens"}, {"memory_dtype": torch.bfloat16}, {"memory_dtype": torch.int8}],
    ids=["tokens", "bfloat16", "int8"],
)
def test_other_tiers_and_types_too(options: Any, files: list[Path], tmp_path: Path) -> None:
    subject = subject_of("sinks")
    read_alone(subject, files, tmp_path / "alone", **options)
    read_with(subject, files, tmp_path / "together", 2, **options)
    assert_same_memory(tmp_path / "alone", tmp_path / "together")


def stop_after(tokens: int) -> Callable[[int], None]:
    """What is told of pieces that were read, as somebody who presses Ctrl-C."""
    left = [tokens]

    def passed(read: int) -> None:
        left[0] -= read
        if left[0] < 0:
            raise KeyboardInterrupt

    return passed


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_command_goes_on(
    world: int, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of processes, whatever is missing: a run may begin and end anywhere. Of the next version too."""
    subject, folder = subject_of("drt"), tmp_path / "together"
    first, second = readers(subject, files, folder, 2)
    with pytest.raises(KeyboardInterrupt):
        first.read(stop_after(150))
    second.read()
    shutil.rmtree(first.parts / f"part-{len(first.stretches) - 3:06}")
    monkeypatch.setattr(parted_reading, "__version__", "99.0.0")
    again = read_with(subject, files, folder, world)
    read = sum(reader.read_tokens for reader in again)
    lost = first.stretches[-3].end - first.stretches[-3].first
    assert (
        read
        == again[0].missing_tokens
        == lost + sum(x.end - x.first for x in first.stretches if x.reader == 0 and x.end > 150)
    )
    most = max(reader.read_tokens for reader in again)
    assert most <= read / world + 80  # a stretch
    read_alone(subject, files, tmp_path / "alone")
    assert_same_memory(tmp_path / "alone", folder)


@pytest.mark.parametrize("name", ["drt", "sinks"])
@pytest.mark.parametrize("length", [3, 64 + 16, 4 * 64 + 1, 5 * 64 + 2, 6 * 64 + 30])
@pytest.mark.sampled(3)
def test_a_short_last_stretch_is_begun_early_enough_for_the_end(
    name: str, length: int, files: list[Path], tmp_path: Path
) -> None:
    """Also one without a whole chunk."""
    subject, folder, files = subject_of(name), tmp_path / "together", files[:1]
    files[0].write_text(prose(120)[: length - len(subject.beginning)])
    made = readers(subject, files, folder, 2)
    for reader in made:
        reader.read()
    last = made[0].stretches[-1]
    assert last.end == length
    shutil.rmtree(made[0].parts / f"part-{last.number:06}")
    (again,) = read_with(subject, files, folder, 1)
    assert again.read_tokens == last.end - last.first
    assert again.read_tokens + again.read_twice >= min(length, tokens_before_end(subject.model))
    read_alone(subject, files, tmp_path / "alone")
    assert_same_memory(tmp_path / "alone", folder)


def test_a_run_is_read_from_the_state_at_hand(files: list[Path], tmp_path: Path) -> None:
    subject = subject_of("drt")
    made = read_with(subject, files, tmp_path / "together", 3)
    owners = [stretch.reader for stretch in made[0].stretches]
    assert owners == sorted(owners)
    assert {*owners} == {0, 1, 2}
    # each begins with a piece of 16 tokens, which holds what a chunk depends on, and two chunks that fill the windows
    assert tokens_before_chunks(subject.model) <= 16
    assert tokens_of_windows(subject.model) == 8
    assert [reader.read_twice for reader in made[:2]] == [0, 16 + 8]
    assert 16 + 8 <= made[2].read_twice <= 3 * 16  # the second file begins with shorter pieces


def test_a_text_that_changes_meanwhile_is_told(files: list[Path], tmp_path: Path) -> None:
    (reader,) = readers(subject_of("drt"), files, tmp_path / "together", 1)
    files[1].write_text("Fewer or more.\n")
    with pytest.raises(ValueError, match=r"^file: expected .*b.txt' to stay as it is"):
        reader.read()


def test_what_does_not_fit_is_found_before_anything_is_joined(files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    made = readers(subject, files, folder, 2)
    for reader in made:
        reader.read()
    part = made[0].parts / "part-000003"
    part.rename(tmp_path / "elsewhere")
    with saved.hold(folder) as held:
        with pytest.raises(
            ValueError, match=r"^parts: expected .*part-000003', which process 0 read, it is not there"
        ):
            join(made, held)
        (tmp_path / "elsewhere").rename(part)
        chunks = folder / FILE
        content = bytearray(chunks.read_bytes())
        content[records_of(header_of(part), made[0]._part(made[0].stretches[3]), 1).begin] ^= 1
        chunks.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^parts: expected .*part-000003', got .* not as they were written"
        ):
            join(made, held)
    assert not (folder / manifest.NAME).exists()
    shutil.rmtree(part)  # as the message says
    again = read_with(subject, files, folder, 3)
    assert (
        sum(reader.read_tokens for reader in again) == again[0].stretches[3].end - again[0].stretches[3].first
    )
    verify(folder)
    with pytest.raises(ValueError, match=r"^memory: expected a new one for several processes"):
        readers(subject, files, folder, 2)


def test_chunks_that_are_gone_are_read_again(files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    for reader in readers(subject, files, folder, 2):
        reader.read()
    size = (folder / FILE).stat().st_size
    os.truncate(folder / FILE, size // 2)
    made = readers(subject, files, folder, 2)
    assert all(sum(x.reader == n for x in made[0].stretches) > 0 for n in (0, 1))
    for reader in made:
        reader.read()
    tokens = made[0].stretches[-1].end
    assert tokens / 3 < sum(reader.read_tokens for reader in made) < tokens * 2 / 3
    with saved.hold(folder) as held:
        join(made, held)
    read_alone(subject, files, tmp_path / "alone")
    assert_same_memory(tmp_path / "alone", folder)


@pytest.mark.parametrize(
    "change",
    [
        {"first": 0},
        {"first": 2**80},
        {"count": 1},
        {"count": 2**60},
        {"dtype": "nn"},
        {"dtype": "float32"},
        {"record_shape": [4]},
        {"record_shape": [2, 1, 4, 2]},
        "turned",
        {"sha256": []},
        {"sha256": ["x"]},
        "records",
        None,
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_what_was_changed_in_a_part_is_named(change: Any, files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    made = readers(subject, files, folder, 2)
    for reader in made:
        reader.read()
    part = made[0].parts / "part-000003"
    path = part / manifest.NAME
    body = json.loads(path.read_text())
    records = body["header"]["records"]
    if change == "turned":  # as many bytes
        _, J, S, D = records["record_shape"]
        change = {"record_shape": [2, 2 * J, S // 2, D]}
    body["header"]["records"] = records | change if isinstance(change, dict) else change
    del body["sha256"]
    path.write_text(json.dumps(body | {"sha256": manifest.hash_body(body)}))
    with saved.hold(folder) as held, pytest.raises(ValueError, match=r"^parts: expected .*part-000003', got"):
        join(made, held)
    assert not (folder / manifest.NAME).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"num_chunks": torch.tensor([7])},
        {"num_tokens": None},
        {"num_tokens": torch.tensor([2**60])},
        {"deferred.first_chunk": torch.tensor([0])},
        {"layers.0.keys": torch.full((1, 2, 7, 4), torch.nan, dtype=torch.float64)},
        {"spans.0": None},
        {"more": torch.zeros(1)},
        {},
    ],
    ids=lambda change: "".join(change) or "nothing",
)
def test_what_was_changed_in_the_end_is_named(change: Any, files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    made = readers(subject, files, folder, 2)
    for reader in made:
        reader.read()
    part = made[0].parts / f"part-{made[0].stretches[-1].number:06}"
    known = manifest.read(part)
    state = part / known.state.file
    tensors = safetensors.torch.load_file(state)
    assert change.keys() <= {*tensors, "more"}
    safetensors.torch.save_file({k: x for k, x in (tensors | change).items() if x is not None}, state)
    body = json.loads((part / manifest.NAME).read_text())
    body["state"] |= {"bytes": state.stat().st_size, "sha256": sha256_of(state)}
    del body["sha256"]
    (part / manifest.NAME).write_text(json.dumps(body | {"sha256": manifest.hash_body(body)}))
    with saved.hold(folder) as held:
        if not change:
            join(made, held)
            return
        with pytest.raises(ValueError, match=rf"^parts: expected .*{part.name}', got something else"):
            join(made, held)
    assert not (folder / manifest.NAME).exists()


def test_a_memory_that_another_process_reads_into_is_left_alone(files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    with Reader(subject, folder) as other:
        other.read(files[0])
        (reader,) = readers(subject, files[1:], tmp_path / "elsewhere", 1)
        reader.folder = folder  # as if it had begun before
        with pytest.raises(ValueError, match="another process"):
            reader.read()
    verify(folder)


def test_a_save_that_fails_leaves_every_chunk(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where files cannot be locked."""
    subject, folder = subject_of("drt"), tmp_path / "together"
    made = readers(subject, files, folder, 2)
    for reader in made:
        reader.read()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, saved.hold(folder) as held:
        patch.setattr(saved, "_write_state", full)
        patch.setattr(saved, "lock", lambda descriptor: True)
        with pytest.raises(NoSpaceError):
            join(made, held)
    again = read_with(subject, files, folder, 2)
    assert all(reader.read_tokens == 0 for reader in again)
    verify(folder)


def test_a_memory_that_another_start_made_meanwhile_stays(files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    late = PartedReader(subject, files[1:], folder, 0, 1)  # there is none yet
    assert read_with_all(PartedReader(subject, files[:1], folder, 0, 1)) is not None
    with pytest.raises(ValueError, match=r"^memory: expected a new one for several processes, there is one"):
        read_with_all(late)
    verify(folder)
    assert [source["path"] for source in manifest.read(folder).header["notes"]["sources"]] == [str(files[0])]


def test_what_stands_in_the_way_is_told_before_anything_is_counted(files: list[Path], tmp_path: Path) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    counted: list[int] = []

    def reader(told: Callable[[int], None] = counted.append, text: list[Path] = files) -> PartedReader:
        return PartedReader(subject, text, folder, 0, 1, stretch=64, counted=told)

    def start_another(tokens: int) -> None:
        with pytest.raises(BusyError, match="another process is writing"):
            read_with_all(reader())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_with_all(reader(start_another))
    assert not folder.exists()  # nothing was read
    assert not parts_of(folder).exists()
    with pytest.raises(ValueError, match=r"nothing\.txt"):
        read_with_all(reader(text=[tmp_path / "nothing.txt"]))
    assert not parts_of(folder).exists()
    for own in readers(subject, files, folder, 2):
        own.read()
    (parts_of(folder) / "part-000002" / manifest.NAME).write_text("{")
    with pytest.raises(ValueError, match=r"^parts: expected .*part-000002', got .* Remove that folder"):
        read_with_all(reader())
    assert not counted
    shutil.rmtree(parts_of(folder) / "part-000002")
    assert read_with_all(reader()) is not None
    assert counted == [*itertools.accumulate(counted[:1] + [len(file.read_bytes()) for file in files[1:]])]
    verify(folder)


def test_an_error_is_told_though_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    together = parted_reading._Together(lambda tokens, seconds: None)

    def ended(*arguments: Any) -> int:
        raise LauncherError

    def change(tell: Callable[[int], None]) -> None:
        raise ValueError("the first error")

    monkeypatch.setattr(processes.Count, "add", ended)
    with pytest.raises(ValueError, match="the first error"):
        together.watch(change)
    with pytest.raises(LauncherError):
        together.watch(lambda tell: tell(1))
    together.wait()  # who is done leaves it to those who read


def test_the_clock_starts_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, float]] = []
    clock = iter([100.0, *(100.0 + x for x in (7, 7, 9, 9, 12, 12, 20, 20))])
    monkeypatch.setattr(parted_reading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    together = parted_reading._Together(lambda *found: told.append(found))
    together.watch(lambda tell: [*map(tell, (0, 0, 16, 16))] and None)
    assert told == [(0, 0.0), (0, 0.0), (16, 12 - 9), (32, 20 - 9)]


def test_parts_of_another_text_or_model_are_refused(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    (other,) = readers(subject, files[1:], folder, 1)
    other.read()
    with pytest.raises(
        ValueError,
        match=r"^parts: expected (sha256|end) .* which an earlier start read, got .* Remove '.*parts'",
    ):
        read_with(subject, files, folder, 1)
    with pytest.raises(ValueError, match=r"^parts: expected model "):
        read_with(subject_of("hsa"), files[1:], folder, 1)
    monkeypatch.setattr(parted_reading, "_FORMAT", 2)
    with pytest.raises(ValueError, match=r"^parts: expected format 2 in .* got 1: "):
        read_with(subject, files[1:], folder, 1)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (landmark, "depends on all that it read"),
        (lambda: hils(num_sinks=2), "depends on all that it read"),
        (window_model, "without"),
        (block_recurrent, "without"),
        (lambda: drt().without_retrieval(), "without"),
    ],
    ids=["landmark", "hils", "window", "block_recurrent", "off"],
)
def test_models_whose_memory_cannot_be_read_so_are_told(build: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model: expected one .*{said}"):
        readers(Subject.of(build(), BYTES, 4), [], tmp_path / "none", 2)


def test_processes_that_differ_are_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reader,) = readers(subject_of("drt"), files, tmp_path / "together", 1)
    for change, said in (({"stretch": 3}, "stretch of process 0 in all, process 1"), ({}, "does not see")):
        answers = iter([[reader.agreed, reader.agreed | change], [True, False]])
        monkeypatch.setattr(processes, "gathered", lambda value, answers=answers: next(answers))
        with pytest.raises(ValueError, match=said):
            read_with_all(reader)


def test_one_process_goes_on_with_what_several_began(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, folder = subject_of("drt"), tmp_path / "together"
    subject.model.save_pretrained(tmp_path / "model")
    BYTES.save_pretrained(tmp_path / "model")
    own, _ = readers(Subject.of(load(tmp_path / "model").model, BYTES, 4), files, folder, 2)
    own.read()
    assert own.parts.exists()
    command = ["read", str(tmp_path / "model"), *map(str, files), "--memory", str(folder)]
    with pytest.raises(SystemExit, match="1"):
        cli.main([*command, "--trace", str(tmp_path / "trace.jsonl")])
    assert own.parts.exists()
    said: list[str] = []
    monkeypatch.setattr(parted_reading, "PartedReader", partial(PartedReader, stretch=64))
    monkeypatch.setattr(Progress, "show", lambda progress, message: said.append(message))
    monkeypatch.setattr(parted_reading, "_TELL_SECONDS", 0.0)  # after every piece
    began = time.monotonic()
    cli.main(command)
    took = time.monotonic() - began
    assert not own.parts.exists()
    verify(folder)
    total = own.stretches[-1].end - own.read_tokens
    passed, *told = [line for line in said if " read" in line]
    assert passed == f"0 of {total:,} tokens read"  # no time left is told of nothing
    for line in told[told.count(passed) :]:
        found = re.fullmatch(rf"([\d,]+) of {total:,} tokens read, [\d,]+/s, (\d+):(\d\d) left", line)
        assert found, line
        tokens, minutes, seconds = (int(number.replace(",", "")) for number in found.groups())
        assert 60 * minutes + seconds <= took * (total - tokens) / tokens + 0.5  # it is rounded
    assert told.count(passed) > 1
    assert told[-1].startswith(f"{total:,} of {total:,} ")


@pytest.mark.slow
def test_torchrun_starts_several(files: list[Path], tmp_path: Path) -> None:
    subject = subject_of("drt")
    subject.model.save_pretrained(tmp_path / "model")
    BYTES.save_pretrained(tmp_path / "model")
    for told in ("by 2 processes", "read already"):
        assert told in by_processes(2, "read", tmp_path / "model", *files, "--memory", tmp_path / "together")
        assert not parts_of(tmp_path / "together").exists()
        parts_of(tmp_path / "together").mkdir()  # as if the last had been killed
        (parts_of(tmp_path / "together") / f"{SHARED}0").touch()
    again = load(tmp_path / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "_READ_TOKENS", 4096)
        patch.setattr(hashes, "BLOCK_BYTES", 64 << 20)
        read_alone(again, files, tmp_path / "alone")
        assert_same_memory(tmp_path / "alone", tmp_path / "together")


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    subject_of("drt").model.save_pretrained(tmp_path / "model")
    BYTES.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_a_disk_that_fills_on_one_process_stops_all(
    saved_model: Path, files: list[Path], tmp_path: Path
) -> None:
    folder, words = tmp_path / "together", [saved_model, *files, "--memory", tmp_path / "together"]
    made = readers(load_subject(saved_model), files, folder, 2)
    others = sum(stretch.reader == 0 for stretch in made[0].stretches)
    launcher = start(2.0, 1, *words)  # each piece takes 2 s, of the process with room too
    said, _ = launcher.communicate(timeout=300)
    assert launcher.returncode
    told = [line for line in said.splitlines() if "process 1: memory_folder: expected" in line]
    assert len(told) == 2, said  # by both of them
    assert all("limit of file size" in line and "the same command goes on" in line for line in told)
    assert len([*parts_of(folder).glob("part-*")]) < others
    assert not (folder / manifest.NAME).exists()
    said = end_well(start(1.0, 0, *words))  # 15 s after the first line another one
    assert re.search(r"\d+ of \d+ tokens read by 2 processes together, [\d,]+/s, [\d:]+ left", said), said
    read_alone(load_subject(saved_model), files, tmp_path / "alone")
    assert_same_memory(tmp_path / "alone", folder)


def end_well(launcher: subprocess.Popen[str]) -> str:
    said, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, said
    return said


@pytest.mark.slow
def test_killed_anywhere_the_same_command_goes_on(
    saved_model: Path, files: list[Path], tmp_path: Path
) -> None:
    """SIGKILL for the launcher and both processes: soon after the first chunk, between parts, as they are joined.

    Once for the launcher alone: the others stop, so that the same command finds nobody who writes.
    """
    folder, draw = tmp_path / "together", random.Random(SEED)
    words = [saved_model, *files, "--memory", folder]
    stretches = len(readers(load_subject(saved_model), files, folder, 2)[0].stretches)

    def parts() -> int:
        return len([*parts_of(folder).glob(f"part-*/{manifest.NAME}")])

    kills = []
    for least in (0, 1, 3, 5, stretches - 1, stretches):
        launcher = start(0.1, 0, *words)
        while not ((folder / FILE).exists() and parts() >= least) and launcher.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.random() * (0.3 if least < stretches else 0.01))
        if (said := kill(launcher, alone=least == 3)) is None:
            break  # it was quicker
        if least == 3:
            ended = "^trailmark: process [01]: processes: expected torchrun's launcher to last as long as they do, "
            assert len(re.findall(ended, said, re.MULTILINE)) == 2, said  # one line of each
            assert "Traceback" not in said
        kills.append(parts())
        assert kills[-1] < stretches or least >= stretches - 1  # they did not read on to the end
    print(f"killed with {kills} of {stretches} parts")
    assert len(kills) >= 5
    end_well(start(0.0, 0, *words))
    assert not parts_of(folder).exists()
    verify(folder)
    read_alone(load_subject(saved_model), files, tmp_path / "alone")
    assert_same_memory(tmp_path / "alone", folder)
