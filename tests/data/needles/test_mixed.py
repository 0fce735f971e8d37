"""Needles over samples of text: what is asked was told before, and the same whatever batch it comes in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.corpora import prose, save_chat_bpe
from tests.training.tiny import CHUNK_SIZE, run_config
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.needles.mixed import MixedNeedles
from trailmark.data.shards import Corpus
from trailmark.training.run import Run
from trailmark.training.tasks import TextTask

BYTES = load_tokenizer()
LENGTH = 2048


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_chat_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_what_is_asked_was_told_before(name: str, bpe: Any) -> None:
    tokenizer = BYTES if name == "bytes" else bpe
    needles = MixedNeedles(tokenizer, LENGTH, seed=3, share=1.0)
    text = torch.from_numpy(tokenize([prose(0, 4000)], tokenizer)[:LENGTH]).long()
    kinds, asked = set(), 0
    for sample in range(60):
        assert needles.holds(sample)
        ids = text.clone()
        marks, answers = needles.write(ids, sample)
        assert len(marks) == len(answers) >= 1
        assert len(ids) == LENGTH
        for mark, (first, stop) in zip(marks, answers, strict=True):
            assert mark + 1 < first < stop <= LENGTH  # a token of the cue reads what the landmark finds
            value = tokenizer.decode(ids[first:stop]).strip()
            before = tokenizer.decode(ids[: mark + 1])
            assert re.fullmatch(r"\d{4,7}", value)
            asked += 1
            (told,) = [place.start() for place in re.finditer(rf"\b{value}\b", before)]
            question = before[-160:]
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+", before[max(0, told - 90) : told + 90])
            assert any(own in question for own in names)
            cue = tokenizer.decode(ids[mark + 1 : first])
            kinds.add("line" if "Answer:" in cue else "turn" if "assistant" in cue else "sentence")
        assert bool((ids != text).any())
    assert asked > 100
    assert kinds == ({"line", "sentence"} if name == "bytes" else {"line", "sentence", "turn"})


def test_a_sample_is_a_function_of_the_seed_and_its_number(bpe: Any) -> None:
    text = torch.zeros(LENGTH, dtype=torch.int64)
    share = 0.25
    needles, again = (MixedNeedles(bpe, LENGTH, seed=3, share=share) for _ in range(2))
    held = [n for n in range(4000) if needles.holds(n)]
    assert held == [n for n in range(4000) if again.holds(n)]
    assert len(held) / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)
    rows = []
    for made, numbers in ((needles, [7, 8]), (again, [8, 7]), (MixedNeedles(bpe, LENGTH, 4, share), [7, 8])):
        own = {n: (text.clone(),) for n in numbers}
        rows.append({n: (made.write(ids, n), ids) for n, (ids,) in own.items()})
    for n in (7, 8):
        assert rows[0][n][0] == rows[1][n][0]
        assert torch.equal(rows[0][n][1], rows[1][n][1])
        assert not torch.equal(rows[0][n][1], rows[2][n][1])


def test_samples_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.needle_share: expected samples of at least"):
        MixedNeedles(BYTES, 200, seed=0, share=0.1)


def test_a_run_mixes_them_in(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose(1, 3000), encoding="utf-8")
    config = run_config(tmp_path / "run", "text", steps=2, tokens_per_step=1024, context_length=512)
    config.data.paths, config.data.needle_share = [str(tmp_path / "text.txt")], 1.0
    run = Run(config)
    batch = run.task.batch(1, 0, 2)
    needles = MixedNeedles(BYTES, 512, config.training.seed, 1.0)
    for row in range(2):
        ids = batch["input_ids"][row].clone()
        marks, _ = needles.write(ids, 2 + row)
        assert torch.equal(ids, batch["input_ids"][row])  # they stand there already
        assert bool(batch["close_chunk"][row, marks].all())
    run.train()
    assert run.finished


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("chunk_size", "weight"), [(1, 1.0), (CHUNK_SIZE, 7.0)])
def test_a_training_on_text_with_some_needles(separate: bool, chunk_size: int, weight: float) -> None:
    tokens = tokenize([prose(1, 3000)], BYTES)
    corpus = Corpus.of_tokens(tokens, list(range(0, len(tokens), 700)))
    length, rows = 1024, 6
    config = run_config(Path("unused"), "text", tokens_per_step=rows * length, context_length=length, seed=5)
    config.data.separate_documents, config.data.answer_weight = separate, weight
    plain = TextTask(config, corpus, chunk_size)
    needles = MixedNeedles(BYTES, length, 5, 0.4)
    mixed = TextTask(config, corpus, chunk_size, needles=needles)
    held = 0
    for step in range(4):
        one, other = mixed.batch(step, 0, rows), plain.batch(step, 0, rows)
        parts = [mixed.batch(step, first, 2) for first in range(0, rows, 2)]
        ids = one["input_ids"]
        assert torch.equal(ids, torch.cat([part["input_ids"] for part in parts]))
        assert torch.equal(ids, one["labels"])
        weights = torch.ones(ids.shape)
        assert ("close_chunk" in one) == (chunk_size > 1)
        for row in range(rows):
            sample = step * rows + row
            if not needles.holds(sample):
                assert torch.equal(ids[row], other["input_ids"][row])
                continue
            held += 1
            expected = other["input_ids"][row].clone()
            marks, answers = needles.write(expected, sample)
            assert torch.equal(ids[row], expected)
            for begin, end in answers:
                weights[row, begin:end] = weight
            if chunk_size > 1:
                assert bool(one["close_chunk"][row, marks].all())
            if separate:
                documents = one.get("document_ids", torch.zeros_like(ids))
                assert bool((documents[row] == 0).all())
        assert torch.equal(one["loss_weights"], weights)
    assert held > 3
