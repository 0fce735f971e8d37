"""The checks that ops share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trailmark.ops import grouped_cross_attention, landmark_attention, select_chunks

NUMBERS = torch.zeros(2, 3, dtype=torch.int64)
CALLS: dict[str, Callable[[str], object]] = {
    "grouped_cross_attention": lambda name: grouped_cross_attention(
        *(torch.zeros(2, 3, 4, 2, 16) for _ in range(3)),
        NUMBERS[..., None],
        torch.ones(2, 3, 1),
        implementation=name,
    ),
    "landmark_attention": lambda name: landmark_attention(
        *(torch.zeros(2, 3, 2, 16) for _ in range(3)), NUMBERS.bool(), implementation=name
    ),
    "select_chunks": lambda name: select_chunks(
        torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), 2, torch.tensor([0, 1, 5]), implementation=name
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("op", CALLS)
def test_triton_without_a_gpu_or_an_interpreter(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"^implementation: .*'triton'.* on cpu.*TRITON_INTERPRET=1"):
        CALLS[op]("triton")
    CALLS[op]("torch")
