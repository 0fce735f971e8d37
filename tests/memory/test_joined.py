"""Texts that were read apart, joined into one batch, and rows that leave: each is what it is alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from trailmark.memory import ChunkCache
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
EACH = pytest.mark.parametrize("model", EVERY, ids=name_of)


class Row:
    """A text, read alone, and read in turns with others."""

    def __init__(
        self, model: TrailmarkForCausalLM, seed: int, length: int, tier: str, branches: bool
    ) -> None:
        self.model, self.text, self.done = model, tokens(200, seed=seed), length
        self.alone, self.together = (self._read(tier, branches) for _ in range(2))

    def _read(self, tier: str, branches: bool) -> ChunkCache:
        cache = self.model.new_cache(memory_tier=tier)
        self.model.read(self.text[:, : self.done], cache)
        return cache.branch() if branches else cache

    def take(self, count: int) -> Tensor:
        self.done += count
        return self.text[0, self.done - count : self.done]


class Batch:
    """Rows that are joined, asked and parted at random; each step is compared with every row alone."""

    def __init__(self, model: TrailmarkForCausalLM, seed: int) -> None:
        self.model, self.drawn = model, random.Random(seed)
        self.inside: list[Row] = []
        self.cache: ChunkCache | None = None
        lengths = [1, 46, 7, 31, 60][seed % 2 :]
        tiers = ["device", "host", "disk"]
        self.outside = [
            Row(model, 10 * seed + n, length, tiers[n % 3], n % 2 == 0) for n, length in enumerate(lengths)
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
        for row in self.outside[-len(places) + 1 :] if len(places) > 1 else ():
            row.together = left.leave([1])
        self.outside[-len(places)].together = left
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
            for row in self.inside[1:]:
                row.together = self.cache.leave([1])
            self.inside[0].together = self.cache
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


@EACH
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
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
