"""Texts that were read apart, joined into one batch, and rows that leave: each is what it is alone."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.budgets import assert_within_budget
from tests.models.drt.test_model import memory_of
from tests.models.landmark.test_reading import CAUSAL
from tests.models.test_every_architecture import (
    FITTED,
    GATES,
    GROUPS,
    HILS,
    HSAS,
    RPT_MODES,
    Model,
    ablations,
    build,
    models,
    name_of,
)
from tests.models.tiny import (
    VARIANTS,
    assert_same,
    block_recurrent,
    drt,
    hils,
    hsa,
    landmark,
    pad,
    rpt,
    tokens,
    window_model,
)
from trailmark.memory import ChunkCache, FaissSearch
from trailmark.models import TrailmarkForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
S = 4
LANDMARKS: list[dict[str, Any]] = [
    *CAUSAL,
    {"memory_position": "true", "retrieve_per": "head"},
    {"max_memory_chunks": 5, "retrieve_per": "cell"},
    {"gate_probability": 0.5, "gate_cutoff": 0.3},
    {"num_retrieved_chunks": 0},
]
EVERY = [
    *models(drt, [*GROUPS, *FITTED, *VARIANTS[7:]]),
    *ablations(("random-2", "encoder", "contriever")),
    *models(window_model, [{}, {"sliding_window": None}, {"num_sinks": 3}]),
    *models(block_recurrent, GATES),
    *models(rpt, [*RPT_MODES, {"continuation": False}]),
    *models(landmark, LANDMARKS),
    *models(hils, [*HILS, {"chunk_score": "mass", "chunk_weights": "keys"}]),
    *models(hsa, HSAS),
]
QUICK = [EVERY[n] for n in (1, 4, 13, 16, 18, 22, 26, 29, 33, 36, 38)]


class Row:
    """A text that is read alone, and the same one read in turns with others."""

    def __init__(self, model: TrailmarkForCausalLM, seed: int, caches: list[ChunkCache]) -> None:
        self.model, self.text = model, tokens(200, seed=seed)
        self.alone, self.together = caches
        self.done = self.alone.get_seq_length()

    def take(self, count: int) -> Tensor:
        self.done += count
        return self.text[0, self.done - count : self.done]


def read(model: TrailmarkForCausalLM, length: int, seed: int, tier: str) -> ChunkCache:
    return model.read(tokens(length, seed=seed), model.new_cache(memory_tier=tier))


class Batch:
    """Rows that are joined, asked and parted at random; each step is compared with every row alone."""

    def __init__(self, model: TrailmarkForCausalLM, seed: int) -> None:
        self.model, self.drawn = model, random.Random(seed)
        self.inside: list[Row] = []
        self.cache: ChunkCache | None = None
        shared = read(model, 46, 7, "disk")  # two go on from one text
        self.outside = [
            Row(model, 1, [read(model, 1, 1, "device") for _ in range(2)]),
            Row(model, 2, [shared.branch() for _ in range(2)]),
            Row(model, 3, [read(model, 31, 3, "host") for _ in range(2)]),
            Row(model, 4, [shared.branch() for _ in range(2)]),
            Row(model, 5, [read(model, 60, 5, "disk").branch() for _ in range(2)]),
        ]

    def join(self) -> None:
        some = [self.outside.pop() for _ in range(self.drawn.randint(1, len(self.outside)))]
        parts = [row.together for row in some]
        if self.cache is not None:
            parts = [self.cache, *parts]
        self.cache = ChunkCache.join(parts)
        assert all(part.batch_size is None for part in parts)
        self.inside += some

    def leave(self) -> None:
        assert self.cache is not None
        places = self.drawn.sample(range(len(self.inside)), self.drawn.randint(1, len(self.inside)))
        left = self.cache.leave(places)
        self.outside += [self.inside[b] for b in places]
        for row, cache in zip(self.outside[-len(places) :], left.split(), strict=True):
            row.together = cache
        self.inside = [row for b, row in enumerate(self.inside) if b not in places]
        if not self.inside:
            assert self.cache.batch_size is None
            self.cache = None

    @torch.no_grad()
    def ask(self) -> None:
        most = self.drawn.choice([1, 1, 1, 2, 9])
        counts = [most] + [self.drawn.randint(most == 1, most) for _ in self.inside[1:]]
        self.drawn.shuffle(counts)
        given = [row.take(count) for row, count in zip(self.inside, counts, strict=True)]
        ids, mask = pad(given, "right"), pad([torch.ones_like(x) for x in given], "right")
        keep = self.drawn.choice([0, 1])
        closes = self.drawn.random() < 0.3
        options = {"close_chunk": closes, "logits_to_keep": keep, "output_retrieval": True}
        out = self.model(ids, attention_mask=mask, past_key_values=self.cache, **options)
        for b, (row, own) in enumerate(zip(self.inside, given, strict=True)):
            if not len(own):
                continue
            alone = self.model(own[None], past_key_values=row.alone, **options)
            logits = out.logits[b : b + 1] if keep else out.logits[b : b + 1, : len(own)]
            assert_same(logits, alone.logits)
            for ours, exact in zip(out.retrieval or (), alone.retrieval or (), strict=True):
                n = exact.indices.shape[1]
                assert torch.equal(ours.indices[b : b + 1, :n], exact.indices)
                assert_same(ours.weights[b : b + 1, :n], exact.weights)

    def end(self, folder: Path) -> None:
        if self.inside:
            assert self.cache is not None
            for row, cache in zip(self.inside, self.cache.split(), strict=True):
                row.together = cache
        for number, row in enumerate(self.outside + self.inside):
            assert row.together.num_tokens.tolist() == [row.done]
            row.together.save(folder / str(number))
            loaded = self.model.load_cache(folder / str(number))
            assert loaded.state is not None
            assert row.alone.state is not None
            assert loaded.state.memory.short == row.alone.state.memory.short
            if self.model.config.keeps_chunks and row.alone.num_chunks.any() and row.alone.memory.planes == 1:
                for ours, alone in zip(memory_of(loaded), memory_of(row.alone), strict=True):
                    assert_same(ours, alone)
            own = row.take(5)[None]
            with torch.no_grad():
                outs = [self.model(own, past_key_values=cache).logits for cache in (loaded, row.alone)]
            assert_same(*outs)


@pytest.mark.parametrize(
    ("model", "seed"),
    [pytest.param(model, 0) for model in QUICK]
    + [pytest.param(model, 0, marks=pytest.mark.slow) for model in EVERY if model not in QUICK]
    + [pytest.param(model, 1, marks=pytest.mark.slow) for model in EVERY],
    ids=name_of,
)
@pytest.mark.sampled(9)
def test_rows_that_join_and_leave_are_the_texts_alone(model: Model, seed: int, tmp_path: Path) -> None:
    batch = Batch(build(model), seed)
    for step in range(14):
        if batch.outside and (batch.cache is None or step % 6 == 2):
            batch.join()
        elif step % 6 == 5:
            batch.leave()
        else:
            batch.ask()
    batch.end(tmp_path)


@pytest.mark.parametrize("make", [drt, hsa], ids=["drt", "hsa"])
def test_in_float32_rows_are_within_the_budget(make: Any) -> None:
    """Of all logits of three rows, against each alone; of a model that chooses so few chunks that all are chosen."""
    lengths, more = (9, 3, 12), tokens(6, batch=3, seed=9)
    found = []
    for dtype, together in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        model = make(num_retrieved_chunks=8)
        model = model.float().to(dtype)
        caches = [read(model, n, b, "host") for b, n in enumerate(lengths)]
        if together:
            caches = [ChunkCache.join(caches)]
        rows = [more] if together else more.split(1)
        with torch.no_grad():
            outs = [
                torch.cat([model(x, past_key_values=cache).logits for x in own.split(1, dim=1)], 1)
                for own, cache in zip(rows, caches, strict=True)
            ]
        found.append(torch.cat(outs))
    assert_within_budget(*found)


def joined(model: TrailmarkForCausalLM, *lengths: int, seed: int = 0) -> ChunkCache:
    return ChunkCache.join([read(model, n, seed + b, "host") for b, n in enumerate(lengths)])


def test_a_neighbours_content_changes_no_bit_of_what_a_row_writes(tmp_path: Path) -> None:
    model, more, files = drt(2), tokens(40, batch=3, seed=9), []
    for seed in (0, 50):
        others = joined(model, 30, 7, seed=seed)
        cache = ChunkCache.join([read(model, 46, 3, "disk"), others])
        more[1:] = (more[1:] + seed) % 50
        for piece in more.split([1, 9, 1, 29], dim=1):
            with torch.no_grad():
                model(piece, past_key_values=cache)
        cache.leave([0]).save(tmp_path / str(seed))
        files.append(next((tmp_path / str(seed)).glob("chunks-*.bin")).read_bytes())
    assert files[0] == files[1]


def test_an_index_is_searched_for_rows_over_one_text_and_over_another() -> None:
    pytest.importorskip("faiss")
    model = drt(1)

    def branches() -> list[ChunkCache]:
        search = FaissSearch(min_chunks=16, batch_chunks=8, num_lists=1)
        one = model.read(tokens(400), model.new_cache(search=search))
        other = model.read(
            tokens(90, seed=1), model.new_cache(search=FaissSearch(min_chunks=16, num_lists=1))
        )
        return [one.branch(), other.branch(), one.branch()]

    together, more = ChunkCache.join(branches()), tokens(30, batch=3, seed=2)
    alone = branches()
    for piece in more.split([1, 9, 20], dim=1):
        with torch.no_grad():
            out = model(piece, past_key_values=together).logits
            exact = [model(piece[b : b + 1], past_key_values=cache).logits for b, cache in enumerate(alone)]
        assert_same(out, torch.cat(exact))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [drt, rpt, hils, hsa, landmark], ids=lambda make: make.__name__)
@pytest.mark.sampled(2)
def test_memories_of_several_types_keep_theirs(make: Any, dtype: torch.dtype) -> None:
    model, more = make(), tokens(20, batch=2, seed=9)
    caches = [
        [model.read(tokens(40, seed=b), model.new_cache(memory_dtype=one)) for _ in range(2)]
        for b, one in enumerate((dtype, None))
    ]
    together = ChunkCache.join([pair[0] for pair in caches])
    for piece in more.split([1] * 20, dim=1):
        with torch.no_grad():
            out = model(piece, past_key_values=together).logits
            exact = [model(piece[b : b + 1], past_key_values=caches[b][1]).logits for b in range(2)]
        assert_same(out, torch.cat(exact))
    assert together.leave([0]).memory.store.dtype == dtype  # type: ignore[union-attr]


def test_nothing_of_a_memory_is_copied() -> None:
    model = drt()
    text = read(model, 1000 * S, 0, "device")
    branches = [text.branch() for _ in range(3)]
    cache = ChunkCache.join(branches)
    assert [branch.memory_bytes() for branch in branches] == [0, 0, 0]
    assert cache.memory_bytes() == 0
    assert cache.window_bytes() == 3 * text.window_bytes()
    with torch.no_grad():
        model(tokens(S + 1, batch=3, seed=1), past_key_values=cache)
    ((rows, over_one),) = cache.memory.parts(np.ones(3, bool))
    assert rows == [0, 1, 2]
    shared, own = over_one.blocks(1001, 3)
    assert shared.data_ptr() == text.memory.blocks(1000, 1)[0].data_ptr()
    assert own.shape == (3, 1, 16)


def test_a_call_that_one_memory_stops_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, folder = drt(2), tmp_path / "gone"
    caches = [read(model, 30, 0, "host"), model.new_cache(memory_tier="disk", memory_folder=folder)]
    model.read(tokens(31, seed=1), caches[1])
    exact = caches[0].branch()
    cache = ChunkCache.join(caches)
    shutil.rmtree(folder)
    before = cache.state
    with pytest.raises(ValueError, match="memory_folder: expected the folder"), torch.no_grad():
        model(tokens(9, batch=2, seed=5), past_key_values=cache)
    assert cache.state is before
    left = cache.leave([0])
    with torch.no_grad():
        outs = [model(tokens(9, seed=6), past_key_values=one).logits for one in (left, exact)]
    assert_same(*outs)


def test_what_cannot_be_joined_or_left_is_refused(tmp_path: Path) -> None:
    model = drt(2)
    cache = joined(model, 9, 30)
    empty, other = model.new_cache(), read(window_model(), 9, 0, "host")
    for caches, reason in (
        ([], "got 0"),
        ([cache, cache], "at least one, got 2"),
        ([cache, empty], "got an empty one as number 1"),
        ([cache, other], "got one of another model as number 1"),
    ):
        with pytest.raises(ValueError, match=f"caches: expected .*{reason}"):
            ChunkCache.join(caches)
    assert cache.batch_size == 2
    for rows in ([], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match=r"rows: expected different numbers of its 2 rows"):
            cache.leave(rows)
    with pytest.raises(ValueError, match="cache: expected one memory to save, got 2 that were joined"):
        cache.save(tmp_path / "memory")
    with pytest.raises(ValueError, match="rows: expected each row of joined caches at most once"):
        cache.reorder_cache(torch.tensor([0, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.num_tokens.tolist() == [30, 9]
    assert [one.num_tokens.tolist() for one in cache.split()] == [[30], [9]]
    assert cache.batch_size is None
    assert cache.split() == []
