"""Questions as a tokenizer's chat template writes them, in parts: so that a landmark can stand where one ends.

A template writes whole conversations. Here it is taken apart, once, by what it writes around a question and an answer
that stand for any: a conversation then goes on behind what was read and written before, and none of that is tokenized
again. What a user or a text says is text: what it spells like a control token (``<|im_end|>``) becomes none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, meta

from trailmark.data.corpus import Integers, text_tokens, tokenize, tokenize_parts
from trailmark.untrusted import brief, first_line

# what a template is given; they stand in no template, and trimming changes nothing of them
_EARLIER, _ANSWER, _ASKED = "EARLIER-2c7f", "ANSWER-91d4", "ASKED-5be0"
Options = Mapping[str, bool | int | float | str]  # of a chat template, as Qwen3's enable_thinking


@dataclass(frozen=True)
class ChatTurns:
    """What stands around questions and answers.

    Attributes:
        first: before the first question. following: between an answer and the next question.
        end: behind a question. A landmark closes the question's chunk there.
        cue: what the answer follows, behind the landmark: an answer's first token is predicted at the token before it,
            which has to read what the question selected. Never empty.
        one_line: an answer ends with its line.
    """

    first: str
    following: str
    end: str
    cue: str
    one_line: bool = False

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None, options: Options | None = None) -> ChatTurns:
        """Those of a tokenizer's chat template; ``system``: what stands in the role "system"; None: its own.

        Raises:
            ValueError: a tokenizer without a chat template, or one whose template cannot be taken apart, does not
                know the role "system" or reads none of an option's name.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "tokenizer: expected one with a chat template, got one without: nothing says how a question is put to "
                "its model. Put a chat_template.jinja beside it, or ask in plain lines: trailmark chat --plain, "
                "trailmark evaluate without --chat."
            )
        expect_options(tokenizer, options or {})
        begin = [] if system is None else [{"role": "system", "content": system}]
        asked = {"role": "user", "content": _ASKED}
        earlier = [{"role": "user", "content": _EARLIER}, {"role": "assistant", "content": _ANSWER}]
        first, end = _around(_rendered(tokenizer, [*begin, asked], False, options), _ASKED)
        first_too, whole = _around(_rendered(tokenizer, [*begin, asked], True, options), _ASKED)
        later, _ = _around(_rendered(tokenizer, [*begin, *earlier, asked], True, options), _ASKED)
        following = _around(later, _ANSWER)[1]
        if first != first_too or not whole.startswith(end):
            end = ""  # a template that writes otherwise where an answer follows
        return cls(first_too, following, *_parted(end, whole[len(end) :]))

    @classmethod
    def plain(cls, system: str | None = None) -> ChatTurns:
        """A line for the question and one for the answer, for models without a chat template."""
        first = "\n" if system is None else f"\n{system}\n"
        return cls(f"{first}\nQuestion: ", "\n\nQuestion: ", "\n", "Answer:", one_line=True)

    def question(self, text: str, tokenizer: Any, before: str = "") -> tuple[Integers, Integers]:
        """The tokens of a question up to its landmark, and those of its cue.

        Args:
            before: ``first`` or ``following``.
        """
        if not _spells_control(text, tokenizer):  # as the template's whole text is tokenized
            question, cue = tokenize_parts([f"{before}{text}{self.end}", self.cue], tokenizer)
            return question, cue
        parts = (
            tokenize([before], tokenizer),
            text_tokens(text, tokenizer),
            tokenize([self.end], tokenizer),
        )
        return np.concatenate(parts).astype(np.int64), tokenize([self.cue], tokenizer).astype(np.int64)

    def ends(self, tokenizer: Any, model: Any) -> set[int]:
        """The tokens that end an answer: the model's own, the tokenizer's, and the control token of the template."""
        ends = answer_ends(tokenizer, model)
        ids = tokenize([self.following], tokenizer).tolist()
        return ends | ({ids[0]} & control_ids(tokenizer) if ids else set())

    def inside(self, tokenizer: Any) -> str:
        """``first`` behind a text: what begins a text (BOS) stands at its beginning alone."""
        return self.first.removeprefix(tokenizer.bos_token) if beginning(tokenizer) else self.first


def with_passages(passages: Sequence[str], question: str) -> str:
    """What a user says who puts passages of a text before a question."""
    return "\n\n".join([*(passage.strip() for passage in passages), question.strip()])


def expect_options(tokenizer: Any, options: Options) -> None:
    """Raise a ValueError for an option that is none of the tokenizer's chat template, which transformers would drop.

    What a text among them spells like a control token would become one: that is refused too.
    """
    known = _options_of(tokenizer) if options else set()
    for name, value in options.items():
        if name not in known:
            own = " or ".join(sorted(known)) or "no option"
            raise ValueError(
                f"template: expected {own}, as the tokenizer's chat template reads it, got {brief(name)}. Leave it out."
            )
        if isinstance(value, str) and _spells_control(value, tokenizer):
            raise ValueError(
                f"template: {name}: expected a text that spells no control token, got {brief(value)}. Leave it out."
            )


def _options_of(tokenizer: Any) -> set[str]:
    """What a template reads that transformers does not give it."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        # tags of transformers' own
        text = re.sub(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}", "", tokenizer.get_chat_template())
        read = meta.find_undeclared_variables(environment.parse(text))
    except Exception as error:  # whatever a stranger's template raises
        raise ValueError(
            f"template: expected no option: the tokenizer's chat template cannot be read ({first_line(error)}). Leave "
            "it out."
        ) from error
    given = {
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
    }
    return read - given - {*environment.globals, "messages", "raise_exception", "strftime_now"}


def conversation(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    inside: bool = False,
    options: Options | None = None,
) -> tuple[Integers, Integers]:
    """The tokens of a whole conversation up to the landmark of its last turn, and those of the cue of its answer.

    Args:
        messages: "role" and "content" of each, as chat templates take them.
        inside: it stands behind a text: what begins a text (BOS) is left out.
        options: of the template, which :func:`expect_options` has seen.

    Raises:
        ValueError: a template that refuses the conversation, or does not write each message once and as it is.
    """
    contents = [message["content"].strip() for message in messages]
    marked = [dict(message) | {"content": f"TURN-{n}-7c19"} for n, message in enumerate(messages)]
    parts, order = _taken_apart(_rendered(tokenizer, marked, True, options), len(messages))
    end, cue = _taken_apart(_rendered(tokenizer, marked, False, options), len(messages))[0][-1], parts[-1]
    if not cue.startswith(end):
        end = ""
    parts[-1], cue = _parted(end, cue[len(end) :])
    plain = not any(_spells_control(content, tokenizer) for content in contents)
    real = [dict(message) | {"content": own} for message, own in zip(messages, contents, strict=True)]
    contents = [contents[n] for n in order]
    if plain and (whole := _rendered(tokenizer, real, True, options)).endswith(cue):
        # whatever the template does with contents: of earlier answers it may leave out what was thought
        parts, contents = [whole.removesuffix(cue)], []
    if inside and beginning(tokenizer):
        parts[0] = parts[0].removeprefix(tokenizer.bos_token)
    if plain:
        body = "".join(text for pair in zip(parts, [*contents, ""], strict=True) for text in pair)
        asked, after = tokenize_parts([body, cue], tokenizer)
        return asked, after
    pieces = []
    for part, content in zip(parts, [*contents, ""], strict=True):
        pieces += [tokenize([part], tokenizer), text_tokens(content, tokenizer)]
    return np.concatenate(pieces).astype(np.int64), tokenize([cue], tokenizer).astype(np.int64)


def _taken_apart(text: str, count: int) -> tuple[list[str], list[int]]:
    """What a template wrote around the marks of ``count`` messages, and the order in which they stand."""
    found = re.split(r"TURN-(\d+)-7c19", text)
    order = [int(number) for number in found[1::2]]
    if sorted(order) != list(range(count)):
        raise ValueError(
            "tokenizer: expected a chat template that writes each message once and as it is, its own does not."
        )
    return found[::2], order


def beginning(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before a text: a model that learned with it is lost without."""
    ids, bos = tokenizer("a")["input_ids"], tokenizer.bos_token_id
    return [bos] if bos is not None and len(ids) > 1 and ids[0] == bos else []


def answer_ends(tokenizer: Any, model: Any) -> set[int]:
    """The tokens that end what a model generates: of its generation_config one, several or none; the tokenizer's."""
    own = getattr(model.generation_config, "eos_token_id", None)
    every = own if isinstance(own, list) else [own]
    return {int(token) for token in (*every, tokenizer.eos_token_id) if token is not None}


def control_ids(tokenizer: Any) -> set[int]:
    """The control tokens of a tokenizer (its special ones)."""
    known = getattr(tokenizer, "added_tokens_decoder", {})
    return {number for number, token in known.items() if token.special} | {*tokenizer.all_special_ids}


def _spells_control(text: str, tokenizer: Any) -> bool:
    return any(token in text for token in tokenizer.convert_ids_to_tokens(sorted(control_ids(tokenizer))))


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], cue: bool, options: Options | None
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=cue, **(options or {})
        )
    except Exception as error:  # whatever a stranger's template raises
        way_out = (
            "Leave --system out." if messages[0]["role"] == "system" else "Ask in plain lines (--plain)."
        )
        raise ValueError(
            f"tokenizer: expected a chat template for {' and '.join(m['role'] for m in messages)}, its own refuses "
            f"that ({first_line(error)}). {way_out}"
        ) from error
    return text


def _around(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ValueError(
            "tokenizer: expected a chat template that writes each message once and as it is, its own does not. Ask in "
            "plain lines (--plain)."
        )
    return before, after


def _parted(end: str, cue: str) -> tuple[str, str]:
    """With something in the cue."""
    if cue or end:
        return (end, cue) if cue else ("", end)
    raise ValueError(
        "tokenizer: expected a chat template that writes something between a question and its answer, its own does "
        "not. Ask in plain lines (--plain)."
    )
