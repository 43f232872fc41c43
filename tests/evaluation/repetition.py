"""A plugin of pytest that repeats tests, with busy loops next to them.

PYTHONPATH=tests pytest -p evaluation.repetition --times 200 --busy 4 -n 4 TEST...
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="how often each test is run")
    parser.addoption("--busy", type=int, default=0, help="how many busy loops run meanwhile")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append("repetition")
    metafunc.parametrize("repetition", range(metafunc.config.getoption("--times")))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    is_worker = hasattr(session.config, "workerinput")
    with busy(0 if is_worker else session.config.getoption("--busy")):
        return (yield)
