"""Summaries that a model writes, against references: ROUGE on text (Lin, 2004), by Google's rouge-score.

What a model is asked is what it was fine-tuned on (:mod:`trailmark.data.summarization`): ``document|Summary*:``, where
``*`` is an early landmark. What it writes up to the end of the text is decoded and scored as text, never as tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from trailmark.data.batches import mix
from trailmark.data.corpus import Tokens, padding_id, tokenize, tokenize_parts, tokenizer_fingerprint
from trailmark.data.summarization import Pairs
from trailmark.evaluation.protocols import PUBLISHED
from trailmark.evaluation.record import Part, Record
from trailmark.evaluation.subject import Subject, generating_by
from trailmark.evaluation.summarization.suite import PROTOCOL, SummarizationSettings
from trailmark.statistics import bootstrap_mean

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_PARTS, _MEASURES = ("f", "precision", "recall"), ("fmeasure", "precision", "recall")
_BLOCK = 64  # documents that a kill can cost


def run(
    subject: Subject,
    settings: SummarizationSettings,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Summaries of all documents, measured or found in the record, and the total of them.

    Documents are measured in blocks of 64, each kept when it is done (``settings["block"]``: its first document and
    the one after its last), with what was written: ``number`` of the document among the pairs, ``generated``,
    ``reference``, ``tokens``, ``ended`` (False: cut at ``max_new_tokens``), ``cut`` (the document lost its end) and
    its ROUGE F-measures. The total's result has ``documents``, ``rouge1``, ``rouge2``, ``rougeL`` and ``rougeLsum``
    (sentences are lines), each with ``f`` (0 to 1), its 95% interval ``low`` to ``high`` over documents drawn again,
    ``precision`` and ``recall``; ``tokens`` (mean of a summary), ``ended`` and ``cut`` (shares of the documents),
    ``unseen`` (references without a word of a to z or a digit, for which rouge-score gives 0), ``seconds_writing`` and
    ``published``, rows of the protocol's paper in percent.

    Returns:
        The total alone, in a list.

    Raises:
        ValueError: no rouge-score; pairs as :class:`trailmark.data.summarization.Pairs`, or whose summaries it sees
            nothing of; a tokenizer that cannot end a text; a context too short for the cue and a summary.
    """
    scorer = rouge_scorer(settings.stemmer)
    pairs = Pairs(settings.pairs, settings.document_column, settings.summary_column)
    writer = _Writer(subject, settings)
    documents = min(len(pairs), settings.limit or len(pairs))
    unseen = _unseen(pairs, documents)
    asked: dict[str, Any] = {
        "suite": "summarization",
        "protocol": settings.protocol,
        "pairs": pairs.fingerprint,
        "tokenizer": tokenizer_fingerprint(subject.tokenizer),
        "prompt": "document|Summary*:",
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "context_length": writer.context_length,
        "stemmer": settings.stemmer,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
    if writer.begin:
        asked["begin"] = writer.begin
    parts = []
    for first in range(0, documents, _BLOCK):
        stop = min(documents, first + _BLOCK)
        block = _Block(range(first, stop), pairs, writer, scorer)

        def tell(done: int, first: int = first) -> None:
            progress(f"summaries: {first + done:,} of {documents:,} documents")

        parts.append(Part(asked | {"block": [first, stop]}, partial(block.measure, tell), block.written))
    blocks = record.measure_all(parts)
    progress(f"summaries: {documents:,} of {documents:,} documents")
    total = asked | {"block": None, "documents": documents}
    return [record.measure(total, lambda: _total(blocks, settings) | {"unseen": unseen})]


class _Block:
    """Some documents, summarised and scored."""

    def __init__(self, numbers: range, pairs: Pairs, writer: _Writer, scorer: Any) -> None:
        self.numbers, self._pairs, self._writer, self._scorer = numbers, pairs, writer, scorer
        self._lines: list[dict[str, Any]] = []

    def measure(self, progress: Callable[[int], None]) -> dict[str, Any]:
        chosen = [self._pairs[number] for number in self.numbers]
        texts = self._writer.write([pair.document for pair in chosen], self.numbers.start, progress)
        scores = []
        for number, pair, written in zip(self.numbers, chosen, texts, strict=True):
            found = self._scorer.score(pair.summary, written["generated"])
            each = [[float(getattr(found[name], part)) for part in _MEASURES] for name in ROUGE]
            scores.append(each)
            measures = {name: values[0] for name, values in zip(ROUGE, each, strict=True)}
            self._lines.append({"number": number, "reference": pair.summary} | written | measures)
        return {
            "documents": len(self.numbers),
            "scores": scores,  # [documents, 4 of ROUGE, f precision recall]
            "written": [[line["tokens"], line["ended"], line["cut"]] for line in self._lines],
        }

    def written(self) -> list[dict[str, Any]]:
        return self._lines


def _total(blocks: Sequence[dict[str, Any]], settings: SummarizationSettings) -> dict[str, Any]:
    scores = np.concatenate([np.array(block["scores"], np.float64) for block in blocks])
    written = np.concatenate([np.array(block["written"], np.float64) for block in blocks])
    low, high = bootstrap_mean(scores[:, :, 0], settings.seed)
    means = scores.mean(0)
    found: dict[str, Any] = {"documents": len(scores)}
    for place, name in enumerate(ROUGE):
        found[name] = dict(zip(_PARTS, map(float, means[place]), strict=True))
        found[name] |= {
            end: None if math.isnan(value[place]) else min(1.0, max(0.0, float(value[place])))
            for end, value in (("low", low), ("high", high))
        }
    tokens, ended, cut = map(float, written.mean(0))
    found |= {"tokens": tokens, "ended": ended, "cut": cut}
    found["seconds_writing"] = sum(block["seconds"] for block in blocks)
    return found | {"published": PUBLISHED[PROTOCOL] if settings.protocol == PROTOCOL else []}


def rouge_scorer(stemmer: bool = True) -> Any:
    """rouge-score's scorer of :data:`ROUGE`: ``score(reference, text)``. It needs no network.

    Raises:
        ValueError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(
            "suite: summaries are scored by rouge-score, which is not installed. pip install 'trailmark[rouge]'"
        ) from error
    return RougeScorer(list(ROUGE), use_stemmer=stemmer)


def _unseen(pairs: Pairs, documents: int) -> int:
    """How many summaries rouge-score takes for empty: its words are of a to z and 0 to 9 alone.

    Raises:
        ValueError: all of them.
    """
    from rouge_score.tokenizers import DefaultTokenizer

    words = DefaultTokenizer(use_stemmer=False)
    unseen = sum(not words.tokenize(pairs[number].summary) for number in range(documents))
    if unseen == documents:
        raise ValueError(
            "pairs: expected summaries with words of a to z or digits, all that rouge-score counts, got none in "
            f"{documents:,} (the first: {pairs[0].summary[:40]!r}): ROUGE would be 0 whatever is written. Choose "
            "others, or another measure."
        )
    return unseen


class _Writer:
    """Writes summaries in batches, each row as if it were alone."""

    def __init__(self, subject: Subject, settings: SummarizationSettings) -> None:
        self.model, self.tokenizer, self.ours = subject.model, subject.tokenizer, subject.ours
        self.settings = settings
        self._generating = generating_by(self.model, GenerationConfig())
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: expected one with an end-of-text token, which ends a summary, got none. Set eos_token."
            )
        self._before, self._after = tokenize_parts(["|Summary", ":"], self.tokenizer)
        self.begin = [] if self.ours else subject.beginning  # as training has them
        self.context_length = settings.context_length
        longest = subject.longest_text
        if self.context_length is None:
            trained = subject.run.get("training", {}).get("context_length")
            self.context_length = trained if subject.task == "summarization" else longest
        if longest is not None and (self.context_length or 0) > longest:
            raise ValueError(
                f"context_length: expected at most the {longest:,} tokens that {subject.name!r} takes, got "
                f"{self.context_length:,}."
            )
        if self._room is not None and self._room < 1:
            assert self.context_length is not None
            raise ValueError(
                f"context_length: expected more than {self.context_length - self._room:,} tokens, for the cue and "
                f"{settings.max_new_tokens:,} new ones, got {self.context_length:,}. Choose a longer context, or fewer "
                "new tokens."
            )

    @property
    def _room(self) -> int | None:
        """Tokens of a document."""
        if self.context_length is None:
            return None
        cue = len(self.begin) + len(self._before) + len(self._after)
        return self.context_length - cue - self.settings.max_new_tokens

    def write(
        self, texts: Sequence[str], first: int, progress: Callable[[int], None]
    ) -> Iterator[dict[str, Any]]:
        """What is written of each text, in their order; ``first`` numbers the texts, for sampling."""
        documents = [tokenize([text], self.tokenizer) for text in texts]
        # rows of like length together: little padding
        order = np.argsort([len(document) for document in documents], kind="stable")
        found: list[dict[str, Any]] = [{}] * len(texts)
        with torch.random.fork_rng():
            torch.manual_seed(mix(self.settings.seed, first) % 2**63)
            for start in range(0, len(order), self.settings.batch_size):
                rows = order[start : start + self.settings.batch_size]
                progress(start)
                written = self._write_batch([documents[n][: self._room] for n in rows])
                for n, ids in zip(rows, written, strict=True):
                    found[n] = self._decoded(ids) | {"cut": self._is_cut(documents[n])}
        return iter(found)

    def _is_cut(self, document: Tokens) -> bool:
        return self._room is not None and len(document) > self._room

    @torch.no_grad()
    def _write_batch(self, documents: Sequence[Tokens]) -> list[list[int]]:
        settings, tokenizer = self.settings, self.tokenizer
        absent = padding_id(tokenizer)
        options: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": absent,
            "do_sample": settings.temperature > 0,
        }
        if settings.temperature > 0:
            options |= {"temperature": settings.temperature, "top_k": settings.top_k or 0}
        cue = torch.from_numpy(self._after).to(self.model.device).expand(len(documents), -1)
        if self.ours:
            ids, mask = self._padded([np.concatenate([text, self._before]) for text in documents], absent)
            cache = self.model.new_cache(num_tokens=ids.shape[1])
            text = ids.shape[1] - len(self._before)
            self.model.read(ids[:, :text], cache, mask[:, :text])  # of any length
            if len(self._before) > 1:
                self.model.read(ids[:, text:-1], cache, mask[:, text:-1], prompt=True)
            # the landmark stands before the cue, as in training: what it finds serves the summary from the cue on
            self.model(ids[:, -1:], past_key_values=cache, close_chunk=True, logits_to_keep=1)
            prompt = cue
            out = self._generating.generate(
                cue, attention_mask=torch.ones_like(cue), past_key_values=cache, close_chunk=False, **options
            )
        else:
            begin = np.array(self.begin, np.int32)
            prompt, mask = self._padded(
                [np.concatenate([begin, text, self._before, self._after]) for text in documents], absent
            )
            out = self._generating.generate(prompt, attention_mask=mask, **options)
        return out[:, prompt.shape[1] :].tolist()

    def _padded(self, rows: Sequence[Any], absent: int) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T], padded on the left."""
        width = max(map(len, rows))
        ids, mask = torch.full((len(rows), width), absent), torch.zeros(len(rows), width, dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, width - len(row) :] = torch.from_numpy(row.astype(np.int64))
            mask[n, width - len(row) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)

    def _decoded(self, ids: list[int]) -> dict[str, Any]:
        end = self.tokenizer.eos_token_id
        ended = end in ids
        own = ids[: ids.index(end)] if ended else ids
        text = self.tokenizer.decode(own, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return {"generated": text.strip(), "tokens": len(own), "ended": ended}
