"""Retrieval and grouped cross-attention in a module of your own; needs torch alone.

python examples/ops_in_your_module.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trailmark.ops import grouped_cross_attention, select_chunks


class ReadPastChunks(nn.Module):
    """Each chunk of S positions reads the K past chunks that the last position of the chunk before asks for."""

    def __init__(self, width: int, num_heads: int, chunk_size: int = 16, num_retrieved: int = 4) -> None:
        super().__init__()
        self.heads, self.S, self.K = num_heads, chunk_size, num_retrieved
        self.ask, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, E], T a multiple of S
        chunks = x.unflatten(1, (-1, self.S))  # [B, N, S, E]
        q, k, v = self.qkv(chunks).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, N, S, H, D] each
        landmarks = k.mean(2).flatten(2)  # [B, N, E]: what stands for a chunk
        before = torch.arange(chunks.shape[1])  # chunk n selects among the n chunks before it
        found = select_chunks(self.ask(chunks[:, :, -1]), landmarks, self.K, before)
        # the chunk after it reads what it selected; the first reads nothing (-1)
        indices = F.pad(found.indices[:, :-1], (0, 0, 1, 0), value=-1)  # [B, N, K]
        weights = F.pad(found.weights[:, :-1], (0, 0, 1, 0))
        read = grouped_cross_attention(q, k, v, indices, weights)  # [B, N, S, H, D]
        return x + self.out(read.flatten(3).flatten(1, 2))


torch.manual_seed(0)
module, text = ReadPastChunks(width=64, num_heads=4), torch.randn(2, 128, 64)
module(text).square().mean().backward()
# What is selected is a choice, but the weights of what was selected are not: through them the retriever learns.
assert module.ask.weight.grad is not None
assert module.ask.weight.grad.abs().max() > 0
print(f"gradient of the retriever: {module.ask.weight.grad.norm():.2e}")
