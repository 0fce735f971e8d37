"""``trailmark chat --url``: the conversation of a server, with its passages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import Server, serving
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.subject import load

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_restart", "one_thread")
KEY = "a-key-that-nobody-guesses"


def test_it_says_what_a_conversation_here_says(
    live: Server, models: dict[str, Path], book: str, command: Command, lines: Callable[[str], None]
) -> None:
    live.append("chatted", "book.txt", book, model="chat")
    lines("Where is the river?\n")
    options = ("--max-new-tokens", "12", "--passages", "2")
    code, out, err = command("chat", "chat", "--url", live.url, "--memory", "chatted", *options)
    assert (code, err) == (0, "")
    sampling = Sampling(max_new_tokens=12)
    talk = Conversation(load(models["chat"]), live.folder / "chatted", sampling)
    answer = "".join(talk.ask("Where is the river?"))
    assert out.splitlines()[0] == answer.splitlines()[0]
    lines("Where is the river?\n")
    _, here, _ = command("chat", models["chat"], "--memory", live.folder / "chatted", *options)
    assert out.replace("\ufffd", "") == here.replace("\ufffd", "")
    assert "Read for this by group 2 of 2:" in out


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


def test_a_conversation_goes_on(live: Server, command: Command, lines: Callable[[str], None]) -> None:
    lines("Where is the river?\nAnd the stones?\n")
    code, out, _ = command(
        "chat", "chat", "--url", f"{live.url}/", "--max-new-tokens", "4", "--passages", "1"
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
        (
            ("chat", "--url", live.url, "--no-quotes"),
            "no_quotes: expected none with --url: a server puts nothing",
        ),
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
    assert "model: expected a folder" in refused("serve", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "memories: expected a folder" in refused("serve", model, "--memories", tmp_path / "file")
