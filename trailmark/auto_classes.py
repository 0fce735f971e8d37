"""After ``import trailmark`` transformers' Auto classes and ``pipeline`` know the models, which are not imported yet.

The models need torch and transformers, ``import trailmark.ops`` torch alone: what is not asked for is not imported. So
``AutoConfig.from_pretrained``, by which every Auto class and every pipeline begins, is wrapped, now or when
transformers brings it: where it meets a ``model_type`` of ours that it does not know, the models are imported, which
registers them, and it is asked again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_WHERE = "transformers.models.auto.configuration_auto"
_REGISTERING = "trailmark.models"


def register_when_asked() -> None:
    """Wrap ``AutoConfig.from_pretrained``, at once where transformers brought it already."""
    if (module := sys.modules.get(_WHERE)) is not None and hasattr(module, "AutoConfig"):
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, as all others would, and looks at it when it has run; then it is gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_wrap(module: ModuleType) -> None:
                run(module)
                _wrap(module)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType) -> None:
    auto: Any = getattr(module, "AutoConfig", None)
    if auto is None or hasattr(auto.from_pretrained, "of_trailmark"):
        return
    own = auto.from_pretrained.__func__

    @functools.wraps(own)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(cls, *args, **kwargs)
        except ValueError as error:
            if "trailmark_" not in str(error) or _REGISTERING in sys.modules:
                raise
        importlib.import_module(_REGISTERING)
        return own(cls, *args, **kwargs)

    from_pretrained.of_trailmark = True  # type: ignore[attr-defined]
    auto.from_pretrained = classmethod(from_pretrained)
