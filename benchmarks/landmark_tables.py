"""What the documents say of Landmark Attention, of landmark.json, landmark_decode.json and landmark_models.json."""

from __future__ import annotations

from collections.abc import Callable

from landmark import COLUMNS
from landmark_decode import READING_TABLE, TOKEN_TABLE
from tables import RIGHT, Columns, Row, crossed, on_machine, record, table


def op_text() -> str:
    found = record("landmark")["op"]
    return on_machine(table(COLUMNS, found["results"]), found["environment"])


def decode_text() -> str:
    """A token after a long text, and reading."""
    found = record("landmark_decode")
    return on_machine(
        f"{table(TOKEN_TABLE, found['token'])}\n\n"
        f"Reading {found['reading'][0]['tokens']:,} tokens with 4 layers of 256:\n\n"
        f"{table(READING_TABLE, found['reading'])}",
        *found["environment"].values(),
    )


def models_text() -> str:
    """What small models found, part by part; parts that were not measured are left out."""
    found = record("landmark_models")
    texts = [make(found) for name, make in _PARTS.items() if found.get(name)]
    trained = "; ".join(
        f"{name}: {m['last']['step']:,} steps of {m['tokens_per_step']:,} tokens in {m['seconds'] / 60:.0f} minutes"
        for name, m in found["models"].items()
    )
    texts.append(f"Trained, each with one thread beside other work: {trained}.")
    return on_machine("\n\n".join(texts), *found["environment"].values())


def _needles(found: Row) -> str:
    def beside(asked: Row) -> Row | None:
        """The demo's DRT at this length, with at least as many needles."""
        alike = [
            r for r in found["drt"] if r["length"] == asked["length"] and r["needles"] >= asked["needles"]
        ]
        return min(alike, key=lambda r: r["needles"], default=None)

    columns: Columns = {
        "model": lambda r: r["model"].removeprefix("needles, ") if "," in r["model"] else "seed 0",
        "tokens": "{length:,}",
        "x train": lambda r: f"{r['length'] // 1024}x",
        "positions": "{memory_position}",
        "hidden": "{needles}",
        "questions": "{questions}",
        "all digits right (95%)": RIGHT,
        "chunk read": "{recall:.3f}",
        "the demo DRT": "{beside[accuracy]:.3f} ({beside[needles]} hidden)",
    }
    return f"**Needles.**\n\n{table(columns, [r | {'beside': beside(r)} for r in found['needles']])}"


def _modes(found: Row) -> str:
    in_memory = next(r["chunks_in_memory"] for r in found["modes"] if "chunks_in_memory" in r)

    def touched(results: list[Row]) -> str:
        return next((f"{r['unique_chunks']:.1f}" for r in results if "unique_chunks" in r), "-")

    shown = crossed(
        found["modes"],
        {"selects": "{mode}", "k": "{num_retrieved_chunks}"},
        "perplexity at {length:,}",
        "{perplexity:.3f}",
        {"chunks touched": touched},
        order=_length,
    )
    return (
        "**Ways to select** (perplexity per byte; chunks that a cell and layer touch of "
        f"{in_memory:.0f} in memory, App. C; counting bytes alone: a loss of {found['unigram_loss']:.2f}).\n\n{shown}"
    )


def _gate(found: Row) -> str:
    def read_with(r: Row) -> str:
        return r.get("mode") or ("memory" if r["model"] == "text" else f"cutoff {r['gate_cutoff']}")

    columns: Columns = {
        "model": "{model}",
        "read with": read_with,
        "tokens": "{length:,}",
        "perplexity": "{perplexity:.3f}",
        "retrievals skipped": "{skipped_share:.0%}",
    }
    return f"**The retrieval gate** (App. D).\n\n{table(columns, found['gate'])}"


def _jumps(found: Row) -> str:
    down: Columns = {"model": "{model}", "read with": "{mode}"}
    shown = crossed(found["jumps"], down, "{length:,} tokens", "{perplexity:.3f}", order=_length)
    return f"**Position jumps** (App. E; trained on 510 positions).\n\n{shown}"


def _length(result: Row) -> int:
    return result["length"]


_PARTS: dict[str, Callable[[Row], str]] = {
    "needles": _needles,
    "modes": _modes,
    "gate": _gate,
    "jumps": _jumps,
}
