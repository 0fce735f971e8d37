"""The openai client, unchanged, against a real server."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.data.corpora import CHAT_TEMPLATE, save_chat_bpe
from tests.models.tiny import drt
from tests.server.conftest import Server, serving
from tests.test_cli_chat import followed
from trailmark.data.chat import conversation
from trailmark.data.corpus import tokenize
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.subject import load
from trailmark.memory import ChunkCache
from trailmark.models import HiLSForCausalLM
from trailmark.trace.passages import Passages

ASKED = [{"role": "user", "content": "Where is the river?"}]


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_completion_is_what_the_model_writes(live: Server, models: dict[str, Path]) -> None:
    subject = load(models["bytes"])
    ids = torch.from_numpy(tokenize(["The river is"], subject.tokenizer)).long()[None]
    written = subject.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    out = live.openai.completions.create(
        model="bytes", prompt="The river is", max_tokens=12, temperature=0, logprobs=3
    )
    choice = out.choices[0]
    # the tokenizer leaves out bytes that are no text
    assert choice.text.replace("\ufffd", "") == subject.tokenizer.decode(written, skip_special_tokens=True)
    assert choice.finish_reason in ("length", "stop")
    assert out.usage is not None
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (12, len(written))
    logs = choice.logprobs
    assert logs is not None
    assert logs.token_logprobs is not None
    assert logs.top_logprobs is not None
    for own, top in zip(logs.token_logprobs, logs.top_logprobs, strict=True):
        assert own == pytest.approx(max(top.values()))
        assert len(top) == 3


def test_tokens_of_a_completion_have_their_places_streamed_or_not(live: Server) -> None:
    ask: dict[str, Any] = {
        "model": "bytes",
        "prompt": ["x", "The"],
        "max_tokens": 9,
        "seed": 1,
        "logprobs": 0,
    }
    whole = {choice.index: choice for choice in live.openai.completions.create(**ask).choices}
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for event in live.openai.completions.create(**ask, stream=True):
        offsets[event.choices[0].index] += event.choices[0].logprobs.text_offset
    for number, choice in whole.items():
        assert choice.logprobs is not None
        assert offsets[number] == choice.logprobs.text_offset
        named = choice.logprobs.tokens
        assert offsets[number][0] == 0
        for name, offset in zip(named, offsets[number], strict=True):
            assert name.startswith("bytes:") or choice.text[offset : offset + len(name)] == name


def test_answers_of_several_prompts_are_draws_of_their_own(live: Server) -> None:
    ask: dict[str, Any] = {"model": "bytes", "max_tokens": 12, "temperature": 1.5, "seed": 5}
    answers = live.openai.completions.create(prompt=["The", "The"], n=2, **ask).choices
    assert len({choice.text for choice in answers}) == 4
    assert answers[0].text == live.openai.completions.create(prompt="The", **ask).choices[0].text


def test_fewer_tokens_than_usual_may_be_the_most(models: dict[str, Path]) -> None:
    with serving({"bytes": models["bytes"]}, limits={"new_tokens": 3}) as made:
        out = made.openai.completions.create(model="bytes", prompt="The")
        assert out.usage is not None
        assert out.usage.completion_tokens <= 3


def test_a_look_for_passages_has_the_requests_time_and_its_turn(
    models: dict[str, Path], tmp_path: Path, book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, most, go_on, joined = 0, 0, threading.Event(), Passages.joined

    def slowly(self: Passages, chunks: list[int]) -> Any:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        go_on.wait(60)
        looking -= 1
        return joined(self, chunks)

    monkeypatch.setattr(Passages, "joined", slowly)
    with serving({"focus": models["focus"]}, tmp_path / "memories", limits={"seconds": 2.0}) as made:
        made.append("book", "book.txt", book)
        body = {"model": "focus", "memory": "book", "messages": ASKED, "max_tokens": 2}
        for _ in range(2):
            assert made.http.post("/v1/chat/completions", json=body).status_code == 503
        go_on.set()
    assert most == 1


def test_what_is_streamed_is_the_whole_answer(live: Server) -> None:
    ask: dict[str, Any] = {"model": "chat", "messages": ASKED, "max_tokens": 20, "temperature": 0}
    whole = live.openai.chat.completions.create(**ask)
    events = list(
        live.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert events[0].choices[0].delta.role == "assistant"
    parts = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert [c.finish_reason for e in events for c in e.choices if c.finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_seeds_repeat_and_several_answers_differ(live: Server) -> None:
    ask: dict[str, Any] = {"model": "bytes", "prompt": "The river", "max_tokens": 16, "n": 3, "seed": 5}
    first, second = (live.openai.completions.create(**ask, temperature=1.5) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3


def test_several_prompts_are_answered_in_their_order(live: Server) -> None:
    ask: dict[str, Any] = {"model": "bytes", "max_tokens": 8, "temperature": 0}
    alone = [live.openai.completions.create(prompt=p, **ask).choices[0].text for p in ("ab", "cd")]
    together = live.openai.completions.create(prompt=["ab", "cd"], **ask)
    assert [choice.text for choice in together.choices] == alone
    as_tokens = live.openai.completions.create(prompt=[[ord(c) + 3 for c in p] for p in ("ab", "cd")], **ask)
    assert [choice.text for choice in as_tokens.choices] == alone


def test_a_stop_string_ends_an_answer_and_is_not_shown(live: Server) -> None:
    ask: dict[str, Any] = {"model": "bytes", "prompt": "The river is", "max_tokens": 40, "temperature": 0}
    text = live.openai.completions.create(**ask).choices[0].text
    stop = text[5:8]
    choice = live.openai.completions.create(**ask, stop=[stop, "never"]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = live.openai.completions.create(**ask, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == choice.text


def test_an_answer_can_be_sent_back_as_the_client_has_it(live: Server) -> None:
    ask: dict[str, Any] = {"model": "chat", "max_completion_tokens": 4, "temperature": 0}
    answer = live.openai.chat.completions.create(messages=ASKED, **ask).choices[0].message
    dumped = answer.model_dump() | {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    again = ASKED[:1]
    both = [
        live.openai.chat.completions.create(messages=[*ASKED, sent, *again], **ask).choices[0].message.content
        for sent in (dumped, {"role": "assistant", "content": answer.content})
    ]
    assert both[0] == both[1]


def test_log_probabilities_of_a_conversation(live: Server) -> None:
    out = live.openai.chat.completions.create(
        model="chat", messages=ASKED, max_completion_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    assert out.choices[0].logprobs is not None
    content = out.choices[0].logprobs.content
    assert content is not None
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"extra_body": {"store": True}}, "store"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(live: Server, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.openai.chat.completions.create(model="chat", messages=ASKED, **body)  # type: ignore[call-overload]
    assert param.split(".")[0] in error.value.message
    assert error.value.type == "invalid_request_error"


def test_models_are_listed_and_others_are_not_found(live: Server) -> None:
    assert {"bytes", "chat"} <= {model.id for model in live.openai.models.list()}
    assert live.openai.models.retrieve("chat").owned_by == "trailmark"
    with pytest.raises(openai.NotFoundError) as error:
        live.openai.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="chat template"):
        live.openai.chat.completions.create(model="bytes", messages=ASKED)  # type: ignore[arg-type]


def test_who_leaves_stops_his_answer(live: Server) -> None:
    before = live.metric("trailmark_engine_cancelled")
    # the likeliest tokens: one drawn at random would end the text before long
    long: dict[str, Any] = {"model": "bytes", "prompt": "x", "max_tokens": 4000, "temperature": 0}
    with live.openai.completions.create(**long, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: live.metric("trailmark_engine_cancelled") > before)
    body = json.dumps(long).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(0.3)
    eventually(lambda: live.metric("trailmark_engine_cancelled") > before + 1)


def test_a_full_queue_and_a_deadline_are_told(models: dict[str, Path]) -> None:
    few = {"bytes": models["bytes"]}
    with serving(few, max_rows=1, max_waiting=1, limits={"seconds": 1.0}) as made:
        # greedy: what is sampled ends by itself now and then, on a fast machine before the deadline
        ask: dict[str, Any] = {"model": "bytes", "prompt": "x", "max_tokens": 4000, "temperature": 0}
        began = time.monotonic()
        with pytest.raises(openai.RateLimitError) as error:
            streams = [made.openai.completions.create(**ask, stream=True) for _ in range(8)]
        assert error.value.code == "rate_limit_exceeded"
        del error
        out = None
        while out is None:
            try:
                out = made.openai.completions.create(**ask)
            except openai.RateLimitError:
                time.sleep(0.05)
        assert out.choices[0].finish_reason == "length"
        assert out.usage is not None
        assert out.usage.completion_tokens < 4000
        assert time.monotonic() - began < 60
        streams = []
        del streams


def test_a_look_that_waits_knows_the_deadline(
    models: dict[str, Path], book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn came too late: the memory is not looked at for it any more."""
    few, looks = {"focus": models["focus"]}, []
    focus = HiLSForCausalLM.focus
    with serving(few, memories=tmp_path / "memories", limits={"seconds": 0.5}) as made:
        made.append("late", "book.txt", book)

        def slow(*args: Any) -> None:
            looks.append(args)
            eventually(lambda: made.metric("trailmark_engine_waiting") == 2)
            time.sleep(0.7)  # until the time of the other one is over
            focus(*args)

        monkeypatch.setattr(HiLSForCausalLM, "focus", slow)

        def ask() -> tuple[int, str | None]:
            with pytest.raises(openai.InternalServerError) as error:
                made.openai.completions.create(model="focus+late", prompt="x", max_tokens=2)
            return error.value.status_code, error.value.code

        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(ask) for _ in range(2)]
            assert [one.result() for one in both] == [(503, "timeout")] * 2
        assert len(looks) == 1


def test_nothing_of_an_answer_waits_for_the_collector(live: Server, book: str) -> None:
    """Caches are large, and Python's collector counts objects: a circle of references would let RAM grow."""
    live.append("flat", "book.txt", book)
    ask: dict[str, Any] = {"model": "bytes+flat", "prompt": "x", "max_tokens": 2, "stop": "never"}
    live.openai.completions.create(**ask)
    gc.collect()
    gc.disable()
    try:
        before = _caches()
        for number in range(6):
            if number % 2:
                list(live.openai.completions.create(**ask, stream=True))
            else:
                live.openai.completions.create(**ask)
        eventually(lambda: _caches() <= before)
    finally:
        gc.enable()


def _caches() -> int:
    return sum(type(own) is ChunkCache for own in gc.get_objects())


def test_what_begins_a_text_begins_a_conversation(tmp_path: Path) -> None:
    """Also where the chat template does not write it, as that of a tokenizer that puts it there by itself."""
    tokenizer = save_chat_bpe(tmp_path, bos=True, template=CHAT_TEMPLATE)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    drt(2, chunk_size=32, vocab_size=len(tokenizer), **ends).float().save_pretrained(tmp_path)
    written, _ = conversation([{"role": "user", "content": "Where?"}], tokenizer)
    assert written[0] != tokenizer.bos_token_id
    talk = Conversation(load(tmp_path), None, Sampling(1))
    tokens, _ = followed(talk)
    "".join(talk.ask("Where?"))
    assert tokens[0] == tokenizer.bos_token_id
    body = {"model": "m", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1}
    with serving({"m": tmp_path}) as live:
        found = live.http.post("/v1/chat/completions", json=body).json()
    assert found["usage"]["prompt_tokens"] == len(tokens)
