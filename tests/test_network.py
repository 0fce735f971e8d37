"""Where no hub answers, a hub name fails at once, with the way out; what was downloaded before is found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# each is timed after its imports: how long these take says nothing of the network
_ASK = """
import sys, time
import trailmark.data.hub, trailmark.evaluation.subject, trailmark.evaluation.targets
import transformers.models.auto.tokenization_auto
from pathlib import Path
from trailmark import network
from trailmark.data.corpus import load_tokenizer
from trailmark.data.hub import HubDataset
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.evaluation.subject import load
from trailmark.evaluation.targets import open_reference
bytes_of = load_tokenizer("bytes")
for ask in (
    lambda: load_tokenizer("owner/gone"),
    lambda: load(Path("owner/gone"), any_model=True),
    lambda: open_reference("owner/gone", bytes_of),
    lambda: open_embedder("transformers:owner/gone", bytes_of),
    lambda: HubDataset("owner/gone").size(),
):
    began = time.monotonic()
    try:
        ask()
    except ValueError as error:
        print(f"{time.monotonic() - began:.1f} {error}")
print(type(load_tokenizer("owner/here")).__name__)
"""


@pytest.fixture
def silent_hub() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that takes every connection and never answers, and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def take() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return
                asked.append(kept[-1].recv(1 << 16))

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once(
    silent_hub: tuple[str, list[bytes]], tmp_path: Path
) -> None:
    from trailmark.data.corpus import load_tokenizer

    snapshot = tmp_path / "hub" / "models--owner--here" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    load_tokenizer("bytes").save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "hub" / "models--owner--here" / "refs").mkdir()
    (tmp_path / "hub" / "models--owner--here" / "refs" / "main").write_text("0" * 40)
    address, asked = silent_hub
    mine = {
        name: x for name, x in os.environ.items() if "OFFLINE" not in name and "proxy" not in name.lower()
    }
    mine |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", _ASK], env=mine, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *refused, found = done.stdout.splitlines()
    assert found.startswith("By")  # from the cache
    assert [line.split()[1] for line in refused] == ["tokenizer:", "model:", "model:", "embedder:", "source:"]
    for line in refused:
        assert f"the hub cannot be reached ({address}: " in line
        assert "where there is a network" in line
    assert all("hf download owner/gone" in line for line in refused[:4])
    assert max(float(line.split()[0]) for line in refused) < 5  # 2 for the first; a busy machine adds
    lines = [request.split(b"\r\n")[0] for request in asked]
    # huggingface_hub asks once a day, in passing, which programs there are
    assert [line for line in lines if b"/api/agent-harnesses" not in line] == [b"HEAD / HTTP/1.1"]
    assert "Retrying" not in done.stderr
