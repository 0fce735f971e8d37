"""The batches of all processes are one stream of samples, no gap, no repeat, however a run is divided and stopped."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.tiny import CHUNK_SIZE, TEXT, run_config
from trailmark.data.corpus import load_tokenizer
from trailmark.data.needles.curriculum_texts import Level
from trailmark.data.needles.niah import NiahTexts
from trailmark.data.shards import Corpus
from trailmark.data.summarization import Pairs, SummarizationTexts
from trailmark.ops import fold_seed
from trailmark.training.config import RunConfig
from trailmark.training.context_parallel import Sharing
from trailmark.training.curriculum import Curriculum
from trailmark.training.run import Run
from trailmark.training.tasks import Batch, NeedleTask, SampleTask, Task, TextTask, micro_batches, share_of
from trailmark.training.trainer import Batches

SEED = 5
LENGTH = 80
DEFAULT = {"attention_mask": True, "close_chunk": False, "document_ids": 0}
# a text of some documents
CORPUS = Corpus.of_tokens(TEXT, list(range(0, len(TEXT), 37)))
LEVELS = tuple(Level(chunks, 0.5, 1.0, 0.0, early=0.5) for chunks in (4, 6, 12))
TOKENIZER = load_tokenizer()
TASKS = ("text", "documents", "needles", "niah", "summarization")
FOLDER = TemporaryDirectory()  # removed with the module: pairs are read when they are asked for


def make_task(kind: str, rows: int) -> tuple[Task, Curriculum]:
    """A process's own; ``rows`` of the global batch, of needles at the highest level."""
    length = LENGTH if kind != "needles" else LEVELS[-1].chunks * CHUNK_SIZE
    config: RunConfig = run_config(
        Path("unused"),
        "needles" if kind == "needles" else "text",
        tokens_per_step=rows * length,
        context_length=length,
        seed=SEED,
    )
    config.data.separate_documents = kind == "documents"
    config.data.early_landmarks = 0.3
    curriculum = Curriculum(LEVELS, threshold=-1.0)
    if kind == "needles":
        return NeedleTask(config, CORPUS, TOKENIZER, curriculum), curriculum
    if kind == "niah":
        texts = NiahTexts(TOKENIZER, CORPUS, length, CHUNK_SIZE, SEED, value_tokens=2, any_phase=True)
        return SampleTask(config, texts), curriculum
    if kind == "summarization":
        return SampleTask(config, SummarizationTexts(TOKENIZER, pairs(), length, SEED)), curriculum
    return TextTask(config, CORPUS, CHUNK_SIZE), curriculum


@cache
def pairs() -> Pairs:
    path = Path(FOLDER.name) / "pairs.jsonl"
    rows = [
        {"document": f"{n} " * 3 + "the old river sees a boat", "summary": f"sings {n}"} for n in range(7)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return Pairs(path)


def full(batch: Batch) -> Batch:
    """With the masks and marks that change nothing."""
    shape = batch["input_ids"].shape
    return {key: torch.full(shape, value) for key, value in DEFAULT.items()} | batch


def joined(parts: list[Batch]) -> Batch:
    whole = [full(part) for part in parts]
    return {key: torch.cat([part[key] for part in whole]) for key in whole[0]}


def assert_equal(ours: Batch, other: Batch) -> None:
    assert ours.keys() == other.keys()
    for key, x in other.items():
        assert torch.equal(ours[key], x), key


class Process:
    """One of a run's processes: it makes a batch ahead, as loaders do."""

    def __init__(
        self, kind: str, rows: int, world: int, rank: int, micro: int, start: int, state: dict[str, Any]
    ) -> None:
        self.task, self.curriculum = make_task(kind, rows)
        self.curriculum.restore(state)
        self.micro = micro
        batches = Batches(self.task, 1000, micro, Sharing(1))
        batches.start = start
        self.batches, self.world, self.rank = iter(batches), world, rank
        self.ahead = self._next()

    def _next(self) -> Batch:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(self.world))
            patch.setenv("RANK", str(self.rank))
            return next(self.batches)

    def step(self) -> list[Batch]:
        """The micro-batches of the next step; the first of the one after it is made."""
        mine = [self.ahead, *(self._next() for _ in range(self.micro - 1))]
        self.ahead = self._next()
        return mine

    def learn(self, step: int) -> None:
        self.curriculum.update(step, 1.0, self.task.rows(step))


# how a run is divided: processes, micro-batches of each, steps until it is stopped
PARTS = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 4))


@pytest.mark.parametrize("kind", TASKS)
@settings(max_examples=12, deadline=None)
@given(parts=st.lists(PARTS, min_size=1, max_size=3))
@pytest.mark.sampled(5)
def test_a_run_in_parts_is_one_stream(kind: str, parts: list[tuple[int, int, int]]) -> None:
    """Each part begins with fresh processes, of another number, from what a checkpoint keeps."""
    rows = 24  # for 1 .. 4 processes of 1 or 2 micro-batches
    reference, curriculum = make_task(kind, rows)
    state, step, sample = curriculum.state(), 0, 0
    seen: set[int] = set()
    for world, micro, count in parts:
        group = [Process(kind, rows, world, rank, micro, step, state) for rank in range(world)]
        for _ in range(count):
            made = [process.step() for process in group]
            # in order: each micro-batch of all processes is a part of the step
            found = joined([made[rank][number] for number in range(micro) for rank in range(world)])
            assert len({len(part["input_ids"]) for process in made for part in process}) == 1
            together = reference.rows(step)
            assert_equal(found, full(reference.batch(step, 0, together)))
            # the noise tells the number of a sample in the run
            numbers = torch.arange(sample, sample + together)
            assert torch.equal(found["noise_seed"], fold_seed(SEED, step, numbers))
            if kind != "needles":  # each sample as made alone
                assert torch.equal(found["input_ids"], windows(reference, sample, together))
            assert seen.isdisjoint(numbers.tolist())
            seen.update(numbers.tolist())
            for process in group:
                process.learn(step)
            curriculum.update(step, 1.0, together)
            step, sample = step + 1, sample + together
        states = [process.curriculum.state() for process in group]
        assert all(each == curriculum.state() for each in states)
        state = states[0]
    assert seen == set(range(sample))
    if kind == "needles":
        assert curriculum.starts == [0, 2, 4][: len(curriculum.starts)]


def windows(task: Task, first: int, count: int) -> Tensor:
    if isinstance(task, TextTask):
        return torch.cat([task.windows.batch(first + n, 1) for n in range(count)])
    assert isinstance(task, SampleTask)
    return torch.cat([task.texts.batch(first + n, 1)["input_ids"] for n in range(count)])


@given(
    processes=st.integers(1, 64),
    micro=st.integers(1, 16),
    count=st.integers(1, 8),
    lost=st.integers(0, 3),
)
def test_the_shares_of_a_step_are_its_rows(processes: int, micro: int, count: int, lost: int) -> None:
    rows = processes * micro * count
    assert micro_batches(rows, processes, count) == micro
    assert micro_batches(rows, processes, None) == micro_batches(rows, processes, rows) == 1
    order = []
    for number in range(micro):
        for rank in range(processes):
            first, size = share_of(rows, processes, rank, micro, number)
            assert size == count
            order += range(first, first + size)
    assert order == list(range(rows))
    if rows % (processes + lost):
        with pytest.raises(
            ValueError, match=r"^training\.tokens_per_step: expected a global batch that divides"
        ):
            micro_batches(rows, processes + lost, count)


# --- resuming costs O(1) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "documents"])
@pytest.mark.parametrize("start", [0, 10, 10**6, 10**12])
def test_resuming_reads_what_the_next_batch_holds(
    kind: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = Corpus.read

    def counting(corpus: Corpus, begin: int, end: int) -> Any:
        reads.append(end - begin)
        return read(corpus, begin, end)

    monkeypatch.setattr(Corpus, "read", counting)
    task, _ = make_task(kind, 4)
    batches = Batches(task, start + 1, 1, Sharing(1))
    batches.start = start
    assert len(list(batches)) == 1
    assert sum(reads) == 4 * LENGTH
    assert len(reads) <= 2 * 4  # a window may run over the end


def test_needles_draw_no_sample_twice_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    for start in (0, 10**6):
        task, curriculum = make_task("needles", 4)
        assert isinstance(task, NeedleTask)
        curriculum.restore({"starts": [0, 2, 4], "samples": [0, 24, 40], "average": 0.0})
        make = task.texts.batch
        numbers: list[int] = []

        def batch(first: int, count: int, level: Level, make: Any = make, numbers: Any = numbers) -> Any:
            numbers.extend(range(first, first + count))
            return make(first, count, level)

        monkeypatch.setattr(task.texts, "batch", batch)
        batches = Batches(task, start + 1, 1, Sharing(1))
        batches.start = start
        assert len(list(batches)) == 1
        drawn.append(len(numbers))
    assert drawn == [12, 4]  # rows at the first level and at the last


@pytest.mark.slow
def test_a_run_that_goes_on_makes_the_batches_that_are_left(tmp_path: Path) -> None:
    """Through the Trainer and its loader, which would skip batches by making them."""
    made: list[int] = []

    def start(at: int) -> Run:
        def progress(run: Run) -> None:
            if run.step == at:
                raise KeyboardInterrupt

        run = Run(run_config(tmp_path, steps=10), progress, TEXT)
        make = run.task.batch

        def batch(step: int, first: int, count: int) -> Batch:
            made.append(step)
            return make(step, first, count)

        run.task.batch = batch  # type: ignore[method-assign]
        return run

    with pytest.raises(KeyboardInterrupt):
        start(7).train()
    assert made[:7] == list(range(7))
    made.clear()
    start(0).train()
    assert made == list(range(5, 10))


def test_a_summarys_weight_comes_from_the_configuration(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", "text", tokens_per_step=LENGTH, context_length=LENGTH)
    pairs()
    config.data.task, config.data.paths = "summarization", [str(Path(FOLDER.name) / "pairs.jsonl")]
    config.data.answer_weight = 7.0
    batch = Run(config).task.batch(0, 0, 1)
    assert set(batch["loss_weights"][batch["answers"]].tolist()) == {7.0}
