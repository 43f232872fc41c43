"""What holds for all tests."""

import os
import signal
import tempfile
import threading

from hypothesis import HealthCheck, settings

if threading.current_thread() is threading.main_thread():
    # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The key that staging directories are sealed with is not made in the home of who runs the tests.
_STATE = tempfile.TemporaryDirectory(prefix="unshard-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# How often every property is tried, unless its test says otherwise. No clock judges: the machine
# may be busy.
settings.register_profile(
    "suite", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
