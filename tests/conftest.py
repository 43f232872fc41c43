"""What holds for all tests."""

import os
import signal
import tempfile
import threading

if threading.current_thread() is threading.main_thread():
    # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The key that staging directories are sealed with is not made in the home of who runs the tests.
_STATE = tempfile.TemporaryDirectory(prefix="unshard-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
