"""/v1/completions and /v1/chat/completions: a request becomes jobs of an engine, and their tokens a response."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from trailmark.data.corpus import text_tokens
from trailmark.evaluation.chat import focused_chunks
from trailmark.memory import ChunkCache
from trailmark.server.answers import TextEnd, Written, merged, told
from trailmark.server.engine import Answer, Busy, Job, Sampling, Token
from trailmark.server.errors import RequestError, internal
from trailmark.server.memories import Opened
from trailmark.server.schemas import ChatRequest, CompletionRequest
from trailmark.server.served import Served
from trailmark.server.state import State
from trailmark.trace.passages import Passage
from trailmark.trace.token_texts import START, TextState

T = TypeVar("T")
Body = TypeVar("Body", CompletionRequest, ChatRequest)
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_DEFAULT_TOKENS = 16  # of a completion, as the reference
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Of a stream: nothing on the way keeps it back."""


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    landmark: int  # how many of them stand before it
    asks: tuple[int, ...]  # what is asked, by which the chunks of a focus are chosen


class Generation(Generic[Body]):
    """One request.

    Raises:
        RequestError: no such model or memory, or a prompt that is none.
    """

    prefix: str
    kind: str
    piece_kind: str

    def __init__(
        self, state: State, body: Body, served: Served, memory: str | None, opened: Opened | None
    ) -> None:
        self.body: Body = body
        self._state, self.served, self.memory, self._opened = state, served, memory, opened
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.known = 0 if opened is None else opened.num_tokens
        self._deadline = time.monotonic() + state.limits.seconds
        self.prompts = self._prompts()
        self.written, self._answers = list[Written](), list[Answer]()
        self.quoted = list[Passage]()  # that stand before the question
        most = state.limits.new_tokens
        if self._max_tokens > most:
            raise RequestError(400, f"max_tokens: expected at most {most}.", "max_tokens")
        if body.answers > served.engine.max_rows:
            raise RequestError(400, f"n: expected at most {served.engine.max_rows}.", "n")
        self._samplings = [self._sampling(number) for number in range(len(self.prompts))]

    # --- what an endpoint says -----------------------------------------------------------------------------------

    ends: frozenset[int]

    @property
    def _max_tokens(self) -> int:
        raise NotImplementedError

    @property
    def _top_logprobs(self) -> int | None:
        """None: no log-probabilities are asked for."""
        raise NotImplementedError

    def _prompts(self) -> list[Prompt]:
        raise NotImplementedError

    def _choice(self, number: int) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        raise NotImplementedError

    def _stored_text(self) -> str:
        raise NotImplementedError

    # --- running -------------------------------------------------------------------------------------------------

    async def _begin_jobs(self) -> None:
        """Have each prompt look at the memory, where its model focuses, and then be answered.

        Raises:
            RequestError: a full queue, or a look whose turn did not come within the request's time.
        """
        try:
            caches = [await self._looked(number) for number in range(len(self.prompts))]
            self.written = [
                Written(self.served, self.body.stops, self._opened, prompt.tokens, prompt.landmark)
                for prompt in self.prompts
                for _ in range(self.body.answers)
            ]
            self._answers = self._submit(caches)
        except TimeoutError as error:
            raise _too_busy() from error
        except Busy as error:
            raise RequestError(
                429, "The server has all the requests that it takes. Try again.", code="rate_limit_exceeded"
            ) from error

    async def _looked(self, number: int) -> ChunkCache | None:
        """A branch of the memory, with the focus of a prompt; None: nothing was read before."""
        cache = None if self._opened is None else self._opened.branch()
        if cache is not None and self.served.subject.model.focuses:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                await self.served.engine.focus(cache, self.prompts[number].asks)
        return cache

    def _sampling(self, number: int) -> Sampling:
        body = self.body
        try:
            return Sampling(
                self._max_tokens,
                1.0 if body.temperature is None else body.temperature,
                1.0 if body.top_p is None else body.top_p,
                None if body.seed is None else (body.seed + number * body.answers) % 2**63,
                self._top_logprobs or 0,
            )
        except ValueError as error:  # it names nothing but these numbers
            raise RequestError(400, str(error)) from error

    def _submit(self, caches: Sequence[ChunkCache | None]) -> list[Answer]:
        answers = list[Answer]()
        for number, (prompt, cache) in enumerate(zip(self.prompts, caches, strict=True)):
            job = Job(
                prompt.tokens,
                cache,
                self._samplings[number],
                self.body.answers,
                self._deadline,
                self._ending(),
                landmark=prompt.landmark,
            )
            try:
                answers.append(self.served.engine.submit(job))
            except Busy:
                for answer in answers:
                    answer.cancel()
                raise
        return answers

    def _ending(self) -> Callable[[int, int], bool]:
        """What the engine asks after each token; its text is put together once more there, where it stops at once."""
        stops = [
            TextEnd(self.served, self.body.stops) for _ in range(self.body.answers if self.body.stops else 0)
        ]

        last = self.ends  # not self: a circle would keep caches until it is looked for

        def ends(number: int, token: int) -> bool:
            if token in last:
                return True
            if not stops:
                return False
            stops[number].add(token)
            return stops[number].stopped

        return ends

    async def _tokens(self) -> AsyncIterator[tuple[int, Token]]:
        try:
            async for number, token in merged(self._answers, self.body.answers):
                self.written[number].add(token)
                yield number, token
        except TimeoutError as error:
            raise _too_busy() from error
        self._state.metrics.tokens(self.served.name, sum(len(p.tokens) for p in self.prompts), self._count)

    @property
    def _count(self) -> int:
        return sum(len(written.tokens) for written in self.written)

    def usage(self) -> dict[str, Any]:
        """With what lay in the memory as cached tokens of the prompt."""
        known = self.known * len(self.prompts)
        prompt = known + sum(len(prompt.tokens) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._count,
            "total_tokens": prompt + self._count,
            "prompt_tokens_details": {"cached_tokens": known},
        }

    async def _store(self) -> str | None:
        """The document as which the answer was added to the memory; None: nobody asked for that."""
        if not self.body.store:
            return None
        assert self.memory is not None
        assert self._state.memories is not None
        document = f"{self.id}.txt"
        text = self._stored_text().replace("\0", "\ufffd")
        task = await self._state.memories.append(self.memory, document, once(text.encode()), self.served)
        await asyncio.shield(task)
        return document

    async def _cited(self, number: int) -> dict[str, Any]:
        retrieved: list[dict[str, Any]] = []
        if self.body.passages:
            look = partial(self.written[number].cited, self.body.passages)
            retrieved = look() if self._opened is None else await self._opened.look(look)
        troubles = [] if self._opened is None else self._opened.passages.troubles
        return {
            "retrieved": retrieved,
            "read_by": self.served.read_by,
            "quoted": [told(passage) for passage in self.quoted],
            "troubles": [f"{path.name!r} {trouble}" for path, trouble in troubles],
        }

    def _of_request(self, stored: str | None) -> dict[str, Any]:
        return {"memory": self.memory, "stored": stored}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": f"fp_{self.served.weights[:12]}",
        }

    async def respond(self, request: Request) -> Response:
        """All of it at once, or as server-sent events; a client that leaves stops it."""
        await unless_gone(request, self._begin_jobs())
        if self.body.stream:
            return StreamingResponse(guarded(self._events()), media_type="text/event-stream", headers=HEADERS)
        return JSONResponse(await unless_gone(request, self._whole()))

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._tokens():
            pass
        for written in self.written:
            written.show()
        stored = await self._store()
        choices = [
            self._choice(number) | {"index": number, "finish_reason": written.finish_reason}
            | {"trailmark": await self._cited(number)}
            for number, written in enumerate(self.written)
        ]  # fmt: skip
        return self._head(self.kind) | {
            "choices": choices, "usage": self.usage(), "trailmark": self._of_request(stored)
        }  # fmt: skip

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        head = self._head(self.piece_kind)
        options = self.body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}

        def event(
            number: int, piece: dict[str, Any], finish: str | None = None, **more: Any
        ) -> dict[str, Any]:
            return head | {"choices": [piece | {"index": number, "finish_reason": finish} | more]} | usage

        for number in range(len(self.written)):
            if begin := self._begin():
                yield event(number, begin)
        async for number, token in self._tokens():
            text = self.written[number].show()
            if text or self._top_logprobs is not None:
                yield event(number, self._piece(number, text, [token]))
            if token.finish is not None and not self.body.store:
                yield event(number, self._piece(number, "", []), self.written[number].finish_reason,
                            trailmark=await self._cited(number))  # fmt: skip
        if self.body.store:  # an end that is told is one that was kept
            stored = await self._store()
            yield event(0, self._piece(0, "", []), self.written[0].finish_reason,
                        trailmark=await self._cited(0)) | {"trailmark": self._of_request(stored)}  # fmt: skip
        if usage:
            yield head | {"choices": [], "usage": self.usage()}

    def _begin(self) -> dict[str, Any]:
        return {}

    # --- log-probabilities ---------------------------------------------------------------------------------------

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        own = self.served.bytes_of(token)
        text = own.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(own)}


class _Places(NamedTuple):
    """How far the text of an answer is known."""

    characters: int = 0
    waiting: int = 0  # tokens of a character that is not whole
    state: TextState = START


class Completion(Generation[CompletionRequest]):
    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    @property
    def ends(self) -> frozenset[int]:  # type: ignore[override]
        return self.served.ends

    @property
    def _max_tokens(self) -> int:
        return self.body.max_tokens or min(_DEFAULT_TOKENS, self._state.limits.new_tokens)

    @property
    def _top_logprobs(self) -> int | None:
        return self.body.logprobs

    def _prompts(self) -> list[Prompt]:
        self._places: dict[int, _Places] = {}  # of each answer
        found = [self.served.prompt(given, self.known > 0) for given in self.body.prompts]
        return [Prompt(tokens, len(tokens), tokens) for tokens in found]

    def _choice(self, number: int) -> dict[str, Any]:
        return self._piece(number, self.written[number].text, self.written[number].tokens)

    def _piece(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(number, tokens)}

    def _logprobs(self, number: int, tokens: list[Token]) -> dict[str, Any] | None:
        if self._top_logprobs is None:
            return None
        named = [self._named(token.token, token.logprob) for token in tokens]
        names = [_key(entry) for entry in named]
        top = [
            {_key(e): e["logprob"] for e in (self._named(*pair) for pair in token.top)} for token in tokens
        ]
        offsets = [self._offset(number, token.token) for token in tokens]
        return {
            "tokens": names, "token_logprobs": [entry["logprob"] for entry in named], "top_logprobs": top,
            "text_offset": offsets,
        }  # fmt: skip

    def _offset(self, number: int, token: int) -> int:
        """Where a token's text begins in its answer; behind the character of which tokens before it hold a part."""
        before = self._places.get(number, _Places())
        offset = before.characters + (before.waiting > 0)
        if token not in self.served.control:
            settled = self.served.texts.settle(before.state, np.array([token], np.int64))
            waiting = before.waiting + 1 - len(settled.widths)
            self._places[number] = _Places(before.characters + len(settled.text), waiting, settled.state)
        return offset

    def _stored_text(self) -> str:
        return f"{self.body.prompt}{self.written[0].text}\n"


class Chat(Generation[ChatRequest]):
    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def ends(self) -> frozenset[int]:  # type: ignore[override]
        return self.served.chat_ends

    @property
    def _max_tokens(self) -> int:
        return self.body.max_completion_tokens or self.body.max_tokens or self._state.limits.new_tokens

    @property
    def _top_logprobs(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    def _prompts(self) -> list[Prompt]:
        tokens, landmark = self.served.turns(self.body, self.known > 0)
        last, self._words = self.body.messages[-1], tuple[int, ...]()
        if self.known and self.served.subject.model.focuses and last.role == "user":
            # those of a template look at the text's beginning, whatever is asked
            self._words = tuple(text_tokens(last.text.strip(), self.served.subject.tokenizer).tolist())
        return [Prompt(tokens, landmark, self._words or tokens[: landmark or None])]

    async def _looked(self, number: int) -> ChunkCache | None:
        """The same, and the passages of the focus before the last question."""
        cache = await super()._looked(number)
        if cache is not None and self._opened is not None and self._words and self.body.quotes:
            look = partial(self._quote, self._opened, focused_chunks(cache))
            async with asyncio.timeout(self._deadline - time.monotonic()):
                await self._opened.look(look)
        return cache

    def _quote(self, opened: Opened, chunks: list[int]) -> None:
        self.quoted = opened.passages.joined(chunks)
        if self.quoted:
            texts = [passage.text or "" for passage in self.quoted]
            tokens, landmark = self.served.turns(self.body, self.known > 0, texts)
            self.prompts = [Prompt(tokens, landmark, self._words)]

    def _choice(self, number: int) -> dict[str, Any]:
        written = self.written[number]
        message = {"role": "assistant", "content": written.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(written.tokens)}

    def _piece(self, number: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(tokens) if tokens else None}

    def _begin(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._top_logprobs is None:
            return None
        content = [
            self._named(token.token, token.logprob)
            | {"top_logprobs": [self._named(*pair) for pair in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _stored_text(self) -> str:
        turns = [(message.role, message.text.strip()) for message in self.body.new_messages]
        turns.append(("assistant", self.written[0].text.strip()))
        return "".join(f"{role}: {text}\n" for role, text in turns) + "\n"


def _too_busy() -> RequestError:
    return RequestError(
        503, "The server was too busy to begin the answer within its time. Try again.", code="timeout"
    )


def _key(entry: dict[str, Any]) -> str:
    """A token's text; of a part of a character its bytes, or several would be one."""
    text: str = entry["token"]
    return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


async def once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def guarded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events; an error after the first of them is one more."""
    try:
        async for event in events:
            yield sent(event)
    except RequestError as error:
        yield sent(error.body())
    except Exception as error:
        yield sent(internal(error).body())
    else:
        yield "data: [DONE]\n\n"


def sent(event: dict[str, Any]) -> str:
    """As a server-sent event."""
    return f"data: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives; it is cancelled when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if working.cancelled():
            raise RequestError(499, "The client left.")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
