"""Documents of one row: each is computed as if it stood alone, and nothing of one reaches another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.tiny import (
    assert_same,
    block_recurrent,
    drt,
    hils,
    hsa,
    landmark,
    logits_of,
    pad,
    place,
    tokens,
    window_model,
)
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.grid import lay_out
from trailmark.models.landmark.model import _JUMP
from trailmark.models.text import Text
from trailmark.ops import fold_seed

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "drt": (drt, {}),
    "drt-2-rope": (drt, {"groups": 2, "window_position": "rope", "residual_gca": True}),
    "drt-2-exclude": (drt, {"groups": 2, "exclude_visible_chunks": True, "sliding_window": 15}),
    "drt-hidden": (
        drt,
        {
            "groups": 2,
            "window_position": "rope",
            "landmarks_as_keys": False,
            "num_sinks": 2,
            "max_sink_distance": 11,
        },
    ),
    "drt-sinks": (drt, {"num_sinks": 3, "exclude_visible_chunks": True, "sliding_window": 11}),
    "window": (window_model, {}),
    "window-sinks": (
        window_model,
        {"window_position": "rope", "sliding_window": 3, "num_sinks": 2, "max_sink_distance": 9},
    ),
    "full": (window_model, {"sliding_window": None}),
    "block-recurrent": (block_recurrent, {"block_size": 4, "truncation_blocks": 2}),
    "block-recurrent-lstm-rope": (block_recurrent, {"state_gate": "lstm", "window_position": "rope"}),
    "full-rope": (window_model, {"sliding_window": None, "window_position": "rope"}),
    "landmark": (landmark, {}),
    "hils": (hils, {}),
    "hils-sinks": (
        hils,
        {"num_sinks": 3, "max_sink_distance": 9, "summary_query": "tokens", "far_position": "window"},
    ),
    "hsa": (hsa, {}),
    "hsa-sinks-heads": (hsa, {"num_sinks": 3, "num_memory_heads": 2, "num_retrieval_heads": 2}),
    "moba": (hils, {"chunk_score": "mean", "chunk_weights": "keys"}),
    "landmark-gate-jump": (landmark, {"gate_probability": 0.5, "position_jump": 9}),
    "landmark-text": (landmark, {"landmark_loss": "text", "gate_probability": 0.5}),
    "landmark-eos": (landmark, {"landmark_loss": "none_after_eos", "eos_token_id": 7}),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
# chunks hold 4 tokens: documents of one token, of exactly one and two chunks, shorter, longer than the window
LENGTHS = (9, 1, 4, 3, 14, 8, 1, 27, 2)


def build(name: str, **changes: Any) -> TrailmarkForCausalLM:
    make, options = MODELS[name]
    model: TrailmarkForCausalLM = make(**options | changes)
    return model


def documents(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    return [tokens(n, seed=seed + i)[0] for i, n in enumerate(lengths)]


def ids_of(lengths: Sequence[int]) -> Tensor:
    """[T]: any numbers will do."""
    return torch.cat([torch.full((n,), 5 * i * (-1) ** i) for i, n in enumerate(lengths)])


def spans(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum(lengths)
    return [slice(int(end) - n, int(end)) for n, end in zip(lengths, ends, strict=True)]


def packed(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """One row."""
    texts = torch.cat(documents(lengths, seed))[None]
    return {"input_ids": texts, "document_ids": ids_of(lengths)[None]}


def chunks_of(length: int, chunk_size: int = 4) -> int:
    return -(-length // chunk_size)


# --- as if alone -------------------------------------------------------------------------------------------


@torch.no_grad()
def assert_each_as_alone(
    model: TrailmarkForCausalLM, rows: Sequence[Sequence[int]], side: str = "right", extra: int = 0
) -> None:
    """Logits, and what was selected; ``rows`` of documents of these lengths."""
    texts = [documents(lengths, seed=10 * b) for b, lengths in enumerate(rows)]
    whole = pad([torch.cat(row) for row in texts], side, extra)
    present = pad([torch.ones(sum(lengths), dtype=torch.bool) for lengths in rows], side, extra)
    ids = pad([ids_of(lengths) for lengths in rows], side, extra)
    out = model(whole, present.long(), document_ids=ids, close_chunk=True, output_retrieval=True)
    for b, lengths in enumerate(rows):
        columns, first_chunk = place(sum(lengths), whole.shape[1], side), 0
        logits = out.logits[b, columns]
        for text, span in zip(texts[b], spans(lengths), strict=True):
            alone = model(text[None], close_chunk=True, output_retrieval=True)
            assert_same(logits[span], alone.logits[0])
            chunks = chunks_of(len(text))
            for ours, theirs in zip(out.retrieval or (), alone.retrieval or (), strict=True):
                own = slice(first_chunk, first_chunk + chunks)
                if not model.selects_by_chunk:
                    own = slice(columns.start + span.start, columns.start + span.stop)
                mine = ours.indices[b, own]
                shifted = torch.where(mine >= 0, mine - first_chunk, -1)
                assert torch.equal(shifted, theirs.indices[0])
                assert_same(ours.weights[b, own], theirs.weights[0])
            first_chunk += chunks


@EVERY_MODEL
def test_a_document_in_a_row_is_as_it_is_alone(name: str) -> None:
    assert_each_as_alone(build(name), [LENGTHS])


any_cut = given(
    st.sampled_from(list(MODELS)),
    st.lists(st.lists(st.integers(1, 22), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from(["left", "right"]),
    st.integers(0, 2),
)


# a row of many documents, one of a single one, one that is shorter than a chunk
ROWS = [[*LENGTHS], [30], [2], [1, 1, 1], [16, 21]]


@settings(max_examples=30)
@any_cut
@example("drt-2-exclude", ROWS, "left", 2)
@example("landmark-gate-jump", ROWS, "right", 2)
def test_any_cut_into_documents(name: str, rows: list[list[int]], side: str, extra: int) -> None:
    assert_each_as_alone(build(name), rows, side, extra)


@pytest.mark.slow
@settings(max_examples=500)
@any_cut
def test_very_many_cuts_into_documents(name: str, rows: list[list[int]], side: str, extra: int) -> None:
    assert_each_as_alone(build(name), rows, side, extra)


@EVERY_MODEL
def test_early_landmarks_within_documents(name: str) -> None:
    model, both = build(name), packed(LENGTHS)
    marks = torch.rand(both["input_ids"].shape, generator=torch.Generator().manual_seed(3)) < 0.2
    ends = [span.stop - 1 for span in spans(LENGTHS)]
    marks[0, ends] = True  # alone they are said, in a row they follow
    said = marks.clone()
    said[0, ends[:-1]] = False
    ids, rest = both["input_ids"], {"document_ids": both["document_ids"]}
    logits = logits_of(model, ids, **rest, close_chunk=said)
    marks[0, ends[-1]] = False
    if name != "landmark-text":  # whose last prediction a landmark makes
        assert_same(logits_of(model, ids, **rest, close_chunk=marks), logits)
    marks[0, ends[-1]] = True
    for span in spans(LENGTHS):
        alone = logits_of(model, ids[:, span], close_chunk=marks[:, span])
        assert_same(logits[:, span], alone)


@pytest.mark.parametrize("name", ["drt", "window", "landmark-gate-jump"])
@pytest.mark.parametrize("train", [False, True])
def test_one_document_is_a_call_without_documents(name: str, train: bool) -> None:
    """Bit for bit: it takes the same path."""
    model, ids = build(name).train(train), tokens(43, batch=2)
    rest = {"labels": ids, "noise_seed": torch.tensor([3, 4])}
    plain = model(ids, **rest)
    same = model(ids, **rest, document_ids=torch.tensor([[5] * 43, [-1] * 43]))
    assert torch.equal(same.logits, plain.logits)
    assert torch.equal(same.loss, plain.loss)
    mask = (torch.arange(43) < 30).long().expand(2, -1)
    rest["labels"] = ids.masked_fill(mask == 0, -100)
    padded = torch.where(mask > 0, 5, 9)  # what the padding says is not looked at
    assert torch.equal(model(ids, mask, **rest, document_ids=padded).loss, model(ids, mask, **rest).loss)


def test_places_begin_anew_with_each_document() -> None:
    """Jumps too: the retrieval gate stands before a document's first place, and its distance to that counts."""
    model = landmark(gate_probability=0.5, position_jump=9, landmark_phase="fixed").train()
    grid = lay_out(8, 2, documents=np.array([[0, 0, 0, 0, 0, 1, 1, 1]]))
    assert grid.chunk.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4]]
    rotary = model._sight(grid, torch.zeros(1, 12, 16).double(), torch.tensor([3])).rotary[0]  # cos, sin
    jumps = (fold_seed(torch.tensor(3), _JUMP, torch.arange(5)) % 9).tolist()
    assert jumps[0] > 0
    # chunks of 3 places, and what the landmarks before them in the document add
    places = [
        0,
        1,
        2,
        *(3 + jumps[0] + n for n in range(3)),
        6 + jumps[0] + jumps[1],
        8 + jumps[0] + jumps[1],
    ]
    places += [0, 1, 2, 3 + jumps[3]]
    angle = torch.tensor(places)[:, None] * model.config.rope_theta ** -(torch.arange(2) / 2).double()
    assert_same(rotary, torch.stack([angle.cos(), angle.sin()], -1))


# --- nothing leaks -----------------------------------------------------------------------------------------


@EVERY_MODEL
@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_another_document_changes_no_bit(name: str, train: bool) -> None:
    """Not even in training, where noise, jumps and gates are drawn by chunk."""
    model, both = build(name).train(train), packed(LENGTHS)
    rest = {"document_ids": both["document_ids"], "noise_seed": torch.tensor([3])}

    def answer(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids, **rest).logits[0]

    before = answer(both["input_ids"])
    for span in spans(LENGTHS):
        ids = both["input_ids"].clone()
        ids[:, span] = (ids[:, span] + 11) % 50
        after = answer(ids)
        assert not torch.equal(after[span], before[span])
        after[span] = before[span]
        assert torch.equal(after, before)


@EVERY_MODEL
@pytest.mark.sampled(3)  # each architecture
def test_no_gradient_crosses_a_document(name: str) -> None:
    model, both = build(name).train(), packed(LENGTHS)
    ids, states = both["input_ids"], []
    hook = model.embed_tokens.register_forward_hook(lambda *x: states.append(x[2]))
    out = model(ids, document_ids=both["document_ids"], noise_seed=torch.tensor([3]))
    hook.remove()
    (embedded,) = states
    labels = model.bearing_loss(ids, ids, both["document_ids"])
    losses = F.cross_entropy(out.logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="none")
    if out.landmark_loss is not None:
        losses = losses + out.landmark_loss[0, :-1].masked_fill(labels[0, 1:] == -100, 0)
    for length, span in zip(LENGTHS, spans(LENGTHS), strict=True):
        own = losses[span.start : span.stop - 1].sum()  # the last token of a document predicts nothing
        (gradient,) = torch.autograd.grad(own, embedded, retain_graph=True)
        assert length == 1 or gradient[0, span].any()
        gradient[0, span] = 0
        assert not gradient.any()


# --- the loss ----------------------------------------------------------------------------------------------


@EVERY_MODEL
@pytest.mark.sampled(3)  # each architecture
def test_the_loss_is_that_of_the_documents(name: str) -> None:
    """Without the predictions of first tokens, and so are the gradients."""
    model, both = build(name), packed(LENGTHS)
    both["labels"] = both["input_ids"].clone()
    both["labels"][0, 3] = -100

    def loss_of(**arguments: Any) -> tuple[Tensor, list[Tensor]]:
        loss = model(num_items_in_batch=1, **arguments).loss
        return loss.detach(), list(torch.autograd.grad(loss, parameters))

    parameters = [
        p for key, p in model.named_parameters() if key != "gate"
    ]  # nothing is drawn without training
    together, gradients = loss_of(**both)
    total, sums = torch.zeros_like(together), [torch.zeros_like(x) for x in gradients]
    for span in spans(LENGTHS):
        loss, own = loss_of(input_ids=both["input_ids"][:, span], labels=both["labels"][:, span])
        total += loss
        for x, y in zip(sums, own, strict=True):
            x += y
    assert_same(together, total)
    for x, y in zip(gradients, sums, strict=True):
        assert_same(x, y)
    items = sum(LENGTHS) - len(LENGTHS)
    if name == "landmark-eos":
        return
    mean = model(**both).loss.detach()
    assert_same(mean * (items - 1), together)  # one label is -100


def test_what_bears_loss() -> None:
    ids = torch.tensor([[3, 7, 4, 5, 7, 6]])
    of_documents = torch.tensor([[2, 2, 2, 0, 0, 1]])
    assert window_model().bearing_loss(ids, ids) is ids
    found = window_model().bearing_loss(ids, ids, of_documents)
    assert found.tolist() == [[3, 7, 4, -100, 7, -100]]
    found = build("landmark-eos").bearing_loss(ids, ids, of_documents)
    assert found.tolist() == [[3, 7, -100, -100, 7, -100]]


# --- gradients for every parameter (DDP) ----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7, 5, 4), (1, 3, 2)])
@pytest.mark.parametrize("name", ["drt", "hils", "hsa"])
def test_where_nothing_is_retrieved_gradients_are_zeros(name: str, lengths: tuple[int, ...]) -> None:
    model, both = build(name).train(), packed(lengths)
    model(**both, labels=both["input_ids"], noise_seed=torch.tensor([3])).loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if "retrievers" in key or "landmark_proj" in key:
            assert not parameter.grad.any(), key


# --- recomputed, compiled -----------------------------------------------------------------------------------


def test_under_torch_compile() -> None:
    """Like other ragged calls it runs uncompiled."""
    model, both = drt().train(), packed(LENGTHS)
    rest = {"labels": both["input_ids"], "noise_seed": torch.tensor([3])}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(**both, **rest).loss, model(**both, **rest).loss)
    torch._dynamo.reset()


# --- the layout ----------------------------------------------------------------------------------------------


def test_the_grid_of_documents() -> None:
    """Two rows: documents of 3, 5 and 1 tokens; 4 and 2, its first chunk begun with one token."""
    numbers = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1, 1]])
    grid = lay_out(9, 4, np.array([0, 1]), np.array([9, 6]), documents=numbers)
    assert grid.chunk.tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3],
        [0, 0, 0, 0, 1, 1, 2, 2, -1, -1, -1, -1],
    ]
    assert grid.document is not None
    assert grid.document.tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2],
        [0, 0, 0, 0, 0, 0, 1, 1, -1, -1, -1, -1],
    ]
    assert grid.places.tolist() == [
        [0, 1, 2, 4, 0, 1, 2, 3, 4, 5, 9, 0],
        [1, 2, 3, 4, 5, 9, 0, 1, 0, 0, 0, 0],
    ]
    assert grid.lengths.tolist() == [[3, 4, 1], [4, 1, 0]]
    assert grid.first_chunks.tolist() == [[0, 1, 1, 3], [0, 0, 2, 2]]
    assert grid.begins_document.tolist() == [[True, True, False, True], [True, False, True, False]]


def test_documents_that_are_one_are_none() -> None:
    ids, other = tokens(6, batch=2), torch.zeros(2, 6, dtype=torch.int64)
    assert Text.of(ids, None, False, other).documents is None
    present = torch.arange(6) < torch.tensor([[3], [4]])
    other[:, 4:] = 1
    assert Text.of(ids, present, False, other).documents is None
    other[1, 3] = 1
    found = Text.of(ids, present.flip(1), False, other.flip(1)).documents
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]


# --- refused -------------------------------------------------------------------------------------------------


def test_errors() -> None:
    model, ids = drt(), tokens(6)
    one = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^document_ids: .*int64 of shape \(1, 6\).*\(1, 5\)"):
        model(ids, document_ids=one[:, :5])
    with pytest.raises(ValueError, match=r"^document_ids: .*int64.*float32"):
        model(ids, document_ids=one.float())
    with pytest.raises(ValueError, match=r"^document_ids: .*past_key_values or use_cache"):
        model(ids, document_ids=one, use_cache=True)
    cache = model.new_cache()
    with pytest.raises(ValueError, match=r"^document_ids: .*one text per row"):
        model(ids, document_ids=one, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=r"^document_ids: .*generate"):
        model.generate(ids, document_ids=one)
    again = torch.tensor([[0, 0, 3, 1, 3, 3]])
    with pytest.raises(ValueError, match=r"^document_ids: .*one piece, got 3 again after another in row 0"):
        model(ids, document_ids=again)
