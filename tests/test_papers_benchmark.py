"""What benchmarks/papers.py prints: commands that are taken, each into a folder of its own, and no row without one."""

from __future__ import annotations

import shlex
from types import ModuleType

import torch

from tests import benchmark_scripts
from tests.commands import ROOT, fields_of_init_from
from trailmark.models import MODELS
from trailmark.training.config import load_run_config

papers = benchmark_scripts.modules("papers")


def test_every_training_fits_its_configuration_and_has_a_folder_of_its_own(papers: ModuleType) -> None:
    commands = {row.command for row in papers.rows()}
    outputs: dict[str, str] = {}
    for command in sorted(own for own in commands if own.startswith("trailmark train ")):
        _, _, file, *overrides = shlex.split(command)
        begun = fields_of_init_from(ROOT / file, overrides)
        config = load_run_config(ROOT / file, [*begun, *overrides])
        fields = config.model_config(50_257)
        with torch.device("meta"):
            MODELS[fields.model_type](fields)
        assert config.output not in outputs, (command, outputs[config.output])
        outputs[config.output] = command


def test_no_row_of_the_second_papers_tables_is_missing(papers: ModuleType) -> None:
    """Table 1: seven models at two sizes, two at one, two ablations of each; Table 2: seven models, of which five have
    summaries, in two tasks each."""
    count: dict[str, int] = {}
    for row in papers.rows():
        count[row.table] = count.get(row.table, 0) + 1
    assert count == {
        "Table 1": 7 * 2 + 2 + 2 * 2 + 2, "Table 2": 7 * 2 + 5 * 2, "Table 3": 3, "Table 4": 4 * 6, "Figure 3": 4,
        "arXiv 2305.16300": 2,
    }  # fmt: skip


def test_a_row_is_recorded_if_the_json_has_it(papers: ModuleType) -> None:
    for part, expected in (
        (("compare", "text", "Base"), True),
        (("compare", "text", "a row that is none"), False),
        (("compare", "a part that is none"), False),
        (("training", "length"), True),
        (("table_2", "results", "Base", "single"), True),
        (("table_2", "results", "Base", "a task that is none"), False),
        ((), False),
    ):
        row = papers.Row("Table 1", "a row", "a command", "nothing", "a twin", part)
        assert row.recorded() is expected
        assert ("has its twin" in row.status()) is expected
