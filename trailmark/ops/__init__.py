"""Pure functions of tensors: the attention of long-context models. Needs torch alone."""

from trailmark.ops.block_attention import block_attention
from trailmark.ops.chunk_scores import chunk_log_mass, score_for_tokens, select_for_tokens, summarize_chunks
from trailmark.ops.chunk_weights import weigh_chunks
from trailmark.ops.chunked_cross_attention import chunked_cross_attention
from trailmark.ops.divergence import selection_divergence, token_divergence
from trailmark.ops.gca.api import grouped_cross_attention
from trailmark.ops.gca.one_reader import ReadAgain
from trailmark.ops.landmark.api import landmark_attention
from trailmark.ops.landmark.layout import LandmarkLayout
from trailmark.ops.landmark.selection import select_by_landmarks
from trailmark.ops.mass import attention_mass
from trailmark.ops.ranking_loss import ranking_loss
from trailmark.ops.score_parts import score_parts
from trailmark.ops.selection.api import ChunkSelection, select_chunks
from trailmark.ops.selection.noise import fold_seed, gumbel_noise
from trailmark.ops.selection.random_selection import random_chunks
from trailmark.ops.selection.scores import score_chunks
from trailmark.ops.window.api import alibi_slopes, sliding_window_attention

__all__ = [
    "ChunkSelection",
    "LandmarkLayout",
    "ReadAgain",
    "alibi_slopes",
    "attention_mass",
    "block_attention",
    "chunk_log_mass",
    "chunked_cross_attention",
    "fold_seed",
    "grouped_cross_attention",
    "gumbel_noise",
    "landmark_attention",
    "random_chunks",
    "ranking_loss",
    "score_chunks",
    "score_for_tokens",
    "score_parts",
    "select_by_landmarks",
    "select_chunks",
    "select_for_tokens",
    "selection_divergence",
    "sliding_window_attention",
    "summarize_chunks",
    "token_divergence",
    "weigh_chunks",
]
