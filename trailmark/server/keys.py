"""Keys, and where a server may listen without them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from trailmark import untrusted

_SHORTEST = 16  # characters


def is_loopback(url: str) -> bool:
    """Whether the host of an address, as "//localhost:8000", is this machine alone."""
    try:
        host = urlsplit(url).hostname
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one a line.

    Raises:
        ValueError: it cannot be read, holds none, or one that is short enough to be guessed.
    """
    try:
        text = untrusted.read_bytes(path, "api_key_file", most=1 << 20, links=True).decode("ascii")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise ValueError(
            f"api_key_file: expected a file of ASCII text with a key a line, {str(path)!r} is none. Make one: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        ) from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or min(map(len, keys)) < _SHORTEST:
        raise ValueError(
            f"api_key_file: expected keys of at least {_SHORTEST} characters, one a line, in {str(path)!r}. Make "
            "one: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return keys


def expect_safe(host: str, keys: Sequence[str]) -> None:
    """A ValueError where others than this machine could ask without a key."""
    if not keys and not is_loopback(f"//[{host}]" if ":" in host else f"//{host}"):
        raise ValueError(
            f"host: expected a loopback address (127.0.0.1, ::1, localhost) without keys, got {host!r}: whoever "
            "reaches it could ask. Add --api-key-file."
        )
