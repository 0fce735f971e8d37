"""How a process is set up, and what is said of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from trailmark import machine

_PRINTS = """
import json, os, sys
from trailmark import machine
if os.environ.get("STRIPS"):  # as a wrapper that takes variables away
    execve = os.execve
    def bare(program, words, environment):
        execve(program, words, {k: v for k, v in environment.items() if k not in machine.SET_UP})
    os.execve = bare
machine.start_again_set_up()
print(json.dumps({name: os.environ.get(name) for name in (*machine.SET_UP, "OMP_WAIT_POLICY")}))
"""


def started(**given: str) -> dict[str, str | None]:
    """What a process that sets itself up has of the variables, which was started with those that are given."""
    import json

    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in (*machine.SET_UP, *machine.SPINS, "GLIBC_TUNABLES")
    }
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS],
        capture_output=True,
        text=True,
        check=True,
        env=clean | given,
        timeout=60,
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is started again")


@linux
def test_a_process_sets_up_what_the_user_has_not() -> None:
    assert started() == machine.SET_UP | {"OMP_WAIT_POLICY": None}


@linux
def test_what_the_user_has_set_stays() -> None:
    assert started(OMP_WAIT_POLICY="ACTIVE") == machine.KEEP_FREED_MEMORY | {
        "GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": "ACTIVE",
    }  # fmt: skip
    found = started(MALLOC_TOP_PAD_="1")
    assert found["MALLOC_TOP_PAD_"] == "1"
    assert found["MALLOC_TRIM_THRESHOLD_"] is None
    assert found["GOMP_SPINCOUNT"] == machine.WAITING["GOMP_SPINCOUNT"]


@linux
def test_a_process_is_started_again_once_whatever_takes_variables_away() -> None:
    assert set(started(STRIPS="1").values()) == {None}


def test_the_words_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in (*machine.SET_UP, *machine.SPINS, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert "defaults" in machine.allocator()
    assert "default" in machine.threads()
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert machine.threads() == "OMP_WAIT_POLICY=PASSIVE"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert machine.allocator() == "keeps freed memory"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "system" in machine.allocator()
    assert "system" in machine.threads()


@pytest.mark.parametrize(
    ("vectors", "instructions", "expected"),
    [
        ("AVX512", ["amx_bf16", "avx512_bf16"], ["amx_bf16", "avx512_bf16"]),
        ("AVX512", ["avx512_f"], []),
        ("AVX2", ["avx512_bf16"], []),  # by ATEN_CPU_CAPABILITY
        ("DEFAULT", [], []),
    ],
)
def test_what_torch_uses_of_a_processor(
    vectors: str, instructions: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True), raising=False
    )
    assert machine.bfloat16_instructions() == expected
    assert all(name in machine.processor() for name in expected)
    assert ("neither AMX nor AVX-512" in machine.processor()) is not bool(expected)
