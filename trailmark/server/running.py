"""Making the server of models and a folder of memories, and running it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import uvicorn
from starlette.types import ASGIApp

from trailmark.evaluation.subject import Subject
from trailmark.server.app import make_app
from trailmark.server.engine import Engine
from trailmark.server.memories import Memories
from trailmark.server.metrics import Metrics
from trailmark.server.served import Served
from trailmark.server.state import Limits, State

_HEADER_BYTES = 32 << 10  # of a request's line and headers together
_MOST_CONNECTIONS = 1000
_LAST_SECONDS = 5  # for what is still answered when the server is told to stop


def build(
    subjects: Mapping[str, Subject],
    memories: Path | None,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    *,
    open_bytes: int = 1 << 33,
    dtype: torch.dtype | None = None,
    max_rows: int = 32,
    max_waiting: int = 64,
) -> ASGIApp:
    """The application.

    Args:
        subjects: the models by the names under which they are asked.
        memories: folder of memories. open_bytes, dtype: see :class:`~trailmark.server.memories.Memories`.
        max_rows, max_waiting: of each model's engine.

    Raises:
        ValueError: a model whose answers cannot be written token by token, or a folder that cannot be written to.
    """
    models = {
        name: Served(name, subject, Engine(subject.model, max_rows=max_rows, max_waiting=max_waiting))
        for name, subject in subjects.items()
    }
    kept = None if memories is None else Memories(memories, models, open_bytes, dtype)
    return make_app(State(models, kept, Metrics(), limits or Limits()), keys)


def server(app: ASGIApp) -> uvicorn.Server:
    """uvicorn around it: headers bounded, no word about who serves, and no log of what is asked."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",  # the one that bounds headers
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, for a server that is not started yet: who connects waits for it.

    ``port`` 0: any that is free.

    Raises:
        ValueError: nobody can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            taken = error.errno == errno.EADDRINUSE
            why = "another program listens there" if taken else "this user may not"
            raise ValueError(
                f"port: cannot listen at {host}, port {port}: {why}. Choose another --port."
            ) from error
        raise ValueError(
            f"host: cannot listen at {host!r} ({error}). Name an address of this machine."
        ) from error
    # its connections inherit it; asyncio sets it only where a socket names its protocol, which this one does not. Else
    # an answer's second write, as a streamed token's, waits up to 40 ms for the client's acknowledgement of the first
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def run(app: ASGIApp, listening: socket.socket, say: Callable[[str], None]) -> None:
    """Serve at a socket of :func:`listen` until Ctrl-C or SIGTERM; ``say`` is told where."""
    host, port = listening.getsockname()[:2]
    say(f"Serving at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server(app).run(sockets=[listening])
