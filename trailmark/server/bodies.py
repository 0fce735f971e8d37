"""Bodies of requests: of bounded size and patience, and JSON as the door for files from strangers takes it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from trailmark import untrusted
from trailmark.server.errors import RequestError, invalid

Schema = TypeVar("Schema", bound=BaseModel)
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
_PATIENCE = 30.0  # seconds between two parts of a body


async def pieces(request: Request, most: int) -> AsyncIterator[bytes]:
    """The parts of a body as they come.

    Raises:
        RequestError: more than ``most`` bytes, a client that sends nothing for half a minute, or one that left.
    """
    too_large = RequestError(413, f"body: expected at most {most:,} bytes, there are more.", code="too_large")
    if (length := request.headers.get("content-length", "0")).isdecimal() and int(length[:20]) > most:
        raise too_large
    count, stream = 0, request.stream().__aiter__()
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), _PATIENCE)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise RequestError(408, "body: expected its rest, nothing came for a while.") from error
        except ClientDisconnect as error:
            raise RequestError(400, "body: expected its rest, the client left.") from error
        count += len(piece)
        if count > most:
            raise too_large
        yield piece


def body_of(schema: type[Schema]) -> Callable[..., Any]:
    """A dependency that gives the JSON of a request's body as ``schema``.

    Its raises are a RequestError with status 400: no JSON, nested too deep, a key twice, numbers that are not finite,
    or what the schema refuses.
    """

    async def read(request: Request) -> Schema:
        most = request.app.state.limits.request_bytes
        content = b"".join([piece async for piece in pieces(request, most)])
        try:
            parsed = untrusted.parse_json(content, "body: what came")
        except ValueError as error:  # it names nothing but the body
            raise RequestError(400, str(error), code="invalid_json") from error
        try:
            if _HALVES.search(content):  # JSON can spell halves of characters, which are no text
                json.dumps(parsed, ensure_ascii=False).encode()
            return schema.model_validate(parsed)
        except UnicodeEncodeError as error:
            raise RequestError(400, "body: expected characters, got a half of one.") from error
        except ValidationError as error:
            raise invalid(error) from error
        except RecursionError as error:
            raise RequestError(
                400, "body: what came is nested too deep to be read.", code="invalid_json"
            ) from error

    return read
