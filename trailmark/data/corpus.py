"""Text to tokens: a user's own files, or the sources of the Python standard library that runs the program."""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
import logging
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trailmark import pretrained
from trailmark.untrusted import open_regular

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
T = TypeVar("T")
_LINE_ENDS = re.compile(r"(?<=\S)(\r?\n)(?=\S)")


def load_tokenizer(name: str = "bytes") -> Any:
    """A transformers tokenizer: "bytes" is ByT5's (no files needed), otherwise a folder or a hub name.

    Code that lies in a tokenizer's folder is never run.
    """
    from trailmark.byte_tokenizer import ByteTokenizer

    if name == "bytes":
        return ByteTokenizer()
    try:
        return pretrained.load_tokenizer(name, "tokenizer")
    except ValueError as error:
        raise ValueError(
            f"tokenizer: expected 'bytes', a folder with a tokenizer or a hub name, got {name!r}. "
            f"({str(error).removeprefix('tokenizer: ').splitlines()[0]})"
        ) from error


def vocabulary_size(tokenizer: Any) -> int:
    """Tokens that text can become, for a model: "bytes" has 259, without the numbers that T5 keeps free."""
    from transformers import ByT5Tokenizer

    return 256 + tokenizer.offset if isinstance(tokenizer, ByT5Tokenizer) else len(tokenizer)


def padding_id(tokenizer: Any) -> Any:
    """The token that stands where a row of a batch has none: the one that ends a text, where there is no other."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what decides a tokenizer's tokens: equal fingerprints give equal tokens for equal text.

    Of a tokenizer with a Rust backend that is its own description without what only shapes batches (padding,
    truncation, special tokens put around a text), and the token that ends a text. Versions of transformers do not
    enter. Added to it are what stands outside of it: ``split_special_tokens``, and the class, where it has steps in
    Python of its own.
    """
    from transformers import ByT5Tokenizer

    if isinstance(tokenizer, ByT5Tokenizer):
        parts: list[Any] = ["bytes", tokenizer.offset]
    elif (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        described = json.loads(backend.to_str())
        parts = [{k: v for k, v in described.items() if k not in ("padding", "truncation", "post_processor")}]
        if tokenizer.split_special_tokens:
            parts.append("split_special_tokens")
        if not rust_alone(tokenizer):
            parts.append(f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}")
    else:  # written in Python: its vocabulary, and the files that it would save (merges, a SentencePiece model)
        with tempfile.TemporaryDirectory() as folder:
            files = sorted(map(Path, tokenizer.save_vocabulary(folder) or ()))
            hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        parts = [type(tokenizer).__name__, tokenizer.get_vocab(), hashes]
    parts.append(tokenizer.eos_token_id)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def rust_alone(tokenizer: Any) -> bool:
    """Whether a tokenizer is its Rust backend and nothing more: a class may put steps in Python around it."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus")
    )


def tokenize(texts: Iterable[str], tokenizer: Any) -> Tokens:
    """All texts as one array of tokens, without special tokens."""
    from transformers import ByT5Tokenizer

    parts: list[Tokens] = []
    for text in texts:
        if isinstance(tokenizer, ByT5Tokenizer):  # a byte's token is its value after the special tokens
            parts.append(np.frombuffer(text.encode(), np.uint8).astype(np.int32) + tokenizer.offset)
        else:
            parts.append(np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def text_tokens(text: str, tokenizer: Any) -> Tokens:
    """One text as tokens, none of which is a control token, whatever the text spells."""
    return tokenize([text], of_texts(tokenizer))


_OF_TEXTS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def of_texts(tokenizer: Any) -> Any:
    """A tokenizer to which a text spells no control token.

    Only those with a chat template have such as speak to the model; others are their own. It is a copy, no option of a
    call: threads share a tokenizer, and its Rust backend keeps that option from one thread's call to another's.
    Tokens may be added to a tokenizer later; nothing else of it may change.
    """
    if not getattr(tokenizer, "chat_template", None) or getattr(tokenizer, "split_special_tokens", False):
        return tokenizer
    known = _OF_TEXTS.get(tokenizer)
    if known is None or len(known) != len(tokenizer):
        known = copy.deepcopy(tokenizer)
        known.split_special_tokens = True
        _OF_TEXTS[tokenizer] = known
    return known


def tokenize_parts(parts: Sequence[str], tokenizer: Any) -> list[npt.NDArray[np.int64]]:
    """Return the tokens of each part, int64, as it stands in running text.

    Where a token would cross the end of a part, the parts are tokenized one by one.
    """
    whole, pieces, done = tokenize(["".join(parts)], tokenizer).astype(np.int64), [], 0
    for count in range(1, len(parts) + 1):
        lead = tokenize(["".join(parts[:count])], tokenizer)
        if not np.array_equal(whole[: len(lead)], lead):
            return [tokenize([part], tokenizer).astype(np.int64) for part in parts]
        pieces.append(whole[done : len(lead)])
        done = len(lead)
    return pieces


class NotText(ValueError):
    """A file that can be read and holds no UTF-8 text."""


def read_texts(paths: Sequence[str | Path], argument: str = "data") -> list[str]:
    """The text of files and of every file below folders, in order of name.

    A named file must be text. Below a folder, files that are not text are left out and named in a warning. A file that
    is named or reached twice is read once, with a warning.

    Args:
        argument: by which a user named the paths, for messages.

    Raises:
        ValueError: a path that does not exist or cannot be read, a named file that is empty or not UTF-8 text, or no
            text at all.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{argument}: expected a file or folder, {str(path)!r} does not exist.")
    texts = each_text(map(Path, paths), argument, lambda path, folder: read_text(path, argument))
    if not texts:
        raise ValueError(
            f"{argument}: expected at least one UTF-8 text file in {', '.join(map(str, paths)) or 'the list'}, "
            "found none."
        )
    return texts


def each_text(paths: Iterable[Path], argument: str, look_at: Callable[[Path, Path | None], T]) -> list[T]:
    """What ``look_at`` gives for files, and for every file below folders, in order of name.

    Args:
        argument: by which a user named the paths, for messages.
        look_at: is given a file, and the folder below which it was found or None. It raises :class:`NotText` where a
            file is none: of a named file that goes on, files of a folder are left out and named in a warning. A file
            that is named or reached again, by a link too, is left out with a warning.

    Raises:
        ValueError: what ``look_at`` raises, and as :func:`files_below`.
    """
    results, seen, again = list[T](), set[str](), list[str]()

    def take(file: Path, folder: Path | None) -> None:
        if (real := os.path.realpath(file)) in seen:
            again.append(str(file))
        else:
            results.append(look_at(file, folder))
            seen.add(real)

    for path in paths:
        if not path.is_dir():
            take(path, None)
            continue
        left_out = []
        for file in files_below(path, argument):
            try:
                take(file, path)
            except NotText:
                left_out.append(file.name)
        if left_out:
            logger.warning(
                "Left out %d files below %s that are empty or hold no UTF-8 text: %s",
                len(left_out),
                path,
                _shown(left_out),
            )
    if again:
        logger.warning("%s: left out, for they were taken already: %s", argument, _shown(again))
    return results


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def read_text(path: Path, argument: str = "data") -> str:
    """One file's text; errors as :func:`decoded`."""
    return "".join(decoded(path, argument))


def decoded(
    path: Path,
    argument: str = "data",
    block_bytes: int = 1 << 20,
    look: Callable[[bytes], None] | None = None,
) -> Iterator[str]:
    """One file's text, block by block.

    Args:
        argument: by which a user named the file, for messages.
        look: is given the bytes of each block.

    Raises:
        NotText: a file that is empty, binary, or not UTF-8; after the blocks before the mistake.
        ValueError: it cannot be read.
    """
    decoder, words, done = codecs.getincrementaldecoder("utf-8")(), False, 0
    try:
        with open_regular(path, argument, links=True) as file:
            while block := file.read(block_bytes):
                if look is not None:
                    look(block)
                if not done and block.startswith(codecs.BOM_UTF8):  # which says the encoding, and is no text
                    done = len(codecs.BOM_UTF8)
                    block = block[done:]
                elif not done and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise NotText(
                        f"{argument}: expected UTF-8 text, {str(path)!r} is UTF-16. Convert it to UTF-8 first, as with "
                        "iconv -f utf-16 -t utf-8."
                    )
                if b"\0" in block:
                    raise NotText(f"{argument}: expected UTF-8 text, {str(path)!r} is binary.")
                words = words or bool(block.strip())
                text = decoder.decode(block)
                done = file.tell() - len(decoder.getstate()[0])  # a character's beginning waits for the rest
                yield text
        decoder.decode(b"", final=True)
    except OSError as error:
        raise ValueError(f"{argument}: cannot read {str(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise NotText(
            f"{argument}: expected UTF-8 text, {str(path)!r} is not (byte {done + error.start}). Convert it to UTF-8 "
            "first, as with iconv -f latin1 -t utf-8."
        ) from error
    if not words:
        raise NotText(f"{argument}: expected text, {str(path)!r} is empty or holds white space alone.")


def standard_library_texts(split: str) -> list[str]:
    """Sources of the running Python's standard library: split "train" or "haystack", disjoint by file.

    A file belongs to the haystacks if a hash of its name says so, thus on every machine the same. Tests are
    left out, and the character tables of ``encodings``, which are made by a program.
    """
    if split not in ("train", "haystack"):
        raise ValueError(f"split: expected 'train' or 'haystack', got {split!r}.")
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    texts = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if outside.intersection(name.parts):
            continue
        held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 102  # two fifths
        if held_out == (split == "haystack"):
            try:
                texts.append(read_text(file))
            except ValueError:  # a few sources are empty or written in another encoding on purpose
                continue
    if not texts:
        raise ValueError(f"data: no Python sources below {root}. Name text files of your own instead.")
    return texts


def files_below(folder: Path, argument: str = "data") -> list[Path]:
    """Every file below a folder in order of name; those that are hidden or lie in hidden folders are left out.

    Links are followed, but for those to a folder above this one. A folder that is reached twice is listed once.

    Args:
        argument: by which a user named the folder, for messages.

    Raises:
        ValueError: a folder that cannot be listed.
    """

    def refuse(error: OSError) -> Never:
        raise ValueError(f"{argument}: cannot list {error.filename!r}: {error.strerror}.") from error

    root = Path(os.path.realpath(folder))
    files, seen = [], set(map(str, (root, *root.parents)))
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        files += [Path(place, name) for name in names if not name.startswith(".")]
        shown, folders[:] = sorted(name for name in folders if not name.startswith(".")), []
        for name in shown:
            if (real := os.path.realpath(Path(place, name))) not in seen:
                seen.add(real)
                folders.append(name)
    return sorted(files)


def text_pieces(
    path: Path, size: int = 1 << 20, look: Callable[[bytes], None] | None = None
) -> Iterator[str]:
    """One file's text in pieces of about ``size`` bytes, so that it may be longer than memory.

    A piece ends at a line's end, before a line that begins with no space, where tokenizers part words anyway;
    a text without such places is cut between characters.

    Args:
        look: is given the file's bytes, all of them once the last piece was given.

    Raises:
        ValueError: as :func:`decoded`.
    """
    left = ""
    for text in decoded(path, "file", size, look):
        left += text
        place = max((m.end(1) for m in _LINE_ENDS.finditer(left)), default=0)
        if not place and len(left) > 4 * size:
            place = len(left)
        if place:
            yield left[:place]
            left = left[place:]
    if left:
        yield left
