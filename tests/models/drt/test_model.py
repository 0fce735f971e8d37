"""The DRT: its equations, reading in pieces, causality, what it retrieves, precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor

from tests.budgets import assert_within_budget
from tests.models.naive import NaiveDRT
from tests.models.tiny import DRT_VARIANTS, EXACT, assert_same, drt, drt_config, logits_of, split, tokens
from trailmark.memory import ChunkCache
from trailmark.models import DRTForCausalLM, TrailmarkForCausalLM, causal_lm, layers
from trailmark.models.drt import model as drt_model
from trailmark.models.grid import lay_out
from trailmark.ops import ChunkSelection, ReadAgain

S = 4


def selected(retrieval: Sequence[ChunkSelection], group: int, row: int = 0) -> list[list[int]]:
    """What each closed chunk selected, without the missing ones."""
    return [[m for m in chunk if m >= 0] for chunk in retrieval[group].indices[row].tolist()]


@torch.no_grad()
def in_calls(
    model: TrailmarkForCausalLM, pieces: Sequence[Tensor]
) -> tuple[Tensor, list[tuple[ChunkSelection, ...]]]:
    """Logits [B, T, V] of a text passed piece by piece with a cache, and each call's retrieval."""
    cache = model.new_cache()
    outs = [model(piece, past_key_values=cache, output_retrieval=True) for piece in pieces]
    assert cache.num_tokens.tolist() == [sum(piece.shape[1] for piece in pieces)] * len(pieces[0])
    return torch.cat([out.logits for out in outs], dim=1), [out.retrieval for out in outs]


# --- the equations ---------------------------------------------------------------------------------------


@DRT_VARIANTS
def test_one_forward_is_the_equations(options: dict[str, Any]) -> None:
    model, ids = drt(**options), tokens(46)
    out, naive = model(ids, output_retrieval=True), NaiveDRT(model, ids[0])
    assert_same(out.logits[0], naive.logits)
    for group, chunks in enumerate(naive.retrieval):
        assert selected(out.retrieval, group) == [best for best, _ in chunks]
        for n, (_, weights) in enumerate(chunks):
            assert out.retrieval[group].weights[0, n, : len(weights)].tolist() == pytest.approx(
                weights, abs=EXACT
            )


@DRT_VARIANTS
@pytest.mark.sampled(3)
def test_early_landmarks_are_the_equations(options: dict[str, Any]) -> None:
    model, ids = drt(**options), tokens(46)
    pieces, lengths = split(ids, [6, 3, 1, 9, 4, 2, 15]), []
    cache = model.new_cache()
    logits = [logits_of(model, piece, past_key_values=cache, close_chunk=True) for piece in pieces]
    for piece in pieces:
        lengths += [part.shape[1] for part in piece.split(S, dim=1)]
    assert min(lengths) == 1
    assert_same(torch.cat(logits, 1)[0], NaiveDRT(model, ids[0], lengths, close=True).logits)


@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 2 * S, 2 * S + 1, 61])
def test_any_length(length: int) -> None:
    model, ids = drt(groups=2), tokens(length)
    assert_same(logits_of(model, ids)[0], NaiveDRT(model, ids[0]).logits)


SIZES: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 500},
    {"chunk_size": 1},
    {"num_lower_layers": 0},
    {"num_hidden_layers": 1, "num_lower_layers": None},
    {"num_retrieved_chunks": 1},
    {"num_retrieved_chunks": 20},
    {"num_encoder_layers": 3},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": None},
    {"retrieval_normalization": True, "retrieval_scale": 5.0},
    {"logit_scale": 0.25, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_any_sizes(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = drt(**changes), tokens(46)
    exact = NaiveDRT(model, ids[0]).logits
    assert_same(logits_of(model, ids)[0], exact)
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    cache = model.new_cache()
    model.read(ids[:, :38], cache)
    assert_same(logits_of(model, ids[:, 38:], past_key_values=cache)[0], exact[38:])


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_one_implementation_of_gca_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's "w/o Triton": the window's stays as it was."""
    asked: dict[str, set[str | None]] = {"gca": set(), "window": set()}

    def watched(of: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked[of].add(kwargs["implementation"])
            return op(*args, **kwargs)

        return call

    monkeypatch.setattr(
        drt_model, "grouped_cross_attention", watched("gca", drt_model.grouped_cross_attention)
    )
    monkeypatch.setattr(
        layers, "sliding_window_attention", watched("window", layers.sliding_window_attention)
    )
    ids = tokens(46, batch=2)
    found = logits_of(drt(gca_implementation=name), ids)
    assert asked == {"gca": {name}, "window": {None}}
    assert_same(found, logits_of(drt(), ids))


# --- reading in pieces -----------------------------------------------------------------------------------

LENGTH = 103  # 25 chunks and 3 tokens: more than any variant's reading tail


@DRT_VARIANTS
@torch.no_grad()
def test_what_calls_share_changes_no_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, of rows that close their chunks at different ones."""
    model, ids, marks = drt(**options), tokens(40, batch=2), torch.zeros(2, 18, dtype=torch.bool)
    marks[1, 15] = True

    def decoded() -> Tensor:
        cache = model.new_cache()
        first = model(ids[:, :18], past_key_values=cache, close_chunk=marks)
        later = [model(ids[:, at : at + 1], past_key_values=cache) for at in range(18, 40)]
        return torch.cat([out.logits for out in (first, *later)], dim=1)

    served = _watched_again(monkeypatch)
    shared = decoded()
    assert served.count(True) > len(served) / 3 > 0  # of 22 tokens few begin a chunk
    monkeypatch.setattr(ReadAgain, "serves", lambda *_: False)
    assert torch.equal(decoded(), shared)


def _watched_again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call that others may share something with, whether it did."""
    serves, served = ReadAgain.serves, list[bool]()

    def watched(self: ReadAgain, *args: Any) -> bool:
        served.append(serves(self, *args))
        return served[-1]

    monkeypatch.setattr(ReadAgain, "serves", watched)
    return served


@torch.no_grad()
def test_layers_that_accelerate_moves_decode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = drt(2), tokens(30)
    expected = in_calls(model, ids.split([20] + [1] * 10, dim=1))[0]
    for layer in model.upper_layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    served = _watched_again(monkeypatch)
    assert torch.equal(in_calls(model, ids.split([20] + [1] * 10, dim=1))[0], expected)
    assert served.count(True) > len(served) / 3 > 0


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_upper_layers_run_on_the_last_positions_only(groups: int) -> None:
    """And not before logits are wanted: no matter in how many pieces a text was read."""
    model, ids = drt(groups), tokens(40 * S)
    seen: dict[str, int] = {}
    for name, layer in model.named_modules():
        if name.count("_layers.") and name.endswith(".attention"):
            layer.register_forward_hook(
                lambda _, inputs, out, name=name: seen.update({name: inputs[0].shape[1]})
            )
    cache = model.read(ids)
    lower = [f"lower_layers.{n}.attention" for n in range(len(model.lower_layers))]
    assert seen == dict.fromkeys(lower, 40 * (S + 1))
    seen.clear()
    logits_of(model, tokens(2), past_key_values=cache, logits_to_keep=1)
    upper = [f"upper_layers.{n}.attention" for n in range(len(model.upper_layers))]
    assert model.reach() < 20 * (S + 1)
    # the kept token is the last
    assert seen == dict.fromkeys(lower, 2) | dict.fromkeys(upper, model.reach() + 1)


@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 3, "window_position": "rope"}], ids=str)
def test_a_batch_is_its_rows(options: dict[str, Any]) -> None:
    model, ids = drt(**options), tokens(LENGTH, batch=3)
    together = logits_of(model, ids)
    for row in range(3):
        assert_same(logits_of(model, ids[row : row + 1]), together[row : row + 1])


def memory_of(cache: ChunkCache) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [B, M, S, J, D] and landmarks [B, M, E] of all chunks."""
    B, M = len(cache.num_chunks), int(cache.num_chunks.max())
    records, _ = cache.memory.gather(np.broadcast_to(np.arange(M), (B, M)))
    landmarks = torch.cat(cache.memory.blocks(M, B), dim=1)
    return records[:, :, 0].transpose(2, 3), records[:, :, 1].transpose(2, 3), landmarks


# --- causality -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_far_token_changes_later_logits_through_retrieval_alone(groups: int) -> None:
    """Layers of a window of 2 positions reach few positions; memory reaches all."""
    model, ids = drt(groups, sliding_window=2), tokens(LENGTH)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 50
    moved = (logits_of(model, ids) - logits_of(model, changed)).abs().amax(-1)[0] > 1e-6  # [T]
    assert moved[5 + model.config.num_hidden_layers + 1 :].any()
    with torch.no_grad():
        for layer in model.upper_layers:
            layer.gca_o_proj.weight.zero_()
    moved = (logits_of(model, ids) - logits_of(model, changed)).abs().amax(-1)[0] > 0
    assert not moved[5 + model.config.num_hidden_layers + 1 :].any()


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_first_two_chunks_read_nothing(groups: int) -> None:
    model, ids = drt(groups), tokens(LENGTH)
    before = logits_of(model, ids)
    with torch.no_grad():
        for layer in model.upper_layers:
            layer.gca_o_proj.weight.mul_(-2)
    after = logits_of(model, ids)
    assert torch.equal(before[:, : 2 * S], after[:, : 2 * S])
    assert (before[:, 2 * S :] != after[:, 2 * S :]).any(-1).all()


def test_what_is_read_feeds_the_mlp_but_not_the_residual_stream() -> None:
    """With MLPs that put out nothing, nothing read arrives, unless it is added to the stream."""
    for residual in (False, True):
        model, ids = drt(residual_gca=residual), tokens(30)
        with torch.no_grad():
            for layer in model.upper_layers:
                layer.mlp.down_proj.weight.zero_()
            before = logits_of(model, ids)
            for layer in model.upper_layers:
                layer.gca_o_proj.weight.mul_(2)
        assert torch.equal(before, logits_of(model, ids)) is not residual


@pytest.mark.parametrize("memory_kv", ["shared", "group", "layer"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_lookup_finds_what_is_like_it_and_says_what_it_was_made_of(memory_kv: str, heads: int) -> None:
    """q . k is a kernel, the same for both sides, and out of the values comes what went in, or its projection."""
    config = drt_config(2, memory_kv=memory_kv, gca_start="lookup", num_key_value_heads=heads)
    torch.manual_seed(0)
    model = DRTForCausalLM(config)
    E, H, D = config.hidden_size, config.num_attention_heads, config.head_dim
    kv = model.encoder.kv_proj.weight.detach().view(2, -1, heads, D, E)
    states = torch.randn(50, E)
    for number, layer in enumerate(model.upper_layers):
        keys, values = kv[
            :, {"shared": 0, "group": number // config.layers_per_group, "layer": number}[memory_kv]
        ]
        own = keys.repeat_interleave(H // heads, 0).flatten(0, 1)
        assert torch.equal(layer.gca_q_proj.weight, own)
        said = (states @ values.repeat_interleave(H // heads, 0).flatten(0, 1).T) @ layer.gca_o_proj.weight.T
        rows = values.flatten(0, 1)
        torch.testing.assert_close(rows @ rows.T, torch.eye(heads * D))
        torch.testing.assert_close(said, states @ rows.T @ rows)
    assert len({layer.gca_q_proj.weight.sum().item() for layer in model.upper_layers}) == config.kv_per_chunk


def test_a_lookup_makes_what_came_next_likelier_before_any_training() -> None:
    """Of tokens that follow what stood far before, beside the model without retrieval; less so with a field less."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, 500, (8, 64), generator=generator)
    ids = torch.cat([drawn, torch.randint(1, 500, (8, 64), generator=generator), drawn], 1)
    whole = {"gca_start": "lookup", "memory_values": "next", "residual_gca": True}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 500}
    sizes |= {"chunk_size": 16, "num_retrieved_chunks": 20, "sliding_window": 16, "initialization": "fan_in"}

    def costs(seed: int, **fields: Any) -> float:
        torch.manual_seed(seed)
        model, found = DRTForCausalLM(drt_config(**sizes | fields)).eval(), []
        for model.config.num_retrieved_chunks in (20, 0):
            with torch.no_grad():
                logits = model(ids).logits
            losses = torch.nn.functional.cross_entropy(logits[:, 130:-1].mT, ids[:, 131:])
            found.append(float(losses))
        return found[0] - found[1]

    for seed in range(3):
        lookup = costs(seed, **whole)
        less = [
            costs(seed, **whole | {"gca_start": "drawn"}),
            costs(seed, **whole | {"memory_values": "same"}),
            costs(seed, **whole | {"residual_gca": False}),
        ]
        assert lookup < min(0, *less), (seed, lookup, less)


def test_a_lookup_and_what_came_next_need_queries_and_chunks_of_their_own() -> None:
    for field, value in (("gca_start", "lookup"), ("memory_values", "next")):
        with pytest.raises(ValueError, match=f"{field}: expected .* with virtual_key 'window'"):
            drt_config(window_position="rope", virtual_key="window", **{field: value})
    with pytest.raises(ValueError, match="chunk_size: expected at least 2 with memory_values 'next'"):
        drt_config(chunk_size=1, memory_values="next")


def test_a_chunk_that_asks_first_finds_what_its_own_landmark_vector_is_like() -> None:
    """Before training scores are those of landmark vectors among each other, whatever the group knows."""
    torch.manual_seed(0)
    model = (
        DRTForCausalLM(drt_config(2, retrieval_query="chunk", retrieval_normalization=True)).double().eval()
    )
    ids = tokens(LENGTH, batch=2)
    own = model.encode_chunks(ids, lay_out(LENGTH, S)).landmarks
    asked = layers.rms_normalize(own, model.config.rms_norm_eps)
    wanted = asked @ own.mT * model.config.hidden_size**-0.5
    with torch.no_grad():
        scores = model(ids, output_retrieval_scores=True).retrieval_scores.scores
    for group in scores:
        candidates = group > -torch.inf
        assert candidates.any()
        torch.testing.assert_close(group[candidates], wanted[candidates])


@pytest.mark.parametrize(
    "options", [("device", torch.bfloat16), ("host", torch.int8), ("tokens", torch.float16)], ids=str
)
def test_a_chunk_asks_with_what_a_memory_keeps_in_another_type(options: tuple[str, torch.dtype]) -> None:
    """Of another type than the projection that it asks through."""
    model, ids = drt(2, retrieval_query="chunk").float(), tokens(LENGTH)
    tier, dtype = options
    found = logits_of(model, ids, past_key_values=model.new_cache(tier, memory_dtype=dtype))
    assert found.dtype == torch.float32
    assert found.isfinite().all()


def test_a_chunk_that_asks_needs_scores_of_the_model_s_own() -> None:
    for fields in ({"retrieval_projections": False}, {"retriever": "encoder", "encoder_weights": "encoder"}):
        with pytest.raises(
            ValueError, match="retrieval_query: expected 'landmark' with encoder_weights 'encoder'"
        ):
            drt_config(retrieval_query="chunk", **fields)


def test_an_encoder_that_keeps_no_keys_keeps_no_values() -> None:
    model = drt(memory_values="next")
    positions = torch.randn(1, 3 * (S + 1), model.config.hidden_size, dtype=torch.float64)
    found = model.encoder(positions, lay_out(3 * S, S), keeps_kv=False)
    assert found.k.shape == found.v.shape
    assert found.k.shape[2] == 0


# --- what is retrieved -----------------------------------------------------------------------------------


@DRT_VARIANTS
def test_retrieval_reports_chunks_before_the_asking_one(options: dict[str, Any]) -> None:
    model, ids = drt(**options), tokens(LENGTH, batch=2)
    retrieval = model(ids, output_retrieval=True).retrieval
    assert len(retrieval) == options["groups"]
    for chosen in retrieval:
        assert chosen.indices.shape == chosen.weights.shape == chosen.scores.shape == (2, LENGTH // S, 3)
        asking = torch.arange(LENGTH // S)[:, None]
        assert (chosen.indices < asking).all()
        present = chosen.indices >= 0
        assert torch.equal(chosen.weights > 0, present)
        assert torch.equal(chosen.scores.isfinite(), present)
        assert_same(chosen.weights.sum(-1), present.any(-1).double())
    assert model(ids).retrieval is None


@pytest.mark.parametrize("window", [2, 7, 14, 15, 19, 20, 35])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.sampled(3)
def test_chunks_wholly_visible_to_the_last_reading_row_can_be_excluded(window: int, exclude: bool) -> None:
    """With room for all, just the allowed chunks are selected. Positions: chunk m has 5m ... 5m + 4."""
    R, N = S + 1, 12
    options = {"sliding_window": window, "exclude_visible_chunks": exclude, "num_retrieved_chunks": N}
    model, ids = drt(**options), tokens(N * S)
    for pieces in ([N * S], [S], [7]):
        _, calls = in_calls(model, split(ids, pieces))
        found = [chunk for call in calls for chunk in selected(call, 0)]
        for asking in range(N):
            last_row = (asking + 1) * R + R - 1
            visible = range(last_row - window + 1, last_row + 1)
            allowed = [
                m
                for m in range(asking)
                if not exclude or not all(p in visible for p in range(m * R, m * R + R))
            ]
            assert found[asking] == allowed, (asking, pieces)


def test_equal_scores_select_the_earlier_chunks() -> None:
    model = drt(num_retrieved_chunks=2)
    with torch.no_grad():
        model.retrievers[0].q_proj.weight.zero_()
    found = selected(model(tokens(24), output_retrieval=True).retrieval, 0)
    assert found == [[], [0], [0, 1], [0, 1], [0, 1], [0, 1]]


# --- precision -------------------------------------------------------------------------------------------


def test_scores_weights_and_norms_stay_in_float32() -> None:
    ids = tokens(46)
    low = drt().bfloat16()
    out = low(ids, output_retrieval=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.retrieval[0].weights.dtype == out.retrieval[0].scores.dtype == torch.float32
    wide = drt().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = wide(ids, output_retrieval=True)
    assert mixed.retrieval[0].weights.dtype == mixed.retrieval[0].scores.dtype == torch.float32
    # the scores must tell apart what bfloat16 (8 bits) cannot
    scores = mixed.retrieval[0].scores
    finite = scores[scores.isfinite()]
    assert (finite.bfloat16().float() != finite).any()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_keep_the_error_budget(groups: int, dtype: torch.dtype) -> None:
    """Of the same rounded weights, where the same chunks are selected; the oracle is the naive form of the ops."""
    ids = tokens(46)
    options: dict[str, Any] = {"num_retrieved_chunks": 12}  # all of them
    fast, oracle = (drt(groups, **options, implementation=name).to(dtype) for name in (None, "reference"))
    exact = copy.deepcopy(oracle).double()
    assert_within_budget(*(logits_of(model, ids) for model in (fast, oracle, exact)))
