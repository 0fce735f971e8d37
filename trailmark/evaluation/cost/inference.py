"""What a token costs after a long prompt: time in rounds that all models share, and what each must hold for it."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trailmark.evaluation.cost.peak import peak_kind, with_peak
from trailmark.evaluation.cost.rounds import Case, Progress, now, random_tokens, spread
from trailmark.evaluation.room import find_short
from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkCache
from trailmark.memory.chunks import TABLE_BYTES
from trailmark.memory.tiers.base import tier_named
from trailmark.models.costs import CacheBytes, foreign_cache_bytes

_PIECE = 1 << 16  # tokens of a prompt that are on a device at once
_FOREIGN_PIECE = 4096  # tokens of one call of a model that cannot read
_MEASURED = (  # what a row has beside what is known of the model
    "ms_per_token", "tokens_per_second_reading", "read_seconds", "first_token_seconds", "cache_bytes",
    "window_bytes", "memory_bytes", "device_bytes", "formula_bytes", "formula_device_bytes", "formula_parts",
    "paper_formula_bytes", "peak_reading_bytes", "peak_generating_bytes",
)  # fmt: skip
_COPIES = 3  # of a window: the cache's, a branch's, and that of a call that makes a new one


class Text(Case):
    """One model after a prompt, whose first token was generated: to go on from there again and again.

    Args:
        tier: of the memory. prompt: tokens. generate: tokens after it.
        memory_dtype: of keys and values in the memory; None: the model's.
    """

    unit = "generates"

    def __init__(
        self,
        name: str,
        subject: Subject,
        tier: str,
        prompt: int,
        generate: int,
        memory_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(name, subject, seed)
        self.tier, self.prompt, self.generate = tier, prompt, generate
        self.memory_dtype = memory_dtype
        self.cache: Any = None
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
            if tier_named(self.tier).keeps_tokens:
                kept: CacheBytes = self.model.cache_bytes(self.prompt, self.fed)
                return kept.as_tokens(self.model, self.memory_dtype)
            expected: CacheBytes | None = self.model.cache_bytes(self.prompt, self.fed, self.memory_dtype)
            return expected
        tokens, number = self.prompt + self.fed, self.model.dtype.itemsize
        found = foreign_cache_bytes(self.model.config, tokens, number)
        return None if found is None else CacheBytes(window=found)

    def does_not_fit(self) -> str | None:
        """In words, if what is free now cannot hold the text; None: as far as the formula tells, it does."""
        if self.keeps_chunks and tier_named(self.tier).keeps_tokens and not self.model.can_keep_tokens:
            return "its chunks cannot be encoded again from their tokens"
        expected = self.expected()
        if expected is None:
            return None
        resident = _COPIES * expected.window_bytes + expected.landmarks + expected.recent
        need = Counter(device=resident, host=expected.tables)
        need[tier_named(self.tier).takes] += expected.records
        short = find_short(need, self.device)
        if short is None:
            return None
        where = {"device": "the device", "host": "RAM", "disk": f"the disk of {tempfile.gettempdir()}"}
        return f"{where[short.place]} needs {_size(short.needed)}, {_size(short.free)} are free"

    # --- work ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, progress: Progress = lambda message: None) -> None:
        """Read the prompt and generate the first token after it, where the text fits."""
        progress(f"{self.name} reads {self.prompt:,} tokens")
        self.problem = self.does_not_fit()
        if self.problem is not None:
            return
        ids = random_tokens(self.subject, self.prompt, self.seed)
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
            self.model.focus(last, cache)
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
        """What was measured of one model, with what its cache takes by formula."""
        expected = self.expected()
        row = super().row() | {
            "tier": self.tier,
            "keeps_chunks": self.keeps_chunks,
            "prompt": self.prompt,
            "generate": self.generate,
            "peak_kind": peak_kind(self.device),
        }
        row |= dict.fromkeys(_MEASURED)
        if expected is not None:
            row["formula_bytes"], row["formula_parts"] = expected.total, expected.parts()
            row["formula_device_bytes"] = expected.on_device(self.tier, self.device.type)
        if self.subject.ours:
            row["paper_formula_bytes"] = self.model.paper_bytes(self.prompt + self.fed)
        if self.problem is None:
            seconds = self.read_seconds + self.first_seconds
            row |= {
                "ms_per_token": spread(self.times),
                "tokens_per_second_reading": self.prompt / seconds,
                "read_seconds": self.read_seconds,
                "first_token_seconds": self.first_seconds,
                "peak_reading_bytes": self.peaks["reading"],
                "peak_generating_bytes": self.peaks["generating"],
                **self._measured(expected),
            }
        return row

    def release(self) -> None:
        """Let go of the cache."""
        self.cache = None

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
            window, records=records, landmarks=landmarks, gathered=expected.gathered, recent=expected.recent
        )
        held = measured.on_device(self.tier, self.device.type)
        return {
            "cache_bytes": window + memory,
            "window_bytes": window,
            "memory_bytes": memory,
            "device_bytes": held,
        }


def _best(out: Any) -> Tensor:
    return out.logits[:, -1:].argmax(-1)


def _size(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
