"""A real server on loopback, of tiny random models: one of bytes, one with a chat template."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.data.corpora import prose, save_chat_bpe
from tests.models.tiny import drt, hils
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation.subject import load
from trailmark.server.running import build, listen, server
from trailmark.server.state import Limits

S = 8


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of "bytes", in float64, of "chat", in whose chunks a cue has room, and of "focus", which focuses."""
    root = tmp_path_factory.mktemp("models")
    tokenizer: Any = ByteTokenizer(extra_ids=0)
    tokenizer.save_pretrained(root / "bytes")
    drt(1, vocab_size=len(tokenizer), chunk_size=S).save_pretrained(root / "bytes")
    tokenizer = save_chat_bpe(root / "chat")
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    drt(2, chunk_size=4 * S, **sizes).float().save_pretrained(root / "chat")
    save_chat_bpe(root / "focus")
    hils(chunk_size=S, reading="windows", num_focus_chunks=2, **sizes).float().save_pretrained(root / "focus")
    return {name: root / name for name in ("bytes", "chat", "focus")}


class Server:
    """One that runs in a thread of this process."""

    def __init__(self, url: str, key: str | None, memories: Path | None) -> None:
        self.url, self.folder = url, memories or Path("none")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0)

    def append(self, memory: str, document: str, text: str, **more: Any) -> Any:
        """A text that is read into a memory, which is made where there is none."""
        self.http.post("/v1/memories", json={"name": memory})
        body = {"document": document, "text": text} | more
        answer = self.http.post(f"/v1/memories/{memory}/texts", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


Serving = Callable[..., AbstractContextManager[Server]]


@contextmanager
def serving(
    models: dict[str, Path], memories: Path | None = None, key: str | None = None, **options: Any
) -> Iterator[Server]:
    limits = Limits(**options.pop("limits", {}))
    subjects = {name: load(folder) for name, folder in models.items()}
    app = build(subjects, memories, [] if key is None else [key], limits, **options)
    running, socket = server(app), listen("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    made = Server(f"http://127.0.0.1:{socket.getsockname()[1]}", key, memories)
    try:
        yield made
    finally:
        made.http.close()
        made.openai.close()
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def live(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With memories, and without a key."""
    with serving(models, tmp_path_factory.mktemp("served") / "memories") as made:
        yield made


@pytest.fixture(scope="session")
def book() -> str:
    return prose(1, 300) + "\n"
