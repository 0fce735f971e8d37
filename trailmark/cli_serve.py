"""The command ``serve``. It parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import typer

from trailmark.evaluation.suite import device_setting, dtype_setting
from trailmark.settings import Settings, setting, takes

_GIB = 1 << 30


@dataclass(frozen=True)
class ServeSettings(Settings):
    """The options of ``trailmark serve``."""

    models: tuple[Path, ...] = setting(help="Folders with trailmark models.", argument=True)
    memories: Path | None = setting(None, "Folder of memories, each as trailmark read makes it.")
    host: str = setting("127.0.0.1", "Address to listen at; others than loopback ask for keys.")
    port: int = setting(8000, "Port to listen at; 0: any that is free.", least=0, most=65535)
    api_key_file: Path | None = setting(
        None, "File of keys, one a line: who asks sends one. Without it this machine alone may ask."
    )
    memory_dtype: str | None = dtype_setting()
    device: str | None = device_setting()
    open_gib: float | None = setting(
        None,
        "GiB of memories that are open at once, mapped files included; beyond it those used longest ago are closed.",
        default="half of this machine's RAM",
        least=0,
    )
    max_rows: int = setting(32, "Answers that are written together, at most.", least=1)
    max_waiting: int = setting(
        64, "Requests that wait for their turn, at most; more get status 429.", least=1
    )
    max_new_tokens: int = setting(4096, "Tokens of an answer at most.", least=1)
    max_text_mib: int = setting(1024, "MiB of a text that is sent to be read, at most.", least=1)
    seconds: float = setting(600.0, "Until an answer ends, finished or not.", least=1)


@takes(ServeSettings)
def serve(settings: ServeSettings) -> None:
    """Answer at an OpenAI-compatible address, over saved memories, with the passages that were read for each answer."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            'serve: expected fastapi and uvicorn, they are not installed. Run pip install "trailmark[serve]".'
        ) from error
    from trailmark.evaluation.reading import parse_dtype
    from trailmark.evaluation.subject import load, names_of, own_device
    from trailmark.server.keys import expect_safe, read_keys
    from trailmark.server.running import build, listen, run
    from trailmark.server.state import Limits

    keys = [] if settings.api_key_file is None else read_keys(settings.api_key_file)
    expect_safe(settings.host, keys)
    names = names_of(settings.models)
    # before models are loaded: the port may be taken
    with listen(settings.host, settings.port) as listening:
        device = own_device(settings.device)
        subjects = {
            name: load(folder, device=device) for name, folder in zip(names, settings.models, strict=True)
        }
        gib = settings.open_gib
        app = build(
            subjects,
            settings.memories,
            keys,
            Limits(
                text_bytes=settings.max_text_mib << 20,
                new_tokens=settings.max_new_tokens,
                seconds=settings.seconds,
            ),
            open_bytes=psutil.virtual_memory().total // 2 if gib is None else int(gib * _GIB),
            dtype=parse_dtype(settings.memory_dtype),
            max_rows=settings.max_rows,
            max_waiting=settings.max_waiting,
        )
        run(app, listening, typer.echo)
