"""What holds for all tests."""

import signal
import threading

if threading.current_thread() is threading.main_thread():
    # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
