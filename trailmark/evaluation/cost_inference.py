"""What a token costs after a long prompt: time in rounds that all models share, and what each must hold for it."""

from __future__ import annotations

import copy
import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache

from trailmark.evaluation.cost_peak import peak_kind, with_peak
from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkCache
from trailmark.memory.chunks import TABLE_BYTES
from trailmark.models.costs import CacheBytes, foreign_cache_bytes

Progress = Callable[[str], None]

_PIECE = 1 << 16  # tokens of a prompt that are on a device at once
_FOREIGN_PIECE = 4096  # tokens of one call of a model that cannot read
_COPIES = 3  # of a window: the cache's, a branch's, and that of a call that makes a new one


class Text:
    """One model after a prompt, whose first token was generated: to go on from there again and again.

    Args:
        prompt: tokens; generate: tokens after it. tier: of the memory. memory_dtype: of keys and values in it; None:
            the model's.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        tier: str,
        prompt: int,
        generate: int,
        memory_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.subject, self.model = name, subject, subject.model
        self.tier, self.prompt, self.generate = tier, prompt, generate
        self.memory_dtype = memory_dtype
        self.device: torch.device = self.model.device
        self.problem: str | None = None  # why nothing was measured
        self.cache: Any = None
        self.times: list[float] = []  # milliseconds a token, of each round
        self.tokens: list[int] = []  # that were generated last
        self.read_seconds, self.first_seconds = 0.0, 0.0
        self.peaks: dict[str, int | None] = {}
        self._next = torch.zeros(1, 1, dtype=torch.int64)
        taken = inspect.signature(self.model.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

    @property
    def fed(self) -> int:
        """Tokens that the model sees after the prompt: the last one generated is fed to nothing."""
        return self.generate - 1

    @property
    def keeps_chunks(self) -> bool:
        """Whether there is a memory whose tier makes a difference; else all that is carried lies on the device."""
        return bool(self.subject.ours and self.model.config.keeps_chunks)

    # --- what it will take ---------------------------------------------------------------------------------

    def expected(self) -> CacheBytes | None:
        """By formula, after the last token; None: a model of transformers whose sizes are not known."""
        if self.subject.ours:
            expected: CacheBytes | None = self.model.cache_bytes(self.prompt, self.fed, self.memory_dtype)
            return expected
        tokens, number = self.prompt + self.fed, self.model.dtype.itemsize
        found = foreign_cache_bytes(self.model.config, tokens, number)
        return None if found is None else CacheBytes(window=found)

    def does_not_fit(self) -> str | None:
        """In words, if what is free now cannot hold the text; None: as far as the formula tells, it does."""
        expected = self.expected()
        if expected is None:
            return None
        resident = _COPIES * expected.window_bytes + expected.landmarks + expected.recent
        host = expected.tables
        if self.tier == "device":
            resident += expected.records
        elif self.tier == "host":
            host += expected.records
        elif (free := shutil.disk_usage(tempfile.gettempdir()).free) < expected.records:
            return (
                f"the disk of {tempfile.gettempdir()} needs {_size(expected.records)}, {_size(free)} are free"
            )
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            if free < resident:
                return f"the device needs {_size(resident)}, {_size(free)} are free"
        else:
            host += resident
        free = psutil.virtual_memory().available
        return f"RAM needs {_size(host)}, {_size(free)} are free" if free < host else None

    # --- work ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, seed: int, progress: Progress = lambda message: None) -> None:
        """The prompt, and the first token after it."""
        ids = random_tokens(self.subject, self.prompt, seed)
        if self.device.type == "cuda":  # kernels are compiled in their first calls
            self._read(ids[:, :_PIECE], lambda message: None)
            self._first(self.cache, self._last)
            self.cache = None

        def work() -> None:
            began = now(self.device)
            self._read(ids, progress)
            middle = now(self.device)
            self._next = self._first(self.cache, self._last)
            self.read_seconds, self.first_seconds = middle - began, now(self.device) - middle

        _, self.peaks["reading"] = with_peak(self.device, work)

    @torch.no_grad()
    def round(self, number: int) -> None:
        """Generate on a branch, greedily. Round 0 goes on with the model's own token, and its time does not count.

        Each other begins with a token of its own: else it would find in front of the tier what the last one fetched.
        """
        first = self._next if not number else random_tokens(self.subject, 1, number).to(self.device)
        milliseconds = self._generate(self._branch(), first)
        if number:
            self.times.append(milliseconds)

    @torch.no_grad()
    def finish(self) -> None:
        """Generate on the cache itself: what it holds then is what the text takes."""
        _, self.peaks["generating"] = with_peak(self.device, lambda: self._generate(self.cache, self._next))

    def _new_cache(self) -> Any:
        if not self.subject.ours:
            return DynamicCache(config=self.model.config)
        # a first allocation for the whole length, as with any text of known length
        length = self.prompt + self.fed
        return self.model.new_cache(self.tier, num_tokens=length, memory_dtype=self.memory_dtype)

    def _read(self, ids: Tensor, progress: Progress) -> None:
        """All but the last token, whose logits are wanted: what ``read`` leaves to the upper layers runs with it."""
        self.cache = self._new_cache()
        body, self._last = ids[:, :-1], ids[:, -1:].to(self.device)
        size = _PIECE if self.subject.ours else _FOREIGN_PIECE
        for first in range(0, body.shape[1], size):
            piece = body[:, first : first + size].to(self.device)

            def show(read: int, count: int, before: int = first) -> None:
                progress(f"{self.name}: {before + read:,} of {self.prompt:,} tokens read")

            if self.subject.ours:
                self.model.read(piece, self.cache, progress=show)
            else:
                self.model(piece, past_key_values=self.cache, use_cache=True, **self._last_logits)
                show(piece.shape[1], piece.shape[1])

    def _first(self, cache: Any, last: Tensor) -> Tensor:
        if self.subject.ours:  # as generate does: a landmark ends the prompt
            return _best(self.model(last, past_key_values=cache, close_chunk=True, logits_to_keep=1))
        return self._step(cache, last)

    def _step(self, cache: Any, token: Tensor) -> Tensor:
        more = {} if self.subject.ours else {"use_cache": True}
        return _best(self.model(token, past_key_values=cache, **self._last_logits, **more))

    def _branch(self) -> Any:
        return self.cache.branch() if isinstance(self.cache, ChunkCache) else copy.deepcopy(self.cache)

    def _generate(self, cache: Any, token: Tensor) -> float:
        """Milliseconds a token, after the first."""
        found = [token]
        began = now(self.device)
        for _ in range(self.fed):
            token = self._step(cache, token)
            found.append(token)
        seconds = now(self.device) - began
        self.tokens = torch.cat(found, 1)[0].tolist()
        return seconds / self.fed * 1000

    # --- what was found ------------------------------------------------------------------------------------

    def row(self) -> dict[str, Any]:
        """The result of one model, as JSON; what could not be measured is None."""
        expected = self.expected()
        row: dict[str, Any] = {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "tier": self.tier,
            "keeps_chunks": self.keeps_chunks,
            "prompt": self.prompt,
            "generate": self.generate,
            "problem": self.problem,
            "ms_per_token": None,
            "tokens_per_second_reading": None,
            "read_seconds": None,
            "first_token_seconds": None,
            "cache_bytes": None,
            "window_bytes": None,
            "memory_bytes": None,
            "device_bytes": None,
            "formula_bytes": None,
            "formula_device_bytes": None,
            "formula_parts": None,
            "paper_formula_bytes": None,
            "peak_reading_bytes": None,
            "peak_generating_bytes": None,
            "peak_kind": peak_kind(self.device),
        }
        if expected is not None:
            row["formula_bytes"], row["formula_parts"] = expected.total, expected.parts()
            row["formula_device_bytes"] = expected.on_device(self.tier, self.device.type)
        if self.subject.ours:
            row["paper_formula_bytes"] = self.model.paper_bytes(self.prompt + self.fed)
        if self.problem is not None:
            return row
        seconds = self.read_seconds + self.first_seconds
        return row | {
            "ms_per_token": spread(self.times),
            "tokens_per_second_reading": self.prompt / seconds,
            "read_seconds": self.read_seconds,
            "first_token_seconds": self.first_seconds,
            "peak_reading_bytes": self.peaks["reading"],
            "peak_generating_bytes": self.peaks["generating"],
            **self._measured(expected),
        }

    def _measured(self, expected: CacheBytes | None) -> dict[str, int]:
        """Bytes that the cache counts itself; of what no cache counts (``gathered``, ``recent``), the formula's."""
        if not isinstance(self.cache, ChunkCache):
            layers = [x for layer in self.cache.layers for x in (layer.keys, layer.values) if x is not None]
            held = sum(x.numel() * x.element_size() for x in layers)
            return {"cache_bytes": held, "window_bytes": held, "memory_bytes": 0, "device_bytes": held}
        assert expected is not None
        window, memory = self.cache.window_bytes(), self.cache.memory_bytes()
        chunks, landmarks = 0, 0
        if memory:
            state = self.cache.begun(1)
            first = int(self.cache.memory.first_chunk(state.memory)[0])
            end = int(state.memory.chunks[0])
            chunks = end - first
            blocks = self.cache.memory.blocks(end, 1, first)
            landmarks = sum(x.numel() * x.element_size() for x in blocks)
        records = memory - landmarks - chunks * TABLE_BYTES
        measured = CacheBytes(
            window=window,
            records=records,
            landmarks=landmarks,
            gathered=expected.gathered,
            recent=expected.recent,
        )
        held = measured.on_device(self.tier, self.device.type)
        return {
            "cache_bytes": window + memory,
            "window_bytes": window,
            "memory_bytes": memory,
            "device_bytes": held,
        }


def measure(texts: Sequence[Text], rounds: int, seed: int, progress: Progress) -> list[dict[str, Any]]:
    """One row for each text: all read, then ``rounds`` times in turn they generate, after one time that does not count.

    In turn, so that a machine that is slower for a while is so for all of them. A text that does not fit, or came with
    a ``problem``, has a row that says so and no numbers, and the others go on.
    """
    for text in (text for text in texts if text.problem is None):
        progress(f"{text.name} reads {text.prompt:,} tokens")
        text.problem = text.does_not_fit()
        if text.problem is None:
            _or_no_memory(text, partial(text.read, seed, progress))
    for number in range(rounds + 1):
        for text in (text for text in texts if text.problem is None):
            progress(f"round {number} of {rounds}: {text.name} generates {text.generate} tokens")
            _or_no_memory(text, partial(text.round, number))
    rows = []
    for text in texts:
        if text.problem is None:
            _or_no_memory(text, text.finish)
        rows.append(text.row())
        text.cache = None
    return rows


def _or_no_memory(text: Text, work: Callable[[], None]) -> None:
    try:
        work()
    except torch.OutOfMemoryError:  # of a GPU: a CPU without memory ends the process
        text.problem, text.cache = "out of memory on the device", None
        torch.cuda.empty_cache()


def random_tokens(subject: Subject, count: int, seed: int, rows: int = 1) -> Tensor:
    """int64 [rows, count] on the CPU: any tokens of the model's, the same for the same seed."""
    vocabulary = int(subject.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, count), generator=generator)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of rounds, and the rounds in their order."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.quantile(torch.tensor(values, dtype=torch.float64), quartiles).tolist()
    return {"median": middle, "p25": low, "p75": high, "rounds": len(values), "values": list(values)}


def _best(out: Any) -> Tensor:
    return out.logits[:, -1:].argmax(-1)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _size(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
