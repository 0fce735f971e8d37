"""Following a model while it reads: what each chunk reads, and what each token costs with retrieval and without.

Two forwards run side by side, each on a cache of its own: the model's, and that of the same weights with retrieval
off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.memory import ChunkCache
from trailmark.models import architectures
from trailmark.trace.lines import Entry, Floats, Integers, Read, TracedChunk, TraceSource
from trailmark.trace.losses import piece_losses
from trailmark.trace.token_texts import START, TextState, texts_of

_PIECE = 4096  # tokens at once, as ``model.read`` takes them


class Subject(Protocol):
    """A model that is traced, its tokenizer, and what a trace says of it."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def folder(self) -> Path: ...

    @property
    def beginning(self) -> list[int]:
        """Tokens that its texts begin with."""

    @property
    def ours(self) -> bool:
        """Whether it has trailmark's caches and retrieval."""

    def identity(self) -> dict[str, Any]:
        """Its name, folder, architecture, parameters and weights."""

    def environment(self) -> dict[str, Any]:
        """Versions and hardware, and the date."""


@dataclass(frozen=True)
class Moment:
    """All that goes on from one piece of the text to the next, beside the caches. Replaced as one."""

    tokens: int  # read
    number: int  # of the first chunk that is not finished
    ids: Integers  # [n] of that chunk and those after it
    losses: Floats  # [n]
    losses_without: Floats  # [n]
    text: str  # of the first of these tokens, those of
    widths: Integers  # [m]: characters that begin in each
    texts: TextState
    reads: tuple[tuple[Read, ...], ...]  # of the same chunks, and of the one that opens next
    last: Tensor | None = None  # [1, 1, V] logits that predict the next token
    last_without: Tensor | None = None
    entries: tuple[Entry, ...] = ()  # finished, not taken yet


class Tracer:
    """Reads a text piece by piece and gives its chunks as they are finished.

    A chunk is finished when it is closed and its text is known: a character that begins in its last token may end in
    the next chunk.

    Args:
        subject: the model, of those that retrieve, in eval mode, and its tokenizer.
        cache: of the model, fresh; to go on, as the tracer left it whose ``moment`` and ``cache_without`` are then set.

    Raises:
        ValueError: a model that retrieves nothing.
    """

    def __init__(self, subject: Subject, cache: ChunkCache) -> None:
        expect_retrieval(subject)
        self.model, self.cache = subject.model, cache
        self.without = subject.model.without_retrieval()
        self.cache_without = self.without.new_cache()
        self.chunk_size = int(subject.model.config.chunk_size)
        self._texts, self._reads = texts_of(subject.tokenizer), subject.model.follow_reads()
        nothing = np.zeros(0)
        self.moment = Moment(0, 0, START.ids, nothing, nothing, "", START.ids, START, self._reads.begin())

    def pieces(self, ids: Tokens) -> Iterator[Tokens]:
        """Tokens [n] cut as ``model.read`` cuts them: so the memory's bits are those of a reading without a trace."""
        size, unit = self.model.reading_piece(_PIECE), self.model.reading_piece(1)
        opened, first = self.moment.tokens % unit, 0
        while len(ids) - first > size:
            yield ids[first : first + size - opened]
            first, opened = first + size - opened, 0
        yield ids[first:]

    def feed(self, piece: Tokens, source: TraceSource | None = None) -> None:
        """Read tokens [n] at once: one of :meth:`pieces`. ``source``: they begin a file.

        A call that is stopped (Ctrl-C, an error) changes nothing.

        Raises:
            ValueError: tokens outside the vocabulary; losses that are not finite.
        """
        before = self.moment, self.cache.state, self.cache_without.state
        try:
            self.moment = self._after(piece, source)
        except BaseException:
            self.moment, self.cache.state, self.cache_without.state = before
            raise

    def take(self) -> list[Entry]:
        """What was finished since the last call: chunks, and before the one that a file begins in, its source."""
        entries = self.moment.entries
        self.moment = replace(self.moment, entries=())
        return list(entries)

    def rest(self) -> list[TracedChunk]:
        """What is not finished, as it is if the text ends here; nothing changes, and reading may go on."""
        if not len(self.moment.ids):
            return []
        text, widths, _ = self._texts.settle(self.moment.texts, START.ids, last=True)
        moment = self.moment
        moment = replace(moment, text=moment.text + text, widths=np.concatenate([moment.widths, widths]))
        return list(self._chunks(moment, -(-len(moment.ids) // self.chunk_size)))

    # --- a piece -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _after(self, piece: Tokens, source: TraceSource | None) -> Moment:
        moment = self.moment
        own = piece.astype(np.int64)
        ids = torch.from_numpy(own)[None].to(self.model.device)
        out = self.model(ids, past_key_values=self.cache, output_retrieval=True)
        reads = self._reads.add(moment.reads, out.retrieval, moment.tokens, len(piece))
        losses, last = piece_losses(out.logits, moment.last, ids)
        del out  # logits are the most of what is held
        logits = self.without(ids, past_key_values=self.cache_without).logits
        losses_without, last_without = piece_losses(logits, moment.last_without, ids)
        text, widths, texts = self._texts.settle(moment.texts, own)
        grown = Moment(
            moment.tokens + len(piece),
            moment.number,
            np.concatenate([moment.ids, own]),
            _joined(moment.losses, losses[0]),
            _joined(moment.losses_without, losses_without[0]),
            moment.text + text,
            np.concatenate([moment.widths, widths]),
            texts,
            reads,
            last,
            last_without,
            moment.entries if source is None else (*moment.entries, source),
        )
        return self._finished(grown)

    def _finished(self, moment: Moment) -> Moment:
        """With the chunks that are complete among the entries."""
        count = len(moment.widths) // self.chunk_size
        if not count:
            return moment
        n = count * self.chunk_size
        return replace(
            moment,
            number=moment.number + count,
            ids=moment.ids[n:],
            losses=moment.losses[n:],
            losses_without=moment.losses_without[n:],
            text=moment.text[int(moment.widths[:n].sum()) :],
            widths=moment.widths[n:],
            reads=moment.reads[count:],
            entries=(*moment.entries, *self._chunks(moment, count)),
        )

    def _chunks(self, moment: Moment, count: int) -> Iterator[TracedChunk]:
        """The first chunks that are not finished."""
        S = self.chunk_size
        places = np.concatenate([[0], np.cumsum(moment.widths)])  # characters before each token
        for n in range(count):
            part = slice(n * S, min((n + 1) * S, len(moment.ids)))
            length = part.stop - part.start
            begin = int(places[part.start])
            yield TracedChunk(
                moment.number + n,
                (moment.number + n) * S,
                length == S,
                moment.ids[part],
                moment.text[begin : int(places[part.stop])],
                places[part] - begin,
                self._reads.finish(moment.reads[n], length),
                moment.losses[part],
                moment.losses_without[part],
            )


def expect_retrieval(subject: Subject) -> None:
    """A ValueError where a model retrieves nothing, or is none of ours."""
    known = getattr(subject.model.config, "num_retrieved_chunks", None) if subject.ours else None
    if not known:
        why = " with num_retrieved_chunks 0" if known == 0 else ""
        retrieve = [name for name, model in architectures().items() if model.config_class().keeps_chunks]
        raise ValueError(
            f"model: expected one that retrieves chunks ({', '.join(retrieve)}), "
            f"{str(subject.folder)!r} holds a {type(subject.model).__name__}{why}, which retrieves nothing: there is "
            "nothing to trace. Choose another model."
        )


def expect_choice(subject: Subject) -> None:
    """A ValueError where what a text's reading left in a memory is not what a trace of it tells."""
    if not subject.model.reads_as_it_predicts:
        raise ValueError(
            f"trace: expected a model that chooses chunks while it reads, {str(subject.folder)!r} reads with windows "
            "alone (reading in its config.json): of what went into a memory there is nothing to trace. Leave --trace "
            "out, or name texts instead of a memory, which are traced as they are predicted."
        )


def _joined(before: Floats, after: Floats) -> Floats:
    return np.concatenate([before.astype(after.dtype), after])
