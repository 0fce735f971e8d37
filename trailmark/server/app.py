"""The application: addresses, and what each of them calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp

from trailmark.server.bodies import body_of, pieces
from trailmark.server.errors import RequestError, answer_errors
from trailmark.server.generation import HEADERS, Chat, Completion, guarded, once
from trailmark.server.guard import Guard
from trailmark.server.memories import Memories
from trailmark.server.schemas import ChatRequest, CompletionRequest, DocumentName, NewMemory, NewText
from trailmark.server.served import Served
from trailmark.server.state import State

router = APIRouter()


def _state(request: Request) -> State:
    found: State = request.app.state.server
    return found


Server = Annotated[State, Depends(_state)]


def make_app(state: State, keys: Sequence[str] = ()) -> ASGIApp:
    """The server as an ASGI application. As it ends, it stops what is being read and its engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if state.memories is not None:
            await state.memories.close()
        for served in state.models.values():
            await asyncio.to_thread(served.engine.close)

    app = FastAPI(title="trailmark", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.server, app.state.limits = state, state.limits
    answer_errors(app)
    app.include_router(router)
    return Guard(app, keys, state.metrics)


# --- generation --------------------------------------------------------------------------------------------------


@router.post("/v1/completions")
async def completions(
    request: Request, state: Server, body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]
) -> Response:
    named = await _named(state, body)
    # a long prompt takes long to tokenize: others go on meanwhile
    return await (await asyncio.to_thread(Completion, state, body, *named)).respond(request)


@router.post("/v1/chat/completions")
async def chat(
    request: Request, state: Server, body: Annotated[ChatRequest, Depends(body_of(ChatRequest))]
) -> Response:
    named = await _named(state, body)
    return await (await asyncio.to_thread(Chat, state, body, *named)).respond(request)


async def _named(state: State, body: CompletionRequest | ChatRequest) -> tuple[Served, str | None, Any]:
    served, memory = state.named(body.model, body.memory)
    if memory is None:
        if body.store:
            raise RequestError(400, "store: expected a memory to store in.", "store")
        return served, None, None
    return served, memory, await state.expect_memories().open(memory, served)


@router.get("/v1/models")
async def models(state: Server) -> dict[str, Any]:
    names = list(state.models)
    if state.memories is not None:
        owners = state.memories.each(state.memories.model_of)
        names += [f"{served.name}+{own}" for own, served in owners.items() if served is not None]
    return {"object": "list", "data": [_model(state, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(state: Server, name: str) -> dict[str, Any]:
    _, memory = state.named(name, None)
    if memory is not None:
        state.expect_memories().expect(memory)
    return _model(state, name)


def _model(state: State, name: str) -> dict[str, Any]:
    served, memory = state.named(name, None)
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "trailmark",
        "memory": memory,
    }


# --- memories ----------------------------------------------------------------------------------------------------


def _memories(state: Server) -> Memories:
    return state.expect_memories()


Saved = Annotated[Memories, Depends(_memories)]


@router.get("/v1/memories")
async def list_memories(memories: Saved) -> dict[str, Any]:
    return {"object": "list", "data": [*memories.each(memories.describe).values()]}


@router.post("/v1/memories", status_code=201)
async def create_memory(
    memories: Saved, body: Annotated[NewMemory, Depends(body_of(NewMemory))]
) -> dict[str, Any]:
    memories.create(body.name)
    return memories.describe(body.name)


@router.get("/v1/memories/{name}")
async def describe_memory(memories: Saved, name: str) -> dict[str, Any]:
    return memories.describe(name)


@router.delete("/v1/memories/{name}")
async def delete_memory(memories: Saved, name: str) -> dict[str, Any]:
    await memories.delete(name)
    return {"id": name, "object": "memory", "deleted": True}


@router.post("/v1/memories/{name}/texts")
async def append_text(
    state: Server, memories: Saved, name: str, body: Annotated[NewText, Depends(body_of(NewText))]
) -> Response:
    served = _reader(state, memories, name, body.model)
    return await _appended(memories, name, body.document, once(body.text.encode()), served, bool(body.stream))


@router.put("/v1/memories/{name}/texts/{document}")
async def append_file(
    request: Request,
    state: Server,
    memories: Saved,
    name: str,
    document: DocumentName,
    model: Annotated[str | None, Query(max_length=400)] = None,
    stream: bool = False,
) -> Response:
    served = _reader(state, memories, name, model)
    content = pieces(request, state.limits.text_bytes)
    return await _appended(memories, name, document, content, served, stream)


def _reader(state: State, memories: Memories, name: str, model: str | None) -> Served:
    """The model that reads a text: that of the memory, or for the first one that is named, or the server's first."""
    memories.expect(name)
    if model is not None:
        return state.model(model)
    return memories.model_of(name) or next(iter(state.models.values()))


async def _appended(
    memories: Memories,
    name: str,
    document: str,
    content: AsyncIterator[bytes],
    served: Served,
    stream: bool,
) -> Response:
    told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def progress(document: str, tokens: int) -> None:
        told.put_nowait({"object": "memory.progress", "memory": name, "document": document, "tokens": tokens})

    task = await memories.append(name, document, content, served, progress)
    if not stream:
        await asyncio.shield(task)
        return JSONResponse(memories.describe(name))

    async def events() -> AsyncIterator[dict[str, Any]]:
        task.add_done_callback(lambda task: told.put_nowait(None))
        while (event := await told.get()) is not None:
            yield event
        await asyncio.shield(task)
        yield memories.describe(name)

    return StreamingResponse(guarded(events()), media_type="text/event-stream", headers=HEADERS)


# --- the server itself -------------------------------------------------------------------------------------------


@router.get("/health")
async def health(state: Server) -> dict[str, str]:
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(state: Server) -> PlainTextResponse:
    gauges: dict[str, float] = {}
    if state.memories is not None:
        gauges["trailmark_memories_open"] = state.memories.open_count()
        gauges["trailmark_memories_open_bytes"] = state.memories.open_bytes()
    engines = {name: served.engine.stats() for name, served in state.models.items()}
    return PlainTextResponse(state.metrics.text(gauges, engines), media_type="text/plain; version=0.0.4")
