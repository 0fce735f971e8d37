"""A conversation with a server, as :class:`trailmark.evaluation.chat.Conversation` is one with a model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from trailmark.data.chat import Options
from trailmark.evaluation.chat import ReadChunk
from trailmark.evaluation.generation import Sampling
from trailmark.trace.passages import Passage

_SECONDS = 600.0  # without a word
_LONGEST_LINE = 64 << 20


def _address(url: str) -> SplitResult | None:
    """The parts of a server's address; None: it is none."""
    try:
        parts = urlsplit(url)
        there = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets, a port
        return None
    return parts if there else None


class RemoteConversation:
    """Questions and answers, one after the other. The server keeps nothing of them.

    Args:
        url: of the server, as "http://127.0.0.1:8000", with /v1 or without. model, memory: their names there. system:
            what the model is told before the first question. passages: how many are cited of each group. key: None: it
            asks for none.
        template: options of the model's chat template.
        quotes: whether the server puts the passages that a question looks at before it.

    Raises:
        ValueError: no address.
    """

    def __init__(
        self,
        url: str,
        model: str,
        memory: str | None,
        sampling: Sampling,
        *,
        system: str | None = None,
        passages: int = 3,
        key: str | None = None,
        template: Options | None = None,
        quotes: bool = True,
    ) -> None:
        parts = _address(url)
        if parts is None:
            raise ValueError(f"url: expected an address as http://127.0.0.1:8000, got {url!r}.")
        self._parts, self._key, self._passages = parts, key, passages
        self._body: dict[str, Any] = {
            "model": model,
            "stream": True,
            "passages": passages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
        }
        self._body |= {} if sampling.top_p is None else {"top_p": sampling.top_p}
        self._body |= {} if memory is None else {"memory": memory}
        self._body |= {"chat_template_kwargs": template} if template else {}
        self._body |= {} if quotes else {"quotes": False}
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.names: str | None = "group"
        self.begin()

    def begin(self) -> None:
        """A conversation of its own over the same memory: whatever was said before is forgotten."""
        self._messages = self._system
        self._retrieved: list[dict[str, Any]] = []
        self.quoted: list[Passage] = []
        self.troubles: list[str] = []

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece as it comes. Who takes no more stops it, and may ask on.

        Raises:
            ValueError: there is no server, or it refuses the question.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        self._retrieved, self.quoted, answer, refused = [], [], "", False
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_SECONDS)
        try:
            for event in self._events(connection, messages):
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content") or ""
                    answer += text
                    if cited := choice.get("trailmark"):
                        self._retrieved = cited["retrieved"]
                        self.quoted = [_passage(found) for found in cited.get("quoted", ())]
                        self.names, self.troubles = cited.get("read_by", "group"), cited.get("troubles", [])
                    if text:
                        yield text
        except (OSError, http.client.HTTPException) as error:
            refused = True
            raise ValueError(
                f"url: expected a server at {self._parts.netloc!r}, it cannot be reached ({error}). Start one: "
                "trailmark serve MODEL"
            ) from error
        except ValueError:
            refused = True
            raise
        finally:
            connection.close()  # which stops it there too
            if not refused:
                self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _events(
        self, connection: http.client.HTTPConnection, messages: list[dict[str, str]]
    ) -> Generator[dict[str, Any], None, None]:
        headers = {"Content-Type": "application/json"}
        headers |= {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        body = json.dumps(self._body | {"messages": messages})
        path = f"{quote(self._parts.path.rstrip('/').removesuffix('/v1'), safe='/%')}/v1/chat/completions"
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"url: the server refuses the question: {_reason(response.read(1 << 20))}")
        while (line := response.readline(_LONGEST_LINE)).strip() != b"data: [DONE]":
            if not line.endswith(b"\n"):  # http.client tells no one of a connection that was cut
                raise ValueError("url: the server ended before its answer did. Ask again once it is there.")
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise ValueError(f"url: the server failed: {event['error']['message']}")
            yield event

    @property
    def num_groups(self) -> int:
        """Of groups that the server cites; of more than four it gives their mean, which is one."""
        return len({read["group"] for read in self._retrieved})

    def reads(self, most: int) -> list[list[ReadChunk]]:
        """For each group the chunks that were read for the last answer, ``most`` of the largest weights."""
        groups = sorted({read["group"] for read in self._retrieved}, key=lambda group: group or 0)
        return [[_placed(read) for read in self._retrieved if read["group"] == g][:most] for g in groups]

    def reads_of_all(self, most: int) -> list[ReadChunk]:
        """The same where there is one list."""
        return [_placed(read) for read in self._retrieved][:most]


def _placed(read: dict[str, Any]) -> ReadChunk:
    return ReadChunk(read["chunk"], read["weight"], tuple(map(_passage, read["passages"])), read["said"])


def _passage(found: dict[str, Any]) -> Passage:
    places = None if found["bytes"] is None else tuple(found["bytes"])
    return Passage(Path(found["document"]), tuple(found["tokens"]), places, found["text"])


def _reason(content: bytes) -> str:
    try:
        message: str = json.loads(content)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return "it speaks no language of OpenAI's."
    return message
