"""Folders with results, as the suites, the trainings and the demo write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

LENGTHS = (1024, 4096, 16384, 65536)
# of the page about everything()
SECTIONS = (
    *("overview", "needles", "perplexity", "summarization", "cost", "training"),
    *("reproduce", "environment", "not-shown"),
)
ENVIRONMENT = {
    "date": "2026-11-20",
    "trailmark": "0.1.0",
    "python": "3.12.3",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "platform": "Linux-6.1-x86_64",
    "processor": "A processor",
    "cores": 2,
    "threads": 2,
}


def identity(name: str, folder: Path | str, weights: str = "a") -> dict[str, Any]:
    return {
        "name": name,
        "folder": str(folder),
        "architecture": "DRTForCausalLM",
        "parameters": 201_664,
        "dtype": "float32",
        "set": {},
        "config_sha256": "c" * 64,
        "weights_sha256": weights * 64,
    }


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def record(
    folder: Path,
    suite: str,
    results: list[dict[str, Any]],
    model: Any = None,
    environment: dict[str, Any] | None = None,
    lines: list[dict[str, Any]] | None = None,
    **changed: Any,
) -> Path:
    """``<folder>/<suite>.json``, of the model in the folder above."""
    for number, result in enumerate(results):
        result.setdefault("id", f"{suite}{number}")
        result.setdefault("environment", 0)
        result.setdefault("seconds", 1.5)
    own = folder.parent if folder.name == "evaluation" else folder
    content = {
        "kind": "trailmark evaluation",
        "format": 1,
        "suite": suite,
        "model": model or identity(own.name, own),
        "environments": [ENVIRONMENT | (environment or {})],
        "results": results,
    }
    if lines:
        write(folder / f"{suite}.generations.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return write(folder / f"{suite}.json", content | changed)


def needle(
    length: int, right: int = 90, depth: float | None = None, asked: int = 100, **more: Any
) -> dict[str, Any]:
    settings = {
        "suite": "needles",
        "kind": "single",
        "format": "marks",
        "values": "numbers",
        "length": length,
        "depth": depth,
        "needles": 1,
        "distractors": 0,
        "landmarks": 1,
        "phases": "any",
        "questions": asked,
        "seed": 0,
    }
    found = {
        "length": length,
        "depth": depth,
        "needles": 1,
        "questions": asked,
        "correct": right,
        "accuracy": right / asked,
        "accuracy_low": max(0.0, right / asked - 0.05),
        "accuracy_high": min(1.0, right / asked + 0.05),
        "recall": right / asked,
        "mean_weight": 0.75,
        "mean_reciprocal_rank": 0.8,
        "tokens_per_second": 250_000.0,
        "memory_bytes": 520 * length,
        "memory_tier": "device",
    }
    changed = {key: value for key, value in more.items() if key in settings}
    return {"settings": settings | changed} | found | more


def perplexity(length: int, loss: float = 1.5, **more: Any) -> dict[str, Any]:
    value = 2.718281828**loss
    return {
        "settings": {"suite": "perplexity", "windows": "windows", "length": length, "carry": False, "set": {}},
        "length": length,
        "windows": 8,
        "tokens": 8 * (length - 1),
        "loss": loss,
        "perplexity": value,
        "perplexity_low": 0.97 * value,
        "perplexity_high": 1.03 * value,
        "word_perplexity": 90.5,
        "bits_per_byte": 1.25,
        "by_position": [
            {"first": 64 * 2**n - 64, "last": 64 * 2 ** (n + 1) - 65, "loss": loss + 0.5 / (n + 1), "tokens": 512}
            for n in range(4)
        ],
    } | more  # fmt: skip


def rouge(value: float = 0.3, **more: Any) -> dict[str, Any]:
    score = {"f": value, "low": value - 0.01, "high": value + 0.012}
    return {
        "settings": {"suite": "summarization", "max_new_tokens": 128, "pairs": "f00d"},
        "documents": 40,
        "rouge1": score,
        "rouge2": {key: part / 3 for key, part in score.items()},
        "rougeL": {key: part / 1.3 for key, part in score.items()},
    } | more


def cost(models: list[str], prompt: int = 16384, tier: str = "device", **more: Any) -> dict[str, Any]:
    rows = [
        {
            "model": name,
            "architecture": "SlidingWindowForCausalLM" if n == 0 else "DRTForCausalLM",
            "ms_per_token": {"median": 2.0 + n, "p25": 1.9 + n, "p75": 2.2 + n},
            "time_ratio": (2.0 + n) / 2.0,
            "time_ratio_quartiles": [0.9, 1.6],
            "device_bytes": 50_000 * (1 + n),
            "memory_ratio": 1.0 + n,
            "cache_bytes": 40_000 * (1 + n),
            "formula_bytes": 40_000 * (1 + n),
            "problem": None,
        }
        for n, name in enumerate(models)
    ]
    return {
        "settings": {"suite": "cost", "prompt": prompt, "tier": tier, "generate": 128, "models": models},
        "base": models[0],
        "rows": rows,
    } | more


def training_cost(models: list[str], length: int) -> dict[str, Any]:
    rows = [
        {"model": name, "tokens_per_second": 9_000.0 / (n + 1), "time_ratio": 1.0 + n, "peak_bytes": 1 << 28}
        for n, name in enumerate(models)
    ]
    return {"settings": {"suite": "cost", "length": length, "models": models}, "rows": rows}


def training(folder: Path, count: int = 30, **changed: Any) -> Path:
    """A finished training's folder: run.yaml and history.json."""
    settings = {
        "output": str(folder),
        "model": {"architecture": "drt", "hidden_size": 64},
        "data": {"task": "needles"},
        "training": {"steps": 10 * count, "tokens_per_step": 4096, "context_length": 1024},
    }
    write(folder / "run.yaml", yaml.safe_dump(settings))
    logged = [
        {"step": 10 * n, "loss": 5.0 / n, "accuracy": n / count, "recall": 1.0 - 0.5 / n}
        for n in range(1, count + 1)
    ]
    history = {"steps": logged, "seconds": 287.0, "tokens": 40_960 * count, "tokens_per_second": 34_600.0}
    return write(folder / "history.json", history | {"level_starts": [0]} | changed)


def demo(folder: Path) -> Path:
    """The demo's folder: its numbers and two trainings."""
    asked = [
        {"needle": 3 * n, "correct": True, "selected": [[0, 1, 3 * n]], "weights": [0.1, 0.0, 0.9]}
        for n in range(5)
    ]
    results = [
        {"model": name, "asked": asked if name == "drt" else []} | needle(length, right if name == "drt" else 0)
        for name in ("drt", "window")
        for length, right in zip(LENGTHS, (100, 99, 97, 95), strict=True)
    ]  # fmt: skip
    for result in results:
        del result["settings"]
    for name in ("drt", "window"):
        training(folder / name)
    content = {
        "settings": {"seed": 0, "minutes": None, "questions": 100},
        "environment": ENVIRONMENT,
        "train_length": 1024,
        "phases": "any",
        "training": {"drt": {"parameters": 201_664}, "window": {"parameters": 176_768}},
        "results": results,
    }
    return write(folder / "demo.json", content)


def everything(folder: Path) -> Path:
    """Runs of every kind, with notes to make and files that cannot be shown."""
    demo(folder / "demo")
    names = ["base", "drt"]
    for number, name in enumerate(names):
        own = folder / name
        training(own)
        cells = [needle(x, 95 - 40 * (1 - number)) for x in LENGTHS]
        cells += [needle(x, 100 - 20 * number - 5 * d, d / 4) for x in LENGTHS[:3] for d in range(5)]
        cells += [needle(x, 60 + 30 * number, kind="hops", hops=2, distractors=16) for x in LENGTHS]
        said = [
            {"id": "needles0", "expected": "48213", "generated": "48213", "correct": True},
            {"id": "needles0", "expected": "48214", "generated": "11111", "correct": False},
        ]
        version = {"trailmark": "0.2.0"} if number else None
        record(own / "evaluation", "needles", cells, environment=version, lines=said)
        paper = {
            "arxiv": "2410.01651",
            "table": "Table 1",
            "model": "DRT, G = 1",
            "length": 2048,
            "pg19_test": 13.78,
        }
        record(
            own / "evaluation",
            "perplexity",
            [perplexity(x, 1.6 - 0.1 * n, published=[paper]) for n, x in enumerate(LENGTHS)],
        )
        written = [{"id": "summarization0", "reference": "A summary.", "generated": "Another one."}]
        record(own / "evaluation", "summarization", [rouge(0.28 + 0.02 * number)], lines=written)
    both = [identity(name, folder / name) for name in names]
    cells = [cost(names, x, tier) for x in (16384, 49152) for tier in ("device", "host")]
    record(folder / "cost", "cost", cells + [training_cost(names, x) for x in (1024, 4096)], both)
    write(folder / "broken" / "needles.json", "{")
    return folder
