"""Summaries: what a model writes is what it would write alone, step by step; ROUGE is rouge-score's."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import ByT5Tokenizer, LlamaForCausalLM

from tests.evaluation.foreign import llama
from tests.models.tiny import block_recurrent, drt, landmark, window_model
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.summarization import Pairs, SummarizationTexts
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject
from trailmark.evaluation.summarization import run as summarization
from trailmark.evaluation.summarization.run import ROUGE, SummarizationSettings, rouge_scorer, run
from trailmark.statistics import bootstrap_mean

BYTES = load_tokenizer()
WORDS = ["river", "boats", "sing", "old", "the", "stones"]
NEW = 7  # tokens of a summary


def stories(count: int) -> list[tuple[str, str]]:
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    return [(words(9), words(5)) for _ in range(count)]


def write(path: Path, pairs: Sequence[tuple[str, str]]) -> str:
    lines = [json.dumps({"document": document, "summary": summary}) for document, summary in pairs]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def repeating(positions: int = 256) -> LlamaForCausalLM:
    model = llama(positions, 40)
    model.generation_config.repetition_penalty = 5.0  # of its files: a summary is written without
    return model


def ending_in(token: str | None) -> Any:
    """Bytes, with another end of a text."""
    tokenizer = ByT5Tokenizer()
    tokenizer.eos_token = token
    return tokenizer


# of those that write something different each time; Landmark Attention with as many chunks as a text has
MAKERS: dict[str, Callable[[], Any]] = {
    "drt": lambda: drt(2, seed=2, vocab_size=259),
    "window": lambda: window_model(seed=2, vocab_size=259),
    "landmark": lambda: landmark(seed=11, vocab_size=259, num_retrieved_chunks=40),
    "block recurrent": lambda: block_recurrent(seed=2, vocab_size=259),
    "llama": repeating,
}


def summarise(
    folder: Path, model: Any, pairs: Sequence[tuple[str, str]], tokenizer: Any = BYTES, **asked: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], Record]:
    """The total, what was written, and the record."""
    folder.mkdir(exist_ok=True)
    subject = Subject(folder, model, tokenizer, asked.pop("run", {}))
    record = Record(folder, "summarization", subject.identity())
    settings = SummarizationSettings(
        (write(folder / "pairs.jsonl", pairs),), **({"max_new_tokens": NEW} | asked)
    )
    (found,) = run(subject, settings, record)
    blocks = [result for result in record.results if result["settings"]["block"] is not None]
    lines = [line for block in blocks for line in record.generations(block)]
    return found, lines, record


@torch.no_grad()
def greedily(model: Any, document: str) -> list[int]:
    """One text after another without a cache: the document, a landmark before the cue's ":", and what follows."""
    before = tokenize([document + "|Summary"], BYTES).tolist()
    ids, own = before + tokenize([":"], BYTES).tolist(), []
    for _ in range(NEW):
        row = torch.tensor([ids + own])
        close = torch.zeros_like(row, dtype=torch.bool)
        close[0, len(before) - 1] = True
        more = {} if isinstance(model, LlamaForCausalLM) else {"close_chunk": close}
        own.append(int(model(row, **more).logits[0, -1].argmax()))
    return own


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.sampled(5)
def test_what_is_written_is_what_each_text_alone_gives(name: str, tmp_path: Path) -> None:
    model, pairs = MAKERS[name](), stories(5)
    alone = [greedily(model, document) for document, _ in pairs]
    # a token that some of them write ends a text, so that rows end at different times
    end = next(token for row in alone for token in row[1:] if 3 <= token < 131 and token not in row[:1])
    tokenizer = ending_in(chr(end - 3))
    assert tokenizer.eos_token_id == end
    alone = [row[: row.index(end)] if end in row else row for row in alone]
    _, lines, _ = summarise(tmp_path, model, pairs, tokenizer, batch_size=3)
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4]
    for line, ids, (_, reference) in zip(lines, alone, pairs, strict=True):
        assert line["tokens"] == len(ids)
        assert line["generated"] == tokenizer.decode(ids, skip_special_tokens=True).strip()
        assert line["reference"] == reference
        assert line["ended"] == (len(ids) < NEW)
        assert not line["cut"]
    assert len({tuple(ids) for ids in alone}) > 1
    assert any(line["ended"] for line in lines)


def test_rouge_is_that_of_rouge_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = stories(70)
    texts = [reference if n % 3 else document for n, (document, reference) in enumerate(pairs)]
    written = {n: text + ("\nrunning stones" if n % 2 else "") for n, text in enumerate(texts)}

    def write_known(writer: Any, documents: Sequence[str], first: int, progress: Any) -> Any:
        return iter(
            {"generated": written[first + n], "tokens": n, "ended": n % 2 == 0, "cut": False}
            for n in range(len(documents))
        )

    # what a model writes does not enter here: texts between all and nothing of the reference
    monkeypatch.setattr(summarization._Writer, "write", write_known)
    for stemmer in (True, False):
        found, lines, _ = summarise(
            tmp_path / str(stemmer), window_model(vocab_size=259), pairs, stemmer=stemmer
        )
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=stemmer)
        direct = [scorer.score(reference, written[n]) for n, (_, reference) in enumerate(pairs)]
        for name in ROUGE:
            for part, attribute in (("f", "fmeasure"), ("precision", "precision"), ("recall", "recall")):
                mean = np.mean([getattr(score[name], attribute) for score in direct])
                assert found[name][part] == pytest.approx(mean, abs=1e-12)
            each = [score[name].fmeasure for score in direct]
            assert [line[name] for line in lines] == each
            assert (found[name]["low"], found[name]["high"]) == pytest.approx(bootstrap_mean(each))
            assert 0 < found[name]["low"] < found[name]["f"] < found[name]["high"] < 1
        assert found["documents"] == 70


def test_rouge_by_hand() -> None:
    found = rouge_scorer().score("The cats sat on the mat.", "a cat sat on mats")
    # of 6 and 5 words, cat(s), sat, on and mat(s) are in both: 4 of them; "cat sat" and "sat on" of 5 and 4 pairs
    assert found["rouge1"].fmeasure == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    assert found["rouge2"].fmeasure == pytest.approx(2 * (2 / 4) * (2 / 5) / (2 / 4 + 2 / 5))
    assert found["rougeL"].fmeasure == found["rouge1"].fmeasure
    plain = rouge_scorer(stemmer=False).score("The cats sat on the mat.", "a cat sat on mats")
    assert plain["rouge1"].fmeasure == pytest.approx(2 * (2 / 5) * (2 / 6) / (2 / 5 + 2 / 6))


def test_blocks_go_on_where_they_were_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarization, "_BLOCK", 3)
    pairs, model = stories(8), MAKERS["window"]()
    options = {"temperature": 1.0, "top_k": 5, "batch_size": 2, "seed": 4}
    whole, lines, record = summarise(tmp_path / "whole", model, pairs, **options)
    assert [result["settings"]["block"] for result in record.results] == [[0, 3], [3, 6], [6, 8], None]

    class Killed(Exception):
        pass

    subject = Subject(tmp_path, model, BYTES, {})
    file = write(tmp_path / "pairs.jsonl", pairs)
    settings = SummarizationSettings((file,), max_new_tokens=NEW, **options)

    def kill_at_six(message: str) -> None:
        if message.startswith("summaries: 6"):
            raise Killed

    with pytest.raises(Killed):
        run(subject, settings, Record(tmp_path, "summarization", subject.identity()), kill_at_six)
    again = Record(tmp_path, "summarization", subject.identity())
    assert [result["settings"]["block"] for result in again.results] == [[0, 3], [3, 6]]
    (found,) = run(subject, settings, again)
    for key in (*ROUGE, "tokens", "ended"):
        assert found[key] == whole[key]
    ours = [line["generated"] for result in again.results for line in again.generations(result)]
    assert ours == [line["generated"] for line in lines]
    # other draws write other texts
    _, others, _ = summarise(tmp_path / "other", model, pairs, **(options | {"seed": 5}))
    assert ours != [line["generated"] for line in others]


@pytest.mark.slow
def test_a_model_that_learned_its_pairs(tmp_path: Path) -> None:
    """Trained on rows as trailmark train makes them, it is asked what it was taught."""
    pairs = [(document, "the boats sing") for document, _ in stories(12)]
    texts = SummarizationTexts(BYTES, Pairs([write(tmp_path / "train.jsonl", pairs)]), 80)
    torch.manual_seed(0)
    model = window_model(vocab_size=259, sliding_window=30).float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        batch = texts.batch(8 * step, 8)
        labels = batch["labels"].masked_fill(~batch["answers"], -100)
        arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "close_chunk")}
        loss = model(**arguments, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found, lines, _ = summarise(tmp_path / "asked", model.eval(), pairs, max_new_tokens=30)
    assert {line["generated"] for line in lines} == {"the boats sing"}
    assert found["ended"] == 1
    for name in ROUGE:
        assert found[name] == {"f": 1, "precision": 1, "recall": 1, "low": 1, "high": 1}
    assert found["tokens"] == len("the boats sing")


def test_long_documents_lose_their_end(tmp_path: Path) -> None:
    model, (long, reference) = MAKERS["drt"](), (" ".join(WORDS * 3), "river")
    cue = len("|Summary:")
    room = 40
    pairs = [(long, reference), (long[:room], reference), (long[: room - 1], reference)]
    found, lines, _ = summarise(tmp_path / "asked", model, pairs, context_length=room + cue + NEW)
    assert [line["cut"] for line in lines] == [True, False, False]
    assert found["cut"] == pytest.approx(1 / 3)
    assert lines[0]["generated"] == lines[1]["generated"]
    # as in its training, where that was on summaries
    trained = {"data": {"task": "summarization"}, "training": {"context_length": room + cue + NEW}}
    again = summarise(tmp_path / "trained", model, pairs, run=trained)[1]
    assert [line | {"id": 0} for line in again] == [line | {"id": 0} for line in lines]
    # else documents are read whole, by a model of transformers as far as it can tell places
    assert not any(line["cut"] for line in summarise(tmp_path / "whole", model, pairs)[1])
    short = summarise(tmp_path / "llama", repeating(room + cue + NEW), pairs)[1]
    assert [line["cut"] for line in short] == [True, False, False]


def test_a_tokenizer_that_puts_a_token_before_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.evaluation.subject.beginning", lambda tokenizer: [7])
    model, pairs = repeating(60), stories(2)
    document = pairs[0][0]
    with torch.no_grad():
        ids = [7, *tokenize([document + "|Summary:"], BYTES).tolist()]
        own = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, repetition_penalty=1.0, eos_token_id=1
        )[0, len(ids) :].tolist()
    _, lines, record = summarise(tmp_path, model, pairs, limit=1)
    end = own.index(1) if 1 in own else NEW
    assert lines[0]["generated"] == BYTES.decode(own[:end], skip_special_tokens=True).strip()
    assert record.results[0]["settings"]["begin"] == [7]
    ours = summarise(tmp_path / "ours", MAKERS["drt"](), pairs)[2]  # they learn without
    assert "begin" not in ours.results[0]["settings"]


def test_the_papers_protocol(tmp_path: Path) -> None:
    settings = SummarizationSettings(("pairs.jsonl",), protocol="paper-table-2")
    assert (settings.max_new_tokens, settings.temperature, settings.top_k) == (128, 1.0, 2)
    found, lines, _ = summarise(
        tmp_path, MAKERS["window"](), stories(2), protocol="paper-table-2", max_new_tokens=128
    )
    assert len(found["published"]) == 10
    assert {row["data"] for row in found["published"]} == {"xsum", "cnn_dailymail"}
    assert found["settings"]["top_k"] == 2
    assert all(line["tokens"] <= 128 for line in lines)


def test_one_document_has_no_interval(tmp_path: Path) -> None:
    found, lines, _ = summarise(tmp_path, MAKERS["window"](), stories(5), limit=1)
    assert (found["documents"], len(lines)) == (1, 1)
    assert found["rouge1"]["low"] is found["rouge1"]["high"] is None


# Bad input

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pairs": ({"pairs": ()}, "pairs: expected files of documents and summaries, got none"),
    "limit": ({"limit": 0}, "limit: expected 1 or more, got 0"),
    "new tokens": ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, got 0"),
    "temperature": ({"temperature": -1.0}, "temperature: expected 0 or more, got -1"),
    "no number": ({"temperature": math.nan}, "temperature: expected a number, got nan"),
    "top_k": ({"top_k": 2}, "top_k: expected none at temperature 0"),
    "protocol": ({"protocol": "gca-table-1"}, "protocol: expected one of 'paper-table-2'"),
    "protocol and more": (
        {"protocol": "paper-table-2", "max_new_tokens": 64},
        "protocol: 'paper-table-2' samples 128 tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_go_together(case: str) -> None:
    asked, said = WRONG[case]
    with pytest.raises(ValueError, match=said):
        SummarizationSettings(**({"pairs": ("pairs.jsonl",)} | asked))


def test_what_cannot_be_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = window_model(vocab_size=259)
    with pytest.raises(
        ValueError, match="context_length: expected more than 16 tokens, for the cue and 7 new"
    ):
        summarise(tmp_path, model, stories(2), context_length=16)
    with pytest.raises(ValueError, match="context_length: expected at most the 256 tokens"):
        summarise(tmp_path, repeating(), stories(2), context_length=257)
    with pytest.raises(ValueError, match="tokenizer: expected one with an end-of-text token"):
        summarise(tmp_path, model, stories(2), ending_in(None))
    # rouge-score sees nothing of other alphabets: a 0 would say nothing of the model
    unseen = [("a river", "河流与船"), ("a boat", "лодка"), *stories(2)]
    with pytest.raises(
        ValueError, match=r"pairs: expected summaries with words .* none in 2 \(the first: '河流与船'"
    ):
        summarise(tmp_path, model, unseen, limit=2)
    assert [summarise(tmp_path, model, unseen, limit=n)[0]["unseen"] for n in (3, 4)] == [2, 2]
    subject = Subject(tmp_path, model, BYTES, {})
    record = Record(tmp_path, "summarization", subject.identity())
    with pytest.raises(ValueError, match="data: expected a file or folder of pairs"):
        run(subject, SummarizationSettings((str(tmp_path / "none.jsonl"),)), record)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"pip install 'trailmark\[rouge\]'"):
        summarise(tmp_path, model, stories(2))
