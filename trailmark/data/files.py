"""The old name of :mod:`trailmark.files`."""

from trailmark.files import (
    expect_place,
    expect_writable,
    locked,
    read_json,
    replacing,
    sha256_of,
    sync_file,
    sync_folder,
    write_json,
    write_text,
)

__all__ = [
    "expect_place",
    "expect_writable",
    "locked",
    "read_json",
    "replacing",
    "sha256_of",
    "sync_file",
    "sync_folder",
    "write_json",
    "write_text",
]
