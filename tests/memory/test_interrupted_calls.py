"""Ctrl-C at any line, an error in any op and a full disk: what was read stays whole, and reading goes on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.disks import largest_file
from tests.memory.interrupts import interrupt, stopped_at
from tests.models.tiny import (
    EXACT,
    assert_same,
    block_recurrent,
    drt,
    hils,
    hsa,
    landmark,
    logits_of,
    pad,
    tokens,
    window_model,
)
from trailmark.files import NoSpaceError
from trailmark.memory import ChunkCache
from trailmark.memory.tiers.base import TIERS
from trailmark.memory.tiers.disk import DiskStore
from trailmark.models import TrailmarkForCausalLM, causal_lm

MODULES = [
    importlib.import_module(f"trailmark.{name}")
    for name in (
        "files",
        "models.arguments",
        "models.causal_lm",
        "models.text",
        "models.layered",
        "models.drt.model",
        "models.drt.chunks",
        "models.candidates",
        "models.hils.model",
        "models.hils.past",
        "models.hils.sight",
        "models.hsa.model",
        "models.hsa.chunks",
        "models.landmark.model",
        "models.landmark.cell",
        "models.landmark.memory",
        "models.window.model",
        "models.block_recurrent.model",
        "models.step",
        "models.grid",
        "models.layout",
        "models.takes",
        "models.layers",
        "memory.cache",
        "memory.cell",
        "memory.chunks",
        "memory.fetching",
        "memory.tables",
        "memory.tiers.disk",
        "memory.tiers.files",
        "memory.tiers.recent",
        "memory.tiers.records",
        "memory.tiers.resident",
        "memory.search",
        "memory.state",
        "memory.window",
    )
]
READ = 43
Call = Callable[[TrailmarkForCausalLM, ChunkCache], Tensor]


def last(model: TrailmarkForCausalLM, cache: ChunkCache) -> Tensor:
    """Of a prompt that is longer than what is read at a time."""
    return logits_of(model, tokens(20, seed=1), past_key_values=cache, logits_to_keep=2, close_chunk=True)


CALLS: dict[str, Call] = {
    "a prompt": lambda model, cache: logits_of(
        model, tokens(25, seed=1), past_key_values=cache, close_chunk=True
    ),
    "the last logits": last,
    "a token": lambda model, cache: logits_of(model, tokens(1, seed=1), past_key_values=cache),
    "reading": lambda model, cache: torch.from_numpy(model.read(tokens(7, seed=1), cache).num_tokens),
}


class FailingOp(TorchDispatchMode):
    """Op ``number`` (from 1) fails, as for want of memory."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.run = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.run += 1
        if self.run == self.number:
            raise RuntimeError("no memory")
        return func(*args, **(kwargs or {}))


def begun(model: TrailmarkForCausalLM, tier: str, asked: bool) -> ChunkCache:
    cache = model.new_cache(memory_tier=tier)
    model.read(tokens(READ), cache)
    if asked:  # then the upper windows are filled, and chunks are waiting to be read
        logits_of(model, tokens(3, seed=2), past_key_values=cache)
    return cache


def by_line(number: int, run: Callable[[], object]) -> int | None:
    """Ctrl-C before that line; the lines that ran if there was no such line, else None."""
    with stopped_at(number, interrupt, *MODULES) as lines:
        try:
            run()
        except KeyboardInterrupt:
            return None
    return lines.run


def by_op(number: int, run: Callable[[], object]) -> int | None:
    with FailingOp(number) as ops:
        try:
            run()
        except RuntimeError:
            return None
    return ops.run


def assert_goes_on_like(cache: ChunkCache, calm: ChunkCache, model: TrailmarkForCausalLM) -> None:
    assert cache.num_tokens.tolist() == calm.num_tokens.tolist()
    for n in (5, 1, 12):
        more = tokens(n, batch=calm.batch_size or 1, seed=n)
        ours, theirs = (logits_of(model, more, past_key_values=going) for going in (cache, calm))
        assert torch.equal(ours, theirs)


DRT, ON_DISK = (lambda: drt(2), "device", False), (lambda: drt(2), "disk", True)
WINDOW = (window_model, "device", True)
BLOCKS = (lambda: block_recurrent(block_size=4), "device", True)
# a prompt is several cells, which evict chunks
CELLS = (
    lambda: landmark(retrieve_per="token_and_head", max_memory_chunks=3, num_hidden_layers=2),
    "device",
    False,
)
CELLS_ON_DISK = (
    lambda: landmark(retrieve_per="head", max_memory_chunks=5, num_hidden_layers=2),
    "disk",
    False,
)
TOKENS = (lambda: hils(num_hidden_layers=1, num_sinks=2, sliding_window=9), "device", False)
WINDOWS = (lambda: hils(reading="windows", num_hidden_layers=2, num_sinks=2), "device", False)
CHOSEN = (lambda: hsa(1, num_hidden_layers=2, num_lower_layers=1, num_sinks=2), "device", False)
MODELS = {
    "drt": DRT,
    "drt on disk, asked": ON_DISK,
    "window": WINDOW,
    "block-recurrent": BLOCKS,
    "landmark": CELLS,
    "landmark on disk": CELLS_ON_DISK,
    "hils": TOKENS,
    "hils, read with windows": WINDOWS,
    "hsa": CHOSEN,
}


@pytest.mark.parametrize(
    ("call", "stop", "make", "tier", "asked"),
    [
        pytest.param(
            call, stop, *of, id=f"{how}, {name}, {said}", marks=[pytest.mark.slow] if of is BLOCKS else []
        )
        for said, call in CALLS.items()
        for how, stop in (("Ctrl-C", by_line), ("an error", by_op))
        for name, of in MODELS.items()
        if of not in (CELLS, CELLS_ON_DISK, TOKENS, WINDOWS, CHOSEN) or stop is by_line
    ],
)
@pytest.mark.parametrize("stops", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.sampled(12)
def test_a_call_that_is_stopped_leaves_the_cache_as_before(
    call: Call,
    stop: Callable[[int, Callable[[], object]], int | None],
    make: Callable[[], TrailmarkForCausalLM],
    tier: str,
    asked: bool,
    stops: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A branch and, at last, the cache itself go on bit for bit like one that was never disturbed."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model = make()
    cache, calm = (begun(model, tier, asked) for _ in range(2))
    before = calm.get_seq_length()
    call(model, begun(model, tier, asked))  # some lines run once only: layouts are kept
    in_all = stop(10**9, lambda: call(model, begun(model, tier, asked)))
    at_start = stop(10**9, lambda: begun(model, tier, asked))
    assert in_all is not None
    assert at_start is not None
    next_token = logits_of(model, tokens(1, seed=4), past_key_values=calm.branch())
    outs: list[Tensor] = []
    for number in range(1, in_all - at_start, max(1, (in_all - at_start) // stops)):
        if stop(number, lambda cache=cache: outs.append(call(model, cache))) is not None:
            break  # the call had fewer lines than when they were counted
        if cache.get_seq_length() == before:
            again = logits_of(model, tokens(1, seed=4), past_key_values=cache.branch())
            assert torch.equal(again, next_token), number
        else:
            assert call is CALLS["reading"]  # that had come to its end
            cells = make in (CELLS[0], CELLS_ON_DISK[0])  # one ends after 44 tokens
            assert cache.get_seq_length() in ((44, before + 7) if cells else (before + 7,))
            cache = begun(model, tier, asked)
    assert number > (in_all - at_start) // 2
    if not outs:
        outs.append(call(model, cache))
    assert torch.equal(outs[0], call(model, calm))
    assert_goes_on_like(cache, calm, model)


@pytest.mark.parametrize("first", [1, 7, 13])
def test_reading_that_is_stopped_again_and_again_goes_on_from_whole_pieces(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ever later until a piece is read: what was read counts, and reading goes on from there."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model, text = drt(2), tokens(103)
    cache, number, stops = model.new_cache(), first, 0
    while (done := cache.get_seq_length()) < 103:
        assert done % 8 == 0
        assert number < 20_000  # lines: a piece takes some hundreds
        stops += by_line(number, lambda done=done: model.read(text[:, done:], cache)) is None
        number = first if cache.get_seq_length() > done else number + 211
    assert stops > 10
    assert_goes_on_like(cache, model.read(text), model)


def test_after_a_first_call_that_was_stopped_another_batch_may_come() -> None:
    model = drt(2)
    for number in range(400, 1400, 97):
        cache = model.new_cache()
        by_line(number, lambda cache=cache: logits_of(model, tokens(9, batch=3), past_key_values=cache))
        if cache.batch_size is None:
            out = logits_of(model, tokens(30, batch=2), past_key_values=cache)
            assert_same(out, logits_of(model, tokens(30, batch=2)))


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kept", [None, 3])
@pytest.mark.sampled(4)
def test_after_a_first_prompt_that_failed_the_next_is_read_as_ever(
    kept: int | None, rows: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces before its last were read, and chunks of it were evicted, when the logits found no room."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model = landmark(max_memory_chunks=kept, num_hidden_layers=2)
    folder = tmp_path if tier == "disk" else None
    cache = model.new_cache(memory_tier=tier, memory_folder=folder)
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda _: (_ for _ in ()).throw(MemoryError()))
        for prompt in (tokens(60, batch=3, seed=1), tokens(500, batch=rows, seed=2)):
            with pytest.raises(MemoryError):
                model(prompt, past_key_values=cache, logits_to_keep=1)
            assert cache.batch_size is None
            assert cache.memory_bytes() == 0
    logits_of(model, tokens(50, batch=rows), past_key_values=cache, logits_to_keep=1)
    cache.save(tmp_path / "saved")
    for going in (
        cache,
        *(model.load_cache(tmp_path / "saved", memory_tier=of) for of in TIERS if of != "tokens"),
    ):
        calm = model.new_cache()
        logits_of(model, tokens(50, batch=rows), past_key_values=calm, logits_to_keep=1)
        assert_goes_on_like(going, calm, model)


def test_a_long_prompt_keeps_no_more_than_before_it_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts before the call, what counts after it, and a cell: not all that it reads."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model = landmark(max_memory_chunks=5, num_hidden_layers=2)
    cache, first = model.read(tokens(103)), model.new_cache()
    for going, most in ((cache, 2 * 5), (first, 5)):
        logits_of(model, tokens(250, seed=1), past_key_values=going, logits_to_keep=1)
        config, store = model.config, going.memory.store
        assert config.local_length is not None
        assert store is not None
        of_a_cell = config.local_length // config.chunk_size + 1
        assert len(store) <= (most + of_a_cell) * config.num_hidden_layers * config.num_key_value_heads
        assert going.memory._tables.records.shape[1] <= 2 * 64


def test_progress_may_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model, text = drt(2), tokens(103)

    def enough(done: int, total: int) -> None:
        if done >= 40:
            raise KeyboardInterrupt

    cache = model.new_cache()
    with pytest.raises(KeyboardInterrupt):
        model.read(text, cache, progress=enough)
    assert cache.num_tokens.tolist() == [40]
    assert_same(logits_of(model, text[:, 40:], past_key_values=cache), logits_of(model, text)[:, 40:])


# --- a full disk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("how", ["read", "forward"])
def test_a_disk_that_is_full_while_reading(
    rows: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is there to be asked, saved elsewhere, and read on from once there is space."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model, text = drt(2), tokens(103, batch=rows)
    lengths = torch.tensor([103, 60])[:rows]
    mask = pad([torch.ones(int(n), dtype=torch.int64) for n in lengths], "right")
    record = 2 * 4 * 2 * 4 * 8
    cache = model.new_cache(memory_tier="disk", memory_folder=tmp_path / "memory")
    calm = model.new_cache()
    for going in (cache, calm):
        logits_of(model, text[:, :5], past_key_values=going)

    def go_on(going: ChunkCache) -> None:
        left, present = text[:, 5:], mask[:, 5:]
        if how == "read":
            model.read(left, going, present)
        else:
            logits_of(model, left, attention_mask=present, past_key_values=going, logits_to_keep=1)

    with (
        largest_file(12 * record + 100),
        pytest.raises(NoSpaceError, match=r"memory_folder: .* stays valid"),
    ):
        go_on(cache)
    done = cache.num_tokens.tolist()
    if how == "forward":
        assert done == [5] * rows
        go_on(cache)
    else:
        assert 5 < max(done) < 103
        assert len(cache.memory.store) * record <= 12 * record
        elsewhere = tmp_path / "elsewhere"
        cache.save(elsewhere)
        del cache
        cache = model.load_cache(elsewhere)
        left = [text[b, n : int(lengths[b])] for b, n in enumerate(done)]
        present = [torch.ones_like(part) for part in left]
        model.read(pad(left, "right"), cache, pad(present, "right"))
    go_on(calm)
    assert cache.num_tokens.tolist() == calm.num_tokens.tolist() == lengths.tolist()
    ours, theirs = (logits_of(model, tokens(9, batch=rows), past_key_values=going) for going in (cache, calm))
    assert torch.equal(ours, theirs) if rows == 1 else (ours - theirs).abs().max() < EXACT


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    model, text = drt(2), tokens(103)
    cache = model.new_cache(memory_tier="disk", memory_folder=tmp_path)
    with largest_file(100), pytest.raises(NoSpaceError, match="memory_folder: "):
        model.read(text, cache)
    assert cache.batch_size is None
    model.read(text, cache)
    assert_goes_on_like(cache, model.read(text), model)
    store = cache.memory.store
    assert isinstance(store, DiskStore)
    store.keep_free = 1 << 60
    with pytest.raises(NoSpaceError, match="memory_folder: "):
        model.read(text, cache)
    assert cache.num_tokens.tolist() == [103 + 5 + 1 + 12]  # as before
