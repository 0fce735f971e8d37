"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What is allocated without being written is NaN, or the largest integer, not by chance zero."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # of cuBLAS, that the oracle uses on a GPU
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()  # each compiled test counts its graphs anew
