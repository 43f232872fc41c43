"""What holds for all tests."""

import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from properties import QUICK

if threading.current_thread() is threading.main_thread():
    # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The key that staging directories are sealed with is not made in the home of who runs the tests.
_STATE = tempfile.TemporaryDirectory(prefix="unshard-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# How often every property is tried, unless its test has a number of its own: `quick` in
# `make test`, `thorough` wherever nothing else is asked for. No clock judges: the machine may be
# busy.
for _name, _examples in (("quick", QUICK), ("thorough", 500)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("thorough")

_FAILED = pytest.StashKey[bool]()
_NUMBERS = count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Make a directory; remove it again, unless setup or call fails: a whole run makes 18 GB.

    pytest's own fixture uses the paths of removed directories again, and what a path means is
    remembered in places.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.mktemp(f"{name}{next(_NUMBERS)}", numbered=False)
    yield path
    if not request.node.stash.get(_FAILED, True):
        shutil.rmtree(path, ignore_errors=True)  # some tests leave what cannot be removed
