"""The case study's scripts: what was read where a text refers back, numbers, cases and document."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import benchmark_scripts
from tests.benchmark_scripts import BENCHMARKS
from tests.case_study_texts import NAMES, SIZE, WIDTH, chunks_of, tokens_of
from tests.models.tiny import drt
from tests.training.tiny import SHARED, prose
from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.bm25 import Bm25
from trailmark.evaluation.retrieval.run import parts_of
from trailmark.files import read_json
from trailmark.trace.lines import TracedChunk, read_trace

modules = benchmark_scripts.modules(*NAMES)


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
LIMITS = [max(0, n - 1) for n in range(8)]  # of all chunks before the one that asks


@pytest.fixture
def rows(modules: dict[str, ModuleType]) -> list[dict[str, Any]]:
    chunks = chunks_of(TEXT, READS)
    rules = modules["baselines"].Rules(chunks, Bm25.of(*tokens_of(chunks)), load_tokenizer())
    found: list[dict[str, Any]] = modules["measure"].rows_of(chunks, LIMITS, rules)
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
    rules = modules["baselines"].Rules(chunks, Bm25.of(*tokens_of(chunks)), load_tokenizer())
    with pytest.raises(AssertionError, match="chunk 4 read 3, of 3 candidates"):
        modules["measure"].rows_of(chunks, LIMITS, rules)


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
    ranges = numbers.by_candidates([rows, [far | {"now": rows[0]["now"] | {"candidates": 521}}]])
    assert [(own["low"], own["high"], own["rules"]["model"][1]) for own in ranges] == [
        *((1, 130, 3), (131, 520, 0), (521, 2080, 1), (2081, None, 0))
    ]
    assert [own["gain"]["mean"] for own in ranges] == [pytest.approx(0.25), None, 1.0, None]
    apart = numbers.differences(texts)
    assert apart["recent"]["mean"] == pytest.approx(1 - 2 / 4)


def test_habits_compare_the_same_number_of_chunks(modules: dict[str, ModuleType]) -> None:
    numbers = modules["numbers"]
    chunks = chunks_of(TEXT, {6: [[3], [4]], 7: [[0], [0]]})
    statistics = Bm25.of(*tokens_of(chunks))
    rules = modules["baselines"].Rules(chunks, statistics, load_tokenizer())
    found = numbers.habits(chunks, rules, LIMITS)
    assert (found["reading"], found["read"], found["agree"]) == (2, 3, 1)
    assert found["distances"] == [15, 10, 35]
    assert found["shared"]["recent"] == 2  # chunks 3 and 4, of the last two before chunk 5
    assert found["shared"]["random"] == pytest.approx(4 / 5 + 1 / 6)
    means = numbers.habit([{"habits": found}])
    assert (means["chunks_read"], means["agree"], means["shared"]["recent"]) == (1.5, 0.5, 2 / 3)
    assert means["distance"]["median"] == 15
    # chunk 7 reads chunk 0, chunk 6 before it did not; of 8 chunks 0, 3 and 4 are read, once each
    assert (means["kept"], means["never_read"], means["most_read"]) == (0, 5 / 8, 1 / 3)
    again = chunks_of(TEXT, {6: [[3], [4]], 7: [[3], [3]]})
    rules = modules["baselines"].Rules(again, statistics, load_tokenizer())
    means = numbers.habit([{"habits": numbers.habits(again, rules, LIMITS)}])
    assert (means["kept"], means["never_read"], means["most_read"]) == (1 / 3, 6 / 8, 2 / 3)


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


def test_the_document_has_its_cases(modules: dict[str, ModuleType]) -> None:
    record = read_json(modules["study"].OUTPUT)
    assert record["rule"] == modules["cases"].RULE
    for number in range(1, len(record["cases"]) + 1):
        assert (BENCHMARKS.parent / "docs" / f"case-study-{number}.png").stat().st_size <= 300_000


# --- what scores say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [{}, {"retrieval_normalization": True, "retrieval_scale": 4.0}])
def test_scores_are_the_models(modules: dict[str, ModuleType], rest: dict[str, Any]) -> None:
    """Its landmark vectors and its scores; a text that is too short says nothing."""
    model = drt(num_retrieval_groups=2, num_hidden_layers=4, num_lower_layers=2, **rest).float()
    S, vocabulary = model.config.chunk_size, model.config.vocab_size
    text = np.random.default_rng(0).integers(0, vocabulary, 20 * S + 1)
    ids = torch.from_numpy(text)[None]
    landmarks = model.encode(ids[:, : 20 * S]).landmarks[0].detach()
    found = modules["scores"].score_parts(model, [text, text[: 3 * S]])
    assert found["texts"] == 1
    scores = model(ids, output_retrieval_scores=True).retrieval_scores.scores
    assert found["groups"] == [parts_of(own[0].detach(), model.config) for own in scores]
    unit = torch.nn.functional.normalize(landmarks, dim=-1)
    cosines = [float(unit[a] @ unit[b]) for a in range(20) for b in range(20) if a != b]
    assert found["cosine"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert modules["scores"].score_parts(model, [text[: 3 * S], text[: S - 1]]) is None


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
    script = modules["study"]
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
    assert [step for step, _ in record["training"]["validation"]] == [2, 3]
    assert [chapter["file"] for chapter in record["chapters"]] == ["a_3.tex", "b_3.tex"]
    # in each chapter two references to the first label of the name
    assert [chapter["references"] for chapter in record["chapters"]] == [2, 2]
    assert record["hits"][0]["rules"]["model"][0][1] == 4
    header, entries = read_trace(tmp_path / "runs" / "traces" / "a_3.jsonl")
    text = "".join(entry.text for entry in entries if isinstance(entry, TracedChunk))
    assert text == (tmp_path / "data" / "math" / "test" / "a_3.tex").read_text()
    assert header.num_groups == record["groups"] == 2
    assert [len(record["scores"][name]["groups"]) for name in ("trained", "untrained")] == [2, 2]
    monkeypatch.setattr(script, "VARIANTS", {"scale-1": ("model.retrieval_scale=1.0",)})
    monkeypatch.setattr(script, "SHORT", ("training.steps=2",))
    script.CaseStudy(arguments).variants()
    (variant,) = read_json(arguments.output)["variants"]
    assert variant["training"]["steps"] == 2
    assert variant["label"]["model"][1] == 4
    monkeypatch.setattr(script, "VARIANTS", {"scale-1": ("model.retrieval_scale=2.0",)})
    with pytest.raises(SystemExit, match=r"with model\.retrieval_scale=2\.0, .*scale-1 holds one with 1\.0"):
        script.CaseStudy(arguments).variants()
    record |= {"variants": [variant]}
    texts = {name: make(record) for name, make in modules["document"].TEXTS.items()}
    assert len(texts["variants"].splitlines()) == 5
    assert "a_3.tex" in texts["chapters"]
    assert len(texts["found"].splitlines()) >= 4
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.jsonl")}
    kept |= {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "model").rglob("*.safetensors")}
    script.CaseStudy(arguments).run(("prepare", "train", "measure"))
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    again = read_json(arguments.output)
    assert again == record
    (tmp_path / "data" / "math" / "train" / "c_1.tex").write_text("more")
    with pytest.raises(ValueError, match="holds a corpus with source files"):
        script.CaseStudy(arguments).prepare()
