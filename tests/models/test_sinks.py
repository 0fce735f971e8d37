"""What a pretrained base needs: its first tokens stay visible, and landmarks that nobody attends to change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.budgets import assert_same_bits
from tests.models.test_bits import go_on
from tests.models.tiny import (
    assert_same,
    block_recurrent,
    drt,
    drt_config,
    landmark_config,
    logits_of,
    padded,
    rpt,
    split,
    tokens,
    window_config,
    window_model,
)
from trailmark.models import DRTForCausalLM, SlidingWindowForCausalLM

ROPE: dict[str, Any] = {"window_position": "rope"}
BASE: dict[str, Any] = ROPE | {"num_sinks": 3, "max_sink_distance": 30}  # what a window model can have
HIDDEN: dict[str, Any] = BASE | {"landmarks_as_keys": False}
OPTIONS = pytest.mark.parametrize(
    "options", [HIDDEN, {"landmarks_as_keys": False}, {"num_sinks": 3}], ids=["all", "hidden", "sinks"]
)


def begun(groups: int = 2, **options: Any) -> DRTForCausalLM:
    """A DRT as a conversion begins it: what is read adds nothing."""
    model = drt(groups, **options)
    for layer in model.upper_layers:
        nn.init.zeros_(layer.gca_o_proj.weight)
    return model


def base_of(model: DRTForCausalLM) -> SlidingWindowForCausalLM:
    """The window model with the same weights, window and sinks."""
    config, weights = model.config, model.state_dict()
    names = ("num_sinks", "max_sink_distance", "window_position", "sliding_window", "num_hidden_layers")
    base = window_model(**{name: getattr(config, name) for name in names})
    lower = config.num_lower_layers
    for name, parameter in base.named_parameters():
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            part = f"lower_layers.{number}" if number < lower else f"upper_layers.{number - lower}"
            name = name.replace(f"layers.{number}", part, 1)
        parameter.data.copy_(weights[name])
    return base


# --- landmarks that nobody attends to --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [HIDDEN, {"landmarks_as_keys": False, "num_sinks": 2}], ids=["rope", "alibi"]
)
def test_a_drt_that_reads_nothing_is_itself_without_retrieval_bit_for_bit(options: dict[str, Any]) -> None:
    model, ids = begun(**options), tokens(50, batch=2)
    alone, base = model.without_retrieval(), base_of(model)
    whole = logits_of(model, ids)
    assert torch.equal(whole, logits_of(alone, ids))
    assert_same(whole, logits_of(base, ids))
    assert torch.equal(whole[:, :3], logits_of(base, ids)[:, :3])  # before the first landmark
    for pieces in ([30, 1, 1, 18], [1]):
        caches = [m.new_cache() for m in (model, alone)]
        for part in split(ids, pieces):
            ours, theirs = (
                logits_of(m, part, past_key_values=c) for m, c in zip((model, alone), caches, strict=True)
            )
            assert torch.equal(ours, theirs)


def test_where_no_chunk_closes_it_is_the_window_model_bit_for_bit() -> None:
    model, ids = begun(**HIDDEN, chunk_size=100), tokens(90, batch=2)
    assert torch.equal(logits_of(model, ids), logits_of(base_of(model), ids))


@OPTIONS
def test_early_landmarks_change_nothing_below_what_is_read(options: dict[str, Any]) -> None:
    """Anywhere, and with any vector; where landmarks are keys they change what follows."""
    model, ids = begun(**options), tokens(60)
    marks = torch.rand(1, 60, generator=torch.Generator().manual_seed(1)) < 0.3
    plain = logits_of(model, ids)
    model.landmark.data.mul_(-3)
    moved = (logits_of(model, ids, close_chunk=marks) - plain).abs().max()
    assert (moved <= 1e-10) == (not model.config.landmarks_as_keys)


def test_a_landmark_sees_the_tokens_before_it_and_never_the_next() -> None:
    """It closes the first chunk: the token after it has its number, and changes nothing that it selects or says."""
    model = drt(1, **HIDDEN, num_retrieved_chunks=2)
    seen: list[Tensor] = []
    model.retrievers[0].register_forward_hook(lambda _, __, query: seen.append(query))
    ids = tokens(40)
    for place in (None, 35, 36):
        changed = ids.clone()
        if place is not None:
            changed[0, place] = (ids[0, place] + 1) % 50
        logits_of(model, changed)
    queries, before, after = seen  # [1, 10, E]: the ninth landmark stands between tokens 35 and 36
    assert torch.equal(queries[:, :9], after[:, :9])
    assert not torch.equal(queries[:, 9], after[:, 9])
    assert torch.equal(queries[:, :8], before[:, :8])
    assert not torch.equal(queries[:, 8], before[:, 8])


# --- sinks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [window_model, drt, rpt, block_recurrent])
def test_up_to_the_furthest_distance_nothing_differs(make: Any) -> None:
    ids = tokens(31)
    capped, plain = (make(**ROPE, num_sinks=2, max_sink_distance=m) for m in (40, None))
    assert torch.equal(logits_of(capped, ids), logits_of(plain, ids))
    ids = tokens(60)
    ours, theirs = logits_of(capped, ids)[0], logits_of(plain, ids)[0]
    first = 41 if make is not drt else 41 - 41 // 5  # positions, landmarks among them
    assert_same(ours[:first], theirs[:first])
    assert not torch.allclose(ours[first:], theirs[first:])


def test_sinks_far_away_stand_as_far_as_the_furthest() -> None:
    """The whole text but its sinks moved on by 1000 positions: only the sinks could tell, and are not let."""
    model = window_model(num_hidden_layers=1, num_sinks=2, max_sink_distance=20, **ROPE)
    ids = tokens(60)
    moved = torch.cat([ids[:, :30], ids[:, 25:30].repeat(1, 200), ids[:, 30:]], dim=1)
    assert_same(logits_of(model, moved)[:, -25:], logits_of(model, ids)[:, -25:])


def test_the_first_tokens_are_seen_by_all_that_follow() -> None:
    """Whatever read them: also where the upper layers waited."""
    model, ids = drt(2, num_sinks=2, **ROPE).without_retrieval(), tokens(200)
    out = []
    for token in (0, 1):
        changed = ids.clone()
        changed[0, 1] = token
        cache = model.read(changed[:, :190])
        out.append(logits_of(model, changed[:, 190:], past_key_values=cache))
        assert_same(out[-1], logits_of(model, changed)[:, 190:])
    assert not torch.allclose(*out)


@OPTIONS
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@torch.no_grad()
@pytest.mark.sampled(3)
def test_tiers_branches_and_saved_memories_go_on_bit_for_bit(
    options: dict[str, Any], tier: str, tmp_path: Path
) -> None:
    model, ids = drt(2, **options), tokens(103)
    cache = model.new_cache(memory_tier=tier)
    model.read(ids, cache)
    cache.save(tmp_path / "memory")
    expected = go_on(model, model.read(ids))
    assert_same_bits(go_on(model, cache.branch()), expected)
    assert_same_bits(go_on(model, model.load_cache(tmp_path / "memory", memory_tier=tier)), expected)
    assert_same_bits(go_on(model, cache), expected)


@OPTIONS
def test_memories_of_another_kind_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = drt(2)
    model.read(tokens(50)).save(tmp_path / "memory")
    other = DRTForCausalLM(drt_config(2, **options)).double().eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^folder: expected a memory written by this model.*another (num_|land|max_|win)"
    ):
        other.load_cache(tmp_path / "memory")


@pytest.mark.parametrize("make", [window_model, drt, block_recurrent])
def test_a_window_keeps_the_sinks_and_no_more(make: Any) -> None:
    model = make(num_sinks=3)
    cache, held = model.new_cache(), set()
    for part in split(tokens(60), [2, 1, 7, 30]):
        logits_of(model, part, past_key_values=cache)
        held.add(sum(layer.num_bytes() for layer in cache.layers))
    c = model.config
    assert held == {c.num_hidden_layers * 2 * (3 + 7) * c.num_key_value_heads * c.head_dim * 8}
    assert cache.window_bytes() == model.cache_bytes(60, 0).window_bytes


@OPTIONS
@pytest.mark.parametrize("lengths", [(23, 9, 2), (40, 40)], ids=str)
@torch.no_grad()
def test_generation_is_the_text_alone(options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model = drt(2, **options)
    ids, mask = padded(lengths)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    for b, n in enumerate(lengths):
        text = out[b, -n - 9 :][None]
        marks = torch.arange(n + 9)[None] == n - 1  # the prompt's last chunk is closed early
        own = model(text, close_chunk=marks).logits[0, n - 1 : -1]
        assert torch.equal(own.argmax(-1), text[0, n:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "options"), [(window_model, BASE), (drt, HIDDEN), (rpt, BASE), (block_recurrent, BASE)]
)
def test_low_precision_reads_and_decodes_beyond_the_furthest_distance(
    make: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = make(**options).to(dtype)
    cache = model.read(tokens(45))
    for part in split(tokens(12), [1, 3]):
        out = logits_of(model, part, past_key_values=cache)
        assert out.dtype == dtype
        assert out.isfinite().all()


# --- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (window_config, {"num_sinks": -1}, "^num_sinks: expected 0 or more"),
        (
            window_config,
            {"num_sinks": 1, "sliding_window": None},
            "^num_sinks: expected 0 without a sliding_window",
        ),
        (window_config, {"max_sink_distance": 9} | ROPE, "^max_sink_distance: expected None without sinks"),
        (
            window_config,
            {"num_sinks": 1, "max_sink_distance": 9},
            "^max_sink_distance: expected None with window_pos",
        ),
        (
            window_config,
            {"num_sinks": 4, "max_sink_distance": 3} | ROPE,
            "^max_sink_distance: expected at least num_",
        ),
        (
            drt_config,
            {"landmarks_as_keys": False, "sliding_window": 1},
            "^sliding_window: expected at least 2 with",
        ),
        (landmark_config, {"num_sinks": 1}, "^num_sinks: expected 0"),
    ],
)
def test_fields_that_do_not_fit_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@torch.no_grad()
def test_a_chunk_alone_is_not_encoded_without_the_sinks_that_it_sees() -> None:
    model, other, ids = drt(num_sinks=5), drt(num_sinks=4), tokens(40)
    for cache, got in (
        (model.new_cache(), "0 rows and 0 tokens"),
        (model.read(ids[:, :4]), "1 rows and 4 tokens"),
        (model.read(ids.expand(2, -1)), "2 rows and 40 tokens"),
        (other.read(ids), "1 rows and 40 tokens"),
    ):
        with pytest.raises(ValueError, match=f"^cache: expected one of this model, .* got one of {got}"):
            model.encode(ids[:, 20:], None, cache, 5)
