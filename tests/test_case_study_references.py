"""The case study's references of LaTeX, and the rules that its model is compared with."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests import benchmark_scripts
from tests.case_study_texts import NAMES, SIZE, WIDTH, chunks_of
from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.bm25 import Bm25, best_chunks
from trailmark.trace.lines import TracedChunk

modules = benchmark_scripts.modules(*NAMES)


@pytest.fixture
def refs(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["references"]


# --- references --------------------------------------------------------------------------------------------


def test_comments_are_spaces_and_places_stay(refs: ModuleType) -> None:
    text = "a 5\\% rise % \\label{no}\nb\\\\% \\ref{no}\n%\n\\\\\\% c"
    seen = refs.without_comments(text)
    assert seen == "a 5\\% rise " + " " * 12 + "\nb\\\\" + " " * 10 + "\n \n\\\\\\% c"
    assert len(seen) == len(text)


def test_what_counts_as_a_reference(refs: ModuleType) -> None:
    """The works' macros, own ones too, with one name or several, and hyperref's option; not what is no label."""
    text = (
        "\\ref{late} \\label{thm:a} \\begin{x}\\label{ b }\\symlabel{s} \\label{} \\label{c}\n"
        "\\ref{thm:a} \\eqref*{b} \\cref{c, thm:a,elsewhere} \\propref[p.]{c} \\hyperref[b]{c and}\n"
        "\\refl{c} \\href{c}{d} \\input{c} \\ref{s} \\label{late} \\thmvref {late}"
    )
    layout_of = refs.Layout.of(chunks_of(text))
    found = refs.references(layout_of)
    assert [(r.macro, r.name) for r in found] == [
        ("ref", "thm:a"),
        ("eqref", "b"),
        ("cref", "c"),
        ("cref", "thm:a"),
        ("propref", "c"),
        ("hyperref", "b"),
        ("href", "c"),
        ("thmvref", "late"),
    ]
    known = refs.labels(refs.without_comments(text))
    assert list(known) == ["thm:a", "b", "c", "late"]
    assert all(text[named.begin : named.end] == name for name, named in known.items())
    assert refs.summary(layout_of) == {
        "labels": 4,
        "macros": {"ref": 2, "eqref": 1, "cref": 2, "propref": 1, "hyperref": 1, "href": 1, "thmvref": 1},
        "other_macros": {"refl": 1, "input": 1},
    }


def test_places_are_those_of_names(refs: ModuleType) -> None:
    """Tokens and chunks of the name; a name that goes on in the next chunk counts where it begins."""
    text = "\\label{name1}" + "." * 90 + "\\ref{name1}" + "." * 19 + "\\ref{name1}" + " " * 20
    chunks = chunks_of(text)
    first, second = refs.references(refs.Layout.of(chunks))
    label, here = text.index("name1"), text.index("\\ref") + 5
    assert (first.label_token, first.label_chunk) == (label // WIDTH, label // (WIDTH * SIZE)) == (1, 0)
    assert first.tokens[0] == here // WIDTH
    assert first.tokens[1] == -(-(here + 5) // WIDTH)
    assert first.distance == here // WIDTH - 1
    assert first.chunk == here // (WIDTH * SIZE)
    assert (first.mentions, second.mentions) == ((0,), (0, first.chunk))
    # the second one begins in the last token of a chunk
    there = text.rindex("name1")
    assert second.tokens == (there // WIDTH, there // WIDTH + 1)
    assert (there // WIDTH + 1) % SIZE == 0
    assert second.chunk == there // (WIDTH * SIZE) < (there + 4) // (WIDTH * SIZE)


def test_characters_of_several_tokens(refs: ModuleType) -> None:
    """Byte by byte: starts repeat within a character."""
    text = "é\\label{ñ}\\ref{ñ}"
    starts = [n for n, letter in enumerate(text) for _ in letter.encode()]
    chunk = chunks_of(text)[0]
    whole = TracedChunk(
        0,
        0,
        False,
        np.zeros(len(starts), int),
        text,
        np.array(starts),
        chunk.reads,
        *[np.zeros(len(starts))] * 2,
    )
    (found,) = refs.references(refs.Layout.of([whole]))
    raw = text.encode()
    assert found.tokens[1] == raw.rindex(b"}")
    assert raw[: found.tokens[0]].decode(errors="ignore") == "é\\label{ñ}\\ref{"
    assert raw[: found.label_token].decode(errors="ignore") == "é\\label{"


# --- the other rules ---------------------------------------------------------------------------------------


def test_ranks_are_places_in_the_order(modules: dict[str, ModuleType]) -> None:
    """Of numbers with many ties; the earlier of equal ones comes first."""
    rng = np.random.default_rng(0)
    best_rank = modules["baselines"].best_rank
    for _ in range(50):
        scores = rng.integers(0, 4, 12).astype(float)
        limit = int(rng.integers(1, 13))
        wanted = rng.choice(12, 3, replace=False).tolist()
        order = sorted(range(limit), key=lambda m: (-scores[m], m))
        places = [order.index(m) for m in wanted if m < limit]
        assert best_rank(scores, limit, wanted) == (min(places) if places else None)


def test_chance_counts_all_draws(modules: dict[str, ModuleType]) -> None:
    for n, wanted, drawn in ((7, 1, 3), (7, 2, 3), (6, 3, 5), (4, 1, 9)):
        draws = list(itertools.combinations(range(n), min(drawn, n)))
        found = sum(any(m < wanted for m in draw) for draw in draws) / len(draws)
        assert modules["baselines"].chance(n, wanted, drawn) == pytest.approx(found, abs=1e-15)


def test_rules_ask_with_the_text_before_the_reading_chunk(modules: dict[str, ModuleType]) -> None:
    """What BM25, the bag and recency choose is what the library's own search of the same text chooses."""
    letters = np.random.default_rng(1).choice(list("abcdef"), WIDTH * (SIZE * 12 + 2))
    chunks = chunks_of("".join(letters))
    tokenizer = load_tokenizer()
    lengths = np.array([len(chunk.ids) for chunk in chunks])
    assert lengths[-1] == 2
    ids = np.stack([np.resize(chunk.ids, SIZE) for chunk in chunks])
    statistics = Bm25.of(ids, lengths)
    rules = modules["baselines"].Rules(chunks, statistics, tokenizer)
    reading = np.arange(2, len(chunks))

    def chosen(rule: str, count: int = 3) -> list[list[int]]:
        best = modules["baselines"].best_rank
        return [
            [m for m in range(chunk - 1) if best(scores, chunk - 1, [m]) < count]
            for own, chunk, scores in rules.each(reading)
            if own == rule
        ]

    def searched(queries: Any, query_lengths: Any) -> list[list[int]]:
        found = best_chunks(statistics.scores(ids, lengths, queries, query_lengths), reading - 1, 3)
        return [[m for m in row if m >= 0] for row in found.tolist()]

    assert chosen("bm25") == searched(ids[reading - 1], lengths[reading - 1])
    assert chosen("bm25_told") == searched(ids[reading], lengths[reading])
    two = np.concatenate([ids[reading - 2], ids[reading - 1]], axis=1)
    assert chosen("bm25_two") == searched(two, lengths[reading - 2] + lengths[reading - 1])
    assert chosen("recent") == [list(range(max(0, chunk - 4), chunk - 1)) for chunk in reading]
    vectors = rules.vectors.double()
    product = (vectors[reading - 1] @ vectors.T).numpy()
    assert chosen("hash") == [
        sorted(sorted(range(chunk - 1), key=lambda m: (-row[m], m))[:3])
        for chunk, row in zip(reading, product, strict=True)
    ]
    # what was read before each: by no later chunk, in any order of asking
    counted = chunks_of(chunks[0].text * 5, {2: [[0], [0]], 3: [[0, 1], [0]]})
    habits = modules["baselines"].Rules(counted, statistics, tokenizer)
    assert habits.scores("hubs", np.array([4, 2, 3])).tolist() == [[2, 1, 0, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]
    # the first chunk has none before it
    joined, counts = rules._joined(np.array([0, 1]))
    assert counts.tolist() == [SIZE, 2 * SIZE]
    assert joined[0, :SIZE].tolist() == ids[0].tolist()
    with pytest.raises(ValueError, match="rule: expected one with scores"):
        rules.scores("random", reading)
