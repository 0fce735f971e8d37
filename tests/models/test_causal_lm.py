"""What the models share: refused input, padding, loss, saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.models.naive import NaiveDRT
from tests.models.tiny import (
    EACH_MODEL,
    MIXED,
    assert_same,
    drt,
    hsa,
    landmark,
    logits_of,
    padded,
    tokens,
    window_model,
)
from trailmark.models import DRTForCausalLM, SlidingWindowForCausalLM, TrailmarkForCausalLM, causal_lm
from trailmark.models.loss import BearingTokens, shift_labels, text_loss

Make = Callable[..., TrailmarkForCausalLM]

# --- refused input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), r"expected shape \[B, T\] with T >= 1, got \(1, 0\)"),
        (torch.zeros(0, 4, dtype=torch.int64), r"got \(0, 4\)"),
        (torch.tensor([[1, 50]]), r"tokens from 0 to 49 \(vocab_size - 1\), got 50"),
        (torch.tensor([[-1, 3]]), "got -1"),
    ],
    ids=["no token", "no row", "beyond the vocabulary", "negative"],
)
def test_input_that_is_no_text_is_refused(ids: Tensor, message: str) -> None:
    model = drt()
    with pytest.raises(ValueError, match="input_ids: .*" + message):
        model(ids)
    cache = model.new_cache()
    with pytest.raises(ValueError, match="input_ids: .*" + message):
        model.read(ids, cache)
    assert cache.get_seq_length() == 0


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels: expected shape \(1, 5\), got \(1, 4\)"):
        drt()(tokens(5), labels=tokens(4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("argument", ["input_ids", "labels"])
def test_tokens_of_another_type_are_refused(argument: str, dtype: torch.dtype) -> None:
    arguments = {"input_ids": tokens(5), "labels": tokens(5)}
    arguments[argument] = arguments[argument].to(dtype)
    with pytest.raises(ValueError, match=rf"{argument}: expected int64, got {dtype}"):
        drt()(**arguments)


@pytest.mark.parametrize("label", [50, -1])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    labels = tokens(5)
    labels[0, 1:3] = torch.tensor([-100, label])
    with pytest.raises(ValueError, match=rf"labels: expected tokens from 0 to 49 .* got {label}"):
        drt()(tokens(5), labels=labels)


@EACH_MODEL
def test_a_cache_of_another_model_is_refused(make: Make) -> None:
    model, ids = make(), tokens(5)
    others = [drt(1), window_model(sliding_window=8), make(hidden_size=32), make(rms_norm_eps=1e-3)]
    for cache, came in [
        (DynamicCache(), "got DynamicCache"),
        *((other.new_cache(), "expected a cache of this model .* got one of another") for other in others),
    ]:
        for call in (
            lambda cache=cache: model(ids, past_key_values=cache),
            lambda cache=cache: model.read(ids, cache),
            lambda cache=cache: model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=2
            ),
        ):
            with pytest.raises(ValueError, match=f"past_key_values: .*{came}"):
                call()


def test_a_field_that_is_set_makes_another_model(tmp_path: Path) -> None:
    model = drt(1)
    cache = model.read(tokens(60))
    model.config.num_retrieved_chunks = 5
    with pytest.raises(ValueError, match="past_key_values: "):
        model(tokens(3), past_key_values=cache)
    model.read(tokens(60)).save(tmp_path)
    drt(1, num_retrieved_chunks=5).load_cache(tmp_path)
    with pytest.raises(ValueError, match=r"another num_retrieved_chunks \(5, not 3\)"):
        drt(1).load_cache(tmp_path)


@pytest.mark.parametrize("prefill_chunk_size", [None, 1, 4])
@pytest.mark.parametrize("make", [lambda: window_model(layer_types=MIXED), lambda: hsa(chunk_size=1)])
def test_a_call_of_many_pieces_that_is_stopped_leaves_the_cache(
    make: Make, prefill_chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make(), tokens(60)
    cache = model.read(ids[:, :30])
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.generate(
                ids[:, 30:42], past_key_values=cache, max_new_tokens=1, prefill_chunk_size=prefill_chunk_size
            )
    assert cache.get_seq_length() == 30
    assert_same(logits_of(model, ids[:, 30:], past_key_values=cache), logits_of(model, ids)[:, 30:])


@pytest.mark.parametrize(
    ("close_chunk", "came"),
    [
        (torch.ones(1, 4, dtype=torch.bool), r"torch.bool of \(1, 4\)"),
        (torch.ones(5, dtype=torch.bool), r"torch.bool of \(5,\)"),
        (torch.ones(1, 5), r"torch.float32 of \(1, 5\)"),
        ([[True] * 5], "list"),
        (1, "int"),
    ],
    ids=str,
)
def test_early_landmarks_of_another_shape_or_type_are_refused(close_chunk: Any, came: str) -> None:
    model, ids = drt(), tokens(5)
    cache = model.new_cache()
    for arguments in ({}, {"past_key_values": cache}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}):
        with pytest.raises(ValueError, match=r"close_chunk: expected .*\(1, 5\), got " + came):
            model(ids, close_chunk=close_chunk, **arguments)
    assert cache.batch_size is None


REFUSED: dict[str, Callable[[TrailmarkForCausalLM, Any], object]] = {
    "another vocabulary": lambda model, cache: model.read(torch.tensor([[50]]), cache),
    "another batch": lambda model, cache: model(tokens(3, batch=2), past_key_values=cache),
    "another mask": lambda model, cache: model(
        tokens(3), attention_mask=torch.ones(1, 2), past_key_values=cache
    ),
    "other marks": lambda model, cache: model(tokens(3), close_chunk=torch.ones(1, 3), past_key_values=cache),
}


@EACH_MODEL
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_a_call_that_is_refused_leaves_the_cache(
    make: Make, call: Callable[[TrailmarkForCausalLM, Any], object]
) -> None:
    model = make()
    caches = [model.new_cache() for _ in range(2)]
    for cache in caches:
        logits_of(model, tokens(9), past_key_values=cache)
    with pytest.raises(ValueError, match="expected"):
        call(model, caches[0])
    assert torch.equal(*(logits_of(model, tokens(6), past_key_values=cache) for cache in caches))


def test_a_tuple_on_request() -> None:
    model, ids = drt(), tokens(5)
    loss, logits = model(ids, labels=ids, return_dict=False)
    out = model(ids, labels=ids)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)


def test_logits_after_no_token_at_all() -> None:
    model, ids = drt(1), tokens(9, batch=2)
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert model(ids, logits_at=none).logits.shape == (2, 0, model.config.vocab_size)
    bearing = BearingTokens(none, none.float(), torch.tensor(1.0), 4)
    assert float(model(ids, logits_at=none, bearing=bearing).loss) == 0


def test_logits_to_keep_with_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="logits_to_keep: expected 0"):
        drt()(tokens(5), labels=tokens(5), logits_to_keep=1)


@EACH_MODEL
@pytest.mark.parametrize("kept", [1, 3, 9, 20])
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_to_keep_are_the_last(make: Make, kept: int, use_cache: bool) -> None:
    model, ids = make(), tokens(9, batch=2)
    whole = logits_of(model, ids)
    assert_same(logits_of(model, ids, logits_to_keep=kept, use_cache=use_cache), whole[:, -kept:])
    out = model(ids, logits_to_keep=kept, use_cache=use_cache, output_retrieval=True)
    assert_same(out.logits, whole[:, -kept:])
    assert (out.retrieval is None) == (not model.config.keeps_chunks)


@EACH_MODEL
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [1, 3, 30])
@pytest.mark.sampled(4)
def test_padding_does_not_count_as_what_is_kept(make: Make, side: str, kept: int) -> None:
    model, lengths = make(), [26, 1, 9]
    ids, mask = padded(lengths, side)
    for arguments in ({}, {"use_cache": True}, {"use_cache": True, "output_retrieval": True}):
        logits = logits_of(model, ids, attention_mask=mask, logits_to_keep=kept, **arguments)
        assert logits.shape[:2] == (3, min(kept, 26))
        for row, length in enumerate(lengths):
            n = min(kept, length)
            exact = logits_of(model, tokens(length, seed=row))[0, length - n :]
            assert_same(logits[row, logits.shape[1] - n :], exact)


@EACH_MODEL
def test_what_is_read_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model, told = make(), []
    cache = model.read(tokens(30), progress=lambda done, total: told.append((done, total)))
    assert told == [(8, 30), (16, 30), (24, 30), (30, 30)]
    told.clear()
    ids, mask = padded([30, 3])
    cache = model.read(ids, attention_mask=mask, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (30, 30)
    assert cache.num_tokens.tolist() == [30, 3]


# --- padding ---------------------------------------------------------------------------------------------


@EACH_MODEL
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.sampled(3)
def test_padded_rows_are_the_texts_alone(make: Make, side: str, use_cache: bool, extra: int) -> None:
    """``extra`` columns are padding in every row, as ``pad_to_multiple_of`` makes them."""
    model, lengths = make(), [26, 1, 3, 4, 5, 8, 26, 25]
    ids, mask = padded(lengths, side, extra)
    logits = logits_of(model, ids, attention_mask=mask, use_cache=use_cache)
    for row, length in enumerate(lengths):
        assert_same(logits[row, mask[row].bool()], logits_of(model, tokens(length, seed=row))[0])


@EACH_MODEL
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_goes_on(make: Make, side: str) -> None:
    """A ragged prompt, then a ragged piece whose mask spans both, then one token each."""
    model, first, second = make(), [29, 4, 16], [3, 8, 1]
    cache = model.new_cache()
    ids, mask = padded(first, side)
    logits_of(model, ids, attention_mask=mask, past_key_values=cache)
    more, more_mask = padded(second, side)
    middle = logits_of(model, more, attention_mask=torch.cat([mask, more_mask], dim=1), past_key_values=cache)
    last = tokens(1, batch=3, seed=9)
    end = logits_of(model, last, past_key_values=cache)
    assert cache.get_seq_length() == 33
    for row in range(3):
        whole = torch.cat(
            [tokens(first[row], seed=row), tokens(second[row], seed=row), last[row : row + 1]], dim=1
        )
        exact = logits_of(model, whole)[0, first[row] :]
        assert_same(torch.cat([middle[row, more_mask[row].bool()], end[row]]), exact)


HOLES = {
    "inside": [[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]],
    "both ends": [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("mask", HOLES.values(), ids=HOLES)
@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_that_is_not_at_one_end_is_refused(mask: list[list[int]], use_cache: bool) -> None:
    with pytest.raises(ValueError, match="attention_mask: "):
        drt()(tokens(5, batch=2), attention_mask=torch.tensor(mask), use_cache=use_cache)


@pytest.mark.parametrize("shape", [(2, 3), (1, 5), (2, 6), (5,), (2, 5, 1)])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...], use_cache: bool, first: int) -> None:
    mask = torch.ones(shape)
    mask.view(-1)[0] = first
    model, ids = drt(), tokens(5, batch=2)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 5\] as input_ids, got"):
        model(ids, attention_mask=mask, use_cache=use_cache)
    if mask.dim() == 2 and not first:  # else transformers refuses or drops it
        with pytest.raises(ValueError, match="attention_mask"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("width", [4, 6, 13, 15])
def test_a_mask_that_does_not_fit_what_was_read_is_refused(width: int) -> None:
    model = drt()
    cache = model.new_cache()
    model.read(tokens(9), cache)
    with pytest.raises(
        ValueError, match=r"\[1, 5\] as input_ids, or with the 9 cached tokens before, got \[1"
    ):
        model(tokens(5), attention_mask=torch.ones(1, width), past_key_values=cache)
    assert cache.num_tokens.tolist() == [9]


@pytest.mark.parametrize("mask", [[[1, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], ids=["a row", "all"])
def test_no_token_at_all_is_refused(mask: list[list[int]]) -> None:
    """Of a row without a cache, where its text could go on later, or of every row."""
    model = drt()
    with pytest.raises(ValueError, match="attention_mask: "):
        model(tokens(3, batch=2), attention_mask=torch.tensor(mask))
    if mask[0][0] == 0:
        with pytest.raises(ValueError, match="attention_mask: "):
            model(tokens(3, batch=2), attention_mask=torch.tensor(mask), use_cache=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_retrieval_of_a_padded_batch_is_that_of_its_texts(side: str, use_cache: bool) -> None:
    model, lengths = drt(2), [25, 13, 3]
    ids, mask = padded(lengths, side)
    out = model(ids, attention_mask=mask, use_cache=use_cache, output_retrieval=True)
    for row, length in enumerate(lengths):
        alone = model(tokens(length, seed=row), output_retrieval=True)
        for ours, exact in zip(out.retrieval, alone.retrieval, strict=True):
            closed = length // 4
            assert ours.indices.shape == (3, 6, 3)
            assert torch.equal(ours.indices[row, :closed], exact.indices[0])
            assert_same(ours.weights[row, :closed], exact.weights[0])
            assert (ours.indices[row, closed:] == -1).all()
            assert not ours.weights[row, closed:].any()
            assert (ours.scores[row, closed:] == -torch.inf).all()


@pytest.mark.parametrize("read", ["padded", "equal", "a few tokens"])
@pytest.mark.parametrize("rows", [1, 3])
def test_other_rows_than_the_cache_has_are_refused(read: str, rows: int) -> None:
    model = drt()
    cache = model.new_cache()
    if read == "padded":
        ids, mask = padded([5, 3], "left")
        logits_of(model, ids, attention_mask=mask, past_key_values=cache)
    else:
        model.read(tokens(8 if read == "equal" else 2, batch=2), cache)
    for call in (model.read, lambda ids, cache: model(ids, past_key_values=cache)):
        with pytest.raises(ValueError, match=f"input_ids: expected the 2 rows .* got {rows}"):
            call(tokens(5, batch=rows), cache)


# --- loss ------------------------------------------------------------------------------------------------


@EACH_MODEL
def test_the_loss_is_the_mean_cross_entropy_of_the_next_token(make: Make) -> None:
    model, ids = make(), tokens(19, batch=2)
    labels = ids.clone()
    labels[0, 4:9] = -100
    out = model(ids, labels=labels)
    chosen = [(b, t) for b in range(2) for t in range(1, 19) if labels[b, t] != -100]
    each = [-out.logits[b, t - 1].log_softmax(-1)[ids[b, t]] for b, t in chosen]
    assert_same(out.loss, torch.stack(each).mean())
    assert_same(model(ids, labels=labels, num_items_in_batch=7).loss, torch.stack(each).sum() / 7)


@EACH_MODEL
@pytest.mark.parametrize("labels", [torch.full((2, 9), -100), tokens(1, batch=2)], ids=["ignored", "T = 1"])
def test_a_loss_over_no_token_is_zero(make: Make, labels: Tensor) -> None:
    model = make()
    for num_items in (None, 0):
        loss = model(tokens(labels.shape[1], batch=2), labels=labels, num_items_in_batch=num_items).loss
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.abs().max() for p in model.parameters())


@EACH_MODEL
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_padded_batch_is_that_of_its_texts(make: Make, side: str) -> None:
    model, lengths = make(), [19, 7]
    ids, mask = padded(lengths, side)
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels).loss
    alone = [model(text, labels=text).loss for text in (tokens(n, seed=b) for b, n in enumerate(lengths))]
    assert_same(loss, (alone[0] * 18 + alone[1] * 6) / 24)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    logits = torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = tokens(9, batch=2)
    loss = text_loss(logits, shift_labels(labels))
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)


@settings(max_examples=15)
@given(
    slab=st.integers(1, 9),
    labels=st.lists(st.sampled_from([-100, 0, 3, 49]), min_size=8, max_size=8),
    weights=st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=8, max_size=8),
)
def test_the_loss_in_slabs_is_that_of_all_logits(slab: int, labels: list[int], weights: list[float]) -> None:
    """Its gradients too."""
    model, ids = window_model(), tokens(4, 2)
    labels_of = torch.tensor(labels).view(2, 4)
    weights_of = torch.tensor(weights, dtype=torch.float64).view(2, 4)
    total = torch.tensor(7.0)

    def gradients(loss: Tensor) -> list[Tensor]:
        return [x for x in torch.autograd.grad(loss, list(model.parameters())) if x is not None]

    whole = text_loss(model(ids).logits, labels_of, weights=weights_of, total=total)
    out = model(ids, bearing=BearingTokens(labels_of, weights_of, total, slab))
    assert out.logits is None
    for ours, exact in zip([out.loss, *gradients(out.loss)], [whole, *gradients(whole)], strict=True):
        assert_same(ours, exact)


def test_tokens_that_bear_loss_are_those_of_the_call() -> None:
    bearing = BearingTokens(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), torch.tensor(4.0), 2)
    with pytest.raises(ValueError, match=r"bearing: expected labels of the 5 tokens .* got \(1, 4\)"):
        window_model()(tokens(5), bearing=bearing)
    with pytest.raises(ValueError, match="bearing: expected a slab of at least 1 token, got 0"):
        window_model()(tokens(4), bearing=bearing._replace(slab=0))
    with pytest.raises(ValueError, match=r"bearing: expected a weight of each label, \(1, 4\), got \(1, 3\)"):
        window_model()(tokens(4), bearing=bearing._replace(weights=torch.ones(1, 3)))
    with pytest.raises(ValueError, match="bearing: expected"):
        window_model()(tokens(4), bearing=bearing._replace(labels=bearing.labels + 50))
    with pytest.raises(ValueError, match="bearing: expected none together with labels"):
        window_model()(tokens(4), bearing=bearing, labels=tokens(4))
    with pytest.raises(ValueError, match="bearing: expected none of a model whose landmarks are tokens"):
        landmark(landmark_loss="text").train()(tokens(4), bearing=bearing)


def test_what_is_no_number_without_a_label_is_no_loss_and_no_token_counts_as_one() -> None:
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[3, -100, 5, -100]])
    added = torch.tensor([[0.0, torch.inf, 0.0, torch.nan]])
    assert torch.equal(text_loss(logits, labels, landmark_loss=added), text_loss(logits, labels))
    assert torch.equal(text_loss(logits, labels, total=0), text_loss(logits, labels, total=1))
    assert float(text_loss(logits, torch.full((1, 4), -100))) == 0


def test_shift_labels() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]
    assert shift_labels(torch.tensor([[1]])).tolist() == [[-100]]


# --- saving and loading ----------------------------------------------------------------------------------

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"window_position": "rope", "tie_word_embeddings": False},
    {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3},  # slopes that no float holds
]


@EACH_MODEL
@pytest.mark.parametrize("changes", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(3)
def test_saving_and_loading_changes_no_bit(
    make: Make, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, ids = make(**changes).to(dtype), tokens(46)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert next(loaded.parameters()).dtype == dtype
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) is model.config.tie_word_embeddings
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    # a copy: loaded weights are maps of the file that lie anywhere in memory, and a GEMM's last bit depends on that
    assert torch.equal(logits_of(copy.deepcopy(loaded), ids), logits_of(model, ids))


def test_the_slopes_of_a_float64_model_are_of_float64() -> None:
    """The naive model computes them in float64."""
    model, ids = drt(**CONFIGURATIONS[2]), tokens(46)
    assert_same(logits_of(model, ids)[0], NaiveDRT(model, ids[0]).logits)


def test_a_loaded_model_goes_on_from_the_same_memory(tmp_path: Path) -> None:
    model, ids = drt(2), tokens(103)
    model.save_pretrained(tmp_path)
    loaded = DRTForCausalLM.from_pretrained(tmp_path).eval()
    cache = loaded.new_cache()
    loaded.read(ids[:, :90], cache)
    assert_same(logits_of(model, ids[:, 90:], past_key_values=cache), logits_of(model, ids)[:, 90:])


@pytest.mark.parametrize(
    ("config", "model"), [(drt(2).config, DRTForCausalLM), (window_model().config, SlidingWindowForCausalLM)]
)
def test_the_auto_classes_know_the_models(config: Any, model: type) -> None:
    assert type(AutoModelForCausalLM.from_config(config)) is model
