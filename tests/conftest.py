"""Where there is no CUDA, Triton kernels are interpreted on the CPU: the same tests run everywhere."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import interpreting

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts what runs in its background so, and then no test could press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


# a busy machine is no failure, and what fails once fails again; --hypothesis-profile=anew draws other examples
settings.register_profile("trailmark", deadline=None, derandomize=True)
settings.register_profile("anew", deadline=None, derandomize=False)
settings.load_profile("trailmark")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers = Counter[str]()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            (every,), name = sampled.args, item.nodeid.split("[")[0]
            if numbers[name] % every:
                item.add_marker(pytest.mark.slow)
            numbers[name] += 1
    interpreter = sys.modules.get("triton.runtime.interpreter")  # by now the test files imported the kernels
    if interpreter is not None:
        interpreting.hasten(interpreter)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``TRAILMARK_SLOW_UNTIL``, in seconds since 1970: where a run's time is bounded, slow tests begin before that."""
    until = float(os.environ.get("TRAILMARK_SLOW_UNTIL", "inf"))
    if item.get_closest_marker("slow") and time.time() > until:
        pytest.skip("TRAILMARK_SLOW_UNTIL has passed")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A run that somebody stops shows no summary: what fails is named at once."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f" {report.nodeid} failed ({report.when})", file=sys.__stdout__, flush=True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors: on a busy machine threads wait for each other for tenths of a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def no_restart() -> Iterator[None]:
    """The commands start their process again with these settings; here that would be pytest."""
    with pytest.MonkeyPatch.context() as patch:
        from trailmark.machine import SET_UP

        for name, value in SET_UP.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what stands in a report's page: drawing is tested elsewhere."""
    monkeypatch.setattr("trailmark.report.page.available", lambda: False)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What comes from a pipe."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: its exit code and what it and the processes that it starts print."""
    from trailmark import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code: Any = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = stopped.code or 0
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a command that has to fail, and gives its last line; what came before it is progress."""

    def run(*arguments: object) -> str:
        code, _, err = command(*arguments)
        assert code == 1
        assert "Traceback" not in err
        line = err.strip().splitlines()[-1]
        assert line.startswith("trailmark: ")
        return line

    return run
