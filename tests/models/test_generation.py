"""Generation against whole forwards: greedy, sampled, beams, padded at either side, streamed, after reading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    SuppressTokensLogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
)

from tests.budgets import assert_within_budget
from tests.models.tiny import (
    EACH_MODEL,
    assert_same,
    drt,
    logits_of,
    padded,
    tokens,
)
from trailmark.models import TrailmarkForCausalLM, causal_lm

Make = Callable[..., TrailmarkForCausalLM]
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def generated(model: TrailmarkForCausalLM, prompt: Tensor, steps: int, **options: Any) -> Tensor:
    # a mask, because transformers else takes every token 0 of the prompt for padding
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0} | options
    options |= {"max_new_tokens": steps, "min_new_tokens": steps}
    return model.generate(prompt, **options)[:, prompt.shape[1] :]


def predicted(model: TrailmarkForCausalLM, prompt: Tensor, new: Tensor, close_chunk: bool) -> Tensor:
    """Logits [B, steps, V] of one forward over prompt and continuation, without a cache."""
    text = torch.cat([prompt, new[:, :-1]], dim=1)
    marks = torch.zeros_like(text, dtype=torch.bool)
    marks[:, prompt.shape[1] - 1] = close_chunk
    return logits_of(model, text, close_chunk=marks)[:, prompt.shape[1] - 1 :]


# --- one prompt, and many --------------------------------------------------------------------------------


@EACH_MODEL
@pytest.mark.parametrize("length", [1, 3, 4, 5, 18, 41])
@pytest.mark.parametrize("close_chunk", [True, False, None])
@pytest.mark.sampled(8)
def test_greedy_is_what_one_forward_predicts(make: Make, length: int, close_chunk: bool | None) -> None:
    model, prompt = make(), tokens(length, batch=2)
    options = {} if close_chunk is None else {"close_chunk": close_chunk}
    new = generated(model, prompt, 14, **options)
    assert torch.equal(predicted(model, prompt, new, close_chunk is not False).argmax(-1), new)


@settings(max_examples=5)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.sampled_from([0, 0, 3]),
    st.booleans(),
    st.sampled_from([5, 4096]),
)
@example([26, 1, 3, 4, 9], "left", 0, True, 4096)
@example([26, 1, 3, 4, 9], "right", 0, True, 5)
def test_a_padded_batch_generates_what_its_rows_do(
    lengths: list[int], side: str, extra: int, close_chunk: bool, read_tokens: int
) -> None:
    model, (ids, mask) = drt(2), padded(lengths, side, extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "_READ_TOKENS", read_tokens)
        together = generated(model, ids, 10, attention_mask=mask, close_chunk=close_chunk)
    for row, length in enumerate(lengths):
        new = together[row : row + 1]
        prompt = tokens(length, seed=row)
        assert torch.equal(predicted(model, prompt, new, close_chunk).argmax(-1), new)


def test_an_early_landmark_makes_the_answer_read_what_the_prompt_asked_for() -> None:
    model, prompt = drt(2), tokens(42)
    assert not torch.equal(generated(model, prompt, 14), generated(model, prompt, 14, close_chunk=False))


@EACH_MODEL
@SIDES
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2, "close_chunk": False}],
    ids=str,
)
@pytest.mark.sampled(4)
def test_beams_of_a_padded_batch_are_those_of_its_rows(
    make: Make, side: str, options: dict[str, Any]
) -> None:
    model, lengths = make(), [26, 1, 9]
    ids, mask = padded(lengths, side)
    together = generated(model, ids, 12, attention_mask=mask, **options)
    each = len(together) // 3
    for row, length in enumerate(lengths):
        alone = generated(model, tokens(length, seed=row), 12, **options)
        assert torch.equal(together[each * row : each * (row + 1)], alone)


@EACH_MODEL
def test_several_samples_of_a_padded_batch(make: Make) -> None:
    """Each continuation is one of its own prompt."""
    model, lengths = make(logit_scale=0.2), [26, 1, 9]
    ids, mask = padded(lengths)
    torch.manual_seed(0)
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        num_return_sequences=2,
        max_new_tokens=9,
        min_new_tokens=9,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new, logits = out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)
    assert not torch.equal(new[0], new[1])
    for row in range(6):
        prompt = tokens(lengths[row // 2], seed=row // 2)
        exact = predicted(model, prompt, new[row : row + 1], True)[0]
        assert_within_budget(logits[row], exact.float(), exact)  # transformers keeps them in float32


@EACH_MODEL
def test_beam_search_finds_the_best_of_all_continuations(make: Make) -> None:
    """With a beam for each continuation of all tokens but the last, it is exhaustive."""
    model, prompt = make(vocab_size=6), tokens(10, vocab=6)
    found = generated(model, prompt, 3, num_beams=36, close_chunk=False)
    every = torch.cartesian_prod(*(torch.arange(6),) * 3)  # [216, 3]
    logits = logits_of(model, torch.cat([prompt.expand(216, -1), every[:, :-1]], dim=1))[:, 9:]
    score = logits.log_softmax(-1).gather(2, every[..., None]).sum((1, 2))
    assert torch.equal(found[0], every[score.argmax()])


@EACH_MODEL
def test_beam_search_goes_over_chunk_ends(make: Make) -> None:
    model, prompts = make(), tokens(10, batch=2)
    out = model.generate(
        prompts,
        max_new_tokens=12,
        num_beams=3,
        num_return_sequences=2,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones_like(prompts),
        close_chunk=False,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    new = out.sequences[:, 10:]
    logits = logits_of(model, out.sequences[:, :-1])[:, 9:]
    # summed in float32 there
    scores = [x.log_softmax(-1).gather(2, new[..., None]).sum((1, 2)) for x in (logits.float(), logits)]
    assert_within_budget(out.sequences_scores, *scores)


# --- long prompts ----------------------------------------------------------------------------------------


@EACH_MODEL
@pytest.mark.parametrize("size", [1, 9, 16, 1000])
@pytest.mark.parametrize("lengths", [[71], [71, 20, 3]], ids=str)
@pytest.mark.sampled(16)
def test_a_prompt_may_be_read_in_pieces(
    make: Make, size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because it is asked for, or because the prompt is longer than what is read at a time."""
    model, (ids, mask) = make(), padded(lengths)
    whole = generated(model, ids, 10, attention_mask=mask)
    widths: list[int] = []
    run = type(model).run
    monkeypatch.setattr(
        type(model), "run", lambda *args, **kw: widths.append(args[1].shape[1]) or run(*args, **kw)
    )
    for asked in (True, False):
        widths.clear()
        if not asked:
            monkeypatch.setattr(causal_lm, "_READ_TOKENS", size)
        options = {"prefill_chunk_size": size} if asked else {}
        assert torch.equal(generated(model, ids, 10, attention_mask=mask, **options), whole)
        assert max(widths) <= max(size, 4)
        assert sum(widths) == 71 + 9


# --- streams ---------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each of the tiny models' tokens."""
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def test_text_streams(tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> None:
    model = drt(2)
    prompt = tokenizer(" ".join(f"w{n}" for n in tokens(18)[0].tolist()), return_tensors="pt").input_ids
    assert torch.equal(prompt, tokens(18))
    expected = tokenizer.decode(generated(model, prompt, 14)[0])
    generated(model, prompt, 14, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generated, args=(model, prompt, 14), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer).strip() == expected
    thread.join()


@SIDES
def test_a_tokenizers_padded_batch(tokenizer: PreTrainedTokenizerFast, side: str) -> None:
    """model.generate(**tokenizer(texts, padding=True, return_tensors="pt"))"""
    model, lengths = drt(2), [18, 5]
    tokenizer.padding_side = side
    tokenizer.pad_token = "w49"
    texts = [
        " ".join(f"w{n}" for n in tokens(length, seed=row)[0].tolist()) for row, length in enumerate(lengths)
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**batch, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=49)
    for row, length in enumerate(lengths):
        alone = generated(model, tokens(length, seed=row), 8)
        assert torch.equal(out[row : row + 1, -8:], alone)


# --- after reading ---------------------------------------------------------------------------------------


@EACH_MODEL
@pytest.mark.parametrize("read", [40, 43, 103])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.sampled(12)
def test_a_question_after_reading_is_answered_as_if_all_were_the_prompt(
    make: Make, read: int, tier: str
) -> None:
    model, text, question = make(), tokens(read), tokens(6, seed=1)
    cache = model.new_cache(memory_tier=tier)
    model.read(text, cache)
    answer = generated(model, torch.cat([text, question], dim=1), 12)
    assert torch.equal(generated(model, question, 12, past_key_values=cache.branch()), answer)
    whole_mask = torch.ones(1, read + 6, dtype=torch.int64)
    again = generated(model, question, 12, past_key_values=cache, attention_mask=whole_mask)
    assert torch.equal(again, answer)
    assert cache.num_tokens.tolist() == [read + 6 + 11]


@EACH_MODEL
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "close_chunk": False},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("questions", [1, 2])
@pytest.mark.sampled(4)
def test_several_continuations_after_reading_are_those_of_the_whole_prompt(
    make: Make, options: dict[str, Any], questions: int
) -> None:
    """They go on in branches; the cache stays where it was."""
    model, text, prompts = make(), tokens(41), tokens(5, batch=questions, seed=1)
    cache = model.new_cache()
    model.read(text, cache)
    torch.manual_seed(0)
    whole = generated(model, torch.cat([text.expand(questions, -1), prompts], dim=1), 12, **options)
    torch.manual_seed(0)
    assert torch.equal(generated(model, prompts, 12, past_key_values=cache, **options), whole)
    assert cache.num_tokens.tolist() == [41]
    assert_same(
        logits_of(model, prompts[:1], past_key_values=cache),
        logits_of(model, torch.cat([text, prompts[:1]], dim=1))[:, 41:],
    )


@SIDES
def test_questions_of_unequal_length_after_one_text(side: str) -> None:
    model, text, lengths = drt(2), tokens(41, seed=9), [9, 1, 4]
    cache = model.new_cache()
    model.read(text, cache)
    ids, mask = padded(lengths, side)
    together = generated(model, ids, 10, attention_mask=mask, past_key_values=cache)
    for row, length in enumerate(lengths):
        whole = torch.cat([text, tokens(length, seed=row)], dim=1)
        assert torch.equal(together[row : row + 1], generated(model, whole, 10))


# --- options ---------------------------------------------------------------------------------------------


def test_generation_without_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="use_cache: expected True, got False"):
        drt(2).generate(tokens(5), use_cache=False)


def test_arguments_stand_where_those_of_transformers_do() -> None:
    model, ids = drt(2), tokens(5)
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor(range(20))])
    with torch.no_grad():
        found = model.generate(ids, config, processors)
        named = model.generate(input_ids=ids, logits_processor=processors, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, named)
    assert found[0, 5:].min() >= 20


@pytest.mark.parametrize(
    "option",
    [
        {"cache_implementation": "static"},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"output_retrieval": True},
        {"output_retrieval_scores": True},
        {"labels": torch.ones(1, 5, dtype=torch.int64)},
        {"logits_at": torch.ones(1, 1, dtype=torch.int64)},
        {"logits_to_keep": 2},
        {"noise_seed": torch.ones(1, dtype=torch.int64)},
        {"close_chunk": torch.ones(1, 5, dtype=torch.bool)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_generation_cannot_do_is_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}: expected"):
        generated(drt(2), tokens(5), 2, return_dict_in_generate=True, **option)


def test_assisted_generation_is_refused() -> None:
    model = drt(2)
    for option in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            generated(model, tokens(10), 5, **option)


def test_sampling_is_a_function_of_the_seed() -> None:
    model, prompt = drt(2, logit_scale=0.2), tokens(10)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(generated(model, prompt, 20, do_sample=True))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_generation_stops_at_the_end_token_of_each_row() -> None:
    model, (prompt, mask) = drt(2), padded([10, 4])
    plain = generated(model, prompt, 8, attention_mask=mask)
    end = int(plain[0, 3])
    out = model.generate(
        prompt, attention_mask=mask, max_new_tokens=8, eos_token_id=end, pad_token_id=0, do_sample=False
    )[:, 10:]
    for row in range(2):
        said = plain[row].tolist()
        last = said.index(end) + 1 if end in said else 8
        assert out[row].tolist() == [*said[:last], *[0] * (out.shape[1] - last)]
