"""What a running server consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trailmark.server.errors import RequestError
from trailmark.server.memories import Memories
from trailmark.server.metrics import Metrics
from trailmark.server.served import Served


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
        request_bytes: of a body of JSON. text_bytes: of a text that is sent as a file.
        new_tokens: of an answer. seconds: until an answer ends, finished or not.
    """

    request_bytes: int = 8 << 20
    text_bytes: int = 1 << 30
    new_tokens: int = 4096
    seconds: float = 600.0


@dataclass(frozen=True)
class State:
    models: Mapping[str, Served]
    memories: Memories | None
    metrics: Metrics
    limits: Limits

    def model(self, name: str) -> Served:
        """A model by its name.

        Raises:
            RequestError: 404, there is none.
        """
        if (found := self.models.get(name)) is None:
            raise RequestError(
                404,
                "The model does not exist: GET /v1/models lists those that do.",
                "model",
                "model_not_found",
            )
        return found

    def named(self, model: str, memory: str | None) -> tuple[Served, str | None]:
        """A model and a memory of a request: ``model+memory`` names both.

        Raises:
            RequestError: 404, there is no such model; 400, two memories.
        """
        if model in self.models or "+" not in model:
            return self.model(model), memory
        model, _, own = model.rpartition("+")
        if memory not in (None, own):
            raise RequestError(400, "memory: expected the one that the model's name has, or none.", "memory")
        return self.model(model), own

    def expect_memories(self) -> Memories:
        """A RequestError with status 400 where the server was started without them."""
        if self.memories is None:
            raise RequestError(
                400, "memory: this server has none. Start it with --memories FOLDER.", "memory"
            )
        return self.memories
