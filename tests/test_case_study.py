"""The case study's scripts: references of LaTeX, what was read of them, the other rules, numbers and document."""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.tiny import SHARED, prose
from trailmark.data.bm25 import Bm25
from trailmark.data.bm25 import candidates as bm25_candidates
from trailmark.data.corpus import load_tokenizer
from trailmark.data.files import read_json
from trailmark.data.traces import Read, TracedChunk, read_trace
from trailmark.models import DRTConfig
from trailmark.models.grid import lay_out

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = ("references", "baselines", "measure", "numbers", "cases", "document")
WIDTH = 4  # characters of a made-up token
SIZE = 5  # tokens of a made-up chunk


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The scripts, which import each other as they do when they are run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        found = {name: importlib.import_module(f"case_study_{name}") for name in NAMES}
        yield found | {"case_study": importlib.import_module("case_study")}
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def refs(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["references"]


def chunks_of(
    text: str, reads: dict[int, Sequence[Sequence[int]]] | None = None, groups: int = 2
) -> list[TracedChunk]:
    """A text of tokens of WIDTH characters: what each chunk reads, with equal weights; a gain of 1/4 a token."""
    tokens = [text[n : n + WIDTH] for n in range(0, len(text), WIDTH)]
    known = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    found = []
    for number, first in enumerate(range(0, len(tokens), SIZE)):
        own = tokens[first : first + SIZE]
        chosen = (reads or {}).get(number, [[]] * groups)
        found.append(
            TracedChunk(
                number,
                first,
                len(own) == SIZE,
                np.array([known[token] for token in own]),
                "".join(own),
                np.arange(len(own)) * WIDTH,
                tuple(Read(np.array(m, np.int64), np.full(len(m), 1 / max(1, len(m)))) for m in chosen),
                np.where(np.arange(len(own)) + first, 2.0, np.nan),
                np.where(np.arange(len(own)) + first, 2.25, np.nan),
            )
        )
    return found


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


@pytest.mark.parametrize(
    ("size", "window", "exclude"), [(63, 128, True), (4, 17, True), (5, 6, True), (5, 6, False)]
)
def test_candidates_are_the_models(refs: ModuleType, size: int, window: int, exclude: bool) -> None:
    config = DRTConfig(chunk_size=size, sliding_window=window, exclude_visible_chunks=exclude)
    grid = lay_out(20 * size, size)
    wanted = grid.candidates(config.first_visible, torch.device("cpu")).flatten().tolist()
    assert [refs.candidates(t + 1, size, config.first_visible) for t in range(20)] == wanted
    assert refs.candidates(0, size, config.first_visible) == 0


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
        rows: dict[int, list[int]] = {}

        def use(chunk: int, scores: Any) -> None:
            best = modules["baselines"].best_rank
            rows[chunk] = [m for m in range(chunk - 1) if best(scores, chunk - 1, [m]) < count]

        rules.each(rule, reading, use)
        return [rows[chunk] for chunk in reading]

    def searched(queries: Any, query_lengths: Any) -> list[list[int]]:
        found = bm25_candidates(
            *(ids, 3),
            lengths=lengths,
            limits=reading - 1,
            queries=queries,
            query_lengths=query_lengths,
            statistics=statistics,
        )
        return [[m for m in row if m >= 0] for row in found.indices.tolist()]

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
    # the first chunk has none before it
    joined, counts = rules._joined(np.array([0, 1]))
    assert counts.tolist() == [SIZE, 2 * SIZE]
    assert joined[0, :SIZE].tolist() == ids[0].tolist()
    with pytest.raises(ValueError, match="rule: expected one with scores"):
        rules.scores("random", reading)


# --- what was read -----------------------------------------------------------------------------------------

# chunks of 20 characters: labels in chunks 0 and 1, references in chunks 5 and 6, one too near in chunk 2
TEXT = "".join(
    part.ljust(WIDTH * SIZE, ".")
    for part in (
        "\\label{aa}",
        "\\label{bb}",
        "\\ref{bb}",
        "aa",
        "\\ref{aa}",
        "\\ref{aa}",
        "\\ref{bb}",
        "end",
    )
)
READS = {3: [[0], [1]], 4: [[1, 2], [0, 2]], 5: [[0, 2], [2, 3]], 6: [[1, 4], [1, 3]], 7: [[0, 5], [3, 5]]}


def tokens_of(chunks: Sequence[TracedChunk]) -> tuple[Any, Any]:
    return np.stack([chunk.ids for chunk in chunks]), np.full(len(chunks), SIZE)


@pytest.fixture
def rows(modules: dict[str, ModuleType]) -> list[dict[str, Any]]:
    chunks = chunks_of(TEXT, READS)
    found: list[dict[str, Any]] = modules["measure"].rows_of(
        chunks, SIZE, None, Bm25.of(*tokens_of(chunks)), load_tokenizer()
    )
    return found


def test_rows_say_what_was_read(modules: dict[str, ModuleType], rows: list[dict[str, Any]]) -> None:
    """The reference to bb in chunk 2 stands where its label is no candidate."""
    assert [(r["name"], r["chunk"], r["label_chunk"], r["distance"]) for r in rows] == [
        ("aa", 4, 0, 20 - 1 + 1),
        ("aa", 5, 0, 25),
        ("bb", 6, 1, 25),
    ]
    now = [r["now"] for r in rows]
    assert [own["candidates"] for own in now] == [3, 4, 5]
    assert [own["sizes"] for own in now] == [[2, 2, 3], [2, 2, 3], [2, 2, 3]]
    assert [own["label"] for own in now] == [[False, True, True], [True, False, True], [True, True, True]]
    assert [own["weights"] for own in now] == [[None, 0.5], [0.5, None], [0.5, 0.5]]
    # bb was named in chunk 2 again, aa in chunk 4, which chunk 5 may not read
    assert [own["wanted"]["name"] for own in now] == [1, 1, 2]
    assert [own["name"] for own in now] == [[False, True, True], [True, False, True], [True, True, True]]
    assert [own["near"] for own in now] == [[True, True, True], [True, False, True], [True, True, True]]
    early = [r["early"] for r in rows]
    assert [own["candidates"] for own in early] == [2, 3, 4]
    assert [own["label"][-1] for own in early] == [True, True, False]
    assert all(r["tokens"] and r["loss_without"] - r["loss"] == r["tokens"] / 4 for r in rows)
    hit = modules["measure"].hit
    assert [hit(own, "label", "model", -1) for own in now] == [1, 1, 1]
    chances = [hit(own, "label", "random", 0) for own in now]
    assert chances == [pytest.approx(2 / n, abs=1e-15) for n in (3, 4, 5)]
    assert [hit(own, "label", "recent", -1) for own in now] == [1, 0, 0]
    # every rank is that of the chunks that count, among the same candidates
    baselines, chunks = modules["baselines"], chunks_of(TEXT, READS)
    rules = baselines.Rules(chunks, Bm25.of(*tokens_of(chunks)), load_tokenizer())
    for row, label, names in zip(rows, (0, 0, 1), ([0], [0], [1, 2]), strict=True):
        for own, chunk in ((row["now"], row["chunk"]), (row["early"], row["chunk"] - 1)):
            limit = chunk - 1
            near = [m for m in (label - 1, label, label + 1) if 0 <= m < limit]
            for kind, wanted in (("label", [label]), ("name", names), ("near", near)):
                assert set(own["ranks"][kind]) == set(baselines.RULES) - {"random"}
                for rule, rank in own["ranks"][kind].items():
                    scores = rules.scores(rule, np.array([chunk]))[0]
                    assert rank == baselines.best_rank(scores, limit, wanted)


def test_a_trace_of_other_candidates_is_refused(modules: dict[str, ModuleType]) -> None:
    chunks = chunks_of(TEXT, READS | {4: [[0, 3], [1]]})
    statistics = Bm25.of(*tokens_of(chunks))
    with pytest.raises(AssertionError, match="chunk 4 read 3, of 3 candidates"):
        modules["measure"].rows_of(chunks, SIZE, None, statistics, load_tokenizer())


def test_numbers_by_distance(modules: dict[str, ModuleType], rows: list[dict[str, Any]]) -> None:
    numbers = modules["numbers"]
    assert [numbers.bin_of(d) for d in (64, 511, 512, 2047, 2048, 8191, 8192, 32767, 32768, 10**6)] == [
        *(1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    ]
    assert len(numbers.BINS) == 6
    far = rows[0] | {"distance": 5000, "early": None, "tokens": 3, "loss": 1.0, "loss_without": 4.0}
    texts = [rows, [far]]
    assert numbers.counts(texts, "now", "label", "model", 0) == [
        [2, 4],
        [2, 3],
        [0, 0],
        [0, 1],
        [0, 0],
        [0, 0],
    ]
    assert numbers.counts(texts, "early", "label", "model", -1)[0] == [2, 3]
    # aa, which chunk 4 does not read in the first group, chunk 3 does
    assert numbers.counts(texts, "either", "label", "model", 0)[0] == [3, 4]
    chances = [
        1 - (1 - 2 / 3) * (1 - 1 / 2),
        1 - (1 - 2 / 4) * (1 - 2 / 3),
        1 - (1 - 2 / 5) * (1 - 2 / 4),
        2 / 3,
    ]
    assert numbers.counts(texts, "either", "label", "random", 0)[0] == [
        pytest.approx(sum(chances), abs=1e-6),
        4,
    ]
    gains = {(own["part"], own["bin"]): own for own in numbers.gains(texts)}
    own = gains["all", "all"]
    assert (own["names"], own["tokens"]) == (4, sum(r["tokens"] for r in rows) + 3)
    total = sum(r["tokens"] for r in rows)
    assert own["gain"]["mean"] == pytest.approx((total / 4 + 3) / (total + 3), rel=1e-12)
    assert own["gain"]["low"] < own["gain"]["mean"] < own["gain"]["high"]
    assert gains["all", numbers.BINS[3]]["gain"] == {"mean": 1.0, "low": None, "high": None}
    assert gains["all", numbers.BINS[2]]["names"] == 0
    parts = [gains[part, "all"]["names"] for part in ("label read", "name read, label not", "name not read")]
    assert parts == [4, 0, 0]
    assert numbers.label_weights(texts, 2) == [{"read": 2, "weight": 0.5}, {"read": 3, "weight": 0.5}]
    works = numbers.by_work([*texts, rows], ["one", "two", "one"])
    assert [(work, own["model"], own["recent"]) for work, own in works.items()] == [
        ("one", [6, 6], [2, 6]),
        ("two", [1, 1], [1, 1]),
    ]
    apart = numbers.differences(texts)
    assert apart["recent"]["mean"] == pytest.approx(1 - 2 / 4)


def test_habits_compare_the_same_number_of_chunks(modules: dict[str, ModuleType]) -> None:
    numbers, limits = modules["numbers"], [max(0, n - 1) for n in range(8)]
    chunks = chunks_of(TEXT, {6: [[3], [4]], 7: [[0], [0]]})
    statistics = Bm25.of(*tokens_of(chunks))
    rules = modules["baselines"].Rules(chunks, statistics, load_tokenizer())
    found = numbers.habits(chunks, rules, limits)
    assert (found["reading"], found["read"], found["agree"]) == (2, 3, 1)
    assert found["distances"] == [15, 10, 35]
    assert found["shared"]["recent"] == 2  # chunks 3 and 4, of the last two before chunk 5
    assert found["shared"]["random"] == pytest.approx(4 / 5 + 1 / 6)
    means = numbers.habit([{"habits": found}])
    assert (means["chunks_read"], means["agree"], means["shared"]["recent"]) == (1.5, 0.5, 2 / 3)
    assert means["distance"]["median"] == 15


def test_gain_by_where_a_token_stood_before(modules: dict[str, ModuleType]) -> None:
    numbers = modules["numbers"]
    # chunk 2 sees chunk 1 and reads chunk 0; chunk 3 reads nothing
    text = "".join(
        "aaaabbbbccccddddeeee" + "ffffgggghhhhiiiijjjj" + "aaaaffffzzzzaaaabbbb" + "kkkkllllmmmmnnnnoooo"
    )
    found = numbers.seen(chunks_of(text, {2: [[0], []]}))
    assert found == {"in sight": [2, 4.5, 0.5], "read only": [2, 4.5, 0.5], "in neither": [1, 2.25, 0.25]}
    means = numbers.seen_gains([{"seen": found}, {"seen": found | {"read only": [2, 6, 3.0]}}])
    assert [own["tokens"] for own in means.values()] == [0.4, 0.4, 0.2]
    assert means["read only"]["gain"]["mean"] == 3.5 / 4
    assert means["read only"]["of_all"] == 3.5 / 5
    assert means["in neither"]["loss_without"] == 2.25


# --- cases and document ------------------------------------------------------------------------------------


def test_cases_follow_the_rule(modules: dict[str, ModuleType], rows: list[dict[str, Any]]) -> None:
    """Far enough, read, the largest gain of each work; ties: the earlier."""
    cases = modules["cases"]

    def row(distance: int, gain: float, token: int, read: bool = True) -> dict[str, Any]:
        return {
            "distance": distance,
            "loss": 1.0,
            "loss_without": 1.0 + gain,
            "token": token,
            "now": {"label": [False, read]},
        }

    chapters = {
        "one_b.tex": ([row(2048, 3.0, 9), row(2047, 9.0, 1), row(4000, 8.0, 2, read=False)], []),
        "one_a.tex": ([row(3000, 3.0, 80), row(3000, 3.0, 70)], []),
        "two_a.tex": ([row(9000, 5.0, 1)], []),
        "three_a.tex": ([row(9000, 1.0, 1)], []),
        "four_a.tex": ([row(9000, 2.0, 1)], []),
        "five_a.tex": ([row(9, 2.0, 1)], []),
    }
    chosen = [(file, own["token"]) for file, own in cases.choose(chapters)]
    assert chosen == [("two_a.tex", 1), ("one_a.tex", 70), ("four_a.tex", 1)]
    assert cases.choose({}) == []
    told = cases.told("one_a.tex", rows[0], chunks_of(TEXT, READS))
    assert [token["text"] for token in told["tokens"]] == [TEXT[n : n + 4] for n in (84,)]
    assert [[(read["chunk"], read["label"], read["name"]) for read in group] for group in told["groups"]] == [
        [(1, False, False), (2, False, False)],
        [(0, True, True), (2, False, False)],
    ]
    assert (told["gain"], told["chunk_gain"]) == (0.25, SIZE / 4)


def test_shortened_text_shows_the_name(modules: dict[str, ModuleType]) -> None:
    shortened = modules["cases"].shortened
    assert shortened(" a\n  b\tc ") == "a b c"
    text = "x" * 70 + " name " + "y" * 70
    for mark in ("name", "", "elsewhere"):
        shown = shortened(text, mark, 20)
        assert shown.replace("... ", "").replace(" ...", "") in text
        assert len(shown.removeprefix("... ").removesuffix(" ...")) == 20
    assert "name" in shortened(text, "name", 20)
    assert shortened("name " + "y" * 70, "name", 20).startswith("name y")
    assert shortened("y" * 70 + " name", "name", 20).endswith("y name")


def test_blocks_hold_any_text(modules: dict[str, ModuleType]) -> None:
    document = modules["document"]
    assert document._block("a\n~~~~\n```") == "~~~~~text\na\n~~~~\n```\n~~~~~"
    assert document._block("a") == "~~~text\na\n~~~"
    assert document._code("a|b") == "`a\\|b`"
    assert document._code("``a") == "`` ``a ``"


def test_a_document_without_its_markers_is_refused(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- model -->\n")
    with pytest.raises(ValueError, match=r"<!-- model --> and <!-- /model --> once each"):
        modules["document"].fill(path, {})


def test_the_document_has_all_markers(modules: dict[str, ModuleType]) -> None:
    """And what stands between them is what the JSON gives."""
    path = BENCHMARKS.parent / "docs" / "case-study.md"
    text = path.read_text(encoding="utf-8")
    record = read_json(modules["case_study"].OUTPUT)
    for name, make in modules["document"].TEXTS.items():
        _, _, rest = text.partition(f"<!-- {name} -->\n")
        assert rest.split(f"\n<!-- /{name} -->")[0] == make(record), name
    assert record["rule"] == modules["cases"].RULE
    for number in range(1, len(record["cases"]) + 1):
        assert (path.parent / f"case-study-{number}.png").stat().st_size <= 300_000


# --- all of it ---------------------------------------------------------------------------------------------


def write_chapters(folder: Path) -> None:
    """Made-up LaTeX of two works, labels far from references."""
    words = prose(700).split()
    chapters = {"train": ["a_1", "b_1"], "valid": ["a_2"], "test": ["a_3", "b_3"]}
    index = []
    for split, names in chapters.items():
        (folder / split).mkdir(parents=True)
        for number, name in enumerate(names):
            middle = " ".join(words[number * 5 :])
            text = f"\\begin{{lemma}}\\label{{first}} {middle} \\ref{{first}} % \\ref{{first}}\n" * 2
            (folder / split / f"{name}.tex").write_text(text)
            index.append(
                [split, f"{name}.tex", f"Chapter {name}", "CC-BY-SA-4.0", "maker/book", f"{name}.tex"]
            )
    with open(folder / "index.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["split", "file", "title", "licence", "source_repo", "source_path"])
        writer.writerows(index)


@pytest.mark.slow
def test_one_command_that_goes_on(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From made-up chapters to the document's tables: what is finished is not made again."""
    script = modules["case_study"]
    write_chapters(tmp_path / "data" / "math")
    monkeypatch.setenv("TRAILMARK_DATA", str(tmp_path / "data"))
    model = {name: value for name, value in SHARED.items() if name != "vocab_size"}
    changes = {f"model.{name}": value for name, value in model.items()} | {
        "model.num_hidden_layers": 3,
        "model.num_lower_layers": 1,
        "model.sliding_window": 42,
        "model.chunk_size": 20,
        "model.num_retrieved_chunks": 3,
        "training.steps": 3,
        "training.tokens_per_step": 512,
        "training.context_length": 512,
        "training.eval_steps": 2,
        "training.eval_windows": 1,
        "training.precision": "float32",
    }
    arguments = argparse.Namespace(
        folder=tmp_path / "runs",
        config=script.ROOT / script.CONFIG,
        set=[f"{name}={value}" for name, value in changes.items()],
        model=None,
        output=tmp_path / "case_study.json",
    )
    script.CaseStudy(arguments).run(("prepare", "train", "measure"))
    record = read_json(arguments.output)
    assert record["training"]["steps"] == 3
    assert record["training"]["validation"][-1][0] == 2
    assert [chapter["file"] for chapter in record["chapters"]] == ["a_3.tex", "b_3.tex"]
    # in each chapter two references to the first label of the name
    assert [chapter["references"] for chapter in record["chapters"]] == [2, 2]
    assert record["hits"][0]["rules"]["model"][0][1] == 4
    header, entries = read_trace(tmp_path / "runs" / "traces" / "a_3.jsonl")
    text = "".join(entry.text for entry in entries if isinstance(entry, TracedChunk))
    assert text == (tmp_path / "data" / "math" / "test" / "a_3.tex").read_text()
    assert header.num_groups == record["groups"] == 2
    texts = {name: make(record) for name, make in modules["document"].TEXTS.items()}
    assert "a_3.tex" in texts["chapters"]
    assert len(texts["found"].splitlines()) >= 4
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.jsonl")}
    kept |= {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "model").rglob("*.safetensors")}
    script.CaseStudy(arguments).run(("prepare", "train", "measure"))
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    again = read_json(arguments.output)
    same = [name for name in record if name not in ("seconds", "environment")]
    assert [again[name] for name in same] == [record[name] for name in same]
    (tmp_path / "data" / "math" / "train" / "c_1.tex").write_text("more")
    with pytest.raises(SystemExit, match="holds other texts"):
        script.CaseStudy(arguments).prepare()
