"""Published benchmarks of long texts: their files, their rules, one reading for all questions about a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.in_memory import InMemory
from tests.models.tiny import drt, hsa
from tests.training.tiny import prose
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation.subject import Subject
from trailmark.evaluation.yardsticks import formats
from trailmark.evaluation.yardsticks.formats import FORMATS, Extent, Question, questions_of
from trailmark.evaluation.yardsticks.run import run
from trailmark.evaluation.yardsticks.suite import BENCHMARKS, YardstickSettings

pytestmark = pytest.mark.usefixtures("one_thread", "no_restart")
BYTES = ByteTokenizer()


def longbench(folder: Path) -> None:
    rows = []
    for number in range(4):
        rows.append(
            {"_id": str(number), "domain": "Single-Document QA", "sub_domain": "Literary", "difficulty": "hard",
             "length": "short" if number < 3 else "long", "question": f"What is {number}?",
             **{f"choice_{letter}": f"it is {letter}" for letter in "ABCD"}, "answer": "ABCD"[number],
             "context": prose(2 if number < 2 else 3)}
        )  # fmt: skip
    (folder / "data.json").write_text(json.dumps(rows))


def babilong(folder: Path) -> None:
    for task, length in (("qa1", "1k"), ("qa1", "0k"), ("qa10", "0k"), ("qa2", "0k")):
        place = folder / "data" / task / f"{length}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        row = {"input": "Mary went to the kitchen.", "question": "Where is Mary?", "target": "kitchen"}
        place.write_text(json.dumps([row, row | {"question": "Where is she?"}]))


def mrcr(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "user", "content": "Write a poem"}, {"role": "assistant", "content": "Roses"},
             {"role": "user", "content": "Prepend aXb to the first poem"}]  # fmt: skip
    row = {"prompt": json.dumps(turns), "answer": "aXbRoses", "random_string_to_prepend": "aXb", "n_needles": 2,
           "desired_msg_index": 1, "total_messages": 3, "n_chars": 40}  # fmt: skip
    (folder / "2needle").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "2needle" / "2needle_0.parquet")


def nolima(folder: Path) -> None:
    needles = [
        {"id": "0401", "reasoning_type": "world_knowledge", "system_prompt": "",
         "needle": "Actually, {CHAR} lives next to {1}.", "character_set": ["Yuki", "Megan"],
         "questions": {"onehop": "Who has been to {2}?", "twohop": "Who has been to {3}?"},
         "tests": {"T1": {"input_args": ["the Kiasma museum", "Helsinki", "Uusimaa"]},
                   "T2": {"input_args": ["the Louvre", "Paris", "France"]}}},
        {"id": "0402", "reasoning_type": "commonsense", "system_prompt": "", "needle": "{CHAR} cannot eat {1}.",
         "character_set": ["Gary"], "questions": {"onehop": "Would {CHAR} have {2}?"},
         "task_template": "A book:\n{haystack}\nAsked: {question}",
         "tests": {"T1": {"input_args": ["fish", "sushi"], "gold_answers": ["no", "never"]}}},
    ]  # fmt: skip
    (folder / "needlesets").mkdir()
    (folder / "needlesets" / "needle_set.json").write_text(json.dumps(needles))
    books = folder / "haystack" / "rand_shuffle"
    books.mkdir(parents=True)
    for number in range(2):
        lines = "".join(f"Line {n} of book {number} says little.\n" for n in range(40))
        (books / f"rand_book_{number}.txt").write_text(lines)


FILES: dict[str, Callable[[Path], None]] = {
    "longbench-v2": longbench,
    "babilong": babilong,
    "mrcr": mrcr,
    "nolima": nolima,
}
ALL = Extent(BYTES, (200,))


def test_every_benchmark_has_a_format() -> None:
    assert set(FORMATS) == set(FILES) == set(BENCHMARKS)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("longbench-v2", {"short, hard": 3, "long, hard": 1}),
        ("babilong", {"qa1, 0k": 2, "qa1, 1k": 2, "qa2, 0k": 2, "qa10, 0k": 2}),
        ("mrcr", {"2 needles": 1}),
        ("nolima", {"200 tokens, onehop": 3 * 2 * 26, "200 tokens, twohop": 2 * 2 * 26}),
    ],
)
def test_files_are_read_as_published(name: str, parts: dict[str, int], tmp_path: Path) -> None:
    FILES[name](tmp_path)
    found = questions_of(name, tmp_path, ALL)
    assert {part: len(questions) for part, questions in found.items()} == parts
    assert list(found) == list(parts)
    assert all(
        len(questions) == 1 for questions in questions_of(name, tmp_path, ALL._replace(limit=1)).values()
    )


@pytest.mark.parametrize(
    ("name", "wanted", "generated", "score"),
    [
        ("longbench-v2", "B", "B) it is", 1),
        ("longbench-v2", "B", "A or B", 0),
        ("longbench-v2", "B", "none", 0),
        ("babilong", "kitchen", " The Kitchen.\nbedroom", 1),
        ("babilong", "kitchen", " bedroom\nkitchen", 0),
        ("babilong", "apple,milk", "milk and an apple", 1),
        ("nolima", '["Yuki", "Megan"]', " It is Megan.", 1),
        ("nolima", '["Yuki"]', "yuki", 0),
        ("mrcr", '["aXb", "aXbRoses"]', "aXbRoses", 1),
        ("mrcr", '["aXb", "aXbRoses"]', "Roses", 0),
        ("mrcr", '["aXb", "aXbRoses"]', "aXbRose", 2 * 4 / 9),
    ],
)
def test_what_is_right(name: str, wanted: str, generated: str, score: float) -> None:
    assert FORMATS[name].score(wanted, generated) == pytest.approx(score)


def test_nolimas_sentence_stands_between_lines_at_every_depth(tmp_path: Path) -> None:
    nolima(tmp_path)
    found = questions_of("nolima", tmp_path, ALL)
    depths, persons = set(), set()
    for question in found["200 tokens, twohop"]:
        (name,) = json.loads(question.wanted)
        persons.add(name)
        place = "the Kiasma museum" if "Uusimaa" in question.asked else "the Louvre"
        head, needle, tail = question.text.partition(f" Actually, {name} lives next to {place}.\n")
        assert needle
        # the tokens around it are the book's, of which the end of the line before it has become a space
        assert head == "" or len(head) + 1 + len(tail) == 200
        assert f"{head}\n{tail}".lstrip("\n") in whole(tmp_path, question)
        depths.add(round(25 * len(head) / 200))
    assert (depths, persons) == (set(range(26)), {"Yuki", "Megan"})
    (told,) = {question.asked for question in found["200 tokens, onehop"] if "Gary" in question.text}
    assert told == "\nAsked: Would Gary have sushi?"
    # as many as asked, of all needles and books, the same each time
    few = questions_of("nolima", tmp_path, ALL._replace(limit=12))
    assert (
        few
        == questions_of("nolima", tmp_path, ALL._replace(limit=12))
        != questions_of("nolima", tmp_path, ALL._replace(limit=12, seed=1))
    )
    assert {whole(tmp_path, q) for q in few["200 tokens, onehop"]} == {
        whole(tmp_path, q) for q in found["200 tokens, onehop"]
    }
    with pytest.raises(ValueError, match=r"^data: expected a book of at least 9,000 tokens .*--lengths"):
        questions_of("nolima", tmp_path, ALL._replace(lengths=(9000,)))


def whole(folder: Path, question: Question) -> str:
    """The book that a question's text is of."""
    number = question.text.partition("of book ")[2][0]
    return (folder / "haystack" / "rand_shuffle" / f"rand_book_{number}.txt").read_text()


@pytest.mark.parametrize("make", [drt, hsa])
def test_a_text_is_read_once_and_answers_are_those_of_the_whole_prompt(make: Any, tmp_path: Path) -> None:
    longbench(tmp_path)
    own, kept = Subject.of(make(vocab_size=len(BYTES)), BYTES, 4), InMemory()
    settings = YardstickSettings(benchmark="longbench-v2", data=tmp_path, max_new_tokens=3)
    short, long = run(own, settings, kept)  # type: ignore[arg-type]
    assert (short["questions"], short["readings"], long["questions"], long["readings"]) == (3, 2, 1, 1)
    questions = [q for part in questions_of("longbench-v2", tmp_path, ALL).values() for q in part]
    for question, line in zip(questions, kept.written, strict=True):
        ids = torch.tensor([BYTES(question.text + question.asked).input_ids])
        out = own.model.generate(
            ids, max_new_tokens=3, do_sample=False, eos_token_id=BYTES.eos_token_id, pad_token_id=0
        )
        assert line["generated"] == BYTES.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^benchmark: expected one of longbench-v2"):
        YardstickSettings(data=tmp_path)
    with pytest.raises(ValueError, match=r"^lengths: expected none for mrcr"):
        YardstickSettings(benchmark="mrcr", data=tmp_path, lengths=(100,))
    with pytest.raises(ValueError, match=r"^data: expected the folder"):
        YardstickSettings(benchmark="mrcr")
    with pytest.raises(ValueError, match=r"^data: expected data/qa1/4k.json .* got no such file"):
        questions_of("babilong", tmp_path, ALL)
    with pytest.raises(ValueError, match=r"^data: cannot read .*data\.json"):
        questions_of("longbench-v2", tmp_path, ALL)
    (tmp_path / "data.json").write_text('[{"length": "short"}]')
    with pytest.raises(
        ValueError, match=r"^data: expected the fields of longbench-v2 .*rows without 'choice_A'"
    ):
        questions_of("longbench-v2", tmp_path, ALL)


@pytest.mark.parametrize("letter", ["\u2028", "\x85"])
def test_a_line_of_json_ends_at_its_line_end(letter: str, tmp_path: Path) -> None:
    row = {"input": f"a{letter}b", "question": "q", "target": "t"}
    (tmp_path / "0k.json").write_text(f"{json.dumps(row, ensure_ascii=False)}\n" * 2, encoding="utf-8")
    assert formats._rows(tmp_path / "0k.json") == [row, row]
