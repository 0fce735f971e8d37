"""Laptop-size Landmark Attention models, trained and evaluated: how far, by which mode, with which extras.

    TRAILMARK_DATA=... python benchmarks/landmark_models.py             every part that the JSON file lacks
    TRAILMARK_DATA=... python benchmarks/landmark_models.py --only gate one part

Parts: "needles" (configs/needle-landmark.yaml with three seeds, and without packed texts, next to the demo's DRT),
"modes" (a text model: perplexity by what selects for itself, chunks touched), "gate" (the same with a retrieval gate,
App. D of arXiv 2305.16300) and "jumps" (the same with position jumps, App. E). The text is TRAILMARK_DATA/books:
trained on train/, asked about valid/ and test/. Each of seven trainings takes ten to forty minutes on one core and
goes on where it was stopped; numbers are kept in benchmarks/landmark_models.json as they come.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import CONFIGS, ROOT, data_folder, parameters, showing
from torch import Tensor

from trailmark import demo
from trailmark.data.corpus import load_tokenizer, read_text, standard_library_texts, tokenize
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.models import LandmarkForCausalLM
from trailmark.models.loss import shift_labels, text_loss
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config
from trailmark.training.run import Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-landmark"
# what each model is: a configuration and what is changed in it
TEXT_STEPS = "training.steps=400"
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "needles": ("needle-landmark", ()),
    "needles, seed 1": ("needle-landmark", ("training.seed=1",)),
    "needles, seed 2": ("needle-landmark", ("training.seed=2",)),
    "needles, not packed": ("needle-landmark", ("data.packed=false",)),
    "text": ("landmark-text", (TEXT_STEPS,)),
    "gate": ("landmark-text", (TEXT_STEPS, "model.gate_probability=0.5")),
    "jumps": ("landmark-text", (TEXT_STEPS, "model.position_jump=100")),
}
# times the training texts, needles hidden at once and questions: one needle alone takes a reading for each
ASKED = ((1, 1, 40), (1, 8, 80), (4, 1, 40), (4, 8, 80), (16, 8, 80), (64, 8, 80), (16, 1, 40), (64, 1, 20))
ASKED_OF_OTHERS = ((1, 8, 80), (16, 8, 80))  # other seeds, with stingy positions
SPAN, BOOKS = 4096, 8  # tokens of each of so many held-out books, from _SPAN_START on
_SPAN_START = 100_000
# "head" and "cell" in the paper's way take the maximum over the whole cell that was fed, tokens after it included
# "the latest" are the k newest chunks, which nothing selects
MODES: dict[str, dict[str, object]] = {
    "token and head": {"retrieve_per": "token_and_head"},
    "token": {"retrieve_per": "token"},
    "head, causal": {"retrieve_per": "head"},
    "head, whole cell": {"retrieve_per": "head", "causal_retrieval": False},
    "cell, causal": {"retrieve_per": "cell"},
    "cell, whole cell": {"retrieve_per": "cell", "causal_retrieval": False},
    "the latest": {"retrieve_per": "cell"},
}
CUTOFFS = (0.0, 0.1, 0.3, 0.5, 1.0)
Found = dict[str, Any]


class Benchmark:
    """The record and the folder of the models."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output, self.progress = folder, output, Progress()
        self.record: Found = read_json(output) or {"environment": {}, "models": {}}

    def keep(self, part: str, case: Found) -> None:
        """One measured case, into the file at once."""
        self.record.setdefault(part, []).append(case)
        self.record["environment"][part] = environment()
        write_json(self.output, self.record)
        self.progress.clear()
        print(part, {key: value for key, value in case.items() if key != "set"}, flush=True)

    def missing(self, part: str, cases: list[Found]) -> Iterator[Found]:
        """Those that the file lacks; a case is known by what it was asked."""
        done = [{key: old[key] for key in old if key in _ASKED} for old in self.record.get(part, [])]
        yield from (case for case in cases if case not in done)

    def model(self, name: str, **changes: object) -> LandmarkForCausalLM:
        """A trained model, with fields of its configuration set for the evaluation."""
        path, overrides = MODELS[name]
        overrides = (*overrides, f"output={self.folder / name}")
        if path == "landmark-text":
            overrides = (*overrides, f"data.paths=[{data_folder('books') / 'train'}]")
        config = load_run_config(CONFIGS / f"{path}.yaml", overrides)
        known = self.record["models"].get(name)
        if known is not None and known["last"]["step"] != config.training.steps:
            raise SystemExit(
                f"{self.output} has numbers of {name!r} after {known['last']['step']} steps, its configuration says "
                f"{config.training.steps}: remove them, and its folder."
            )
        if not (Path(config.output) / "history.json").exists():
            Run(config, showing(self.progress, name)).train()
            self.progress.clear()
        if known is None:
            history = read_json(Path(config.output) / "history.json")
            last = {key: value for key, value in history["steps"][-1].items() if key != "seconds"}
            self.record["models"][name] = {
                "config": path,
                "changes": [text for text in overrides if not text.startswith(("output", "data.paths"))],
                "seed": config.training.seed,
                "tokens_per_step": config.training.tokens_per_step,
                "parameters": parameters(load(Path(config.output)).model),
                "seconds": history["seconds"],
                "last": last,
                "level_starts": history["level_starts"],
            }
            write_json(self.output, self.record)
        model = load(Path(config.output), [f"{key}={value}" for key, value in changes.items()]).model
        assert isinstance(model, LandmarkForCausalLM)
        return model

    # --- parts ---------------------------------------------------------------------------------------------

    def needles(self) -> None:
        """All digits right by length, stingy and true positions, next to the demo's DRT."""
        self.record["drt"] = [
            {key: r[key] for key in ("length", "needles", "questions", "accuracy", "recall")}
            for r in read_json(OUTPUT.with_name("demo.json"))["results"]
            if r["model"] == "drt"
        ]
        tokenizer = load_tokenizer("bytes")
        text = tokenize(standard_library_texts("haystack"), tokenizer)
        cases = [
            {
                "model": name,
                "memory_position": position,
                "length": demo.TRAIN_LENGTH * factor,
                "needles": needles,
                "questions": questions,
            }
            for name in MODELS
            if name.startswith("needles")
            for factor, needles, questions in (ASKED if name == "needles" else ASKED_OF_OTHERS)
            for position in (("stingy", "true") if name == "needles" else ("stingy",))
        ]
        for case in self.missing("needles", cases):
            model = self.model(case["model"], memory_position=case["memory_position"])
            subject = Subject.of(model, tokenizer, model.config.chunk_size)
            settings = demo.needle_settings(case["length"], case["needles"], case["questions"], seed=0)
            (result,) = measure(subject, settings, text, self.progress.show)
            keep = ("accuracy", "accuracy_low", "accuracy_high", "recall", "haystacks")
            found = {key: result[key] for key in (*keep, "tokens_read", "seconds_reading", "memory_bytes")}
            sight = model.chunks_in_sight(model.config.chunk_size)
            self.keep("needles", case | found | {"chunks_in_sight": sight})

    def modes(self) -> None:
        """Perplexity by what selects for itself, k and length; how many chunks a cell and layer touch (App. C)."""
        whole = {"mode": "whole, without cache", "length": 500}
        cases = [whole] + [
            {"mode": mode, "num_retrieved_chunks": k, "length": length}
            for length in (SPAN // 2, SPAN)
            for k in (2, 4)
            for mode in MODES
        ]
        for case in self.missing("modes", cases):
            if case == whole:
                self.keep("modes", case | perplexity(self.model("text"), 500, cached=False))
                continue
            changes = MODES[case["mode"]] | {"num_retrieved_chunks": case["num_retrieved_chunks"]}
            if case["mode"] == "the latest":
                changes["max_memory_chunks"] = case["num_retrieved_chunks"]
            model = self.model("text", **changes)
            found = perplexity(model, case["length"])
            if case["length"] == SPAN:
                found |= touched(model)
            self.keep("modes", case | found)

    def gate(self) -> None:
        """Perplexity and the share of retrievals skipped by cutoff (App. D), next to the model without a gate."""
        whole = [{"model": name, "mode": "whole, without cache", "length": 500} for name in ("text", "gate")]
        without = [{"model": "text", "length": SPAN}]
        cutoffs = [{"model": "gate", "gate_cutoff": cutoff, "length": SPAN} for cutoff in CUTOFFS]
        for case in self.missing("gate", whole + without + cutoffs):
            changes = {key: case[key] for key in ("gate_cutoff",) if key in case}
            model = self.model(case["model"], **changes)
            self.keep("gate", case | perplexity(model, case["length"], cached="mode" not in case))

    def jumps(self) -> None:
        """Perplexity beyond the trained positions, at true positions (App. E), with and without jumps in training."""
        cases = [
            {"model": name, "mode": mode, "length": length}
            for length in (512, 1024, 2048)
            for mode in ("all chunks, without cache", "true positions, k = 4", "stingy positions, k = 4")
            for name in ("text", "jumps")
        ]
        for case in self.missing("jumps", cases):
            position = case["mode"].split()[0]
            cached = position != "all"
            model = self.model(case["model"], **({"memory_position": position} if cached else {}))
            self.keep("jumps", case | perplexity(model, case["length"], cached))


PARTS: dict[str, Callable[[Benchmark], None]] = {
    "needles": Benchmark.needles,
    "modes": Benchmark.modes,
    "gate": Benchmark.gate,
    "jumps": Benchmark.jumps,
}
_ASKED = {
    "memory_position",
    "needles",
    "questions",
    "mode",
    "model",
    "num_retrieved_chunks",
    "gate_cutoff",
    "length",
}


def spans() -> Tensor:
    """Held-out text [BOOKS, SPAN]: a piece of each book."""
    files = sorted(
        [*(data_folder("books") / "valid").glob("*.txt"), *(data_folder("books") / "test").glob("*.txt")]
    )
    tokenizer, found = load_tokenizer("bytes"), []
    for file in files:
        tokens = tokenize([read_text(file)], tokenizer)[_SPAN_START : _SPAN_START + SPAN]
        if len(tokens) == SPAN:
            found.append(torch.from_numpy(tokens).long())
    return torch.stack(found[:BOOKS])


@torch.no_grad()
def perplexity(model: LandmarkForCausalLM, length: int, cached: bool = True) -> Found:
    """Over windows of ``length`` tokens of every span, each read cold, without the first token of each."""
    began, total, count, state = time.perf_counter(), 0.0, 0, 0
    retrievals = [0, 0]
    windows = spans()[:, : SPAN // length * length].reshape(-1, length)
    for ids in windows.split(max(1, SPAN // length)):
        cache = model.new_cache(num_tokens=length) if cached else None
        logits = model(ids, past_key_values=cache).logits
        total += float(text_loss(logits, shift_labels(ids), total=1))
        count += ids[:, 1:].numel()
        if cache is not None:
            cell = cache.begun(len(ids)).cell
            assert cell is not None
            retrievals = [n + int(more) for n, more in zip(retrievals, cell.retrievals, strict=True)]
            state = cache.num_bytes() // len(ids)
    found: Found = {
        "windows": len(windows),
        "tokens": count,
        "loss": total / count,
        "perplexity": math.exp(total / count),
        "seconds": time.perf_counter() - began,
    }
    if cached:
        found["state_bytes"] = state
    if cached and model.config.gate_probability:
        skips = bool(model.config.gate_cutoff)  # with a cutoff of 0 nothing is counted, and nothing skipped
        found["skipped_share"] = retrievals[1] / retrievals[0] if skips else 0.0
    return found


@torch.no_grad()
def touched(model: LandmarkForCausalLM) -> Found:
    """Chunks of the memory that a cell reads in a layer, in any token and head: mean over layers, cells, spans."""
    config = model.config
    assert config.local_length is not None
    counts, choice = [], []
    for ids in spans().split(1):
        out = model(ids, past_key_values=model.new_cache(num_tokens=SPAN), output_retrieval=True)
        for first in range(config.local_length, SPAN, config.local_length):
            known = first // config.chunk_size
            if SPAN - first < config.local_length:
                continue
            for layer in out.retrieval:
                unique = layer.indices[0, first : first + config.local_length].unique()
                counts.append(int((unique >= 0).sum()))
                choice.append(known)
    return {"unique_chunks": sum(counts) / len(counts), "chunks_in_memory": sum(choice) / len(choice)}


def loss_of_counting(tokens: Tensor) -> float:
    """Nats per byte of the spans' own frequencies: what no model of single bytes can beat."""
    share = torch.bincount(tokens.flatten()).double() / tokens.numel()
    return float(-(share * share.clamp(min=1e-12).log()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    benchmark = Benchmark(arguments.folder, arguments.output)
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            if name != "needles":
                benchmark.record["unigram_loss"] = loss_of_counting(spans())
            part(benchmark)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
