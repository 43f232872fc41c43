"""Actors that read files on the nodes of a Ray cluster: one per node and driver.

The driver starts them, and they end with it. Its other actors find them by name.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import BoundedSemaphore
from typing import Any

from unshard.errors import StoreError
from unshard.stores.nodes.connection import check_version, connect, host_of, unusable
from unshard.stores.nodes.files import NodeFiles

PIECE = 1 << 20
"""The most bytes of an answer. Ray frees answers when there are 100 of them, or after a second."""
_AT_ONCE = 8
"""The most answers that a process waits for, and the most calls that an actor runs at a time."""
_UNDER_WAY = 64 << 20
"""The most bytes that all nodes together wait for; a single node may have to send all of them."""
_RESTARTS = 3

_actors: dict[str, Any] = {}
"""The actors that this process started, by name; Ray ends an actor without references."""


class LostError(Exception):
    """A node is lost, or its actor died repeatedly; the argument is Ray's id of the node."""


def begin(path: str) -> Mapping[str, str]:
    """Start an actor on every node without one.

    Returns:
        "file" or "directory" for each node on which the path exists.

    Raises:
        UsageError: there is no cluster, or unshard cannot be used on a node.
        StoreError: a node is lost.
    """
    subject = f"node://{path}"
    ray = connect(subject)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    answers = {node: _started(ray, node).hello.remote(path) for node in nodes}
    kinds = {}
    for node, answer in answers.items():
        try:
            handshake = ray.get(answer)
        except ray.exceptions.RayActorError as error:
            del _actors[_name(ray, node)]
            if getattr(error, "actor_init_failed", False):
                raise unusable(subject, host(node), error) from error
            raise StoreError(f"{subject}: node {host(node)} is lost") from error
        check_version(subject, host(node), handshake.version)
        if handshake.kind:
            kinds[node] = handshake.kind
    return kinds


def _started(ray: Any, node: str) -> Any:
    """Return the actor on a node; start it if necessary."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name = _name(ray, node)
    if name not in _actors:
        actor = ray.remote(NodeFiles).options(
            name=name,
            num_cpus=0,
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            max_concurrency=_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        _actors[name] = actor.remote()
    return _actors[name]


def call(method: str, arguments: Iterable[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, Any]]:
    """Call a method of the actors on several nodes at the same time; return nodes with results.

    Raises:
        LostError: an actor does not answer.
        OSError: an actor returned it.
    """
    ray = connect("node://")
    pending = []
    for node, values in arguments:
        try:
            actor = _actor(_name(ray, node))
        except ValueError as error:  # Ray has no actor of this name
            raise LostError(node) from error
        pending.append((node, getattr(actor, method).remote(*values)))
    return [(node, _result(ray, node, reference)) for node, reference in pending]


def _result(ray: Any, node: str, reference: Any) -> Any:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        raise LostError(node) from error
    if isinstance(result, OSError):
        raise result
    return result


def host(node: str) -> str:
    """Return a node's name for messages."""
    return host_of(connect("node://"), node)


@lru_cache(maxsize=1)
def pieces() -> BoundedSemaphore:
    """Return the semaphore for this process's share of the pieces that all nodes wait for."""
    nodes = len(connect("node://").nodes())
    return BoundedSemaphore(max(1, min(_AT_ONCE, _UNDER_WAY // (PIECE * nodes))))


def _name(ray: Any, node: str) -> str:
    """Return the name of the actor on a node, unique to this job."""
    return f"unshard-files-{ray.get_runtime_context().get_job_id()}-{node}"


@lru_cache(maxsize=1024)
def _actor(name: str) -> Any:
    import ray

    return ray.get_actor(name)
