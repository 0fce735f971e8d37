"""Triton's interpreter in half the time, with the same bits: what it does again and again is done once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def hasten(interpreter: Any) -> None:
    """Leave out work of the module ``triton.runtime.interpreter`` that has no effect.

    - Each call of a device function exchanges the whole language for its interpreted form, which the launch of the
      kernel did already: once per launch is enough.
    - Each sum and product of integers is computed again, in 64 bits, for an assertion that is off.
    - Each array asks for its NumPy type in a table that is made anew.

    Another Triton than the pinned one may do otherwise: it keeps its pace.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_type, known = interpreter._get_np_dtype, {}

    def remembered(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = numpy_type(kind)
        return known[kind.name]

    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    exchanged: list[Any] = []  # modules, since the launch began

    def once(function: Any) -> Any:
        languages = (interpreter.tl, interpreter.tl.core)
        seen = [x for x in function.__globals__.values() if any(x is language for language in languages)]
        if all(x in exchanged for x in seen):
            return interpreter._LangPatchScope()  # nothing to take back
        exchanged.extend(seen)
        return exchange(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        exchanged.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            exchanged.clear()

    interpreter._get_np_dtype = remembered
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launch_anew
