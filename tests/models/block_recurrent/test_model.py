"""The Block-Recurrent Transformer: its equations, any split into calls, gradients through the states, its cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.budgets import assert_same_bits
from tests.models.block_recurrent.naive import NaiveBlockRecurrent
from tests.models.test_bits import go_on
from tests.models.tiny import (
    assert_same,
    block_recurrent,
    block_recurrent_config,
    logits_of,
    padded,
    place,
    split,
    tokens,
    window_model,
)
from trailmark.models import BlockRecurrentConfig, BlockRecurrentForCausalLM
from trailmark.models.grid import lay_out
from trailmark.models.layers import Place
from trailmark.training.optimizer import MuonAdamW

VARIANTS: list[dict[str, Any]] = [
    {},
    {"state_gate": "lstm", "window_position": "rope"},
    {"block_size": 1, "num_states": 1, "recurrent_layer": 1},
    {"block_size": 7, "recurrent_layer": 4, "state_gate": "lstm", "num_key_value_heads": None},
    {"sliding_window": 1, "block_size": 3, "logit_scale": 0.25, "tie_word_embeddings": False},
    {"sliding_window": 12, "implementation": "reference", "window_position": "rope"},
    {"num_sinks": 3, "max_sink_distance": 12, "window_position": "rope"},
]
OPTIONS = pytest.mark.parametrize("options", VARIANTS, ids=str)
GATES = pytest.mark.parametrize("gate", ["fixed", "lstm"])


# --- the equations -----------------------------------------------------------------------------------------


@OPTIONS
@pytest.mark.parametrize("length", [1, 4, 5, 6, 28])
@pytest.mark.sampled(4)
def test_one_forward_is_the_equations(options: dict[str, Any], length: int) -> None:
    model, ids = block_recurrent(**options), tokens(length)
    assert_same(logits_of(model, ids)[0], NaiveBlockRecurrent(model, ids[0]).logits)


@OPTIONS
@pytest.mark.parametrize(("side", "use_cache"), [("left", False), ("right", True)])
@pytest.mark.sampled(3)
def test_ragged_rows_are_the_equations(options: dict[str, Any], side: str, use_cache: bool) -> None:
    model, lengths = block_recurrent(**options), [16, 1, 10, 4]
    ids, mask = padded(lengths, side, extra=2)
    logits = logits_of(model, ids, attention_mask=mask, use_cache=use_cache)
    for b, length in enumerate(lengths):
        exact = NaiveBlockRecurrent(model, tokens(length, seed=b)[0]).logits
        assert_same(logits[b, place(length, ids.shape[1], side)], exact)


@GATES
def test_documents_of_a_row_are_the_equations(gate: str) -> None:
    """Of less than a block, of one and of two whole ones, and on."""
    model, lengths = block_recurrent(state_gate=gate), [3, 5, 10, 1, 13]
    texts = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    logits = logits_of(model, torch.cat(texts)[None], document_ids=ids[None])[0]
    for part, text in zip(logits.split(lengths), texts, strict=True):
        assert_same(part, NaiveBlockRecurrent(model, text).logits)


def layer_of(model: BlockRecurrentForCausalLM, x: Tensor) -> Tensor:
    """The recurrent layer alone, [B, P, E]."""
    grid = lay_out(x.shape[1], model.config.block_size, landmarks=False)
    return model.recurrent_layer(x, grid, Place.of(model.config, grid, x))


@GATES
def test_gradients_of_the_recurrent_layer(gate: str) -> None:
    model = block_recurrent(state_gate=gate, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    layer = model.recurrent_layer
    x = torch.randn(
        2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    chosen = [layer.states.initial.weight, layer.states.places.weight, layer.states.gate]
    names = ("kv_proj", "q_proj", "update_proj", *(["gate_proj"] if gate == "lstm" else []))
    chosen += [layer.states.get_submodule(name).weight for name in names]
    chosen += [layer.attention.qkv_proj.weight, layer.attention.o_proj.weight]
    assert torch.autograd.gradcheck(lambda *_: layer_of(model, x), (x, *chosen), fast_mode=True)


@GATES
@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_without_the_states_half_it_is_window_attention(gate: str, position: str) -> None:
    """Over the tokens of the previous and the current block, with W = S."""
    options: dict[str, Any] = {"sliding_window": 5, "window_position": position}
    model = block_recurrent(state_gate=gate, num_states=4, **options)
    window = window_model(num_hidden_layers=4, **options)
    own = model.state_dict()
    E = model.config.hidden_size
    qkv, o = (own[f"recurrent_layer.attention.{name}.weight"] for name in ("qkv_proj", "o_proj"))
    with torch.no_grad():
        o[:, E:] = 0  # of the model itself
    theirs = {}
    for name in window.state_dict():
        kind, number, rest = (*name.split(".", 2), "", "")[:3]
        if kind != "layers":
            theirs[name] = own[name]
        elif number == "1":
            theirs[name] = own[f"recurrent_layer.{rest}"]
        else:
            theirs[name] = own[
                f"lower_layers.0.{rest}" if number == "0" else f"upper_layers.{int(number) - 2}.{rest}"
            ]
    theirs["layers.1.attention.qkv_proj.weight"] = torch.cat([qkv[:E], qkv[2 * E :]])
    theirs["layers.1.attention.o_proj.weight"] = o[:, :E]
    window.load_state_dict(theirs)
    ids = tokens(28, batch=2)
    assert_same(logits_of(model, ids), logits_of(window, ids))
    cache = model.new_cache()
    parts = [logits_of(model, piece, past_key_values=cache) for piece in split(ids, [3, 9, 1])]
    assert_same(torch.cat(parts, dim=1), logits_of(window, ids))


# --- causality, and what the states carry -------------------------------------------------------------------


@GATES
def test_a_token_is_seen_through_the_states_alone_from_the_next_block_on(gate: str) -> None:
    """The window shows nothing but the token itself: what changes is what the states of later blocks carry."""
    model, ids = block_recurrent(state_gate=gate, sliding_window=1), tokens(60)
    other = ids.clone()
    other[0, 7] = (ids[0, 7] + 1) % 50
    moved = (logits_of(model, ids) != logits_of(model, other)).any(-1)[0].nonzero().flatten().tolist()
    assert moved == [7, *range(10, 60)]


# --- any split into calls ----------------------------------------------------------------------------------


def test_reading_runs_the_upper_layers_on_what_is_needed_alone() -> None:
    model, ids = block_recurrent(), tokens(90)
    seen: list[int] = []
    model.upper_layers[0].register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].shape[1]))
    cache = model.read(ids[:, :80])
    assert seen == []
    logits_of(model, ids[:, 80:], past_key_values=cache)
    assert model.reach() == 2 * 6
    assert seen == [12 + 10]


@pytest.mark.parametrize("read", [0, 15, 17])
def test_an_answer_is_what_one_forward_predicts(read: int) -> None:
    model, ids = block_recurrent(), tokens(23)
    cache = model.read(ids[:, :read]) if read else None
    answer = model.generate(
        ids[:, read:], past_key_values=cache, max_new_tokens=14, do_sample=False, attention_mask=None
    )[0, 23 - read :]
    text = ids[0].tolist()
    for token in answer.tolist():
        assert token == int(logits_of(model, torch.tensor([text]))[0, -1].argmax())
        text.append(token)


def test_rows_go_on_in_branches_and_in_another_order() -> None:
    model, ids, more = block_recurrent(), tokens(18), tokens(9, batch=3, seed=5)
    cache = model.read(ids)
    before = cache.state.states.clone()
    branch = cache.branch(3)
    logits = logits_of(model, more, past_key_values=branch)
    for b in range(3):
        whole = logits_of(model, torch.cat([ids, more[b : b + 1]], dim=1))
        assert_same(logits[b], whole[0, 18:])
    branch.reorder_cache(torch.tensor([2, 2, 0]))
    last = tokens(7, batch=3, seed=9)
    logits = logits_of(model, last, past_key_values=branch)
    for b, source in enumerate([2, 2, 0]):
        whole = logits_of(model, torch.cat([ids, more[source : source + 1], last[b : b + 1]], dim=1))
        assert_same(logits[b], whole[0, 27:])
    assert torch.equal(cache.state.states, before)  # what was branched from is as it was
    whole = logits_of(model, torch.cat([ids, more[:1]], dim=1))
    assert_same(logits_of(model, more[:1], past_key_values=cache), whole[:, 18:])


def test_a_row_without_tokens_keeps_its_states() -> None:
    model, lengths = block_recurrent(), [[9, 4], [0, 13], [7, 0], [1, 6]]
    texts = [tokens(sum(n), seed=b)[0] for b, n in enumerate(zip(*lengths, strict=True))]
    cache, done = model.new_cache(), [0, 0]
    for counts in lengths:
        width = max(counts)
        ids, mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width, dtype=torch.int64)
        for b, n in enumerate(counts):
            ids[b, :n], mask[b, :n] = texts[b][done[b] : done[b] + n], 1
        logits = logits_of(model, ids, attention_mask=mask, past_key_values=cache)
        for b, n in enumerate(counts):
            exact = NaiveBlockRecurrent(model, texts[b][: done[b] + n])
            assert_same(logits[b, :n], exact.logits[done[b] :])
            assert_same(cache.state.states[b], exact.states[-1])
            done[b] += n


# --- what the published code gets wrong ----------------------------------------------------------------------


@GATES
def test_a_partial_block_never_changes_the_states(gate: str) -> None:
    """The port of arXiv 2410.01651 writes the states after a partial block too."""
    model, ids = block_recurrent(state_gate=gate), tokens(14)
    exact, cache = NaiveBlockRecurrent(model, ids[0]), model.new_cache()
    for t in range(14):
        logits_of(model, ids[:, t : t + 1], past_key_values=cache)
        assert_same(cache.state.states[0], exact.states[(t + 1) // 5])
        assert t % 5 == 4 or cache.state.phases.tolist() == [t % 5 + 1]


def test_keys_and_values_are_those_of_the_present_states() -> None:
    """Issue 3 of that port: they were always the initial states'."""
    model, ids = block_recurrent(), tokens(12)
    cache = model.read(ids)
    exact = NaiveBlockRecurrent(model, ids[0])
    assert_same(cache.state.state_kv[0], exact.of_states(exact.states[2]).flatten(1))
    assert not torch.equal(exact.states[2], exact.states[0])


def test_early_landmarks_end_no_block() -> None:
    model, ids = block_recurrent(), tokens(23)
    marks = torch.arange(23)[None] % 3 == 0
    for close in (True, marks):
        assert torch.equal(logits_of(model, ids, close_chunk=close), logits_of(model, ids))


# --- gradients -----------------------------------------------------------------------------------------------


def gradient_at(model: BlockRecurrentForCausalLM, ids: Tensor, block: int, **arguments: Any) -> Tensor:
    """[T, E] of the summed logits of a block's tokens, in the embeddings."""
    states: list[Tensor] = []
    hook = model.embed_tokens.register_forward_hook(lambda *x: states.append(x[2]))
    logits = model(ids, **arguments).logits
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[0, 5 * block : 5 * block + 5].sum(), states[0])
    return gradient[0]


@GATES
@pytest.mark.parametrize("truncation", [None, 2, 3])
def test_gradients_reach_back_through_the_states_to_where_they_are_cut(
    gate: str, truncation: int | None
) -> None:
    """A window of one token: all that comes from other blocks comes through the states."""
    model = block_recurrent(state_gate=gate, truncation_blocks=truncation, sliding_window=1).train()
    for block in range(7):
        reached = gradient_at(model, tokens(35), block).any(-1).unflatten(0, (7, 5)).any(-1).tolist()
        first = 0 if truncation is None else block // truncation * truncation
        assert reached == [first <= n <= block for n in range(7)]


def test_the_cut_is_counted_from_the_beginning_of_each_document() -> None:
    model = block_recurrent(truncation_blocks=2).train()
    lengths = [8, 22, 15]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    text = tokens(45)
    model(text, document_ids=ids, labels=text, num_items_in_batch=1).loss.backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in text.split(lengths, dim=1):
        model(part, labels=part, num_items_in_batch=1).loss.backward()
    for ours, parameter in zip(together, model.parameters(), strict=True):
        assert_same(ours, parameter.grad)


def test_truncation_changes_no_loss() -> None:
    ids = tokens(35, batch=2)
    losses = [block_recurrent(truncation_blocks=n).train()(ids, labels=ids).loss for n in (None, 2)]
    assert torch.equal(*losses)


@GATES
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("states", [3, 128])
def test_where_no_block_is_read_gradients_are_zeros(gate: str, length: int, states: int) -> None:
    """In float32, where attention to many states is torch's own kernel."""
    model = block_recurrent(state_gate=gate, num_states=states).float().train()
    ids = tokens(length)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        writes = any(part in name for part in ("states.q_proj", "update_proj", "gate"))
        writes = writes and ".mlp." not in name
        assert parameter.grad.isfinite().all(), name
        assert bool(parameter.grad.any()) != writes, name


def test_tables_of_states_are_no_matrices_for_muon() -> None:
    model = block_recurrent(state_gate="lstm")
    matrices = MuonAdamW(model).param_groups[-1]["params"]
    tables = (model.recurrent_layer.states.initial.weight, model.recurrent_layer.states.places.weight)
    assert not any(parameter is table for parameter in matrices for table in tables)


@pytest.mark.parametrize("gate", [pytest.param("fixed", marks=pytest.mark.slow), "lstm"])
def test_the_states_learn_to_carry_what_no_window_reaches(gate: str) -> None:
    """The first token of a text is asked for three blocks later."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 6, "sliding_window": 2, "block_size": 4, "num_hidden_layers": 1}
    config = block_recurrent_config(
        state_gate=gate, recurrent_layer=1, initialization="fan_in", tie_word_embeddings=False, **sizes
    )
    model = BlockRecurrentForCausalLM(config).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(70):
        ids = torch.full((32, 14), 5)
        ids[:, 0] = ids[:, -1] = torch.randint(4, (32,))
        loss = model(ids, labels=ids.masked_fill(torch.arange(14) < 13, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < math.log(4) / 2  # by chance log 4


# --- saving and loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "dtype", "how"),
    [
        ("fixed", torch.bfloat16, "read"),
        ("fixed", torch.float64, "ragged"),
        ("lstm", torch.float64, "forward"),
        ("lstm", torch.bfloat16, "ragged"),
    ],
    ids=str,
)
def test_a_saved_cache_goes_on_bit_for_bit(gate: str, dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    model, rows = block_recurrent(state_gate=gate).to(dtype), 3 if how == "ragged" else 1
    cache = model.new_cache()
    if how == "read":
        model.read(tokens(48), cache)
    elif how == "forward":
        logits_of(model, tokens(48), past_key_values=cache)
    else:
        ids, mask = padded([23, 1, 10])
        logits_of(model, ids, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path)
    expected = go_on(model, cache, rows)
    loaded = model.load_cache(tmp_path)
    assert loaded.num_tokens.tolist() == [23, 1, 10] if rows == 3 else [48]
    assert_same_bits(go_on(model, loaded, rows), expected)
    with pytest.raises(ValueError, match="folder: expected a memory written by this model"):
        block_recurrent(seed=1, state_gate=gate).to(dtype).load_cache(tmp_path)


@GATES
def test_a_saved_model_is_the_same(gate: str, tmp_path: Path) -> None:
    model, ids = block_recurrent(state_gate=gate), tokens(23)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is BlockRecurrentForCausalLM
    assert loaded.config.arithmetic_fields() == model.config.arithmetic_fields()
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_same(logits_of(loaded, ids), logits_of(model, ids))


# --- the cache -----------------------------------------------------------------------------------------------


def test_the_cache_does_not_grow() -> None:
    """Windows, the open block's keys and values, the states and theirs, in float64."""
    model, (W, S, M, E) = block_recurrent(), (7, 5, 3, 16)
    J_D, cache = 8, model.new_cache()
    for piece in split(tokens(90), [7]):
        logits_of(model, piece, past_key_values=cache)
        numbers = 4 * 2 * W * J_D + 2 * S * J_D + M * E + 2 * M * J_D
        assert cache.window_bytes() == numbers * 8
        assert cache.memory_bytes() == 0


def test_what_is_taken_back_is_exact_or_refused() -> None:
    model, ids = block_recurrent(sliding_window=50), tokens(30)
    cache = model.new_cache()
    logits_of(model, ids[:, :19], past_key_values=cache)
    cache.crop(3)  # of the 4 of the open block
    assert_same(logits_of(model, ids[:, 16:], past_key_values=cache), logits_of(model, ids)[:, 16:])
    for n in (1, 5):
        with pytest.raises(ValueError, match=rf"tokens_to_remove: .* got {n}: .*Call branch\(\)"):
            cache.crop(n)  # the last block is closed


def test_a_cache_filled_without_gradients_serves_calls_with_them() -> None:
    model, ids = block_recurrent(), tokens(33)
    cache = model.new_cache()
    with torch.inference_mode():
        model(ids[:, :17], past_key_values=cache)
    logits = model(ids[:, 17:], past_key_values=cache).logits
    assert_same(logits.detach(), logits_of(model, ids)[:, 17:])
    logits.sum().backward()
    assert model.recurrent_layer.states.update_proj.weight.grad.any()


def test_a_call_that_fails_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = block_recurrent(), tokens(33)
    caches = [model.new_cache() for _ in range(2)]
    for cache in caches:
        logits_of(model, ids[:, :9], past_key_values=cache)

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.upper_layers[-1], "forward", fails)
        with pytest.raises(MemoryError):
            logits_of(model, ids[:, 9:20], past_key_values=caches[0])
        with pytest.raises(MemoryError):
            logits_of(model, ids[:, 9:10], past_key_values=caches[0])
    assert torch.equal(*(logits_of(model, ids[:, 9:], past_key_values=cache) for cache in caches))


# --- precision -----------------------------------------------------------------------------------------------


@GATES
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_states_and_gates_are_never_below_float32(gate: str, how: str) -> None:
    model, seen = block_recurrent(state_gate=gate), []
    model = model.bfloat16() if how == "bfloat16" else model.float()
    model.recurrent_layer.states.register_forward_hook(lambda _, inputs, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        logits = logits_of(model, tokens(23))
        cache = model.read(tokens(23))
    assert set(seen) == {torch.float32}
    assert cache.state.states.dtype == torch.float32
    assert logits.isfinite().all()


# --- configuration -------------------------------------------------------------------------------------------


def test_what_is_left_open_follows_the_window_and_the_depth() -> None:
    config = BlockRecurrentConfig()
    assert (config.sliding_window, config.block_size, config.num_states) == (512, 512, 512)
    assert config.recurrent_layer == 6  # of 12
    assert not config.has_landmarks
    assert BlockRecurrentConfig(num_hidden_layers=1).recurrent_layer == 1
    assert BlockRecurrentConfig(sliding_window=768, block_size=256).num_states == 256


def test_what_the_model_starts_from() -> None:
    """Published: S_0 and the fixed gate N(0, .1), places N(0, 1); the LSTM's constants stand in its equation."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_states": 400, "initialization": "fan_in", "hidden_size": 64}
    states = BlockRecurrentForCausalLM(block_recurrent_config(**sizes)).recurrent_layer.states
    assert states.initial.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert states.places.weight.std().item() == pytest.approx(1, rel=0.05)
    assert states.gate.std().item() == pytest.approx(0.1, rel=0.3)
    lstm = BlockRecurrentForCausalLM(
        block_recurrent_config(state_gate="lstm", **sizes)
    ).recurrent_layer.states
    assert not lstm.gate.any()
    # two halves of E each, scaled by both; only what writes into the residual stream is made smaller
    assert states.update_proj.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "sliding_window: expected a number of positions, got None"),
        ({"block_size": 0}, "block_size: expected None or at least 1, got 0"),
        ({"num_states": 0}, "num_states: expected None or at least 1, got 0"),
        ({"recurrent_layer": 0}, r"recurrent_layer: expected 1 to 4 \(num_hidden_layers\), or None, got 0"),
        ({"recurrent_layer": 5}, "recurrent_layer: expected 1 to 4 .*got 5"),
        ({"state_gate": "gru"}, "state_gate: expected 'fixed' or 'lstm', got 'gru'"),
        ({"truncation_blocks": 1}, "truncation_blocks: expected None or at least 2 .*got 1"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        block_recurrent_config(**changes)


def test_a_cache_of_other_blocks_is_refused_and_one_of_another_truncation_is_not() -> None:
    cache = block_recurrent().new_cache()
    with pytest.raises(ValueError, match=r"past_key_values: expected a cache of this model .*block_size 6"):
        block_recurrent(block_size=6)(tokens(5), past_key_values=cache)
    logits_of(block_recurrent(truncation_blocks=2), tokens(5), past_key_values=cache)


def test_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="neighbours: expected none for BlockRecurrentForCausalLM"):
        block_recurrent()(tokens(5), neighbours=torch.zeros(1, 1, 1, dtype=torch.int64))
