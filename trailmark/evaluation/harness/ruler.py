"""What RULER's tasks in lm-eval do not say of themselves: they make 500 texts whatever is asked, and some never end.

Their texts are made by loops that go on until one fits into the wanted length, and that take any error for "too long",
Ctrl-C among them. So it is asked beforehand whether any text can fit.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

_MODULES = {
    "niah": "prepare_niah",
    "ruler_vt": "vt_utils",
    "ruler_cwe": "cwe_utils",
    "ruler_fwe": "fwe_utils",
}
MADE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks that need no network: their texts are made of words that a package brings."""
_EXAMPLE = 500  # tokens that ruler_vt's solved example may have


def is_made(task: str) -> bool:
    """Whether a task makes its texts, as long as it is told."""
    return task.startswith(("niah_", "ruler_"))


def folder() -> str:
    """Where lm-eval describes these tasks; to look through all of its folders takes half a minute."""
    return str(Path(_imported("prepare_niah").__file__).parent)  # which they all import


def _module(task: str) -> Any:
    name = next((module for start, module in _MODULES.items() if task.startswith(start)), None)
    if name is None:
        return None
    module = _imported(name)
    # lm-eval loads what a task names from its file again, unless it finds there when that was changed
    module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
    return module


def _imported(name: str) -> Any:
    import nltk

    # what divides essays into sentences would be downloaded by mere import, for tasks that have no essays too
    with patch.object(nltk, "download", lambda *_, **__: False), redirect_stdout(io.StringIO()):
        return importlib.import_module(f"lm_eval.tasks.ruler.{name}")


@contextmanager
def few(task: str, limit: int | None, progress: Callable[[str], None]) -> Iterator[None]:
    """Inside, the task makes ``limit`` texts and no more, and says how far it is."""
    module = _module(task)
    if module is None:
        yield
        return

    def walk(numbers: Iterable[int], *_: Any, **__: Any) -> Iterator[int]:
        for number in islice(numbers, limit):
            progress(f"{task}: text {number + 1:,}")
            yield number

    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "tqdm", walk))  # what walks over the texts that it makes
        stack.enter_context(patch.object(module, "print", lambda *_, **__: None, create=True))
        yield


def saved_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Where lm-eval's tasks find a tokenizer: they load it by its place, and would run code that it brings."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def expect_room(task: str, length: int, tokenizer: Any) -> None:
    """A ValueError where no text of a task is as short as ``length`` tokens: lm-eval would look for one for ever."""

    def tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    module = _module(task)
    needed: int | None = None
    if task == "ruler_vt":
        example, _ = module.generate_input_output(5, 1, 4, is_icl=True)
        least = tokens(example) + 30
        if least > _EXAMPLE:
            raise ValueError(
                f"tasks: ruler_vt begins with a solved example of at most {_EXAMPLE} tokens, of which this tokenizer "
                f"makes {least} at least: lm-eval would look for a shorter one for ever. Leave the task out, or take a "
                "model whose tokens are longer."
            )
        text, names = module.generate_input_output(10, 1, 4)
        needed = tokens(f"{text} {names}") + 30 + _EXAMPLE
    elif task == "ruler_cwe":
        example, text, words = module.generate_input_output(10, length)
        answer = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
        needed = tokens(f"{example}\n{text} {answer}") + 120
    elif task == "ruler_fwe":
        needed = 2 * tokens(module.TEMPLATE) + 50
    if needed is not None and needed > length:
        raise ValueError(
            f"lengths: expected at least {needed:,} tokens for {task} with this tokenizer, got {length:,}: lm-eval "
            "would look for a shorter text for ever. Choose a longer one."
        )
