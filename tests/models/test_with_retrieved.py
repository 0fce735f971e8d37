"""Other numbers of chunks over the same weights; none, retrieval off: against naive models that find nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.landmark.naive import NaiveReading
from tests.models.landmark.test_reading import FEW, MODELS, joined
from tests.models.naive import NaiveDRT
from tests.models.rpt.naive import NaiveRPT
from tests.models.rpt.test_model import RPTS, WHOLE
from tests.models.test_exactness import DRTS, Step, Story, Told, stories
from tests.models.tiny import (
    DRT_VARIANTS,
    TokenCounter,
    assert_same,
    block_recurrent,
    chunk_lengths,
    drt,
    landmark,
    logits_of,
    rpt,
    tokens,
    window_model,
)
from trailmark.models import RPTForCausalLM, TrailmarkForCausalLM
from trailmark.models.with_retrieved import with_retrieved

S = 4
Make = Callable[..., Any]
MAKES: dict[str, Make] = {"drt": drt, "rpt": rpt, "landmark": landmark}
EACH = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
SLOW = pytest.mark.slow
NO_EMBEDDER = r"^embedder: expected one for a model with retriever='encoder', got none"


class DRTAlone(NaiveDRT):
    """Of a DRT that retrieves, with nothing to read."""

    def choose(self, group: int, n: int, score: dict[int, float]) -> list[int]:
        return []


class ReadingAlone(NaiveReading):
    """Of a Landmark model that retrieves, with nothing to read."""

    def choose(self, i: int, mine: list[int], scores: Any, memory: range) -> list[list[int]]:
        return [[]] * self.q.shape[1]


def rpt_alone(model: RPTForCausalLM, ids: Tensor, marks: Sequence[bool]) -> NaiveRPT:
    lengths, closed = chunk_lengths(marks, model.config.chunk_size)
    return NaiveRPT(model, ids, lengths, closed, [[]] * len(lengths))


def tell(story: Story, make: Make, alone: Callable[[Any, Tensor, Sequence[bool]], Any]) -> None:
    """A story to the model without retrieval; what should come out is of the one that has it."""
    model = make(**dict(story.options))
    exact = [alone(model, *text) for text in zip(story.texts(), story.marks(), strict=True)]
    told = Told(story, model.without_retrieval(), exact)
    assert told.cache.memory_bytes() == 0
    assert told.cache.num_chunks.tolist() == [0] * len(story.lengths)


def rpt_without_embedder(**options: Any) -> RPTForCausalLM:
    model = rpt(**options)
    model.embedder = None
    return model


# --- against the equations -------------------------------------------------------------------------------


# read, forward, for the last tokens and token by token; ragged rows, early landmarks; a small piece at a time
CALLS = (Step("read", (7, 2)), Step("token by token", (2, 3)), Step("last", (0, 3), "right", extra=1))


def tell_drt(story: Story) -> None:
    """The layers of a DRT, one by one and without GCA."""

    def alone(model: Any, ids: Tensor, marks: Sequence[bool]) -> DRTAlone:
        return DRTAlone(model, ids, *chunk_lengths(marks, model.config.chunk_size))

    tell(story, drt, alone)


def tell_rpt(story: Story) -> None:
    """The layers of an RPT, each token with its null key."""
    tell(story, rpt_without_embedder, rpt_alone)


def tell_landmark(story: Story) -> None:
    """Each token with its cell, and the chunk that this began in."""
    tell(story, landmark, ReadingAlone)


@pytest.mark.parametrize(
    ("tell_of", "options"),
    [
        (tell_drt, {"groups": 2, "exclude_visible_chunks": True, "sliding_window": 12}),
        (tell_rpt, {"num_hidden_layers": 3, **WHOLE}),
        (tell_rpt, {"num_hidden_layers": 3, "retriever": "encoder"}),
        (tell_landmark, {"num_hidden_layers": 2, "retrieve_per": "cell", "gate_probability": 0.5}),
        (tell_landmark, {"num_hidden_layers": 2, "memory_position": "true"}),
    ],
    ids=["drt", "rpt", "rpt-encoder", "landmark-gate", "landmark-true"],
)
def test_any_calls_are_the_equations_with_nothing_to_read(
    tell_of: Callable[[Story], None], options: dict[str, Any]
) -> None:
    tell_of(Story(tuple(options.items()), (17, 14), 0.2, CALLS, read_tokens=4))


@pytest.mark.slow
@settings(max_examples=25)
@given(stories(DRTS, longest=45))
def test_many_calls_of_a_drt(story: Story) -> None:
    tell_drt(story)


@pytest.mark.slow
@settings(max_examples=20)
@given(stories(RPTS, longest=25))
def test_many_calls_of_an_rpt(story: Story) -> None:
    tell_rpt(story)


@pytest.mark.slow
@settings(max_examples=20)
@given(stories(joined(MODELS, FEW), longest=40))
def test_many_calls_of_a_landmark_model(story: Story) -> None:
    tell_landmark(story)


@DRT_VARIANTS
def test_a_drt_given_no_neighbours_has_the_same_bits(options: dict[str, Any]) -> None:
    """Another way to nothing: GCA over a table of which every place is missing."""
    model, ids = drt(retriever="encoder", **options), tokens(41, batch=2)
    nothing = torch.full((2, 41 // S, 3), -1)
    alone = model.without_retrieval()
    assert torch.equal(logits_of(alone, ids), logits_of(model, ids, neighbours=nothing))


def test_the_first_chunks_of_a_drt_are_the_same_bits_and_later_ones_are_not() -> None:
    model, ids = drt(2), tokens(2 * S + 1)
    assert torch.equal(logits_of(model.without_retrieval(), ids[:, :-1]), logits_of(model, ids[:, :-1]))
    assert (logits_of(model.without_retrieval(), ids) - logits_of(model, ids))[:, -1].abs().max() > 0.1


def test_without_a_cache_a_landmark_model_sees_all() -> None:
    model, ids = landmark(), tokens(60)
    whole = logits_of(model, ids)
    assert torch.equal(logits_of(model.without_retrieval(), ids), whole)
    assert (logits_of(model.without_retrieval(), ids, use_cache=True) - whole).abs().max() > 0.1


def test_documents_do_not_see_each_other() -> None:
    texts, alone = [tokens(n, seed=n) for n in (9, 1, 14)], drt(2).without_retrieval()
    ids = torch.cat([torch.full_like(text, n) for n, text in enumerate(texts)], dim=1)
    found = logits_of(alone, torch.cat(texts, dim=1), document_ids=ids, close_chunk=True)
    for part, text in zip(found.split([9, 1, 14], dim=1), texts, strict=True):
        assert_same(part, logits_of(alone, text, close_chunk=True))


# --- what is kept and reported -----------------------------------------------------------------------------


@EACH
@torch.no_grad()
def test_a_selection_has_no_columns(make: Make) -> None:
    alone, ids = make().without_retrieval(), tokens(22, batch=2)
    for options in ({}, {"past_key_values": alone.new_cache()}, {"use_cache": True, "logits_to_keep": 1}):
        found = alone(ids, output_retrieval=True, **options).retrieval
        shape: tuple[int, ...]
        if make is landmark:
            shape = (2, 22, 4, 0)
            assert (found is None) == (not options)
        else:
            shape = (2, 22 // S, 0)
            assert len(found) == 1
        assert all(tuple(x.shape) == shape for group in found or () for x in group)
        assert all(x.indices.dtype == torch.int64 and x.scores.dtype == torch.float64 for x in found or ())


@EACH
def test_memory_is_constant(make: Make) -> None:
    alone = make().without_retrieval()
    cache, held = alone.new_cache(), []
    for _ in range(3):
        alone.read(tokens(66), cache)
        held.append((cache.window_bytes(), cache.memory_bytes(), cache.num_chunks.tolist()))
    assert held[0] == held[1] == held[2]
    assert held[0][1:] == (0, [0])


@pytest.mark.parametrize("make", [drt, lambda **more: rpt(**WHOLE, **more)], ids=["drt", "rpt"])
def test_no_chunk_is_encoded_searched_or_read(make: Make) -> None:
    alone = make().without_retrieval()
    parts = [alone.encoder, *(x for x in (getattr(alone, n, None) for n in ("augmentor", "gate")) if x)]
    parts += getattr(alone, "retrievers", None) or [alone.retriever]
    for name, part in alone.named_modules():
        if part in parts or "gca" in name or "cca.kv_proj" in name:
            part.register_forward_hook(lambda part, *_: pytest.fail(f"{part} ran"))
    cache = alone.read(tokens(21))
    logits_of(alone, tokens(9), past_key_values=cache)
    alone(tokens(21), labels=tokens(21)).loss.backward()  # nor for a gradient


@EACH
@pytest.mark.parametrize("tier", [pytest.param("device", marks=SLOW), "disk"])
def test_a_saved_cache_goes_on_bit_for_bit(make: Make, tier: str, tmp_path: Path) -> None:
    model = make()
    alone, rest = model.without_retrieval(), tokens(7, seed=1)
    cache = alone.read(tokens(25), alone.new_cache(tier))
    cache.save(tmp_path)
    exact = logits_of(alone, rest, past_key_values=cache.branch())
    assert torch.equal(logits_of(alone, rest, past_key_values=alone.load_cache(tmp_path, tier)), exact)
    with pytest.raises(ValueError, match="written with another num_retrieved_chunks"):
        model.load_cache(tmp_path)


def aligned(model: Any) -> Any:
    """The same weights where torch puts them: at other addresses, as in a mapped file, products may round otherwise."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("make", [drt, pytest.param(rpt, marks=SLOW), landmark])
def test_it_generates_what_its_logits_say(make: Make) -> None:
    alone, ids = make().without_retrieval(), tokens(14, batch=2)
    found, cache, step = alone.generate(ids, max_new_tokens=4, do_sample=False), alone.new_cache(), ids
    for n in range(4):
        logits = logits_of(alone, step, past_key_values=cache, close_chunk=n == 0)
        step = logits[:, -1:].argmax(-1)
        assert torch.equal(found[:, 14 + n], step[:, 0])


# --- the weights -------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_are_shared(make: Make, tied: bool) -> None:
    model, state = make(tie_word_embeddings=tied), torch.random.get_rng_state()
    alone = model.without_retrieval()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(alone) is type(model)
    assert not alone.training
    pairs = list(zip(model.named_parameters(), alone.named_parameters(), strict=True))
    assert all(a == b and x is y for (a, x), (b, y) in pairs)
    assert len(pairs) > 10
    assert model.config.retrieves
    assert alone.config.num_retrieved_chunks == 0
    ids = tokens(9)
    before = logits_of(alone, ids)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    assert_same(logits_of(alone, ids), 2 * before)
    with torch.no_grad():
        alone.norm.weight.mul_(0.5)
    assert torch.equal(logits_of(model.without_retrieval(), ids), before)


@EACH
def test_a_model_in_training_stays_in_training(make: Make) -> None:
    model = make().train()
    assert not any(part.training for part in model.without_retrieval().modules())
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("make", [drt, pytest.param(rpt, marks=SLOW), pytest.param(landmark, marks=SLOW)])
def test_saved_and_loaded(make: Make, tmp_path: Path) -> None:
    model, ids = make(), tokens(30)
    alone = model.without_retrieval()
    alone.save_pretrained(tmp_path, card=False)
    loaded = aligned(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (type(loaded), loaded.config.num_retrieved_chunks) == (type(model), 0)
    assert torch.equal(logits_of(loaded, ids, use_cache=True), logits_of(alone, ids, use_cache=True))
    again = aligned(
        type(model).from_pretrained(tmp_path, num_retrieved_chunks=model.config.num_retrieved_chunks)
    )
    assert torch.equal(logits_of(again, ids, use_cache=True), logits_of(model, ids, use_cache=True))


@EACH
def test_twice_is_once(make: Make) -> None:
    alone, ids = make().without_retrieval(), tokens(30)
    twice = alone.without_retrieval()
    assert torch.equal(logits_of(twice, ids, use_cache=True), logits_of(alone, ids, use_cache=True))


@EACH
def test_its_caches_are_its_own(make: Make) -> None:
    model, ids = make(), tokens(5)
    logits_of(model, ids, use_cache=True)  # what names its caches was asked for before
    alone = model.without_retrieval()
    for one, other, wanted in ((model, alone, model.config.num_retrieved_chunks), (alone, model, 0)):
        with pytest.raises(ValueError, match=rf"^past_key_values: .*\(num_retrieved_chunks {wanted}\)"):
            one(ids, past_key_values=other.new_cache())


@pytest.mark.parametrize("make", [drt, landmark])
@pytest.mark.parametrize("count", [1, 5])
def test_another_number_of_chunks_is_a_model_made_with_it(make: Make, count: int) -> None:
    model, ids = make(num_retrieved_chunks=3), tokens(60)
    other = with_retrieved(model, count)
    assert (other.config.num_retrieved_chunks, model.config.num_retrieved_chunks) == (count, 3)
    made = make(num_retrieved_chunks=count)
    made.load_state_dict(model.state_dict())
    assert torch.equal(logits_of(other, ids), logits_of(made, ids))
    with torch.no_grad():
        other.norm.weight.mul_(2)  # one weight, no copy
    assert not torch.equal(logits_of(model, ids), logits_of(made, ids))


def test_a_number_of_chunks_below_0_is_refused() -> None:
    model = drt()
    with pytest.raises(ValueError, match=r"^num_retrieved_chunks: expected 0"):
        with_retrieved(model, -1)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [window_model, block_recurrent])
def test_models_that_retrieve_nothing_are_refused(make: Make) -> None:
    model = make()
    assert not model.config.retrieves
    with pytest.raises(ValueError, match=rf"^model: .* got {type(model).__name__}: .* use it as it is"):
        model.without_retrieval()


@pytest.mark.parametrize(("make", "least"), [(drt, 2), (rpt, 1), (lambda: drt(retriever="random"), 1)])
def test_training_is_refused(make: Make, least: int) -> None:
    alone, ids = make().without_retrieval().train(), tokens(9)
    with pytest.raises(
        ValueError, match=f"^num_retrieved_chunks: expected at least {least} in training, got 0"
    ):
        alone(ids, labels=ids)


def test_landmark_attention_trains_as_ever() -> None:
    """Its training knows no k: every parameter gets the gradient that it would."""
    model, ids = landmark(), tokens(30)
    gradients = []
    for trained in (model, model.without_retrieval()):
        model.zero_grad()
        trained.train()(ids, labels=ids, noise_seed=torch.tensor([1])).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("make", [drt, rpt])
def test_an_embedder_is_not_needed_and_neighbours_are_not_taken(make: Make) -> None:
    model, ids = make(retriever="encoder"), tokens(9)
    model.embedder = None
    with pytest.raises(ValueError, match=NO_EMBEDDER):
        model.new_cache()
    alone = model.without_retrieval()
    logits_of(alone, ids, use_cache=True)
    model.embedder = TokenCounter()
    assert model.without_retrieval().embedder is None
    with pytest.raises(ValueError, match=r"^neighbours: expected none with num_retrieved_chunks 0"):
        alone(ids, neighbours=torch.full((1, 2, 0), -1))
    with pytest.raises(ValueError, match=r"^neighbour_scores: expected none with num_retrieved_chunks 0"):
        alone(ids, neighbour_scores=torch.zeros(1, 2, 0))


@EACH
def test_other_weights_than_the_configuration_says_are_refused(make: Make) -> None:
    model: TrailmarkForCausalLM = make()
    model.lm_head.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"^model: expected .* differs in lm_head\.adapter"):
        model.without_retrieval()
