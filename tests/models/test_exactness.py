"""The same result whatever way a text comes in: against the models written naively, one text at a time.

Random texts in random batches with early landmarks at random places come in random calls: read, forward,
forward for the last tokens, token by token; rows padded at either side, or without tokens in some call.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.block_recurrent.naive import NaiveBlockRecurrent
from tests.models.naive import NaiveDRT, NaiveWindow
from tests.models.tiny import (
    EXACT,
    LLAMA3,
    YARN,
    assert_same,
    block_recurrent,
    chunk_lengths,
    drt,
    pad,
    place,
    tokens,
    window_model,
)
from trailmark.memory.tiers.quantized import dequantize, quantize
from trailmark.models import DRTForCausalLM, TrailmarkForCausalLM, causal_lm

HOWS = ("forward", "last", "read", "token by token")


@dataclass(frozen=True)
class Step:
    """One call, or with "token by token" several."""

    how: str
    counts: tuple[int, ...]  # tokens of each row, if it has so many left
    side: str = "left"
    extra: int = 0  # columns that are padding in every row
    keep: int = 1  # of "last"


@dataclass(frozen=True)
class Story:
    options: tuple[tuple[str, Any], ...]
    lengths: tuple[int, ...]  # of each row's text
    early: float = 0.0  # how often a landmark comes early
    steps: tuple[Step, ...] = ()  # what is left then comes in one forward
    read_tokens: int = 4096  # pieces of reading
    memory_dtype: torch.dtype | None = None
    seed: int = 0

    def texts(self) -> list[Tensor]:
        return [tokens(T, seed=10 * self.seed + b)[0] for b, T in enumerate(self.lengths)]

    def marks(self) -> list[list[bool]]:
        drawn = random.Random(self.seed)
        return [[drawn.random() < self.early for _ in range(T)] for T in self.lengths]


class RoundedDRT(NaiveDRT):
    """With keys and values kept in bfloat16."""

    def encode(self, model: DRTForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, landmark = super().encode(model, rows)
        return self.rounded(k), self.rounded(v), self.landmark(landmark)

    def landmark(self, x: Tensor) -> Tensor:
        return x

    def rounded(self, x: Tensor) -> Tensor:
        """x [n, sets, J, D]"""
        return x.bfloat16().to(x.dtype)


class QuantizedDRT(RoundedDRT):
    """With keys and values kept in int8, landmark vectors in bfloat16."""

    def landmark(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        record = x.permute(1, 2, 0, 3)[None]  # [1, sets, J, n, D]
        return dequantize(quantize(record), tuple(record.shape[1:]))[0].permute(2, 0, 1, 3).to(x.dtype)


@lru_cache(maxsize=32)
def drt_of(options: tuple[tuple[str, Any], ...]) -> DRTForCausalLM:
    return drt(**fields_of(options))


@lru_cache(maxsize=32)
def window_of(options: tuple[tuple[str, Any], ...]) -> TrailmarkForCausalLM:
    return window_model(**fields_of(options))


@lru_cache(maxsize=32)
def block_recurrent_of(options: tuple[tuple[str, Any], ...]) -> TrailmarkForCausalLM:
    return block_recurrent(**dict(options))


# --- drawing ---------------------------------------------------------------------------------------------


def fitting(options: dict[str, Any]) -> dict[str, Any]:
    """Without what a configuration refuses."""
    if options["sliding_window"] is None:
        options |= {"num_sinks": 0}
    if options.get("virtual_key") == "window":
        options |= {"softmax_off_by_one": True, "window_position": "rope", "memory_values": "same"}
    if options.get("chunk_size") == 1 and "memory_values" in options:
        options |= {"memory_values": "same"}
    if options["window_position"] == "alibi" or not options["num_sinks"]:
        options |= {"max_sink_distance": None}
    if options["sliding_window"] == 1 and "landmarks_as_keys" in options:
        options |= {"landmarks_as_keys": True}
    return options


SINKS = {"num_sinks": st.sampled_from([0, 0, 1, 3]), "max_sink_distance": st.sampled_from([None, 3, 17])}
WINDOWS = st.fixed_dictionaries(
    {
        "sliding_window": st.sampled_from([1, 2, 3, 7, 12, 70, None]),
        "window_position": st.sampled_from(["alibi", "rope"]),
        **SINKS,
    }
).map(fitting)
DRTS = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 3),
        "chunk_size": st.sampled_from([1, 2, 4, 5]),
        "sliding_window": st.sampled_from([1, 2, 3, 7, 12]),
        "window_position": st.sampled_from(["alibi", "rope"]),
        "exclude_visible_chunks": st.booleans(),
        "num_retrieved_chunks": st.sampled_from([1, 2, 3, 50]),
        "residual_gca": st.booleans(),
        "softmax_off_by_one": st.booleans(),
        "virtual_key": st.sampled_from(["zero", "window"]),
        "retrieval_recency": st.sampled_from([0, 1.5]),
        "chunk_summary": st.sampled_from(["landmark", "mean"]),
        "landmarks_as_keys": st.booleans(),
        "memory_kv": st.sampled_from(["shared", "group", "layer"]),
        "memory_values": st.sampled_from(["same", "next"]),
        "retrieval_query": st.sampled_from(["landmark", "chunk"]),
        **SINKS,
    }
).map(fitting)
BLOCKS = st.fixed_dictionaries(
    {
        "sliding_window": st.sampled_from([1, 2, 3, 7, 12]),
        "window_position": st.sampled_from(["alibi", "rope"]),
        "block_size": st.sampled_from([1, 2, 4, 5]),
        "num_states": st.sampled_from([1, 3]),
        "recurrent_layer": st.sampled_from([1, 2, 4]),
        "state_gate": st.sampled_from(["fixed", "lstm"]),
        **SINKS,
    }
).map(fitting)
# what pretrained weights ask for, or nothing of it
LAYERS = st.fixed_dictionaries(
    {
        "head_dim": st.sampled_from([None, 2, 6]),
        "attention_bias": st.booleans(),
        "qk_norm": st.sampled_from([None, "head", "all"]),
    }
)
SCALED = st.fixed_dictionaries(
    {"window_position": st.just("rope"), "rope_scaling": st.sampled_from(["llama3", "yarn"])}
)
MIXED = st.fixed_dictionaries(
    {
        "sliding_window": st.sampled_from([1, 2, 7, 12]),
        "layer_types": st.permutations(["full_attention", "sliding_attention", "sliding_attention"]).map(
            tuple
        ),
    }
)
PLAINLY = st.just({})


def with_layers(
    options: st.SearchStrategy[dict[str, Any]], *others: st.SearchStrategy[dict[str, Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """Options, and some of those that pretrained weights ask for."""
    some = [st.one_of(PLAINLY, each) for each in (LAYERS, SCALED, *others)]
    return st.tuples(options, *some).map(lambda found: {k: x for part in found for k, x in part.items()})


def fields_of(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Options can be told apart by hashes; a configuration has lists and dictionaries."""
    fields = dict(options)
    if "rope_scaling" in fields:
        fields["rope_scaling"] = {"llama3": LLAMA3, "yarn": YARN}[fields["rope_scaling"]]
    if "layer_types" in fields:
        fields["layer_types"] = list(fields["layer_types"])
    return fields


@st.composite
def stories(draw: st.DrawFn, options: st.SearchStrategy[dict[str, Any]], longest: int) -> Story:
    B = draw(st.integers(1, 3))
    length = st.integers(1, longest)
    lengths = [draw(length)] * B if draw(st.booleans()) else [draw(length) for _ in range(B)]
    steps = []
    for _ in range(draw(st.integers(0, 6))):
        n = draw(st.sampled_from([1, 2, 3, 7, 19]))
        counts = [n] * B if draw(st.booleans()) else [draw(st.integers(0, n)) for _ in range(B)]
        side, extra = draw(st.sampled_from(["left", "right"])), draw(st.sampled_from([0, 0, 1, 3]))
        steps.append(Step(draw(st.sampled_from(HOWS)), tuple(counts), side, extra, draw(st.integers(1, 3))))
    return Story(
        tuple(draw(options).items()),
        tuple(lengths),
        draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
        tuple(steps),
        draw(st.sampled_from([5, 4096])),
        draw(st.sampled_from([None, None, None, torch.bfloat16, torch.int8])),
        draw(st.integers(0, 99)),
    )


# --- telling ---------------------------------------------------------------------------------------------


class Told:
    """A story as it comes in; every logit and selection is compared."""

    def __init__(self, story: Story, model: TrailmarkForCausalLM, exact: list[Any]) -> None:
        self.model, self.exact, self.texts, self.marks = model, exact, story.texts(), story.marks()
        self.cache = model.new_cache(memory_dtype=story.memory_dtype)
        self.done = [0] * len(self.texts)
        with mock.patch.object(causal_lm, "_READ_TOKENS", story.read_tokens), torch.no_grad():
            for step in story.steps:
                self.take(step)
            self.take(Step("forward", story.lengths))
        assert self.done == list(story.lengths)
        assert self.cache.num_tokens.tolist() == self.done
        assert self.cache.get_seq_length() == max(self.done)

    def take(self, step: Step) -> None:
        left = [len(text) - done for text, done in zip(self.texts, self.done, strict=True)]
        counts = [min(n, rest) for n, rest in zip(step.counts, left, strict=True)]
        if step.how == "token by token":
            for t in range(max(counts)):
                one = tuple(int(t < n) for n in counts)
                self.call(Step("last" if t % 3 else "forward", one, step.side))
        elif max(counts):
            self.call(Step(step.how, tuple(counts), step.side, step.extra, step.keep))

    def call(self, step: Step) -> None:
        parts = [slice(done, done + n) for done, n in zip(self.done, step.counts, strict=True)]
        ids = pad([text[part] for text, part in zip(self.texts, parts, strict=True)], step.side, step.extra)
        mask = pad([torch.ones(n, dtype=torch.int64) for n in step.counts], step.side, step.extra)
        early = [torch.tensor(m[part]).bool() for m, part in zip(self.marks, parts, strict=True)]
        arguments: dict[str, Any] = {} if mask.all() else {"attention_mask": mask}
        some = any(m.any() for m in early)
        if step.how == "read" and not some:
            self.model.read(ids, self.cache, **arguments)
        else:
            arguments["past_key_values"] = self.cache
            if some:
                at_the_end = all(m.tolist() == [False] * (len(m) - 1) + [True] for m in early if len(m))
                arguments["close_chunk"] = at_the_end or pad(early, step.side, step.extra)
            self.forward(ids, step, parts, arguments)
        self.done = [part.stop for part in parts]

    def forward(self, ids: Tensor, step: Step, parts: list[slice], arguments: dict[str, Any]) -> None:
        if step.how == "forward":
            out = self.model(ids, output_retrieval=True, **arguments)
            for b, (part, exact) in enumerate(zip(parts, self.exact, strict=True)):
                own = place(part.stop - part.start, ids.shape[1], step.side)
                assert_same(out.logits[b, own], exact.logits[part])
                if isinstance(exact, NaiveDRT):
                    self.compare_retrieval(out.retrieval, b, part, exact)
            return
        keep = min(step.keep, ids.shape[1])
        out = self.model(ids, logits_to_keep=step.keep, **arguments)
        assert out.logits.shape[1] == keep
        for b, (part, exact) in enumerate(zip(parts, self.exact, strict=True)):
            n = min(keep, part.stop - part.start)
            assert_same(out.logits[b, keep - n :], exact.logits[part.stop - n : part.stop])

    def compare_retrieval(self, retrieval: Any, b: int, part: slice, exact: NaiveDRT) -> None:
        S, marks = self.model.config.chunk_size, self.marks[b]
        before, after = (_closed(marks[:end], S) for end in (part.start, part.stop))
        for chosen, asked, scores in zip(retrieval, exact.retrieval, exact.scores, strict=True):
            found = [[m for m in row if m >= 0] for row in chosen.indices[b].tolist()]
            assert not any(found[after - before :])
            pairs = zip(found, asked[before:after], scores[before:after], strict=False)
            for ours, (best, _), score in pairs:
                # chunks of the same content tie: then either may come first in sums of another order
                assert len(ours) == len(best)
                theirs = sorted(score[m] for m in best)
                assert sorted(score[m] for m in ours) == pytest.approx(theirs, rel=0, abs=EXACT)


def _closed(marks: list[bool], chunk_size: int) -> int:
    lengths, closed = chunk_lengths(marks, chunk_size)
    return len(lengths) if closed else len(lengths) - 1


PLAIN = tuple({"groups": 2, "sliding_window": 7}.items())
HIDDEN = tuple(
    {
        "groups": 2,
        "landmarks_as_keys": False,
        "num_sinks": 3,
        "window_position": "rope",
        "max_sink_distance": 17,
        "exclude_visible_chunks": True,
    }.items()
)
# one row a whole segment behind, without tokens for some calls, then decoding in another phase
BEHIND = (
    Step("forward", (9, 2)),
    Step("read", (19, 0), "right"),
    Step("token by token", (5, 5)),
    Step("last", (0, 3)),
)


@settings(max_examples=60)
@given(stories(with_layers(DRTS), longest=45))
@example(Story(HIDDEN, (60, 31), 0.3, BEHIND))
@example(Story(HIDDEN, (60, 31), 0.3, BEHIND, read_tokens=4))
@example(
    Story(HIDDEN, (45, 2, 30), 0.0, (Step("read", (30, 1, 29), extra=2), Step("token by token", (9, 1, 1))))
)
@example(Story(HIDDEN, (45, 20), 0.9, (Step("last", (30, 9)), Step("read", (9, 9)), Step("last", (3, 1)))))
@example(Story(PLAIN, (60, 31), 0.0, BEHIND))
@example(Story(PLAIN, (60, 31), 0.3, BEHIND, read_tokens=4))
@example(Story(PLAIN, (45, 45), 0.0, (Step("read", (40, 40)), Step("token by token", (5, 5)))))
@example(Story(PLAIN, (45, 13, 30), 0.0, (Step("read", (30, 12, 29), extra=2),)))
@example(Story(PLAIN, (45,), 0.0, (Step("read", (40,)), Step("last", (1,)), Step("last", (3,), keep=3))))
@example(Story(PLAIN, (45, 20), 0.2, (Step("last", (30, 9)),), memory_dtype=torch.bfloat16))
@example(Story(PLAIN, (45, 20), 0.2, (Step("last", (30, 9)),), memory_dtype=torch.int8))
@pytest.mark.slow
def test_any_calls_of_any_batch_are_the_texts_alone(story: Story) -> None:
    model = drt_of(story.options)
    naive = {None: NaiveDRT, torch.bfloat16: RoundedDRT, torch.int8: QuantizedDRT}[story.memory_dtype]
    texts = zip(story.texts(), story.marks(), strict=True)
    exact = [naive(model, text, *chunk_lengths(m, model.config.chunk_size)) for text, m in texts]
    Told(story, model, exact)


@settings(max_examples=60)
@given(stories(with_layers(WINDOWS, MIXED), longest=45))
@example(Story((("sliding_window", None),), (90, 80), 0.0, (Step("token by token", (85, 80)),)))
def test_any_calls_of_the_window_model_are_the_texts_alone(story: Story) -> None:
    model = window_of(story.options)
    Told(story, model, [NaiveWindow(model, text) for text in story.texts()])


@settings(max_examples=25)
@given(stories(BLOCKS, longest=25))
@example(Story((("block_size", 4),), (45, 31), 0.3, BEHIND, read_tokens=4))
@pytest.mark.slow
def test_any_calls_of_the_block_recurrent_model_are_the_texts_alone(story: Story) -> None:
    """Early landmarks end none of its blocks."""
    model = block_recurrent_of(story.options)
    Told(story, model, [NaiveBlockRecurrent(model, text) for text in story.texts()])
