"""A small encoder with a WordPiece vocabulary, made on the spot and saved as Contriever is: BERT without a pooler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, BertTokenizer

from tests.data.corpora import WORDS

LONGEST = 160  # tokens


def save_bert(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Two layers of width 32 in ``folder``, with random weights of ``seed``."""
    letters = [chr(code) for code in range(33, 127)]
    words = sorted({word for text in WORDS for word in text.lower().split() if word.isalpha()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + x for x in letters), *words]
    tokenizer = BertTokenizer(vocab={word: n for n, word in enumerate(vocab)}, model_max_length=LONGEST)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(vocab), max_position_embeddings=LONGEST, **sizes | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config, add_pooling_layer=False)
        for parameter in model.parameters():  # BERT's own are so small that every text looks alike
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder
