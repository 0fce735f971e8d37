"""What a model goes on with, as ``trailmark generate`` and ``chat`` write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.data.corpora import prose, save_chat_bpe
from tests.models.tiny import drt, hils
from trailmark.data.corpus import tokenize
from trailmark.evaluation.generation import _Streamer, stream
from trailmark.evaluation.subject import Subject, load


@pytest.fixture
def strips() -> Any:
    """A tokenizer as Llama 2's and Mistral's: a space is "▁", and decoding takes away a text's first one."""
    words = ["<unk>", "▁def", "▁f", "():", "\n", "▁▁▁", "▁return", "▁x"]
    tokenizer = Tokenizer(BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(spaces))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_streamed_text_is_that_of_its_tokens(strips: Any) -> None:
    tokens, kept = [1, 2, 3, 4, 5, 6, 7], list[int]()
    streamer = _Streamer(strips, 12, kept)
    for token in (
        2,
        *tokens[:4],
        11,
        0,
        *tokens[4:],
    ):  # the prompt first, a row that is no token, a control token
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(streamer) == strips.decode(tokens) == "def f():\n    return x"
    assert kept == [*tokens[:4], 11, 0, *tokens[4:]]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("lines", [True, False])
def test_of_a_file_that_is_gone_on_with_the_window_is_prompt(
    windows: bool, lines: bool, tmp_path: Path
) -> None:
    tokenizer = save_chat_bpe(tmp_path)
    text = prose(1, 60) + "\n"
    (tmp_path / "text.txt").write_text(text if lines else " ".join(text.split()))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    made: Any = hils(chunk_size=8, reading="windows", **sizes) if windows else drt(1, **sizes)
    made.save_pretrained(tmp_path)
    subject: Subject = load(tmp_path)
    model: Any = subject.model
    ids = torch.from_numpy(tokenize([(tmp_path / "text.txt").read_text()], subject.tokenizer)).long()[None]
    prompt = model.config.sliding_window if windows else 1
    cache = model.new_cache()
    model.read(ids[:, :-prompt], cache)
    written = model.generate(ids[:, -prompt:], past_key_values=cache, max_new_tokens=12, do_sample=False)
    expected = subject.tokenizer.decode(written[0, prompt:], skip_special_tokens=True)
    found = "".join(stream(subject, None, tmp_path / "text.txt", None, 12, 0.0, 0))
    assert found == expected
