"""A model that is served: what requests ask of it and its tokenizer, found once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trailmark.data.chat import (
    ChatTurns,
    answer_ends,
    conversation,
    expect_options,
    with_passages,
)
from trailmark.data.corpus import tokenize
from trailmark.evaluation.subject import Subject
from trailmark.models.causal_lm import fingerprint
from trailmark.server.engine import Engine
from trailmark.server.errors import RequestError
from trailmark.server.schemas import ChatRequest
from trailmark.trace.token_texts import silent_ids, texts_of, token_bytes


@dataclass
class Served:
    """A model under its name, with the engine that runs it."""

    name: str
    subject: Subject
    engine: Engine
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def weights(self) -> str:
        """What memories that it wrote name in their manifest."""
        return fingerprint(self.subject.model)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end what it writes."""
        return frozenset(answer_ends(self.subject.tokenizer, self.subject.model))

    @cached_property
    def read_by(self) -> str | None:
        """What reads chunks and is cited: "group" or "layer"; None: the model reads none."""
        model = self.subject.model
        return model.follow_reads().group_name if model.config.retrieves else None

    @cached_property
    def control(self) -> frozenset[int]:
        """Tokens that no text shows."""
        return silent_ids(self.subject.tokenizer, int(self.subject.model.config.vocab_size))

    @cached_property
    def texts(self) -> Any:
        return texts_of(self.subject.tokenizer)

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        return token_bytes(self.subject.tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; a control token for its name."""
        tokenizer = self.subject.tokenizer
        if self._bytes is not None and token not in self.control:
            return self._bytes[token]
        text: str = tokenizer.decode([token]) if token < len(tokenizer) else ""
        return text.encode(errors="replace")

    @cached_property
    def chat_ends(self) -> frozenset[int]:
        """Of an answer in a conversation: the control token too with which the template ends a turn."""
        try:
            turns = ChatTurns.of(self.subject.tokenizer)
        except ValueError:  # a template that cannot be taken apart; the model's own ends are left
            return self.ends
        return frozenset(turns.ends(self.subject.tokenizer, self.subject.model))

    def prompt(self, given: str | Sequence[int], begun: bool) -> tuple[int, ...]:
        """The tokens of a completion's prompt. Its text may spell control tokens, as a template written by hand does.

        Args:
            begun: whether the model has read something before.
        """
        if isinstance(given, str):
            ids = self._tokens(given)
            begin = [] if begun else self.subject.beginning
            if ids[: len(begin)] != begin:
                ids = [*begin, *ids]
        else:
            ids = list(given)
        if not ids:
            raise RequestError(400, "prompt: expected at least one character, got none.", "prompt")
        most = int(self.subject.model.config.vocab_size)
        if max(ids) >= most:
            raise RequestError(400, f"prompt: expected tokens below {most}.", "prompt")
        return tuple(ids)

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = tokenize([text], self.subject.tokenizer).tolist()
        return found

    def turns(
        self, request: ChatRequest, begun: bool, before: Sequence[str] = ()
    ) -> tuple[tuple[int, ...], int]:
        """The tokens of a conversation, and how many of them stand before the landmark that ends the question.

        Args:
            begun: whether the model has read something before.
            before: texts that stand in the last message, before its own.
        """
        messages = [message.in_template for message in request.messages]
        messages[-1]["content"] = with_passages(before, messages[-1]["content"])
        if not getattr(self.subject.tokenizer, "chat_template", None):
            raise RequestError(
                400,
                f"messages: expected a model with a chat template, {self.name!r} has none: nothing says how a "
                "question is put to it. Ask at /v1/completions.",
                "messages",
                "no_chat_template",
            )
        tokenizer, options = self.subject.tokenizer, request.chat_template_kwargs or {}
        try:
            expect_options(tokenizer, options)
        except ValueError as error:
            said = str(error).removeprefix("template")
            raise RequestError(400, f"chat_template_kwargs{said}", "chat_template_kwargs") from error
        try:
            asked, cue = conversation(messages, tokenizer, begun, options)
        except ValueError as error:
            raise RequestError(
                400,
                "messages: expected a conversation that the model's chat template takes, it refuses this one: most "
                "begin with at most one system message, and questions and answers take turns.",
                "messages",
            ) from error
        begin = [] if begun else self.subject.beginning
        if asked[: len(begin)].tolist() != begin:  # a template that does not write it
            asked = np.concatenate([np.array(begin, np.int64), asked])
        return tuple(np.concatenate([asked, cue]).tolist()), len(asked)
