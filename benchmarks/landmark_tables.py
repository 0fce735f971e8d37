"""The tables of docs/landmark.md, from benchmarks/landmark*.json; benchmarks/readme.py puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from landmark import table as op_table
from landmark_decode import reading_table, split_table, token_table

from trailmark.report.tables import markdown_table

HERE = Path(__file__).resolve().parent


def record(name: str) -> dict[str, Any]:
    path = HERE / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def op_text() -> tuple[str, dict[str, Any]]:
    """Forward and backward of the op, and where it was measured."""
    section = record("landmark")["op"]
    return op_table(section["results"]), section["environment"]


def decode_text() -> tuple[str, dict[str, Any]]:
    """A token after a long text, its parts, and reading."""
    found = record("landmark_decode")
    text = (
        f"{token_table(found['token'])}\n\nWhere a token's time goes, after {found['split'][-1]['context']:,} tokens, "
        f"tier host (timers cost a little):\n\n{split_table(found['split'])}\n\n"
        f"Reading {found['reading'][0]['tokens']:,} tokens with 4 layers of 256:\n\n{reading_table(found['reading'])}"
    )
    return text, found["environment"]


def models_text() -> tuple[str, dict[str, Any]]:
    """What small models found, part by part; parts that were not measured are left out."""
    found = record("landmark_models")
    parts = {"needles": needles_text, "modes": modes_text, "gate": gate_text, "jumps": jumps_text}
    texts = [make(found) for name, make in parts.items() if found.get(name)]
    trained = "; ".join(
        f"{name} {m['last']['step']:,} steps of {m['tokens_per_step']:,} tokens in {m['seconds'] / 60:.0f} minutes"
        for name, m in found["models"].items()
    )
    texts.append(f"Trained, each with one thread beside other work: {trained}.")
    return "\n\n".join(texts), found["environment"]


def needles_text(found: dict[str, Any]) -> str:
    drt: dict[int, list[dict[str, Any]]] = {}
    for r in found["drt"]:
        drt.setdefault(r["length"], []).append(r)
    rows = []
    for r in found["needles"]:
        low, high = r["accuracy_low"], r["accuracy_high"]
        as_many = [d for d in drt.get(r["length"], []) if d["needles"] >= r["needles"]]
        beside = min(as_many, key=lambda d: d["needles"], default=None)
        rows.append(
            [
                f"{r['length']:,}",
                f"{r['length'] // 1024}x",
                r["memory_position"],
                str(r["needles"]),
                str(r["questions"]),
                f"{r['accuracy']:.3f} ({low:.3f}-{high:.3f})",
                f"{r['recall']:.3f}",
                "-" if beside is None else f"{beside['accuracy']:.3f} ({beside['needles']} hidden)",
            ]
        )
    header = ["tokens", "x train", "positions", "hidden", "questions", "all digits right (95%)", "chunk read"]
    return f"**Needles.**\n\n{markdown_table([*header, 'the demo DRT'], rows)}"


def modes_text(found: dict[str, Any]) -> str:
    ways: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for r in found["modes"]:
        k = str(r.get("num_retrieved_chunks", "-"))
        ways.setdefault((r["mode"], k), {})[r["length"]] = r
    lengths = sorted({r["length"] for r in found["modes"]})
    rows = []
    for (mode, k), by_length in ways.items():
        touched = next((r["unique_chunks"] for r in by_length.values() if "unique_chunks" in r), None)
        numbers = [f"{by_length[n]['perplexity']:.3f}" if n in by_length else "-" for n in lengths]
        rows.append([mode, k, *numbers, "-" if touched is None else f"{touched:.1f}"])
    in_memory = next(r["chunks_in_memory"] for r in found["modes"] if "chunks_in_memory" in r)
    header = ["selects", "k", *(f"perplexity at {n:,}" for n in lengths)]
    return (
        "**Ways to select** (perplexity per byte; chunks that a cell and layer touch of "
        f"{in_memory:.0f} in memory, App. C; counting bytes alone: a loss of {found['unigram_loss']:.2f}).\n\n"
        + markdown_table([*header, "chunks touched"], rows)
    )


def gate_text(found: dict[str, Any]) -> str:
    rows = []
    for r in found["gate"]:
        at = r.get("mode") or ("memory" if r["model"] == "text" else f"cutoff {r['gate_cutoff']}")
        share = f"{r['skipped_share']:.0%}" if "skipped_share" in r else "-"
        rows.append([r["model"], at, f"{r['length']:,}", f"{r['perplexity']:.3f}", share])
    header = ["model", "read with", "tokens", "perplexity", "retrievals skipped"]
    return f"**The retrieval gate** (App. D).\n\n{markdown_table(header, rows)}"


def jumps_text(found: dict[str, Any]) -> str:
    lengths = sorted({r["length"] for r in found["jumps"]})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for r in found["jumps"]:
        cells.setdefault((r["model"], r["mode"]), {})[r["length"]] = f"{r['perplexity']:.3f}"
    rows = [[*key, *(by.get(n, "-") for n in lengths)] for key, by in cells.items()]
    header = ["model", "read with", *(f"{n:,} tokens" for n in lengths)]
    return f"**Position jumps** (App. E; trained on 510 positions).\n\n{markdown_table(header, rows)}"
