"""``trailmark chat --url``: the conversation of a server, with its passages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import Server, serving
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.subject import load
from trailmark.server.client import RemoteConversation
from trailmark.server.running import listen

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_restart", "one_thread")
KEY = "a-key-that-nobody-guesses"


@pytest.mark.parametrize("name", ["chat", "focus"])
def test_it_says_what_a_conversation_here_says(
    name: str, live: Server, models: dict[str, Path], book: str, command: Command, lines: Callable[[str], None]
) -> None:  # fmt: skip
    live.append(f"{name}-read", "book.txt", book, model=name)
    lines("Where is the river?\n")
    options = ("--memory", f"{name}-read", "--max-new-tokens", "12", "--passages", "2")
    code, out, err = command("chat", name, "--url", live.url, *options)
    assert (code, err) == (0, "")
    sampling, memory = Sampling(max_new_tokens=12), live.folder / f"{name}-read"
    talk = Conversation(load(models[name]), memory, sampling)
    answer = "".join(talk.ask("Where is the river?"))
    assert out.splitlines()[0] == answer.splitlines()[0]
    lines("Where is the river?\n")
    _, here, _ = command("chat", models[name], "--memory", memory, *options[2:])
    said, told = out.replace("\ufffd", ""), here.replace("\ufffd", "")
    if name == "focus":  # its layers read for every token; a server counts the question's last piece too
        said, told = (text.partition("  Read for this")[0] for text in (said, told))
    assert said == told
    assert f"Read for this by {'group 2 of 2' if name == 'chat' else 'layer 2 of 3'}:" in out
    assert ("Put before the question:" in out) == (name == "focus")


def test_passages_of_a_focus_stand_before_the_last_question(
    live: Server, models: dict[str, Path], book: str
) -> None:
    """They are those that its own words look at in the memory, whatever was said before."""
    live.append("quoted", "book.txt", book, model="focus")
    talk = Conversation(load(models["focus"]), live.folder / "quoted", Sampling(max_new_tokens=2))
    "".join(talk.ask("Where is the river?"))
    passages = [(passage.tokens, passage.text) for passage in talk.quoted]
    earlier = [("user", "Which stones?"), ("assistant", "None.")]

    def asked(turns: list[tuple[str, str]], **more: object) -> tuple[list[tuple[tuple[int, int], str]], int]:
        out = live.openai.chat.completions.create(
            model="focus+quoted",
            messages=[{"role": role, "content": text} for role, text in turns],  # type: ignore[misc]
            max_tokens=2,
            extra_body=more,
        )
        found = out.choices[0].trailmark["quoted"]  # type: ignore[attr-defined]
        assert out.usage is not None
        return [(tuple(read["tokens"]), read["text"]) for read in found], out.usage.prompt_tokens

    question = ("user", "Where is the river?")
    assert passages
    plain, quoted = asked([question], quotes=False), asked([question])
    assert plain[0] == []
    assert quoted[0] == asked([*earlier, question])[0] == passages
    text = "\n\n".join(text.strip() for _, text in passages if text is not None)
    # what stands there is read as any prompt, and counted
    assert quoted[1] == asked([("user", f"{text}\n\n{question[1]}")], quotes=False)[1] > plain[1]
    assert asked([*earlier, question, ("assistant", "There.")])[0] == []  # it is no question
    assert asked([*earlier, ("user", "  ")])[0] == []
    # what is stored is what was said; places that were found in the book are known to the next state of the memory
    assert asked([question], store=True)[0] == passages
    (said,) = (path for path in (live.folder / "quoted" / "texts").iterdir() if path.name != "book.txt")
    assert said.read_text().startswith(f"user: {question[1]}\nassistant: ")
    assert asked([question])[0][0][1] is not None


def test_a_document_that_changed_is_told(
    live: Server, book: str, command: Command, lines: Callable[[str], None]
) -> None:
    live.append("changed", "book.txt", book, model="focus")
    (live.folder / "changed" / "texts" / "book.txt").write_text(book.replace("e", "a"))
    lines("Where is the river?\nWhere?\n")
    code, out, _ = command("chat", "focus", "--url", live.url, "--memory", "changed", "--max-new-tokens", "2")
    assert code == 0
    assert out.count("Mind: 'book.txt' has changed since it was read;") == 1
    assert "Put before the question:" not in out


def test_a_conversation_begins_anew(
    live: Server, models: dict[str, Path], book: str, command: Command, lines: Callable[[str], None]
) -> None:
    """After /new a question is answered, and its reads are told, as if it were the first."""
    live.append("anew", "book.txt", book, model="chat")
    options = ("--max-new-tokens", "6", "--passages", "2")
    for model, *where in (
        ("chat", "--url", live.url, "--memory", "anew"),
        (models["chat"], "--memory", live.folder / "anew"),
    ):
        said = []
        for asked in ("And the stones?\n", "Where?\n/new\nAnd the stones?\n", "Where?\nAnd the stones?\n"):
            lines(asked)
            said.append(command("chat", model, *where, *options)[1])
        first, after_new, second = said
        assert after_new.endswith(f"\n\n{first}")
        assert not second.endswith(f"\n\n{first}")


def test_a_template_is_given_its_option(
    live: Server, models: dict[str, Path], command: Command, lines: Callable[[str], None], refused: Callable[..., str]
) -> None:  # fmt: skip
    option = ("--template", "enable_thinking=false", "--max-new-tokens", "12", "--passages", "0")
    said = []
    for words in (("chat", "--url", live.url), (str(models["chat"]),)):
        for given in (option, option[2:]):
            lines("Where is the river?\n")
            said.append(command("chat", *words, *given)[1].replace("\ufffd", ""))
    assert said[:2] == said[2:]
    assert said[0] != said[1]
    lines("Where?\n")
    told = refused("chat", "chat", "--url", live.url, "--template", "think=false")
    assert "chat_template_kwargs: expected enable_thinking, as the" in told


@pytest.mark.parametrize("chunked", [False, True])
def test_half_an_answer_is_not_taken_for_a_whole_one(chunked: bool) -> None:
    event = b'data: {"choices": [{"delta": {"content": "The keeper is"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    if chunked:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = b"%x\r\n%b\r\n" % (len(event), event)
    with socket.create_server(("127.0.0.1", 0)) as there:

        def serve() -> None:
            with there.accept()[0] as connection:
                with connection.makefile("rb") as request:
                    lines = iter(request.readline, b"\r\n")
                    length = next(
                        int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")
                    )
                    list(lines)
                    request.read(length)
                connection.sendall(head + event)

        thread = threading.Thread(target=serve)
        thread.start()
        talk = RemoteConversation(
            f"http://127.0.0.1:{there.getsockname()[1]}/caf\u00e9", "m", None, Sampling(8)
        )
        with pytest.raises(ValueError, match="the server ended before its answer did"):
            "".join(talk.ask("Who?"))
        thread.join()


def test_a_conversation_goes_on(live: Server, command: Command, lines: Callable[[str], None]) -> None:
    lines("Where is the river?\nAnd the stones?\n")
    code, out, _ = command(
        "chat", "chat", "--url", f"{live.url}/v1/", "--max-new-tokens", "4", "--passages", "1"
    )
    assert code == 0
    assert out.count("Read for this") >= 2
    assert 'this conversation: "' in out


def test_what_goes_wrong_is_one_line(
    live: Server, models: dict[str, Path], tmp_path: Path, refused: Callable[..., str], lines: Callable[[str], None]
) -> None:  # fmt: skip
    for words, said in (
        (("other", "--url", live.url), "does not exist"),
        (("chat", "--url", live.url, "--memory", "none"), "none of this name"),
        (("chat", "--url", "http://127.0.0.1:1"), "cannot be reached"),
        (("chat", "--url", "ftp://x"), "url: expected an address"),
        (("chat", "--url", "http://127.0.0.1:99999"), "url: expected an address"),
        (("chat", "--url", "http://[::1"), "url: expected an address"),
        (("chat", "--url", live.url, "--plain"), "plain: expected none with --url"),
        (("chat", "--api-key-file", tmp_path / "key"), "without --url"),
    ):
        lines("Where?\n")
        assert said in refused("chat", *words)
    (tmp_path / "key").write_text(KEY)
    with serving({"chat": models["chat"]}, None, KEY) as made:
        lines("Where?\n")
        assert "Incorrect API key" in refused("chat", "chat", "--url", made.url)
        lines("Where?\n")
        # the command leaves where it is refused; with the key it answers
        from trailmark import cli

        cli.main(["chat", "chat", "--url", made.url, "--api-key-file", str(tmp_path / "key")])


def test_serving_begins_with_what_is_wrong(
    models: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    model = models["bytes"]
    assert "host: expected a loopback address" in refused("serve", model, "--host", "0.0.0.0")
    assert "api_key_file" in refused("serve", model, "--api-key-file", tmp_path / "none")
    assert "model: expected a folder" in refused("serve", tmp_path / "none", "--port", "0")
    (tmp_path / "file").write_text("")
    assert "memories: expected a folder" in refused(
        "serve", model, "--memories", tmp_path / "file", "--port", "0"
    )
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert f"port: cannot listen at 127.0.0.1, port {port}" in refused(
            "serve", tmp_path / "none", "--port", port
        )
