"""How the two papers measured, by name, and what they printed: cells to measure and the rows to stand beside them.

Perplexity: ``gca-table-1`` and ``gca-figure-3b`` of arXiv 2410.01651; ``landmark-table-1`` and ``landmark-table-2`` of
arXiv 2305.16300. Summaries: ``paper-table-2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trailmark.models import TrailmarkForCausalLM
from trailmark.settings import nearest

GCA, LANDMARK = "2410.01651", "2305.16300"

# --- as printed ---------------------------------------------------------------------------------------------

_LANDMARK_FIELDS = ("local_length", "max_memory_chunks", "num_retrieved_chunks")
_GCA_COLUMNS = ("pg19_valid", "pg19_test", "arxiv_math_valid", "arxiv_math_test")
# length (0: not given); model; time of training; k; window; 128M: four perplexities; 350M: four
_GCA_TABLE_1 = """
2048  | Base                    | 1    | - | 512 | 15.00 14.10 3.31 3.31 | 12.98 12.09 3.15 3.15
2048  | Base, wider window      | 1.03 | - | 768 | 14.86 13.96 3.24 3.24 | 12.86 11.98 3.04 3.04
2048  | Base, two layers more   | 1.15 | - | 704 | 14.71 13.92 3.06 3.06 | 12.78 11.89 3.08 3.08
2048  | RPT with Contriever     | 2.5  | 8 | 512 | 14.81 13.92 3.24 3.24 | - - - -
2048  | Landmark Attention      | 1.5  | 4 | 768 | 14.41 13.40 3.17 3.16 | 12.52 11.64 2.91 2.91
2048  | Block-Recurrent         | 2    | - | 768 | 15.99 15.00 3.33 3.32 | - - - -
2048  | DRT, G = 1              | 1.22 | 8 | 512 | 14.65 13.78 3.24 3.24 | 12.90 12.02 3.05 3.05
2048  | DRT, G = 2              | 1.24 | 8 | 512 | 14.56 13.69 3.22 3.22 | 12.66 11.78 3.01 3.01
16384 | Base                    | 1    | - | 512 | 14.55 13.68 3.06 3.06 | 12.57 11.70 2.91 2.91
16384 | Base, wider window      | 1.03 | - | 768 | 14.36 13.49 2.95 2.95 | 12.40 11.55 2.76 2.76
16384 | Base, two layers more   | 1.15 | - | 658 | 14.23 13.37 2.95 2.94 | 12.33 11.47 2.80 2.80
16384 | RPT with Contriever     | 2.5  | 8 | 512 | 14.39 13.52 2.93 2.92 | - - - -
16384 | Landmark Attention      | 1.5  | 4 | 768 | 14.10 13.21 3.02 3.02 | 12.18 11.25 2.70 2.70
16384 | Block-Recurrent         | 2    | - | 768 | 15.59 14.60 3.14 3.14 | - - - -
16384 | DRT, G = 1              | 1.22 | 8 | 512 | 14.05 13.21 2.89 2.89 | 12.37 11.48 2.74 2.74
16384 | DRT, G = 2              | 1.24 | 8 | 512 | 14.02 13.18 2.85 2.85 | 12.12 11.22 2.68 2.68
16384 | DRT, G = 1, no noise    | 1.22 | 8 | 512 | 14.36 13.46 2.90 2.90 | - - - -
16384 | DRT, G = 1, Contriever  | 2.5  | 8 | 512 | 14.55 13.69 3.06 3.06 | 12.57 11.70 2.91 2.91
16384 | DRT, G = 1, at random   | 1.22 | 8 | 512 | 14.53 13.67 3.05 3.05 | 12.56 11.69 2.90 2.90
0     | Base                    | 1    | - | 512 | 14.50 13.64 3.05 3.04 | 12.52 11.67 2.88 2.88
0     | Base, wider window      | 1.03 | - | 768 | 14.30 13.46 2.93 2.92 | 12.35 11.52 2.74 2.73
0     | Base, two layers more   | 1.15 | - | 658 | 14.18 13.34 2.93 2.92 | 12.29 11.43 2.78 2.77
0     | RPT with Contriever     | 2.5  | 8 | 512 | 14.35 13.49 2.91 2.91 | - - - -
0     | Landmark Attention      | 1.5  | 4 | 768 | 14.19 13.33 3.07 3.07 | 12.17 11.24 2.75 2.75
0     | Block-Recurrent         | 2    | - | 768 | 15.61 14.56 3.13 3.12 | - - - -
0     | DRT, G = 1              | 1.22 | 8 | 512 | 14.01 13.19 2.85 2.85 | 12.33 11.45 2.71 2.71
0     | DRT, G = 2              | 1.24 | 8 | 512 | 13.98 13.16 2.81 2.81 | 12.08 11.19 2.65 2.65
"""

# length; model; local tokens; chunks kept; k; keys a token sees; PG19; arXiv-math
_LANDMARK_TABLE_1 = """
512  | full attention     | 512 | -  | - | 512 | 16.12 4.01
512  | full attention     | 360 | -  | - | 360 | 16.76 4.31
512  | Landmark Attention | 250 | 10 | 2 | 360 | 16.23 4.01
2048 | Transformer-XL     | 256 | -  | - | -   | 14.72 -
2048 | Landmark Attention | 250 | 40 | 2 | 360 | 15.14 3.43
2048 | Landmark Attention | 350 | 40 | 2 | 460 | 15.07 3.41
2048 | Landmark Attention | 300 | 40 | 3 | 460 | 14.97 3.36
2048 | Landmark Attention | 250 | 20 | 4 | 460 | 15.02 3.37
2048 | Landmark Attention | 250 | 40 | 4 | 460 | 14.92 3.35
4096 | Transformer-XL     | 256 | -  | - | -   | 14.55 -
4096 | Landmark Attention | 250 | 40 | 4 | 460 | 14.79 3.19
4096 | Landmark Attention | 250 | 80 | 2 | 360 | 15.00 3.29
4096 | Landmark Attention | 250 | 80 | 4 | 460 | 14.72 3.18
"""

# length; what selects for itself; local tokens; chunks kept; k; PG19
_LANDMARK_TABLE_2 = """
2048 | token_and_head | 250 | 40 | 2 | 15.14
2048 | token_and_head | 250 | 40 | 4 | 14.92
4096 | token_and_head | 250 | 80 | 4 | 14.72
2048 | head           | 250 | 40 | 2 | 15.48
2048 | head           | 250 | 40 | 4 | 15.10
4096 | head           | 250 | 80 | 4 | 14.95
2048 | token          | 250 | 40 | 2 | 15.44
2048 | token          | 250 | 40 | 4 | 15.04
4096 | token          | 250 | 80 | 4 | 14.89
"""

# model; XSum: ROUGE-1, -2, -L; CNN/DailyMail: the same
_GCA_TABLE_2 = """
Base                  | 29.43 8.04 23.26 | 32.38 12.57 22.61
Base, two layers more | 29.74 8.26 23.48 | 34.14 14.09 23.60
Landmark Attention    | 27.98 6.96 21.99 | 34.06 13.80 23.77
DRT, G = 1            | 30.30 8.59 23.92 | 36.27 15.88 25.08
DRT, G = 2            | 30.39 8.64 23.98 | 36.39 15.96 25.15
"""


def _lines(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _numbers(cell: str) -> list[float | None]:
    return [None if part == "-" else float(part) for part in cell.split()]


def _whole(cell: str) -> int | None:
    return None if cell in ("-", "0") else int(cell)


def _row(arxiv: str, table: int, **values: Any) -> dict[str, Any]:
    return {"arxiv": arxiv, "table": f"Table {table}"} | values


def _named(names: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _gca_table_1() -> list[dict[str, Any]]:
    rows = []
    for length, model, time, k, window, *sizes in _lines(_GCA_TABLE_1):
        setup = {
            "num_retrieved_chunks": _whole(k),
            "window": int(window),
            "training_time": float(time),
        }
        for size, cell in zip(("128M", "350M"), sizes, strict=True):
            values = _named(_GCA_COLUMNS, _numbers(cell))
            if any(value is not None for value in values.values()):
                row = _row(GCA, 1, length=_whole(length), model=model, size=size)
                rows.append(row | setup | values)
    return rows


def _landmark_table_1() -> list[dict[str, Any]]:
    rows = []
    for length, model, *fields, values in _lines(_LANDMARK_TABLE_1):
        row = _row(LANDMARK, 1, length=int(length), model=model)
        row |= _named((*_LANDMARK_FIELDS, "attention_size"), map(_whole, fields))
        rows.append(row | _named(("pg19", "arxiv_math"), _numbers(values)))
    return rows


def _landmark_table_2() -> list[dict[str, Any]]:
    rows = []
    for length, selects, *fields, value in _lines(_LANDMARK_TABLE_2):
        row = _row(LANDMARK, 2, length=int(length), model="Landmark Attention", retrieve_per=selects)
        rows.append(row | _named(_LANDMARK_FIELDS, map(_whole, fields)) | {"pg19": float(value)})
    return rows


def _gca_table_2() -> list[dict[str, Any]]:
    return [
        _row(GCA, 2, model=model, size="128M", data=data)
        | _named(("rouge1", "rouge2", "rougeL"), _numbers(cell))
        for model, *cells in _lines(_GCA_TABLE_2)
        for data, cell in zip(("xsum", "cnn_dailymail"), cells, strict=True)
    ]


PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "gca-table-1": _gca_table_1(),
    "gca-figure-3b": [],
    "paper-table-2": _gca_table_2(),
    "landmark-table-1": _landmark_table_1(),
    "landmark-table-2": _landmark_table_2(),
}
"""Every row of numbers that a protocol's table printed, as JSON. Length null: the paper's text does not give it."""


# --- what to measure ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One measurement: windows of ``length`` tokens (None: whole documents) with fields of the configuration set."""

    length: int | None
    set: Mapping[str, Any] = field(default_factory=dict)
    published: Sequence[Mapping[str, Any]] = ()  # rows of the paper to stand beside it
    note: str | None = None


@dataclass(frozen=True)
class Protocol:
    """A paper's way of measuring perplexity: disjoint windows of the whole split, each read cold."""

    name: str
    cells: Callable[[tuple[int, ...] | None], list[Cell]]
    """What to measure, of the lengths that the protocol leaves open (None: its own); a ValueError for others."""

    def expect(self, model: Any) -> None:
        """Raises ValueError if the protocol asks for what the model has not."""
        fields = {name for cell in self.cells(None) for name in cell.set}
        if missing := sorted(name for name in fields if not hasattr(model.config, name)):
            raise ValueError(
                f"protocol: {self.name!r} sets {', '.join(sorted(fields))}: expected a model with these fields, such "
                f"as Landmark Attention, got a {type(model).__name__}, which has no {missing[0]}. Its lengths can be "
                "asked for without a protocol."
            )


_THIRD = (
    "The length of the table's third block is not given in the paper's text; its rows have no length and stand beside "
    "the length that was asked for."
)


def _of_gca_table_1(lengths: tuple[int, ...] | None) -> list[Cell]:
    rows, own = PUBLISHED["gca-table-1"], (2048, 16384)
    others = [length for length in lengths or () if length not in own]
    if len(others) > 1:
        raise ValueError(
            f"lengths: 'gca-table-1' has blocks of 2,048 and 16,384 tokens and a third one whose length the paper does "
            f"not give: expected at most one other length, got {others}."
        )
    cells = [Cell(length, {}, [row for row in rows if row["length"] == length]) for length in own]
    third = [row for row in rows if row["length"] is None]
    return cells + [Cell(length, {}, third, _THIRD) for length in others]


def _of_gca_figure_3b(lengths: tuple[int, ...] | None) -> list[Cell]:
    note = "The paper draws these values and does not print them."
    return [Cell(length, note=note) for length in lengths or tuple(2048 << n for n in range(6))]


def _of_landmark(name: str, extra: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    def make(lengths: tuple[int, ...] | None) -> list[Cell]:
        rows = PUBLISHED[name]
        known = sorted({row["length"] for row in rows})
        if unknown := [length for length in lengths or () if length not in known]:
            raise ValueError(
                f"lengths: expected those of {name!r}, {', '.join(map(str, known))}, or none for all, got "
                f"{', '.join(map(str, unknown))}."
            )
        asked = lengths or tuple(known)
        cells = []
        for row in rows:
            if row["length"] in asked and row["num_retrieved_chunks"] is not None:
                others = [
                    r for r in rows if r["length"] == row["length"] and r["num_retrieved_chunks"] is None
                ]
                fields = {key: row[key] for key in _LANDMARK_FIELDS} | extra(row)
                cells.append(Cell(row["length"], fields, [row, *others]))
        return cells

    return make


def _permissive(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"retrieve_per": "token_and_head", "causal_retrieval": True}


def _selection(row: Mapping[str, Any]) -> dict[str, Any]:
    # the paper's maximum over a cell's tokens, those to come included
    return {"retrieve_per": row["retrieve_per"], "causal_retrieval": row["retrieve_per"] != "head"}


PERPLEXITY_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        # what is left at the end of the split is not read; the mean is of the windows' means
        Protocol("gca-table-1", _of_gca_table_1),
        Protocol("gca-figure-3b", _of_gca_figure_3b),
        # over all tokens that are no landmarks
        Protocol("landmark-table-1", _of_landmark("landmark-table-1", _permissive)),
        Protocol("landmark-table-2", _of_landmark("landmark-table-2", _selection)),
    )
}


def perplexity_protocol(name: str) -> Protocol:
    """Raises ValueError where there is none of that name."""
    if name not in PERPLEXITY_PROTOCOLS:
        raise ValueError(
            f"protocol: expected one of {', '.join(PERPLEXITY_PROTOCOLS)}, got {name!r}."
            f"{nearest(name, PERPLEXITY_PROTOCOLS)}"
        )
    return PERPLEXITY_PROTOCOLS[name]


def with_fields(model: TrailmarkForCausalLM, fields: Mapping[str, Any]) -> TrailmarkForCausalLM:
    """The same weights, not copied, with fields of the configuration set.

    Raises:
        ValueError: fields that the configuration or the weights do not allow.
    """
    changed = {**model.config.to_dict(), **fields}
    config = type(model.config).from_dict(changed)
    with torch.device("meta"):
        variant = type(model)(config)
    own = {name: tuple(x.shape) for name, x in variant.state_dict().items()}
    weights = model.state_dict()
    if own != {name: tuple(x.shape) for name, x in weights.items()}:
        raise ValueError(f"protocol: expected fields that keep the weights as they are, got {dict(fields)}.")
    variant.load_state_dict(weights, assign=True)
    assert not any(x.is_meta for x in (*variant.parameters(), *variant.buffers()))
    variant.embedder = model.embedder
    return variant.eval()
