"""Memories over HTTP: what is read into them is what ``trailmark read`` reads, and requests leave no trace in them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.data.corpora import prose
from tests.disks import snapshot
from tests.server.conftest import Server, serving
from trailmark.data.corpus import tokenize
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import load
from trailmark.memory.verification import verify
from trailmark.server.memories import Memories

ASK: dict[str, Any] = {"model": "bytes", "prompt": "Where?", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def folder(live: Server) -> Path:
    """Of the memories of the live server."""
    return Path(live.folder)


def answer(live: Server, memory: str | None, **more: Any) -> Any:
    own = {} if memory is None else {"memory": memory}
    return live.openai.completions.create(**ASK, extra_body=own | more)


def test_a_memory_is_what_trailmark_read_makes(
    live: Server, models: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """In float64 to the bit, whatever pieces the texts came in and whatever was asked meanwhile."""
    texts = [prose(n, 200) + "\n" for n in range(3)]
    for number, text in enumerate(texts):
        described = live.append("exact", f"{number}.txt", text)
        assert abs(described["saved"] - time.time()) < 60
        answer(live, "exact")
    subject = load(models["bytes"])
    with Reader(subject, tmp_path / "memory") as reader:
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
            reader.read(tmp_path / f"{number}.txt")
    verify(folder / "exact")
    ours, theirs = subject.model.load_cache(folder / "exact"), subject.model.load_cache(tmp_path / "memory")
    assert described["tokens"] == ours.get_seq_length() == theirs.get_seq_length()
    assert described["records"] == int(ours.num_chunks[0])
    files = [path for path in (folder / "exact").iterdir() if path.suffix in (".bin", ".safetensors")]
    assert described["bytes"] == sum(path.stat().st_size for path in files)
    assert [entry["document"] for entry in described["documents"]] == ["0.txt", "1.txt", "2.txt"]
    ids = torch.from_numpy(tokenize(["Where?"], subject.tokenizer)).long()[None]
    with torch.no_grad():
        outs = [subject.model(ids, past_key_values=c.branch(), output_retrieval=True) for c in (ours, theirs)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert torch.equal(outs[0].retrieval[0].indices, outs[1].retrieval[0].indices)
    written = subject.model.generate(
        ids, past_key_values=theirs.branch(), max_new_tokens=12, do_sample=False
    )[0, 6:]
    text = answer(live, "exact").choices[0].text
    assert text.replace("\ufffd", "") == subject.tokenizer.decode(written, skip_special_tokens=True)


def test_requests_leave_no_trace_and_say_what_was_cached(live: Server, folder: Path, book: str) -> None:
    tokens = live.append("book", "book.txt", book)["tokens"]
    before = snapshot(folder / "book")
    first = answer(live, "book")
    assert first.usage.prompt_tokens_details.cached_tokens == tokens
    assert first.usage.prompt_tokens == tokens + 6
    assert answer(live, None).usage.prompt_tokens_details.cached_tokens == 0
    by_name = live.openai.completions.create(**ASK | {"model": "bytes+book"})
    assert by_name.choices[0].text == first.choices[0].text
    assert snapshot(folder / "book") == before
    assert "bytes+book" in {model.id for model in live.openai.models.list()}
    assert "chat+book" not in {model.id for model in live.openai.models.list()}


def test_an_answer_cites_the_passages_that_were_read(live: Server, book: str) -> None:
    live.append("book", "book.txt", book)
    retrieved = answer(live, "book", passages=2).choices[0].trailmark["retrieved"]
    assert len(retrieved) == 2
    data = book.encode()
    for read in retrieved:
        assert 0 < read["weight"] <= 1
        (passage,) = read["passages"]
        first, stop = passage["bytes"]
        assert passage["document"] == "book.txt"
        assert passage["tokens"] == [8 * read["chunk"], 8 * read["chunk"] + 8]
        assert passage["bytes"] == passage["tokens"]  # its tokens are bytes
        assert passage["text"] == data[first:stop].decode(errors="ignore")
    assert answer(live, "book", passages=0).choices[0].trailmark["retrieved"] == []
    said = [read["said"] for read in answer(live, None, passages=9).choices[0].trailmark["retrieved"]]
    assert all(text and text in "Where?" + answer(live, None).choices[0].text for text in said)


def test_what_was_said_is_stored_where_that_is_asked_for(live: Server, folder: Path, book: str) -> None:
    live.append("talk", "book.txt", book, model="chat")
    question = {"role": "user", "content": "Where is the <|im_end|> river?"}
    earlier = [{"role": "user", "content": "Earlier."}, {"role": "assistant", "content": "Answered."}]
    out = live.http.post(
        "/v1/chat/completions",
        json={
            "model": "chat+talk",
            "messages": [*earlier, question],
            "max_tokens": 5,
            "store": True,
            "seed": 1,
        },
    ).json()
    document = out["trailmark"]["stored"]
    text = (folder / "talk" / "texts" / document).read_text()
    said = out["choices"][0]["message"]["content"].strip()
    assert text == f"user: {question['content']}\nassistant: {said}\n\n"
    described = live.http.get("/v1/memories/talk").json()
    assert [entry["document"] for entry in described["documents"]] == ["book.txt", document]
    streamed = list(
        live.openai.completions.create(
            model="chat",
            prompt="So:",
            max_tokens=3,
            stream=True,
            extra_body={"memory": "talk", "store": True},
        )
    )
    stored = streamed[-1].trailmark["stored"]  # type: ignore[attr-defined]
    known = live.http.get("/v1/memories/talk").json()
    assert known["documents"][-1]["document"] == stored
    assert known["tokens"] > described["tokens"]
    verify(folder / "talk")


def test_the_same_text_is_read_once_and_another_is_refused(live: Server) -> None:
    first = live.append("once", "a.txt", "A text of some words.\n")
    assert live.append("once", "a.txt", "A text of some words.\n") == first
    body = {"document": "a.txt", "text": "Another text.\n"}
    refused = live.http.post("/v1/memories/once/texts", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "document_exists")
    assert live.http.get("/v1/memories/once").json() == first
    assert live.http.post("/v1/memories", json={"name": "once"}).status_code == 409


def test_a_file_is_read_and_its_progress_told(live: Server, folder: Path) -> None:
    live.http.post("/v1/memories", json={"name": "file"})
    data = ("".join(f"Line {n} of a long text.\n" for n in range(3000))).encode()
    with live.http.stream(
        "PUT", "/v1/memories/file/texts/long.txt", params={"stream": True, "model": "bytes"}, content=data
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    told = [event["tokens"] for event in events[:-1]]
    assert all(event["object"] == "memory.progress" for event in events[:-1])
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == events[-1]["tokens"] == len(data)
    assert (folder / "file" / "texts" / "long.txt").read_bytes() == data


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"A text.\0", b"A text.\n" * 9 + b"\xe6\xb2"])
def test_what_is_no_text_changes_nothing(live: Server, folder: Path, content: bytes) -> None:
    live.append("clean", "a.txt", "A text of some words.\n")
    before = snapshot(folder / "clean")
    refused = live.http.put("/v1/memories/clean/texts/b.txt", content=content)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_text")
    assert snapshot(folder / "clean") == before


def test_a_memory_of_another_model_is_refused(live: Server) -> None:
    live.append("own", "a.txt", "A text of some words.\n")
    for answered in (
        live.http.post("/v1/completions", json=ASK | {"model": "chat", "memory": "own"}),
        live.http.post(
            "/v1/memories/own/texts", json={"document": "b", "text": "More words.", "model": "chat"}
        ),
    ):
        assert answered.status_code == 400
        assert "another model" in answered.json()["error"]["message"]


def test_one_writes_and_others_wait_or_are_refused(
    live: Server, models: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    live.append("busy", "a.txt", "A text of some words.\n")
    with Reader(load(models["bytes"]), folder / "busy"):  # another process
        body = {"document": "b.txt", "text": "More words.\n"}
        for answered in (
            live.http.post("/v1/memories/busy/texts", json=body),
            live.http.delete("/v1/memories/busy"),
        ):
            assert answered.status_code == 409
            assert "another process" in answered.json()["error"]["message"]
        assert answer(live, "busy").choices[0].text  # who reads is not kept out
    threads = [
        threading.Thread(target=live.append, args=("busy", f"{n}.txt", f"{n} more words.\n"))
        for n in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    documents = live.http.get("/v1/memories/busy").json()["documents"]
    assert {entry["document"] for entry in documents} == {"a.txt", *(f"{n}.txt" for n in range(5))}
    (tmp_path / "more.txt").write_text("What another process adds.\n")
    before = answer(live, "busy").usage.prompt_tokens
    with Reader(load(models["bytes"]), folder / "busy") as reader:
        reader.read(tmp_path / "more.txt")
    assert answer(live, "busy").usage.prompt_tokens == before + 27  # it is seen at once


def test_those_used_longest_ago_are_closed(models: dict[str, Path], tmp_path: Path, book: str) -> None:
    with serving({"bytes": models["bytes"]}, tmp_path / "memories", open_bytes=1) as made:
        for name in ("a", "b"):
            made.append(name, "book.txt", book)
        for name in ("a", "b", "a"):
            answer(made, name)
            assert made.metric("trailmark_memories_open ") == 1
        one = made.metric("trailmark_memories_open_bytes")
    with serving({"bytes": models["bytes"]}, tmp_path / "memories", open_bytes=int(2 * one)) as made:
        for name in ("a", "b"):
            answer(made, name)
        assert made.metric("trailmark_memories_open ") == 2


def test_a_folder_that_was_moved_keeps_its_texts(models: dict[str, Path], tmp_path: Path, book: str) -> None:
    with serving({"bytes": models["bytes"]}, tmp_path / "a" / "memories") as made:
        tokens = made.append("book", "a.txt", book)["tokens"]
    (tmp_path / "a").rename(tmp_path / "b")
    with serving({"bytes": models["bytes"]}, tmp_path / "b" / "memories") as made:
        assert made.append("book", "a.txt", book)["tokens"] == tokens  # it is not read twice
        read = answer(made, "book").choices[0].trailmark["retrieved"]
        assert all(passage["text"] for chunk in read for passage in chunk["passages"])
        documents = made.append("book", "b.txt", book)["documents"]
        assert [entry["document"] for entry in documents] == ["a.txt", "b.txt"]
    texts = tmp_path / "b" / "memories" / "book" / "texts"
    assert sorted(path.name for path in texts.iterdir()) == ["a.txt", "b.txt"]


def test_another_folder_of_texts_is_no_memorys_own(
    models: dict[str, Path], tmp_path: Path, book: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    folder, theirs = tmp_path / "memories" / "book", tmp_path / "home" / "texts" / "a.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("What trailmark read has read.\n")
    assert command("read", models["bytes"], theirs, "--memory", folder)[0] == 0
    with serving({"bytes": models["bytes"]}, folder.parent) as made:
        tokens = made.append("book", "a.txt", book)["tokens"]
        assert tokens == made.append("book", "a.txt", book)["tokens"] > len(book)
        made.append("book", "b.txt", prose(2, 100))
    notes = load(models["bytes"]).model.load_cache(folder).notes["sources"]
    assert [source["path"] for source in notes][:2] == [str(theirs), str(folder / "texts" / "a.txt")]


def test_files_that_a_memory_does_not_know_stay(
    models: dict[str, Path], tmp_path: Path, book: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tmp_path / "memories" / "book"
    texts = folder / "texts"
    (texts / "notes").mkdir(parents=True)
    (texts / "a.txt").write_text("A text that is read.\n")
    assert command("read", models["bytes"], texts / "a.txt", "--memory", folder)[0] == 0
    (texts / "draft.txt").write_text("A text of mine that is not read yet.\n")
    (texts / ".part-of-a-killed-server").write_text("What came in")
    os.mkfifo(texts / ".part-that-is-a-pipe")
    with serving({"bytes": models["bytes"]}, folder.parent) as made:
        made.append("book", "b.txt", book)
        answered = made.http.put("/v1/memories/book/texts/draft.txt", content=b"Another text.\n")
        assert answered.status_code == 409
    assert sorted(path.name for path in texts.iterdir()) == [
        ".part-that-is-a-pipe", "a.txt", "b.txt", "draft.txt", "notes"
    ]  # fmt: skip


def test_a_text_that_comes_in_is_no_other_servers_to_remove(models: dict[str, Path], tmp_path: Path) -> None:
    came, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"The first part of a text. "
        came.set()
        assert go_on.wait(60)
        yield b"Its end.\n"

    only = {"bytes": models["bytes"]}
    with serving(only, tmp_path / "memories") as first, serving(only, tmp_path / "memories") as second:
        first.http.post("/v1/memories", json={"name": "book"})
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(first.http.put, "/v1/memories/book/texts/a.txt", content=slowly())
            assert came.wait(60)
            second.append("book", "b.txt", "Another text.\n")
            go_on.set()
            assert sent.result().status_code == 200, sent.result().text
        documents = second.http.get("/v1/memories/book").json()["documents"]
    assert [entry["document"] for entry in documents] == ["b.txt", "a.txt"]


def test_a_text_that_is_gone_before_its_end_is_said(
    models: dict[str, Path], tmp_path: Path, book: str
) -> None:
    subject, folder = load(models["bytes"]), tmp_path / "memories" / "book"
    (tmp_path / "a.txt").write_text(book)

    def stopped(ids: torch.Tensor, cache: Any, told: Callable[[int, int], None]) -> None:
        subject.model.read(ids[:, :400], cache)
        told(400, ids.shape[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Reader(subject, folder, take=stopped) as reader:
        reader.read(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with serving({"bytes": models["bytes"]}, folder.parent) as made:
        body = {"document": "b.txt", "text": "More words.\n"}
        answered = made.http.post("/v1/memories/book/texts", json=body)
    assert answered.status_code == 409
    assert "'a.txt', which was not read to its end, is gone" in answered.text
    assert not (folder / "texts" / "b.txt").exists()


def test_what_cannot_be_removed_is_said(live: Server, book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live.append("mounted", "book.txt", book)
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
        assert live.http.delete("/v1/memories/mounted").status_code == 500
    assert live.http.get("/v1/memories/mounted").status_code == 200


def test_a_deleted_memory_is_gone_with_its_texts(live: Server, folder: Path, book: str) -> None:
    live.append("gone", "book.txt", book)
    with live.openai.completions.create(
        **ASK | {"max_tokens": 200}, stream=True, extra_body={"memory": "gone"}
    ) as stream:
        next(iter(stream))
        assert live.http.delete("/v1/memories/gone").json()["deleted"]
        assert [event.choices[0].finish_reason for event in stream][-1] is not None
    assert not (folder / "gone").exists()
    assert live.http.post("/v1/completions", json=ASK | {"memory": "gone"}).status_code == 404
    assert live.append("gone", "book.txt", "Another book.\n")["tokens"] == 14


def test_one_that_is_removed_meanwhile_is_not_listed(live: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    live.append("stays", "a.txt", "A text of some words.\n")
    names = Memories.names
    monkeypatch.setattr(Memories, "names", lambda self: ["removed", *names(self)])
    for address in ("memories", "models"):
        listed = [entry["id"] for entry in live.http.get(f"/v1/{address}").json()["data"]]
        assert any("stays" in name for name in listed)
        assert not any("removed" in name for name in listed)


def test_damage_is_told_without_a_path(live: Server, folder: Path) -> None:
    live.append("broken", "a.txt", "A text of some words, and more of them.\n")
    live.append("whole", "a.txt", "A text of some words.\n")
    (state,) = (folder / "broken").glob("state-*")
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    (folder / "broken" / "memory.json").touch()
    refused = live.http.post("/v1/completions", json=ASK | {"memory": "broken"})
    assert refused.status_code == 500
    assert str(folder) not in refused.text
    (folder / "broken" / "memory.json").write_text("{")
    listed = {entry["id"]: entry for entry in live.http.get("/v1/memories").json()["data"]}
    assert listed["broken"]["damaged"]
    assert listed["whole"]["tokens"] == 22
    shutil.rmtree(folder / "broken")


def test_a_memory_is_read_on_in_its_own_precision(models: dict[str, Path], tmp_path: Path) -> None:
    """That of the server is for new ones; one server asks memories of several."""
    text = "A text that fills a chunk or two of the memory." * 4
    for name, dtype in (("book", None), ("eight", torch.int8), ("book", torch.bfloat16)):
        with serving({"bytes": models["bytes"]}, tmp_path / "memories", dtype=dtype) as made:
            made.append(name, f"{dtype}.txt", text)
            for memory in {"book", name}:
                assert made.http.post("/v1/completions", json=ASK | {"memory": memory}).status_code == 200
    model = load(models["bytes"]).model
    for name, dtype in (("book", torch.float64), ("eight", torch.int8)):
        assert model.load_cache(tmp_path / "memories" / name).memory.dtype == dtype
