"""A memory that keeps tokens: what is read of it is what a memory of keys and values holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.memory.test_strangers import contents, sign
from tests.models.tiny import (
    assert_same,
    block_recurrent,
    drt,
    hils,
    hsa,
    landmark,
    padded,
    rpt,
    split,
    tokens,
    window_model,
)
from trailmark.memory import ChunkCache
from trailmark.memory.manifest import read as read_manifest
from trailmark.memory.verification import verify

ROPE: dict[str, Any] = {"window_position": "rope"}
LAST = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "drt": drt,
    "drt of three groups": lambda: drt(3, **ROPE, memory_kv="layer"),
    "sinks": lambda: drt(2, **ROPE, num_sinks=6, max_sink_distance=20),
    "hidden landmarks": lambda: drt(2, **ROPE, num_sinks=3, landmarks_as_keys=False, max_sink_distance=20),
    "sinks of three chunks": lambda: drt(2, **ROPE, num_sinks=12, sliding_window=4, max_sink_distance=30),
    "no lower layer": lambda: drt(2, num_hidden_layers=4, num_lower_layers=0),
    "rpt": rpt,
    "hsa": hsa,
    "hils": lambda: hils(**LAST, far_position="window", summary_tokens=2),
    "hils, reading with windows": lambda: hils(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        far_position="window",
        reading="windows",
    ),
}
EVERY_MODEL = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def read(model: Any, pieces: list[int], **options: Any) -> ChunkCache:
    """A cache that has read a text of 93 tokens, chunk 5 of which closes early; the chunks after it are short too."""
    cache: ChunkCache = model.new_cache(**options)
    text, rest = tokens(93, seed=1).split([81, 12], 1)
    model.read(text[:, :22], cache)
    model(text[:, 22:23], past_key_values=cache, close_chunk=True)
    for piece in split(text[:, 23:], pieces):
        model.read(piece, cache)
    for piece in rest.split([1, 2, 9], 1):
        model(piece, past_key_values=cache, close_chunk=True)
    return cache


def answers(model: Any, cache: ChunkCache, rows: int = 1) -> list[Any]:
    """Outputs of some calls, one after the other."""
    pieces = tokens(31, batch=rows, seed=7).split([1, 9, 20, 1], 1)
    return [model(piece, past_key_values=cache, output_retrieval=True) for piece in pieces]


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one.logits, other.logits)
        for some, others in zip(one.retrieval, other.retrieval, strict=True):
            assert torch.equal(some.indices, others.indices)


def logits(outputs: list[Any]) -> list[Tensor]:
    return [out.logits for out in outputs]


@EVERY_MODEL
@torch.no_grad()
@pytest.mark.sampled(8)
def test_any_split_and_branch_answers_as_the_device(build: Callable[[], Any]) -> None:
    model = build()
    exact = read(model, [58])
    for number, pieces in enumerate(([58], [1, 3, 37, 2, 15])):
        cache = read(model, pieces, memory_tier="tokens")
        assert cache.memory_bytes() < exact.memory_bytes() / 2
        ours, theirs = (x.branch(2) if number else x.branch() for x in (cache, exact))
        assert_alike(answers(model, ours, 1 + bool(number)), answers(model, theirs, 1 + bool(number)))
        # a branch of a branch has chunks of three memories before it
        ours, theirs = (x.split()[-1].branch() if number else x.branch() for x in (ours, theirs))
        assert_alike(answers(model, ours), answers(model, theirs))


@EVERY_MODEL
@torch.no_grad()
@pytest.mark.sampled(8)
def test_saved_and_loaded_it_answers_bit_for_bit(build: Callable[[], Any], tmp_path: Path) -> None:
    model, folder = build(), tmp_path / "memory"
    cache = read(model, [58], memory_tier="tokens")
    cache.save(folder)
    manifest = read_manifest(folder)
    assert manifest.chunks is not None
    assert (manifest.format, manifest.chunks.dtype, manifest.chunks.record_shape) == (2, "uint8", (4,))
    expected = logits(answers(model, cache.branch()))
    for tier in ("tokens", "host", "disk"):
        again = model.load_cache(folder, tier)
        assert all(map(torch.equal, logits(answers(model, again.branch())), expected))
    model.read(tokens(40, seed=9), again)
    again.save(folder)
    verify(folder)
    model.read(tokens(40, seed=9), cache)
    found, whole = (answers(model, x.branch()) for x in (model.load_cache(folder), cache))
    assert all(map(torch.equal, logits(found), logits(whole)))


@torch.no_grad()
def test_a_branch_is_saved_as_tokens(tmp_path: Path) -> None:
    model = drt(2)
    branch = read(model, [58], memory_tier="tokens", memory_folder=tmp_path / "base").branch()
    model.read(tokens(30, seed=3), branch)
    branch.save(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.chunks is not None
    assert manifest.chunks.keeps_tokens
    loaded = model.load_cache(tmp_path)
    assert all(map(torch.equal, logits(answers(model, loaded)), logits(answers(model, branch))))


@torch.no_grad()
def test_a_chunk_has_the_same_bits_whatever_is_read_beside_it() -> None:
    model = drt(2).float()
    cache = model.read(tokens(400), model.new_cache("tokens"))
    every = np.arange(int(cache.num_chunks[0]))
    records, _ = cache.memory.gather(every[None])
    for some in (every[::-3], every[[7, 7, 2, 90]], every[50:51]):
        cache.memory._recent.clear()
        for _ in range(2):  # encoded, then kept
            assert torch.equal(cache.memory.gather(some[None].copy())[0], records[:, some.copy()])
    # and those that planting encodes, of as many chunks
    reach, ids = model.encoding_reach(), tokens(400).view(1, -1, 4)
    for chunk in (reach, 30, 77):
        entries = model.encode(ids[:, chunk], ids[:, chunk - reach : chunk].flatten(1))
        assert torch.equal(entries.k[0, 0].transpose(0, 1), records[0, chunk, 0])
        assert torch.equal(entries.v[0, 0].transpose(0, 1), records[0, chunk, 1])


@torch.no_grad()
@pytest.mark.parametrize("build", [lambda: drt(num_encoder_layers=2), hsa, lambda: drt(chunk_summary="mean")])
def test_for_a_memory_without_keys_the_last_layer_runs_on_landmarks_alone(build: Callable[[], Any]) -> None:
    model = build().double()
    layer, seen = model.encoder.layers[-1], list[int]()
    layer.mlp.register_forward_hook(lambda _, arguments, __: seen.append(arguments[0].shape[-2]))
    S, ids = model.config.chunk_size, tokens(90)
    caches = [model.read(ids, model.new_cache(tier)) for tier in ("device", "tokens")]
    ours, theirs = (cache.memory.blocks(90 // S, 1) for cache in caches)
    assert_same(torch.cat(ours, 1), torch.cat(theirs, 1))
    assert seen == [S + 1, S + 1 if model.config.chunk_summary == "mean" else 1]


@torch.no_grad()
def test_rows_of_a_batch_have_texts_of_their_own(tmp_path: Path) -> None:
    model, masks = drt(2), torch.arange(60) >= torch.tensor([[0], [23], [51]])
    caches = [
        model.read(tokens(60, batch=3, seed=2), model.new_cache(tier), masks) for tier in ("device", "tokens")
    ]
    for rows in ([0, 1, 2], [2, 0, 0, 1]):
        for cache in caches:
            cache.reorder_cache(torch.tensor(rows))
        caches[1].save(tmp_path)
        loaded = model.load_cache(tmp_path, "host")
        ours, theirs, again = (answers(model, cache, len(rows)) for cache in (*caches, loaded))
        assert_alike(ours, theirs)
        assert all(map(torch.equal, logits(again), logits(theirs)))


@torch.no_grad()
@pytest.mark.parametrize("build", [lambda: drt(2), hsa])
def test_a_row_may_have_no_chunk_yet(build: Callable[[], Any]) -> None:
    model = build()
    ids, mask = padded([1, 30])
    outs = [
        model(ids, attention_mask=mask, past_key_values=model.new_cache(tier)).logits[1]
        for tier in ("device", "tokens")
    ]
    assert_same(*outs)


@torch.no_grad()
def test_it_is_joined_with_memories_on_other_tiers() -> None:
    model = drt(2)
    kept = read(model, [58], memory_tier="tokens")
    alone = [kept.branch(), read(model, [58]), kept.branch()]
    exact = [read(model, [58]) for _ in alone]
    ours, theirs = ChunkCache.join(alone), ChunkCache.join(exact)
    assert_alike(answers(model, ours, 3), answers(model, theirs, 3))
    left, other = ours.leave([2]), theirs.leave([2])
    assert_alike(answers(model, left), answers(model, other))


@torch.no_grad()
def test_landmark_vectors_have_the_dtype_of_choice(tmp_path: Path) -> None:
    model = drt().float()
    cache = read(model, [58], memory_tier="tokens", memory_dtype=torch.bfloat16)
    for memory in (cache, cache.branch()):
        assert memory.memory.blocks(3, 1)[0].dtype == torch.bfloat16
    chunks = int(cache.num_chunks[0])
    assert cache.memory_bytes() == chunks * (4 + 16 * 2 + 24)  # tokens, a landmark vector, tables
    cache.save(tmp_path)
    loaded = model.load_cache(tmp_path)
    assert all(map(torch.equal, logits(answers(model, loaded)), logits(answers(model, cache.branch()))))
    model.read(tokens(40), loaded)
    assert {block.dtype for block in loaded.memory.blocks(int(loaded.num_chunks[0]), 1)} == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize(
    "build",
    [
        landmark,
        lambda: hils(num_sinks=2),
        lambda: hils(reading="windows", far_position="window"),
        lambda: hils(**LAST, far_position="window", num_sinks=6),
        lambda: hils(**LAST),
    ],
    ids=["landmark", "hils", "hils, many layers", "hils, sinks", "hils, true positions"],
)
def test_what_cannot_be_encoded_again_is_refused(build: Callable[[], Any]) -> None:
    model = build()
    with pytest.raises(ValueError, match=r"memory_tier: expected 'device', 'host' or 'disk' for .*'tokens'"):
        model.new_cache("tokens")


@torch.no_grad()
@pytest.mark.parametrize(
    "build",
    [window_model, block_recurrent, lambda: drt().without_retrieval()],
    ids=["window", "recurrent", "off"],
)
def test_where_no_chunk_is_kept_it_changes_nothing(build: Callable[[], Any]) -> None:
    model = build()
    ours, theirs = (model.read(tokens(61), model.new_cache(tier)) for tier in ("tokens", "device"))
    assert ours.memory_bytes() == theirs.memory_bytes() == 0
    piece = tokens(9, seed=1)
    assert torch.equal(*(model(piece, past_key_values=cache).logits for cache in (ours, theirs)))


@torch.no_grad()
def test_it_is_loaded_as_what_it_is(tmp_path: Path) -> None:
    model = drt()
    for tier in ("device", "tokens"):
        model.read(tokens(61), model.new_cache(tier)).save(tmp_path / tier)
    with pytest.raises(
        ValueError, match=r"memory_tier: expected 'disk', 'host' or 'device' .* keys and values"
    ):
        model.load_cache(tmp_path / "device", "tokens")
    before = contents(tmp_path / "tokens")
    cache = model.load_cache(tmp_path / "tokens", "host")
    model.read(tokens(61, seed=2), cache)
    assert cache.memory.tier == "tokens"
    assert contents(tmp_path / "tokens") == before


@torch.no_grad()
def test_tokens_that_a_stranger_wrote_are_checked(tmp_path: Path) -> None:
    model = drt()
    model.read(tokens(61), model.new_cache("tokens")).save(tmp_path)
    (path,) = tmp_path.glob("chunks-*")
    path.write_bytes(bytes([77]) * path.stat().st_size)
    sign(tmp_path, lambda body: body.update(chunks_sample=None))
    cache = model.load_cache(tmp_path)
    with pytest.raises(ValueError, match="memory: expected tokens of the vocabulary, 0 to 49, got 77"):
        model(tokens(25), past_key_values=cache)
