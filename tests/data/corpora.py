"""Small texts, a small tokenizer, and folders to compare."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trailmark.files import read_json

WORDS = [
    "the",
    "river",
    "of stones",
    "ran",
    "below a",
    "häuser",
    "–",
    "河",
    "nothing\tmoved;",
    "and=ran",
    "42",
    "(again).",
]


def prose(seed: int, words: int) -> str:
    """Lines of words; the same for the same seed."""
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice("      \n") for _ in range(words))


def save_bpe(folder: Path, vocab_size: int = 300, end_of_text: bool = True) -> str:
    """A byte-level BPE tokenizer in ``folder``, trained on the spot; its name."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([prose(0, 2000)], trainer)
    special: dict[str, Any] = {"eos_token": "<|endoftext|>"} if end_of_text else {}
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)
    return str(folder)


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def save_chat_bpe(
    folder: Path, vocab_size: int = 500, bos: bool = False, template: str = CHAT_TEMPLATE
) -> Any:
    """A tokenizer as pretrained models for conversations have it: byte-level BPE, control tokens, a chat template.

    Args:
        bos: a token of its own begins each text, in the template too.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(["<|begin|>"] if bos else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([prose(0, 2000), "What is the secret number of Lisbon?\nIt is 48213."], trainer)
    names: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    if bos:
        names["bos_token"] = "<|begin|>"
        single = [("<|begin|>", bpe.token_to_id("<|begin|>"))]
        bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=single)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=special[:3], **names)
    tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + template
    tokenizer.save_pretrained(folder)
    return tokenizer


class InPython(PreTrainedTokenizerFast):
    """Changes a text before its backend sees it."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus(text.upper(), *args, **kwargs)


def write_folder(folder: Path, files: int, words: int = 400) -> Path:
    """``files`` text files of different lengths."""
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"{number:03d}.txt").write_text(prose(number, words + 37 * (number % 7)), encoding="utf-8")
    return folder


def contents(folder: Path, manifest: str = "corpus.json") -> dict[str, Any]:
    """Everything in a folder that a command made, but for the date in its manifest."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    found[manifest] = read_json(folder / manifest)
    del found[manifest]["created"]
    return found
