"""Connect this process to a Ray cluster. Ray is imported only on connecting."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from unshard import __version__
from unshard.errors import UsageError, how_to_install
from unshard.signals import uninterrupted

_CONNECTING_S = 20.0
_SHOWN_ID = 8


def is_connected() -> bool:
    """Return whether this process is connected to a cluster; then Ray is imported."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def connect(what: str) -> Any:
    """Return the module `ray`, connected to the cluster of RAY_ADDRESS, or of this node.

    An existing connection is used. Error messages begin with `what`.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            f"{what}: Ray is not installed", hint=how_to_install("ray", "ray")
        ) from None
    if ray.is_initialized():
        return ray
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{what}: no Ray cluster can be used: {why}",
            hint="run this on a node of a cluster (`ray start`), or set RAY_ADDRESS",
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced the handler
    return ray


@contextmanager
def disconnecting() -> Iterator[None]:
    """End a connection that is made inside the context."""
    was_connected = is_connected()
    try:
        yield
    finally:
        if not was_connected and is_connected():
            import ray

            # It prints the cluster's messages on stdout, which may be our JSON output.
            with uninterrupted(), redirect_stdout(sys.stderr):
                ray.shutdown()


def _check_address(address: str) -> None:
    """Test a cluster's address, which Ray itself would try for more than ten minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in address:
        import socket  # takes a tenth of the time of a merge's start

        try:
            socket.create_connection((host, int(port)), _CONNECTING_S).close()
        except OSError as error:
            raise ConnectionError(f"RAY_ADDRESS={address}: {error.strerror or error}") from error


def host_of(ray: Any, node: str) -> str:
    """Return a node's name for messages: its host, and its id if the host has several nodes."""
    hosts = {item["NodeID"]: item["NodeManagerHostname"] for item in ray.nodes()}
    host = hosts.get(node, node)
    return host if list(hosts.values()).count(host) < 2 else f"{host} ({node[:_SHOWN_ID]})"


def unusable(what: str, host: str, error: Exception) -> UsageError:
    """Return the error for an actor that cannot start on a node."""
    why = str(error).strip().splitlines()[-1]
    return UsageError(
        f"{what}: unshard cannot be used on node {host}: {why}",
        hint=f"install unshard {__version__} in the Python of each node's `ray start`",
    )


def check_version(what: str, host: str, found: str) -> None:
    """Raise a `UsageError` if a node and this process have different versions of unshard."""
    if found != __version__:
        raise UsageError(
            f"{what}: node {host} has unshard {found}, this process has {__version__}",
            hint="install the same version on all nodes",
        )
