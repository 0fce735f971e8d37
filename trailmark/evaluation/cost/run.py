"""The cost suite: time and memory of a generated token after long prompts, and of training by context length.

Tables 3 and 4 and Figure 3a of arXiv 2410.01651 for any set of models, as ratios to one of them. Trained or random
weights cost the same: :func:`trailmark.evaluation.cost.models.load_or_build` takes a folder or a YAML file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from trailmark.evaluation.cost.inference import Text
from trailmark.evaluation.cost.rounds import Case, measure, spread
from trailmark.evaluation.cost.suite import CostSettings
from trailmark.evaluation.cost.training import Step
from trailmark.evaluation.reading import parse_dtype
from trailmark.evaluation.record import Record, processor
from trailmark.evaluation.subject import Subject, names_of

NOTHING_TO_OFFLOAD = "no memory of chunks: as on tier 'device'"  # a row's ``problem``

ON_A_CPU = (
    "Without a GPU the tiers device and host are one memory: times differ by chance alone, and bytes on the device are "
    "those that one would hold."
)

INFERENCE, TRAINING = "cost: generation", "cost: training"  # protocols, of what a cell holds

_ARXIV = "2410.01651"

# As printed. Time per token and memory as ratios to the model with a window alone, 12 layers with W = 512; tier "host":
# "w/ cpu offload". None: not given.
TABLE_3: tuple[dict[str, Any], ...] = tuple(
    {
        "arxiv": _ARXIV,
        "table": "Table 3",
        "model": model,
        "prompt": prompt,
        "generate": 128,
        "tier": tier,
        "time_ratio": time,
        "memory_ratio": memory,
    }
    for model, prompt, tier, time, memory in (
        ("Landmark Attn.", "16K", "host", 160.9, 1.98),
        ("Landmark Attn.", "16K", "device", 4.16, 32.0),
        ("Landmark Attn.", "48K", "host", 163.1, 2.98),
        ("Landmark Attn.", "48K", "device", 4.25, 96.0),
        ("Block Recurrent TFM", "16K", "host", None, None),
        ("Block Recurrent TFM", "16K", "device", 2.85, 2.0),
        ("Block Recurrent TFM", "48K", "host", None, None),
        ("Block Recurrent TFM", "48K", "device", 2.85, 2.0),
        ("DRT retrieval x1", "16K", "host", 1.25, 1.54),
        ("DRT retrieval x1", "16K", "device", 1.06, 4.08),
        ("DRT retrieval x1", "48K", "host", 1.27, 1.62),
        ("DRT retrieval x1", "48K", "device", 1.08, 9.41),
    )
)

# As printed: training throughput and memory. RPT at 350M is slower there than at 760M, perhaps a slip of the exponent.
# None: out of memory.
_SIZES = (("350M", "32K"), ("760M", "16K"), ("1.5B", "8K"), ("3B", "4K"))
TABLE_4: tuple[dict[str, Any], ...] = tuple(
    {
        "arxiv": _ARXIV,
        "table": "Table 4",
        "model": model,
        "parameters": parameters,
        "context_length": length,
        "tokens_per_second": found and found[0],
        "memory_gb": found and found[1],
    }
    for model, each in (
        ("Transformer, sliding window", ((2.91e5, 50), (1.31e5, 50), (6.56e4, 50), (3.41e4, 72))),
        ("Transformer, full attention", ((4.44e4, 50), (4.00e4, 50), (3.50e4, 72), (2.85e4, 72))),
        ("BRT", ((7.94e4, 59), (5.70e4, 56), (4.02e4, 59), None)),
        ("RPT, their implementation", ((1.13e4, 57), (5.17e4, 59), (2.73e4, 64), (1.45e4, 80))),
        ("DRT retrieval x1", ((2.32e5, 56), (1.06e5, 59), (5.52e4, 63), (2.93e4, 80))),
        ("DRT retrieval x2", ((2.28e5, 57), (1.05e5, 59), (5.52e4, 63), (2.93e4, 81))),
    )
    for (parameters, length), found in zip(_SIZES, each, strict=True)
)


def run(
    subjects: Sequence[Subject],
    settings: CostSettings,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """All models together, at each length and tier in a cell: what was found before is not measured again.

    Args:
        record: of all models, ``Record(folder, "cost", [s.identity() for s in subjects])``.

    Returns:
        A cell for each length and tier, then for each training length. Its ``rows`` hold one model each: see
        :class:`trailmark.evaluation.cost.inference.Text` and :mod:`trailmark.evaluation.cost.training`; ratios to
        ``base`` are added by :func:`ratios`. ``published``: what the paper printed for this length. ``note``: what to
        mind.

    Raises:
        ValueError: no model; a prompt that a model of transformers has no positions for.
    """
    if not subjects:
        raise ValueError("models: expected at least one, got none.")
    names, base = names_of([subject.folder for subject in subjects]), base_of(subjects)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"models: expected each once, got {twice[0]!r} several times.")
    named = list(zip(names, subjects, strict=True))
    for model in named:
        _expect_positions(*model, settings)
    device: torch.device = subjects[0].model.device
    shared: dict[str, Any] = {
        "models": names,
        "rounds": settings.rounds,
        "seed": settings.seed,
        # a time is one of a machine
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
    }
    about = {"base": names[base], "base_is_window_only": _window_only(subjects[base])}

    def only_memories(tier: str) -> bool:
        return tier != "device" and "device" in settings.tiers

    def cell(cases: Sequence[Case], where: str, printed: list[dict[str, Any]]) -> dict[str, Any]:
        rows = measure(cases, settings.rounds, lambda message: progress(f"{where}: {message}"))
        return about | {"device": device.type, "rows": ratios(rows, names[base]), "published": printed}

    def generation(length: int, tier: str) -> dict[str, Any]:
        dtype = parse_dtype(settings.memory_dtype)
        texts = [Text(*model, tier, length, settings.generate, dtype, settings.seed) for model in named]
        for text in texts:
            if only_memories(tier) and not text.keeps_chunks and text.name != names[base]:
                text.problem = NOTHING_TO_OFFLOAD
        printed = [row for row in TABLE_3 if _tokens(row["prompt"]) == length and row["tier"] == tier]
        note = ON_A_CPU if (tier, device.type) == ("host", "cpu") else None
        return cell(texts, f"{length:,} tokens, {tier}", printed) | {"note": note}

    def training(length: int) -> dict[str, Any]:
        count = (settings.training_batch_tokens or length) // length
        steps = [Step(*model, length, count, settings.seed) for model in named]
        printed = [row for row in TABLE_4 if _tokens(row["context_length"]) == length]
        return cell(steps, f"training, {length:,} tokens", printed)

    found = []
    for length in settings.lengths:
        for tier in settings.tiers:
            asked = {
                "protocol": INFERENCE,
                "prompt": length,
                "generate": settings.generate,
                "tier": tier,
                "only_memories": only_memories(tier),
                "memory_dtype": settings.memory_dtype,
            }
            found.append(record.measure(asked | shared, partial(generation, length, tier)))
    for length in settings.training_lengths:
        asked = {
            "protocol": TRAINING,
            "length": length,
            "batch_tokens": settings.training_batch_tokens or length,
        }
        found.append(record.measure(asked | shared, partial(training, length)))
    return found


def base_of(subjects: Sequence[Subject]) -> int:
    """Which model the others are compared with: the first with a window alone; the first, if none has."""
    return next((n for n, subject in enumerate(subjects) if _window_only(subject)), 0)


def ratios(rows: Sequence[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """The rows of one cell with ``time_ratio`` and ``memory_ratio`` to the row of the model ``base``.

    Time: the median over rounds of the ratio in each round, so that what slowed a round down counts for both; its
    quartiles are ``time_ratio_quartiles``. Memory: of generation, of what the device holds besides weights and
    activations, as Table 3 compares; of training, of the peak with the weights, as Table 4 does. None where one of the
    two was not measured.
    """
    own = next(row for row in rows if row["model"] == base)
    times, memory = ("seconds", "peak_bytes") if "seconds" in own else ("ms_per_token", "device_bytes")
    found = []
    for row in rows:
        ratio: dict[str, Any] = {"time_ratio": None, "time_ratio_quartiles": None, "memory_ratio": None}
        if row[times] is not None and own[times] is not None:
            pairs = zip(row[times]["values"], own[times]["values"], strict=True)
            each = [mine / theirs for mine, theirs in pairs]
            quartiles = spread(each)
            ratio["time_ratio"] = median(each)
            ratio["time_ratio_quartiles"] = [quartiles["p25"], quartiles["p75"]]
        if row[memory] is not None and own[memory]:
            ratio["memory_ratio"] = row[memory] / own[memory]
        found.append(row | ratio)
    return found


def _tokens(printed: str) -> int:
    """Of "16K"."""
    return int(printed.removesuffix("K")) * 1024


def _window_only(subject: Subject) -> bool:
    """Whether a model sees its window (and sinks) and nothing else: no states, no chunks, no end of a text."""
    return bool(subject.ours and subject.model.can_be_planted and not subject.model.config.keeps_chunks)


def _expect_positions(name: str, subject: Subject, settings: CostSettings) -> None:
    """That a model of transformers has positions for what it is to read; ours have no end."""
    if (most := subject.longest_text) is None:
        return
    for option, length, more in (
        *(("lengths", n, settings.generate - 1) for n in settings.lengths),
        *(("training_lengths", n, 0) for n in settings.training_lengths),
    ):
        if length + more > most:
            raise ValueError(
                f"{option}: expected at most {most - more} tokens for {name!r}, which has {most} positions"
                f"{f' and generates {settings.generate}' if more else ''}, got {length}. Choose shorter ones."
            )
