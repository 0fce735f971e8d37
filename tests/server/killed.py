"""Kills a server at drawn moments while texts are appended, and compares what is left with what it had acknowledged."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.data.corpora import prose
from tests.models.tiny import EXACT
from trailmark.data.corpus import tokenize
from trailmark.evaluation.subject import Subject, load
from trailmark.memory.verification import verify

_SECONDS = 120.0  # for a server to start on a busy machine
NAME = "killed"


@dataclass
class Found:
    """What the kills did."""

    kills: int = 0
    acknowledged: int = 0  # texts
    in_flight: int = 0  # kills while a text was being appended
    kept: int = 0  # of these texts, those that the memory held nevertheless, in whole or in part
    tokens: list[int] = field(default_factory=list)  # after each kill


class Served:
    """A server in a process of its own, at an address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=_SECONDS)
        end = time.monotonic() + _SECONDS
        while True:
            try:
                self.http.get("/health")
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.01)
            else:
                break


class Process(Served):
    """One that the command starts."""

    def __init__(self, model: Path, memories: Path, *options: str) -> None:
        words = ["serve", str(model), "--memories", str(memories), "--port", "0", *options]
        command = [sys.executable, "-m", "trailmark", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # it says where once it has loaded its models
        assert line.startswith("Serving at "), line
        super().__init__(line.split()[-1].removesuffix("/v1"))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        code = self.process.wait(_SECONDS)
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Forked(Served):
    """One of many that are started again and again: forked from a process that has imported everything once."""

    def __init__(self, model: Path, memories: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.server.killed", "trailmark.server.running"])
        here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(model, memories, there), daemon=True)
        self.process.start()
        there.close()
        super().__init__(here.recv().split()[-1].removesuffix("/v1"))
        here.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.http.close()


def _serve(model: Path, memories: Path, told: Any) -> None:
    from trailmark.server.running import build, listen, run

    torch.set_num_threads(1)
    run(build({"tiny": load(model)}, memories), listen("127.0.0.1", 0), told.send)


class Killer:
    """One memory, killed again and again. An AssertionError says what a kill broke."""

    def __init__(self, model: Path, memories: Path, seed: int) -> None:
        self._subject, self._model, self._memories = load(model), model, memories
        self._random = random.Random(seed)
        self._texts: list[str] = []  # those that were acknowledged
        self._seconds = 0.3  # that appending takes, as last measured
        self.found = Found()

    def run(self, kills: int) -> None:
        for _ in range(kills):
            server = Forked(self._model, self._memories)
            server.http.post("/v1/memories", json={"name": NAME})
            stop = threading.Timer(self._random.uniform(0, 5 * self._seconds), server.process.kill)
            flying = self._append_until_killed(server, stop)
            server.kill()
            self.found.kills += 1
            self.found.acknowledged = len(self._texts)
            self._compare(flying)

    def _append_until_killed(self, server: Forked, stop: threading.Timer) -> str | None:
        """The text that was on its way then."""
        stop.start()
        while server.process.is_alive():
            number = len(self._texts)
            text = f"{number} {prose(number, 150)}\n"
            began = time.monotonic()
            try:
                answer = server.http.put(f"/v1/memories/{NAME}/texts/{number}.txt", content=text.encode())
            except httpx.TransportError:
                self.found.in_flight += 1
                stop.join()
                return text
            assert answer.status_code == 200, answer.text
            self._seconds = time.monotonic() - began
            self._texts.append(text)
        return None

    def _compare(self, flying: str | None) -> None:
        """All that was acknowledged is there, and behind it at most a part of what was on its way."""
        folder = self._memories / NAME
        if not (folder / "memory.json").exists():
            assert not self._texts
            return
        verify(folder)
        cache = self._subject.model.load_cache(folder)
        every = tokenize([*self._texts, *([] if flying is None else [flying])], self._subject.tokenizer)
        acknowledged = len(tokenize(self._texts, self._subject.tokenizer))
        known = cache.get_seq_length()
        assert acknowledged <= known <= len(every), (acknowledged, known, len(every))
        assert sum(source["tokens"] for source in cache.notes["sources"]) == known
        torch.testing.assert_close(
            _answer(self._subject, cache),
            _answer(self._subject, self._read(every[:known])),
            rtol=0,
            atol=EXACT,
        )
        self.found.kept += known > acknowledged
        self.found.tokens.append(known)

    def _read(self, tokens: Any) -> Any:
        cache = self._subject.model.new_cache()
        if len(tokens):
            self._subject.model.read(torch.from_numpy(tokens).long()[None], cache)
        return cache


@torch.no_grad()
def _answer(subject: Subject, cache: Any) -> torch.Tensor:
    ids = torch.from_numpy(tokenize(["the river"], subject.tokenizer)).long()[None]
    logits: torch.Tensor = subject.model(ids, past_key_values=cache.branch()).logits
    return logits
