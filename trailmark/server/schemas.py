"""The bodies that requests may have: OpenAI's fields, and ours (``memory``, ``store``, ``passages``, ``quotes``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MEMORY_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""No dot and no slash: such a name leads nowhere but into the folder of memories."""
DOCUMENT_NAME = r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}"
_MOST_MESSAGES, _MOST_TEXTS = 10_000, 16

MemoryName = Annotated[str, StringConstraints(pattern=rf"^{MEMORY_NAME}\z")]
DocumentName = Annotated[str, StringConstraints(pattern=rf"^{DOCUMENT_NAME}\z")]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
OptionText = Annotated[str, StringConstraints(max_length=256)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Body(BaseModel):
    # as the reference: 1 is no "1", and a field that nobody knows is refused
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=_MOST_MESSAGES)]
    name: str | None = None
    # what an answer of ours has of these, as clients send it back
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def in_template(self) -> dict[str, str]:
        """As chat templates take it: none knows a developer."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Generation(_Body):
    """What both endpoints take."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=400)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # ours
    memory: MemoryName | None = None
    store: bool | None = None
    passages: Annotated[int, Field(ge=0, le=64)] = 3
    """Of each group (or layer) the chunks that are cited, those read with most weight."""
    # taken, and without an effect on what is written
    user: str | None = None
    # taken where they ask for nothing
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def answers(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _one_answer_is_stored(self) -> Self:
        if self.store and self.answers > 1:
            raise ValueError("store: expected n to be 1: one answer goes on with the memory")
        return self


class CompletionRequest(_Generation):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_TEXTS)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=_MOST_TEXTS)]
    )  # fmt: skip
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        given: list[Any] = self.prompt
        return [given] if isinstance(given[0], int) else given

    @model_validator(mode="after")
    def _one_prompt_is_stored(self) -> Self:
        if self.store and not isinstance(self.prompt, str):
            raise ValueError("store: expected the prompt to be one text")
        return self


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(_Generation):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    quotes: bool = True
    """Ours: whether the passages that the last question looks at stand before it, where the model focuses."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's: options that the model's chat template reads, as Qwen3's enable_thinking
    chat_template_kwargs: (
        Annotated[dict[str, bool | int | float | OptionText], Field(max_length=16)] | None
    ) = None
    modalities: list[Literal["text"]] | None = None
    # refused by name where they ask for something
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    # taken, and without an effect on what is written
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_tools(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in ("tools", "functions"):
                if body.get(name):
                    raise ValueError(f"{name}: expected none, the models here call no tools. Leave it out")
        return body

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs to be true with it")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: expected none beside max_completion_tokens")
        return self

    @property
    def new_messages(self) -> list[Message]:
        """Those behind the last answer: what came before was said by earlier requests."""
        last = max((n for n, message in enumerate(self.messages) if message.role == "assistant"), default=-1)
        return self.messages[last + 1 :]


class NewMemory(_Body):
    """POST /v1/memories"""

    name: MemoryName


class NewText(_Body):
    """POST /v1/memories/{memory}/texts with JSON"""

    text: str
    document: DocumentName
    model: str | None = None
    stream: bool | None = None
