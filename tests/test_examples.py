"""The examples do what they say. (``read_a_book.py`` needs the demo's model.)"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_ops_in_your_module(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "ops_in_your_module.py"))
    assert "gradient of the retriever: " in capsys.readouterr().out
    module, S = names["module"], names["module"].S
    text = torch.randn(2, 5 * S, 64, generator=torch.Generator().manual_seed(1))
    changed = text.clone()
    changed[:, 3 * S] += 1
    with torch.no_grad():
        before, after = module(text), module(changed)
    assert torch.equal(before[:, : 3 * S], after[:, : 3 * S])  # no chunk reads what comes later
    assert torch.equal(before[:, : 2 * S], text[:, : 2 * S])  # the first two read nothing
    assert not torch.equal(before[:, 2 * S : 3 * S], text[:, 2 * S : 3 * S])
