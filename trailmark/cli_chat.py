"""The command ``chat``. It parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trailmark.evaluation.suite import changes_setting, device_setting, tier_setting
from trailmark.settings import Settings, parse_override, setting, takes

if TYPE_CHECKING:
    from trailmark.evaluation.chat import Conversation, ReadChunk
    from trailmark.evaluation.generation import Sampling
    from trailmark.server.client import RemoteConversation
    from trailmark.trace.passages import Passage

_CHARACTERS = 400  # of a passage at most: chunks of 64 tokens are shown whole
_LISTS = 4  # of passages at most, behind an answer
_NEW = "/new"


@dataclass(frozen=True)
class ChatSettings(Settings):
    """The options of ``trailmark chat``."""

    model: Path = setting(help="A folder with a trailmark model; with --url its name there.", argument=True)
    memory: Path | None = setting(
        None, "A memory that trailmark read made, to ask about; it stays as it is. With --url its name there."
    )
    url: str | None = setting(
        None, "Of a server (trailmark serve), as http://127.0.0.1:8000, that answers instead of this machine."
    )
    api_key_file: Path | None = setting(None, "With --url, a file whose first line is the key for it.")
    system: str | None = setting(
        None, "What the model is told before the first question.", default="as the chat template has it"
    )
    plain: bool = setting(
        False, 'Lines "Question:" and "Answer:" instead of the tokenizer\'s chat template.', option="--plain"
    )
    template: tuple[str, ...] = setting(
        (), "An option that the chat template reads: enable_thinking=false.", repeated=True
    )
    no_quotes: bool = setting(
        False,
        "Ask without the passages that the question looks at, which a model with num_focus_chunks finds and reads "
        "right before it.",
        option="--no-quotes",
    )
    passages: int = setting(
        3,
        "Of each group the passages that are shown, those read with most weight; of more than four groups or layers, "
        "those of all by their mean weight; 0: none.",
        least=0,
    )
    max_new_tokens: int = setting(
        256, "Tokens of an answer at most; of bytes, a letter takes one to four.", least=1
    )
    temperature: float = setting(0.0, "0: always the most likely token.")
    top_p: float | None = setting(
        None, "Sample from the most likely tokens that have this probability together.", least=0, most=1
    )
    seed: int = setting(0, "Seed of what is sampled.", least=0, most=2**32 - 1)
    memory_tier: str = tier_setting("disk")
    changes: tuple[str, ...] = changes_setting()
    device: str | None = device_setting()


@takes(ChatSettings)
def chat(settings: ChatSettings) -> None:
    """Ask about a memory, and see for each answer the passages that were read for it. In a pipe, a question a line.

    The line /new begins a conversation of its own over the same memory.
    """
    conversation = _there(settings) if settings.url is not None else _here(settings)
    told: set[str] = set()
    for question in _questions():
        if question == _NEW:
            conversation.begin()
            typer.echo("A new conversation begins.\n")
            continue
        try:
            for piece in conversation.ask(question):
                typer.echo(piece, nl=False)
            typer.echo()
        except KeyboardInterrupt:
            typer.echo(" (stopped)")
        for line in _read_lines(conversation, settings.passages):
            typer.echo(line)
        for trouble in conversation.troubles:
            if trouble not in told:
                typer.echo(
                    f"  Mind: {trouble}; its passages stand before no question, and are told by their tokens alone."
                )
                told.add(trouble)
        typer.echo()


def _here(settings: ChatSettings) -> Conversation:
    from trailmark.evaluation.chat import Conversation
    from trailmark.evaluation.subject import load, own_device

    if settings.api_key_file is not None:
        raise ValueError("api_key_file: expected none without --url: no server is asked.")
    if settings.plain and settings.template:
        raise ValueError(
            "template: expected none with --plain, which uses no chat template. Leave one of them out."
        )
    return Conversation(
        load(settings.model, settings.changes, device=own_device(settings.device)),
        settings.memory,
        _sampling(settings),
        system=settings.system,
        memory_tier=settings.memory_tier,
        plain=settings.plain,
        template=_template(settings),
        quotes=not settings.no_quotes,
    )


def _there(settings: ChatSettings) -> RemoteConversation:
    from trailmark.server.client import RemoteConversation
    from trailmark.server.keys import read_keys

    for name in ("plain", "memory_tier", "changes", "device"):
        if getattr(settings, name) != ChatSettings.__dataclass_fields__[name].default:
            told = "set" if name == "changes" else name
            raise ValueError(f"{told}: expected none with --url: the server decides. Leave it out.")
    assert settings.url is not None
    key = None if settings.api_key_file is None else read_keys(settings.api_key_file)[0]
    return RemoteConversation(
        settings.url,
        str(settings.model),
        None if settings.memory is None else str(settings.memory),
        _sampling(settings),
        system=settings.system,
        passages=settings.passages,
        key=key,
        template=_template(settings),
        quotes=not settings.no_quotes,
    )


def _template(settings: ChatSettings) -> dict[str, bool | int | float | str]:
    pairs = [parse_override("template", text) for text in settings.template]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError("template: expected each option once, one is given twice. Leave one of them out.")
    for name, value in pairs:
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"template: {name}: expected true, false, a number or a text, got {value!r}.")
    return options


def _sampling(settings: ChatSettings) -> Sampling:
    from trailmark.evaluation.generation import Sampling

    return Sampling(settings.max_new_tokens, settings.temperature, settings.seed, settings.top_p)


def _questions() -> Iterator[str]:
    """Lines that are not empty; from a terminal with a prompt, until Ctrl-C or Ctrl-D there.

    Raises:
        ValueError: standard input is closed.
    """
    if sys.stdin is None:
        raise ValueError("chat: expected a terminal, or questions in standard input, which is closed.")
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin if line.strip())
        except UnicodeDecodeError as error:
            raise ValueError(
                "question: expected UTF-8 text in standard input, got something else. Convert it: iconv -f ENCODING -t "
                "UTF-8"
            ) from error
        return
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line.strip():
            yield line.strip()


def _read_lines(conversation: Conversation | RemoteConversation, most: int) -> Iterator[str]:
    if not most:
        return
    if conversation.quoted:
        yield "  Put before the question:"
        for passage in conversation.quoted:
            yield f"    {_place(passage)}"
    if conversation.names is None:
        return
    count = conversation.num_groups
    if count > _LISTS:  # each layer of a Landmark model reads for itself
        said = [(f", the mean of {count} {conversation.names}s", conversation.reads_of_all(most))]
    else:
        which = f" by {conversation.names} {{}} of {count}" if count > 1 else ""
        said = [(which.format(number), chunks) for number, chunks in enumerate(conversation.reads(most), 1)]
    for which, chunks in said:
        yield f"  Read for this{which}:{'' if chunks else ' nothing'}"
        for read in chunks:
            yield f"    {read.weight:.3f}  {_described(read)}"


def _described(read: ReadChunk) -> str:
    parts = [_place(passage) for passage in read.passages]
    if read.said is not None:
        parts.append(f"this conversation: {_beginning(read.said)}")
    return "; ".join(parts) or f"chunk {read.chunk:,}"


def _place(passage: Passage) -> str:
    first, stop = passage.tokens
    where = f"{_printable(passage.path.name)}, tokens {first:,} to {stop - 1:,}"
    if passage.bytes is not None:
        where += f", bytes {passage.bytes[0]:,} to {passage.bytes[1] - 1:,}"
    return where if passage.text is None else f"{where}: {_beginning(passage.text)}"


def _printable(text: str) -> str:
    """With nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else " " for c in text)


def _beginning(text: str) -> str:
    """On one line, with nothing that a terminal obeys; of a longer text the first words."""
    line = " ".join(_printable(text).split())
    if len(line) <= _CHARACTERS:
        return f'"{line}"'
    return f'"{line[:_CHARACTERS].rsplit(" ", 1)[0]} ..."'
