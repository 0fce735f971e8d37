"""The papers' cells and what they printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.models.tiny import drt, landmark, logits_of, tokens
from trailmark.evaluation.protocols import (
    PERPLEXITY_PROTOCOLS,
    PUBLISHED,
    Cell,
    perplexity_protocol,
    with_fields,
)
from trailmark.models import LandmarkConfig

PAPER = Path(__file__).parent.parent.parent / "configs" / "landmark-paper.yaml"


def cells(name: str, *lengths: int) -> list[Cell]:
    return perplexity_protocol(name).cells(lengths or None)


def test_gca_table_1() -> None:
    at = {cell.length: cell for cell in cells("gca-table-1", 65536)}
    assert list(at) == [2048, 16384, 65536]
    assert all(not cell.set for cell in at.values())
    assert [cell.length for cell in cells("gca-table-1")] == [2048, 16384]

    def row(length: int, model: str, size: str) -> list[float]:
        rows = [r for r in at[length].published if (r["model"], r["size"]) == (model, size)]
        assert len(rows) == 1
        assert rows[0]["length"] == (None if length == 65536 else length)
        return [rows[0][name] for name in ("pg19_valid", "pg19_test", "arxiv_math_valid", "arxiv_math_test")]

    assert row(2048, "Base", "128M") == [15.00, 14.10, 3.31, 3.31]
    assert row(16384, "DRT, G = 2", "350M") == [12.12, 11.22, 2.68, 2.68]
    assert row(16384, "Landmark Attention", "128M") == [14.10, 13.21, 3.02, 3.02]
    assert row(65536, "DRT, G = 1", "128M") == [14.01, 13.19, 2.85, 2.85]
    # the third block's length is not in the paper's text, and a cell says so
    assert "not given" in str(at[65536].note)
    assert at[2048].note is at[16384].note is None
    # eight models a block and three ablations at 16K, some of them at 128M alone
    assert [len(cell.published) for cell in at.values()] == [8 + 6, 11 + 6 + 2, 8 + 6]


def test_gca_figure_3b_has_no_printed_values() -> None:
    assert [c.length for c in cells("gca-figure-3b")] == [2048, 4096, 8192, 16384, 32768, 65536]
    assert [c.length for c in cells("gca-figure-3b", 5000, 70000)] == [5000, 70000]
    assert all(cell.published == () and cell.note for cell in cells("gca-figure-3b"))


def test_landmark_table_1() -> None:
    names = ("local_length", "max_memory_chunks", "num_retrieved_chunks")
    found = [(cell.length, *(cell.set[name] for name in names)) for cell in cells("landmark-table-1")]
    assert found == [
        (512, 250, 10, 2),
        (2048, 250, 40, 2),
        (2048, 350, 40, 2),
        (2048, 300, 40, 3),
        (2048, 250, 20, 4),
        (2048, 250, 40, 4),
        (4096, 250, 40, 4),
        (4096, 250, 80, 2),
        (4096, 250, 80, 4),
    ]
    own = [cell.published[0] for cell in cells("landmark-table-1")]
    assert [row["pg19"] for row in own] == [16.23, 15.14, 15.07, 14.97, 15.02, 14.92, 14.79, 15.00, 14.72]
    for row in own:  # as many keys as the paper says that a token sees: chunks are 50 tokens
        assert row["attention_size"] == row["local_length"] + 50 * row["num_retrieved_chunks"] + 10
    # rows of other models stand beside those of their length
    assert [row["model"] for row in cells("landmark-table-1", 512)[0].published[1:]] == ["full attention"] * 2
    assert [row["model"] for row in cells("landmark-table-1", 4096)[0].published[1:]] == ["Transformer-XL"]


def test_landmark_table_2() -> None:
    found = {}
    for cell in cells("landmark-table-2"):
        assert (cell.set["retrieve_per"] == "head") == (not cell.set["causal_retrieval"])
        key = cell.set["retrieve_per"], cell.length, cell.set["num_retrieved_chunks"]
        found[key] = cell.published[0]["pg19"]
    assert len(found) == 9
    assert found["token", 2048, 2] == 15.44
    assert found["head", 4096, 4] == 14.95
    # its first row is the first table's
    first = {(c.length, *c.set.values()): c.published[0]["pg19"] for c in cells("landmark-table-1")}
    for cell in cells("landmark-table-2")[:3]:
        names = ("local_length", "max_memory_chunks", "num_retrieved_chunks")
        key = (cell.length, *(cell.set[name] for name in names), "token_and_head", True)
        assert first[key] == cell.published[0]["pg19"]


@pytest.mark.parametrize("name", ["landmark-table-1", "landmark-table-2"])
def test_each_cell_is_one_of_the_papers_model(name: str) -> None:
    fields = yaml.safe_load(PAPER.read_text())["model"]
    del fields["architecture"]
    for cell in cells(name):
        LandmarkConfig(**(fields | cell.set))  # fits into its 512 positions


def test_the_summaries_table() -> None:
    rows = {(row["model"], row["data"]): row for row in PUBLISHED["paper-table-2"]}
    assert len(rows) == 10
    drt = rows["DRT, G = 2", "cnn_dailymail"]
    assert [drt[name] for name in ("rouge1", "rouge2", "rougeL")] == [36.39, 15.96, 25.15]


def test_all_is_json() -> None:
    assert json.loads(json.dumps(PUBLISHED)) == PUBLISHED
    for protocol in PERPLEXITY_PROTOCOLS.values():
        for cell in protocol.cells(None):
            json.dumps([dict(cell.set), list(map(dict, cell.published))])


def test_what_a_protocol_does_not_leave_open_is_refused() -> None:
    with pytest.raises(ValueError, match=r"protocol: expected one of .* Did you mean 'gca-table-1'"):
        perplexity_protocol("gca-table1")
    with pytest.raises(ValueError, match=r"lengths: .* at most one other length, got \[100, 200\]"):
        cells("gca-table-1", 100, 2048, 200)
    with pytest.raises(ValueError, match="lengths: expected those of 'landmark-table-1', 512, 2048, 4096"):
        cells("landmark-table-1", 1024)
    with pytest.raises(
        ValueError, match="such as Landmark Attention, got a DRTForCausalLM, which has no causal_retrieval"
    ):
        perplexity_protocol("landmark-table-1").expect(drt())


def test_fields_are_set_without_copying_weights() -> None:
    model, fields = landmark(), {"num_retrieved_chunks": 1, "max_memory_chunks": 2}
    variant = with_fields(model, fields)
    assert variant.state_dict()["embed_tokens.weight"].data_ptr() == model.embed_tokens.weight.data_ptr()
    loaded = landmark(**fields)  # draws the same weights
    ids = tokens(70)
    cached = [logits_of(m, ids, past_key_values=m.new_cache()) for m in (variant, loaded, model)]
    assert torch.equal(cached[0], cached[1])
    assert not torch.equal(cached[0], cached[2])
    assert model.config.num_retrieved_chunks == 3


def test_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="max_position_embeddings: expected at least"):
        with_fields(landmark(), {"num_retrieved_chunks": 300})
    with pytest.raises(ValueError, match="keep the weights"):
        with_fields(landmark(), {"num_hidden_layers": 2})
