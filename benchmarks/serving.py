"""What a server promises, measured on loopback: speed, memory, cancelled clients, kills and hostile bodies.

    python benchmarks/serving.py --model runs/demo/drt            every part that benchmarks/serving.json lacks
    python benchmarks/serving.py first together --model ...       these parts, again

The server is a process of its own, with a memory of 1M tokens in which each client's needles are hidden; it lies in
--folder, and is read once. "kills" and "hostile" serve a tiny model with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import keep

from tests.models.tiny import drt
from tests.server.killed import Killer, Process
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.corpus import standard_library_texts
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import load
from trailmark.files import read_json

OUTPUT = Path(__file__).with_suffix(".json")
NAME = "haystack"
_CHUNK = 32  # of the demo's model: a needle lies in one chunk
_EACH = 8  # needles of a client
_LETTERS, _DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"


@dataclass(frozen=True)
class Plan:
    """What is measured of, and how much."""

    model: Path
    folder: Path
    tokens: int
    clients: int
    requests: int
    kills: int
    hostile: int
    seed: int


# --- a memory with needles ---------------------------------------------------------------------------------------


def haystack(plan: Plan) -> tuple[str, list[tuple[str, str]]]:
    """An ASCII text of ``plan.tokens`` bytes, and the keys and values of its needles, those of a client together."""
    drawn = random.Random(plan.seed)
    needles: dict[str, str] = {}
    while len(needles) < plan.clients * _EACH:
        needles["".join(drawn.choices(_LETTERS, k=4))] = "".join(drawn.sample(_DIGITS, 5))
    filler = "\n".join(standard_library_texts("haystack")).encode("ascii", "ignore").decode()
    filler = filler.replace("$", " ").replace("~", " ").replace("\0", " ")
    text = bytearray((filler * (plan.tokens // len(filler) + 1))[: plan.tokens].encode())
    # none of them in the last chunks, which a question sees by itself
    chunks = drawn.sample(range(2, plan.tokens // _CHUNK - 16), len(needles))
    for chunk, (key, value) in zip(chunks, needles.items(), strict=True):
        needle = f"${key}={value};".encode()
        begin = chunk * _CHUNK + drawn.randrange(_CHUNK - len(needle))
        text[begin : begin + len(needle)] = needle
    return text.decode(), list(needles.items())


@contextmanager
def served(plan: Plan, *options: str) -> Iterator[tuple[Process, list[tuple[str, str]]]]:
    """A server of the model with the memory, which is read if it is not there."""
    text, needles = haystack(plan)
    place = plan.folder / f"{plan.tokens}-{plan.clients}-{plan.seed}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "text.txt").write_text(text)
    with Reader(load(plan.model), place / "memories" / NAME) as reader:
        reader.read(place / "text.txt")
    server = Process(plan.model, place / "memories", *options)
    try:
        yield server, needles
    finally:
        server.stop()


def question(key: str, **more: Any) -> dict[str, Any]:
    """What is asked at /v1/completions: as "marks" has it, the cue and the value are to come."""
    own = {"memory": NAME, "prompt": f"~{key}", "max_tokens": 7, "temperature": 0, "stop": ";"}
    return own | {"passages": 0} | more


class Asker:
    """Asks one server."""

    def __init__(self, server: Process) -> None:
        self.http = httpx.AsyncClient(
            base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=64)
        )
        self.model = server.http.get("/v1/models").json()["data"][0]["id"]

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post("/v1/completions", json={"model": self.model} | body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def first(self, body: dict[str, Any]) -> float:
        """Seconds until the first token; the client leaves then."""
        began = time.perf_counter()
        body = {"model": self.model, "stream": True} | body
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    return time.perf_counter() - began
        return time.perf_counter() - began


# --- speed -------------------------------------------------------------------------------------------------------


def first(plan: Plan) -> dict[str, Any]:
    """Milliseconds to the first token of a short question, one client."""
    with served(plan) as (server, needles):

        async def run() -> list[float]:
            asker = Asker(server)
            bodies = [question(key) for key, _ in needles]
            for body in bodies[:10]:  # the memory is opened, and places are warm
                await asker.first(body)
            return [1000 * await asker.first(body) for body in bodies]

        taken = sorted(asyncio.run(run()))
    at = {p: taken[min(len(taken) - 1, round(p / 100 * len(taken)))] for p in (50, 80, 95)}
    return {"questions": len(taken), "milliseconds": {f"p{p}": value for p, value in at.items()}}


def together(plan: Plan) -> dict[str, Any]:
    """Tokens/s of as many clients at once as the plan has, and of their questions one after the other; in turns."""
    rounds, length = 3, 64
    speeds: dict[str, list[float]] = {"one after the other": [], "together": []}
    with served(plan) as (server, needles):

        async def run() -> None:
            asker = Asker(server)
            keys = [key for key, _ in needles[::_EACH]]
            # nothing stops an answer: each writes as many tokens
            bodies = [question(key, max_tokens=length, stop=None, temperature=1, seed=0) for key in keys]

            async def timed(work: Callable[[], Awaitable[list[dict[str, Any]]]]) -> float:
                began = time.perf_counter()
                done = await work()
                tokens = sum(answer["usage"]["completion_tokens"] for answer in done)
                return tokens / (time.perf_counter() - began)

            async def each() -> list[dict[str, Any]]:
                return [await asker.ask(body) for body in bodies]

            async def all_at_once() -> list[dict[str, Any]]:
                return await asyncio.gather(*map(asker.ask, bodies))

            for number in range(rounds + 1):
                for name, work in (("one after the other", each), ("together", all_at_once)):
                    speed = await timed(work)
                    if number:  # the first does not count
                        speeds[name].append(speed)

        asyncio.run(run())
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    ratio = medians["together"] / medians["one after the other"]
    return {"clients": plan.clients, "tokens": length, "tokens_per_second": medians, "ratio": ratio}


# --- many requests -----------------------------------------------------------------------------------------------


def many(plan: Plan) -> dict[str, Any]:
    """All clients at once, a tenth of their requests left after the first token; RAM, and whose answers came."""
    with served(plan) as (server, needles):
        process, found = psutil.Process(server.process.pid), {"asked": 0, "left": 0, "wrong": 0, "other": 0}
        values = {value for _, value in needles}
        ram: list[dict[str, int]] = []

        async def run() -> tuple[int, dict[str, str]]:
            asker = Asker(server)
            alone = {key: (await asker.ask(question(key)))["choices"][0]["text"] for key, _ in needles}
            drawn, numbers = random.Random(plan.seed + 1), iter(range(plan.requests))

            async def client(own: list[tuple[str, str]]) -> None:
                for number in numbers:
                    if number % 100 == 0:
                        ram.append(_ram(process))
                    key, value = drawn.choice(own)
                    if drawn.random() < 0.1:
                        await asker.first(question(key))
                        found["left"] += 1
                        continue
                    text = (await asker.ask(question(key)))["choices"][0]["text"]
                    found["asked"] += 1
                    found["wrong"] += text != alone[key]
                    said = text.removeprefix("=")
                    found["other"] += said in values and said != value and text != alone[key]

            own = [needles[n * _EACH : (n + 1) * _EACH] for n in range(plan.clients)]
            await asyncio.gather(*map(client, own))
            right = sum(alone[key] == f"={value}" for key, value in needles)
            return right, alone

        right, _ = asyncio.run(run())
        ram.append(_ram(process))
        stats = server.http.get("/metrics").text
        assert server.http.get("/health").status_code == 200
    left = [line for line in stats.splitlines() if "engine_rows{" in line or "engine_waiting{" in line]
    begun, end = ram[len(ram) // 10], ram[-1]
    grown = {name: end[name] / begun[name] - 1 for name in end}
    return found | {
        "clients": plan.clients,
        "needles_found_alone": right,
        "needles": len(needles),
        "ram": {"begun": begun, "end": end, "grown": grown, "anonymous": [own["RssAnon"] for own in ram]},
        "left_in_engine": sum(float(line.split()[-1]) for line in left),
    }


def _ram(process: psutil.Process) -> dict[str, int]:
    """Bytes: all in RAM, and what is no file's."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}


# --- kills and hostile bodies ------------------------------------------------------------------------------------


def _tiny(plan: Plan) -> Path:
    folder = plan.folder / "tiny"
    if not (folder / "config.json").exists():
        tokenizer: Any = ByteTokenizer(extra_ids=0)
        tokenizer.save_pretrained(folder)
        drt(1, vocab_size=len(tokenizer), chunk_size=8).save_pretrained(folder)
    return folder


def kills(plan: Plan) -> dict[str, Any]:
    """SIGKILLs at drawn moments while texts are appended to one memory."""
    memories = plan.folder / "killed"
    shutil.rmtree(memories, ignore_errors=True)
    killer = Killer(_tiny(plan), memories, plan.seed)
    for _ in range(plan.kills):
        killer.run(1)
        print(
            killer.found.kills,
            "kills,",
            killer.found.acknowledged,
            "texts acknowledged",
            end="\r",
            flush=True,
        )
    found = asdict(killer.found)
    del found["tokens"]
    return found


_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", "../../x", "\0", "\ud800", [], {}, [[]], {"a": 1}, ["a", None], "x" * 100_000),
    *(-1, 1.5, -1e300, 1e300, 2**31, 2**63, 2**64, 10**400, float("nan"), float("inf"), [-1], [2**40]),
)  # fmt: skip
_RAW = (b"", b"{", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"\0" * 999, b"{}" * 999, b"9" * 9999)
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/memories",
    "/v1/memories/secret/texts",
    "/v1/memories/..%2fsecret",
    "/v1/models/..%2f..%2fetc",
)
SECRET = "The word of another client is heliotrope."


def hostile(plan: Plan) -> dict[str, Any]:
    """Drawn requests that mean harm: their statuses, and whether one told of a path or of another client's text."""
    drawn, statuses, leaks = random.Random(plan.seed), dict[str, int](), 0
    memories = plan.folder / "hostile"
    shutil.rmtree(memories, ignore_errors=True)
    server = Process(_tiny(plan), memories)
    try:
        server.http.post("/v1/memories", json={"name": "secret"})
        body = {"text": SECRET, "document": "secret.txt"}
        assert server.http.post("/v1/memories/secret/texts", json=body).status_code == 200
        for _ in range(plan.hostile):
            answer = _attack(drawn, server)
            statuses[str(answer.status_code)] = statuses.get(str(answer.status_code), 0) + 1
            leaks += any(word in answer.text for word in ("heliotrope", str(plan.folder), "Traceback", ".py"))
        alive = server.http.get("/health").status_code == 200
    finally:
        server.stop()
    failed = sum(count for status, count in statuses.items() if status >= "500")
    return {"requests": plan.hostile, "statuses": statuses, "failed": failed, "leaks": leaks, "alive": alive}


def _attack(drawn: random.Random, server: Process) -> httpx.Response:
    path, kind = drawn.choice(_PATHS), drawn.randrange(5)
    plain: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "stream": False}
    if "chat" in path:
        plain |= {"messages": [{"role": "user", "content": "x"}]}
    elif "completions" in path:
        plain |= {"prompt": "x"}
    elif "texts" in path:
        plain = {"text": "y", "document": "d"}
    elif "memories" in path:
        plain = {"name": "n"}
    if kind == 0:
        return server.http.request(
            drawn.choice(("GET", "POST", "PUT", "DELETE", "PATCH")), path, content=b"x"
        )
    if kind == 1:
        return server.http.post(path, content=drawn.choice(_RAW))
    if kind == 2:
        flood = {f"x-{n}": "y" * drawn.randrange(99) for n in range(drawn.choice((10, 150, 300)))}
        return server.http.post(path, json=plain, headers=flood)
    if kind == 3:  # some bytes of a good body are others
        content = bytearray(json.dumps(plain).encode())
        for _ in range(drawn.randrange(1, 5)):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        return server.http.post(path, content=bytes(content))
    extra = ("temperature", "n", "stop", "seed", "memory", "store", "logprobs", "passages", "stream_options")
    name = drawn.choice([*plain, *extra])
    return server.http.post(path, content=json.dumps(plain | {name: drawn.choice(_VALUES)}))


PARTS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "first": first,
    "together": together,
    "many": many,
    "kills": kills,
    "hostile": hostile,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: those that are missing")
    parser.add_argument("--model", type=Path, default=Path("runs/demo/drt"), help="the demo's DRT")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-serving"))
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the memory")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hostile", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    plan = Plan(
        *(given.model, given.folder, given.tokens, given.clients),
        *(given.requests, given.kills, given.hostile, given.seed),
    )
    known = read_json(given.output) or {}
    for part in given.parts or [name for name in PARTS if name not in known]:
        print(f"== {part}", flush=True)
        found = PARTS[part](plan)
        print(found, flush=True)
        keep(given.output, part, found)
    print(f"Numbers: {given.output}")


if __name__ == "__main__":
    main()
