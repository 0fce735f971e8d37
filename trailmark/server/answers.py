"""Answers as they are written: text without what ends it, log-probabilities, and the chunks that were read for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from trailmark.evaluation.chat import SaidChunks
from trailmark.server.engine import Answer, Retrieved, Token
from trailmark.server.memories import Opened
from trailmark.server.served import Served
from trailmark.trace.passages import Passage
from trailmark.trace.token_texts import START

_LISTS = 4  # groups that are cited one by one; each layer of a Landmark model reads for itself


class TextEnd:
    """The text of tokens that come one after another, up to the first of some strings."""

    def __init__(self, served: Served, stops: Sequence[str]) -> None:
        self._served, self._stops = served, tuple(stops)
        self._state, self._held = START, ""
        self.stopped = False

    def add(self, *tokens: int) -> str:
        """What is known of the text to come, and is no beginning of a stop string."""
        shown = [token for token in tokens if token not in self._served.control]
        if self.stopped or not shown:
            return ""
        settled = self._served.texts.settle(self._state, np.array(shown, np.int64))
        self._state = settled.state
        return self._take(settled.text)

    def end(self) -> str:
        """What waited for a character's rest, or for a stop string's."""
        if self.stopped:
            return ""
        settled = self._served.texts.settle(self._state, np.zeros(0, np.int64), last=True)
        text = self._take(settled.text)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _take(self, text: str) -> str:
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped, shown, self._held = True, self._held[: min(places)], ""
            return shown
        longest = max(map(len, self._stops), default=1) - 1
        begun = next(
            (n for n in range(min(longest, len(self._held)), 0, -1) if self._may_go_on(self._held[-n:])), 0
        )
        shown, self._held = self._held[: len(self._held) - begun], self._held[len(self._held) - begun :]
        return shown

    def _may_go_on(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


class Written:
    """One answer.

    Args:
        prompt: the tokens that were read for it. landmark: how many of them stand before the landmark.
    """

    def __init__(
        self,
        served: Served,
        stops: Sequence[str],
        opened: Opened | None,
        prompt: Sequence[int],
        landmark: int,
    ) -> None:
        self._served, self._opened, self._prompt = served, opened, (prompt[:landmark], prompt[landmark:])
        self._end = TextEnd(served, stops)
        self.text, self.tokens, self.finish = "", list[Token](), "stop"
        self._shown = 0
        self._reads: list[tuple[tuple[Retrieved, ...], int]] = []  # and by how many tokens in a row

    def add(self, token: Token) -> None:
        self.tokens.append(token)
        if self._reads and self._reads[-1][0] is token.retrieved:  # of all tokens of a chunk
            self._reads[-1] = (token.retrieved, self._reads[-1][1] + 1)
        else:
            self._reads.append((token.retrieved, 1))

    def show(self) -> str:
        """The text that is known since it was last asked for."""
        new = self.tokens[self._shown :]
        self._shown += len(new)
        text = self._end.add(*(token.token for token in new))
        if new and new[-1].finish is not None:
            text += self._end.end()
            self.finish = new[-1].finish
        self.text += text
        return text

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words, which know of no deadline."""
        return "stop" if self._end.stopped or self.finish == "stop" else "length"

    def cited(self, most: int) -> list[dict[str, Any]]:
        """Of each group the ``most`` chunks that were read with most weight, the mean over the tokens.

        It may read whole texts, to find places in them: not for the event loop, but for the memory's ``look``.
        """
        weights: dict[int, dict[int, float]] = {}
        for reads, count in self._reads:
            for read in reads:
                own = weights.setdefault(read.group, {})
                own[read.chunk] = own.get(read.chunk, 0.0) + read.weight * count / len(self.tokens)
        groups: dict[int | None, dict[int, float]] = dict(weights.items())
        if len(groups) > _LISTS:
            together: dict[int, float] = {}
            for own in weights.values():
                for chunk, weight in own.items():
                    together[chunk] = together.get(chunk, 0.0) + weight / len(groups)
            groups = {None: together}
        said = self._said()
        return [
            {"group": group, "chunk": chunk, "weight": own[chunk]} | self._place(chunk, said)
            for group, own in sorted(groups.items(), key=lambda item: item[0] or 0)
            for chunk in sorted(own, key=lambda chunk: (-own[chunk], chunk))[:most]
        ]

    def _said(self) -> SaidChunks:
        size = getattr(self._served.subject.model.config, "chunk_size", None)
        said = SaidChunks(0 if self._opened is None else self._opened.num_tokens, size)
        asked, cue = self._prompt
        said.add(asked, True)
        said.add([*cue, *(token.token for token in self.tokens)], False)
        return said

    def _place(self, chunk: int, every: SaidChunks) -> dict[str, Any]:
        passages = [] if self._opened is None else self._opened.passages.of(chunk)
        said = every.tokens(chunk)
        return {
            "passages": [told(passage) for passage in passages],
            "said": self._served.subject.tokenizer.decode(said, skip_special_tokens=True) if said else None,
        }


def told(passage: Passage) -> dict[str, Any]:
    """A passage as clients are told of it, without the folder that it lies in."""
    return {
        "document": passage.path.name,
        "tokens": list(passage.tokens),
        "bytes": None if passage.bytes is None else list(passage.bytes),
        "text": passage.text,
    }


async def merged(answers: Sequence[Answer], each: int) -> AsyncIterator[tuple[int, Token]]:
    """The tokens of several jobs of ``each`` answers as they come, with the number of the answer among all of them.

    Who takes no more stops all of them.
    """
    arrived: asyncio.Queue[tuple[int, Token] | BaseException | None] = asyncio.Queue()

    async def pump(first: int, answer: Answer) -> None:
        try:
            async for token in answer:
                arrived.put_nowait((first + token.answer, token))
            arrived.put_nowait(None)
        except Exception as error:  # raised by who reads
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(each * n, answer)) for n, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            found = await arrived.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for answer, task in zip(answers, tasks, strict=True):
            answer.cancel()
            task.cancel()
