"""Bugs of the published DRT code that must not come back, named after the bug; what other tests find is not repeated.

They are listed in the notes of this project's reference report; the code is ant-research/long-context-modeling
at aa7fa60. Kernels have tests of their own in tests/ops.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.models.naive import NaiveDRT
from tests.models.tiny import assert_same, drt, logits_of, split, tokens
from trailmark.models import causal_lm, grid

S = 4


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """``torch.empty`` holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("chunk_size", [62, 63, 64])
def test_the_last_rows_query_gradient_is_uninitialised_memory(chunk_size: int) -> None:
    """Rows R = S + 1 of 63, 64 and 65; theirs was NaN at 65. The landmark's row counts through group 2 alone."""
    gradients = []
    for implementation in (None, "reference"):
        model = drt(2, chunk_size=chunk_size, implementation=implementation).train()
        ids = tokens(5 * chunk_size + 7)
        model(ids, labels=ids, noise_seed=torch.tensor([3])).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, exact in zip(*gradients, strict=True):
        assert_same(ours, exact)


@pytest.mark.parametrize("retrieved", range(2, 10))
@pytest.mark.sampled(4)
def test_a_number_of_chunks_that_is_no_power_of_two_crashes(retrieved: int) -> None:
    """K of 2 to 9 for texts of 1 to 7 chunks: fewer than K too."""
    model = drt(num_retrieved_chunks=retrieved)
    for chunks in (1, 2, 3, 4, 7):
        ids = tokens(chunks * S)
        out = model.train()(ids, labels=ids, noise_seed=torch.tensor([3]))
        out.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert_same(logits_of(model.eval(), ids)[0], NaiveDRT(model, ids[0]).logits)


def test_decoding_scores_landmarks_without_their_norm() -> None:
    """Visible only with more chunks than are selected, and weights far from their initial values."""
    model, ids = drt(2, num_retrieved_chunks=2), tokens(60)
    with torch.no_grad():
        for retriever in model.retrievers:
            retriever.norm.weight.mul_(3)
    whole, cache = model(ids, output_retrieval=True), model.new_cache()
    outs = [model(token, past_key_values=cache, output_retrieval=True) for token in ids.split(1, dim=1)]
    assert_same(torch.cat([out.logits for out in outs], dim=1), whole.logits)
    for group in range(2):
        each = torch.cat([out.retrieval[group].indices for out in outs], dim=1)
        assert torch.equal(each, whole.retrieval[group].indices)
        assert each.shape == (1, 15, 2)


@pytest.mark.parametrize("segment", [2, 3, 4, 7])
def test_the_first_chunk_of_a_segment_reads_nothing(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that leave a tail of one chunk too, which there read nothing at all."""
    model, ids = drt(2), tokens(29 * S)
    whole, cache = logits_of(model, ids), model.new_cache()
    outs = [logits_of(model, part, past_key_values=cache) for part in split(ids, [segment * S])]
    assert_same(torch.cat(outs, dim=1), whole)
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", segment * S)
    cache = model.new_cache()
    model.read(ids[:, : 28 * S], cache)
    assert_same(logits_of(model, ids[:, 28 * S :], past_key_values=cache), whole[:, 28 * S :])


def test_masks_pile_up_on_the_module() -> None:
    """No call leaves a tensor behind, whatever its length; but for the layouts of the last few."""

    def tensors_after(lengths: range) -> int:
        for length in lengths:
            logits_of(model, tokens(length), output_retrieval=True)
            cache = model.new_cache()
            model.read(tokens(length), cache)
            model.generate(
                tokens(3), attention_mask=torch.ones(1, 3), past_key_values=cache, max_new_tokens=2
            )
        del cache
        for layouts in (grid._small, grid._large):
            assert layouts.cache_info().maxsize < 1000
            layouts.cache_clear()
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    model = drt(2, pad_token_id=0)
    before = tensors_after(range(70, 72))
    assert tensors_after(range(40, 43)) <= before  # fewer, if other tests' went meanwhile


def test_a_second_turn_raises() -> None:
    """Generation, then another question on the same cache: all as if it had been one text."""
    model, first, second = drt(2), tokens(10), tokens(7, seed=1)
    cache, mask = model.new_cache(), torch.ones(1, 10)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "close_chunk": False}
    told = model.generate(first, attention_mask=mask, past_key_values=cache, **options)
    assert cache.num_tokens.tolist() == [15]  # the last token was never passed in
    prompt = torch.cat([told[:, -1:], second], dim=1)
    again = model.generate(prompt, attention_mask=torch.ones(1, 8), past_key_values=cache, **options)
    whole = torch.cat([told[:, :-1], again], dim=1)
    assert torch.equal(logits_of(model, whole)[:, 22:-1].argmax(-1), whole[:, 23:])


def test_left_padding_is_attended_to_as_content() -> None:
    model, text = drt(2), tokens(30)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 30)], dim=1)
    for filler in (0, 7):
        ids = torch.cat([torch.full((1, 5), filler), text], dim=1)
        assert_same(logits_of(model, ids, attention_mask=mask)[:, 5:], logits_of(model, text))
