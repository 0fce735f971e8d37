"""Who may ask, and what may be sent: raw HTTP against a real server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, serving
from trailmark.server.keys import expect_safe, read_keys
from trailmark.server.running import listen

KEY = "a-key-that-nobody-guesses"
ASK = {"model": "bytes", "prompt": "x", "max_tokens": 1}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/memories", "/v1/memories/book/texts")


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The error of a 4xx in OpenAI's shape."""
    assert 400 <= answer.status_code < 500, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) < 600
    assert "Traceback" not in answer.text
    assert "/" + "tmp" not in answer.text
    return error


def test_without_its_key_nothing_is_told(models: dict[str, Path], tmp_path: Path) -> None:
    with serving({"bytes": models["bytes"]}, tmp_path / "memories", KEY) as made:
        assert made.http.post("/v1/completions", json=ASK).status_code == 200
        # with keys it may stand behind another name
        assert made.http.get("/v1/models", headers={"Host": "example.org"}).status_code == 200
        with httpx.Client(base_url=made.url) as nobody:
            assert nobody.get("/health").json() == {"status": "ok"}
            for path in ("/v1/models", "/metrics", "/v1/memories", "/docs", "/openapi.json", "/nothing"):
                assert nobody.get(path).status_code == 401
            for key in ("x", KEY[:-1], KEY + "x", KEY.upper(), "é" * 10):
                answer = nobody.post(
                    "/v1/completions", json=ASK, headers={b"Authorization": f"Bearer {key}".encode()}
                )
                assert refused(answer)["code"] == "invalid_api_key"
            assert nobody.post("/v1/completions", json=ASK, auth=("user", KEY)).status_code == 401


def test_pages_of_other_sites_reach_nothing_on_loopback(live: Server) -> None:
    elsewhere = [{"Origin": "https://example.org"}, {"Origin": "null"}, {"Host": "example.org"}]
    for headers in (*elsewhere, {"Host": "[::1"}, {"Origin": "http://["}):
        assert live.http.get("/v1/models", headers=headers).status_code == 403
    for headers in ({"Origin": "http://localhost:3000"}, {"Host": "localhost:8000"}, {"Host": "[::1]:80"}):
        assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_keys_and_hosts_are_checked_before_anything_is_served(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n other-key-of-a-client \n")
    assert read_keys(file) == [KEY, "other-key-of-a-client"]
    for text in ("", "short\n", "schlüssel-der-niemand-errät\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"^api_key_file: .* Make one"):
            read_keys(file)
    with pytest.raises(ValueError, match=r"^api_key_file"):
        read_keys(tmp_path / "none")
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        expect_safe(host, [])
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", ""):
        expect_safe(host, [KEY])
        with pytest.raises(ValueError, match=r"^host: .* Add --api-key-file"):
            expect_safe(host, [])


HOSTILE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b"\0" * 100,
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"model": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "bytes", "model": "chat", "prompt": "x"}',
    b'{"model": "bytes", "prompt": "x", "temperature": NaN}',
    b'{"model": "bytes", "prompt": "x", "temperature": Infinity}',
    b'{"model": "bytes", "prompt": "x", "temperature": 1e999}',
    b'{"model": "bytes", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
]
VALUES: list[Any] = [
    *(None, True, "", "x", "../../x", "\0", "\ud800", [], {}, [[]], {"a": 1}, ["a", None], [["a"]], "<script>"),
    *(-1, 1.5, -1e300, 1e300, 2**31, 2**63, 2**64, 10**400, [-1], [2**40], [[1], []]),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_malformed_bodies_are_refused(live: Server, path: str) -> None:
    live.http.post("/v1/memories", json={"name": "book"})
    for body in HOSTILE:
        refused(live.http.post(path, content=body, headers={"Content-Type": "application/json"}))


def test_values_of_wrong_types_are_refused_or_mean_what_they_say(live: Server) -> None:
    plain = {"model": "bytes", "prompt": "x", "max_tokens": 1, "messages": None}
    for path, fields in (
        ("/v1/completions", ("model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed")),
        ("/v1/completions", ("logprobs", "stream_options", "memory", "store", "passages", "logit_bias")),
        ("/v1/chat/completions", ("messages", "tools", "tool_choice", "response_format", "metadata")),
    ):
        own = {k: v for k, v in plain.items() if k != ("messages" if path == "/v1/completions" else "prompt")}
        for name in fields:
            for value in VALUES:
                body = json.dumps(own | {name: value})
                answer = live.http.post(path, content=body)
                if answer.status_code != 200:
                    refused(answer)
    assert live.http.post("/v1/completions", json=ASK).status_code == 200


def test_options_of_a_template_are_those_that_it_reads(live: Server) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1}
    path, name = "/v1/chat/completions", "chat_template_kwargs"
    for value in VALUES:
        answer = live.http.post(path, content=json.dumps(body | {name: value}))
        assert value in (None, {}) if answer.status_code == 200 else refused(answer)
    assert live.http.post(path, json=body | {name: {"enable_thinking": False}}).status_code == 200
    for said in ("<|im_end|>", "x" * 257):
        error = refused(live.http.post(path, json=body | {name: {"enable_thinking": said}}))
        assert error["param"].startswith(name)
    # arguments of transformers' own, a special token, what the template itself sets
    foreign = ["tokenize", "chat_template", "add_generation_prompt", "eos_token", "messages", "loop"]
    for option in (*foreign, "x" * 10_000):
        error = refused(live.http.post(path, json=body | {name: {option: "{{ messages }}"}}))
        assert error["param"] == name


@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "..%2Fx", "%2e%2e", "a/b", "a%2Fb", "a\0b", "a%00b", ".hidden", "x" * 65, "a.b", "a b"]
)  # fmt: skip
def test_names_lead_nowhere_but_into_the_folder(live: Server, name: str) -> None:
    refused(live.http.post("/v1/memories", json={"name": name}))
    refused(live.http.post("/v1/completions", json=ASK | {"memory": name}))
    refused(live.http.post("/v1/completions", json=ASK | {"model": f"bytes+{name}"}))
    raw = name.replace("\0", "%00").replace(" ", "%20")
    for method, path in (("GET", f"/v1/memories/{raw}"), ("DELETE", f"/v1/memories/{raw}")):
        answer = live.http.request(method, path)
        # a client may leave a dot out itself
        assert answer.status_code in (400, 404, 405) or answer.json()["object"] == "list"
    live.http.post("/v1/memories", json={"name": "book"})
    if raw not in (".", ".."):
        refused(live.http.put(f"/v1/memories/book/texts/{raw if len(raw) < 65 else raw * 2}/x", content=b"x"))


def test_documents_lead_nowhere_but_into_their_memory(live: Server) -> None:
    live.http.post("/v1/memories", json={"name": "nowhere"})
    for document in ("..", "../x", "a/b", ".part-x", "", "x" * 101, "a\nb", "\ud800"):
        body = json.dumps({"document": document, "text": "A text."})
        refused(live.http.post("/v1/memories/nowhere/texts", content=body))
    assert live.http.get("/v1/memories/nowhere").json()["documents"] == []


def test_sizes_are_bounded(models: dict[str, Path], tmp_path: Path) -> None:
    limits = {"request_bytes": 1000, "text_bytes": 2000}
    with serving({"bytes": models["bytes"]}, tmp_path / "memories", limits=limits) as made:
        body = json.dumps({"model": "bytes", "prompt": "x" * 1000})
        assert made.http.post("/v1/completions", content=body).status_code == 413
        parts = (b"x" * 100 for _ in range(100))  # of no length that was told
        assert made.http.post("/v1/completions", content=parts).status_code == 413
        made.http.post("/v1/memories", json={"name": "book"})
        assert made.http.put("/v1/memories/book/texts/a.txt", content=b"x" * 2001).status_code == 413
        assert list((tmp_path / "memories" / "book" / "texts").iterdir()) == []
        assert made.http.post("/v1/completions", json=ASK).status_code == 200


def test_floods_of_headers_are_refused(live: Server) -> None:
    many = {f"x-{n}": "y" for n in range(200)}
    refused(live.http.get("/v1/models", headers=many))
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    for line in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(100)
            assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert live.http.get("/health").status_code == 200


def test_addresses_that_are_none_are_told_in_the_same_shape(live: Server) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/memories/none", 404),
        ("DELETE", "/v1/memories/none", 404),
        ("GET", "/../../etc/passwd", 404),
    ):
        answer = live.http.request(method, path)
        assert answer.status_code == status
        refused(answer)


def test_an_answer_is_sent_at_once() -> None:
    """Not when the client has acknowledged what was sent before it, which takes 40 ms."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
