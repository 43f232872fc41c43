"""The actors that read files on the nodes of a Ray cluster: one on each node for each driver.

The driver begins them, and they end with it. Its actors find them by their names.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from threading import BoundedSemaphore
from typing import Any

from unshard.errors import StoreError
from unshard.stores.nodes.connection import check_version, connect, host_of, unusable
from unshard.stores.nodes.files import NodeFiles

PIECE = 1 << 20
"""The most bytes of an answer. Ray frees answers when there are 100 of them, or after a second."""
_AT_ONCE = 8
"""How many answers a process waits for, and how many questions an actor answers at a time."""
_UNDER_WAY = 64 << 20
"""The most bytes that all nodes together wait for; one node may have to send all of them."""
_RESTARTS = 3

_begun: dict[str, Any] = {}
"""The actors that this process began, by their names; Ray would end those that it forgets."""


class LostError(Exception):
    """A node is lost, or the actor there died again and again; the argument is Ray's id of it."""


def begin(path: str) -> Mapping[str, str]:
    """Begin an actor on every node where there is none.

    Returns:
        What a path is on each node where it is something, "file" or "directory".

    Raises:
        UsageError: there is no cluster, or unshard cannot be used on a node.
        StoreError: a node is lost.
    """
    what = f"node://{path}"
    ray = connect(what)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = {node: _begun_on(ray, node).hello.remote(path) for node in nodes}
    found = {}
    for node, answer in asked.items():
        try:
            hello = ray.get(answer)
        except ray.exceptions.RayActorError as error:
            del _begun[_name(ray, node)]
            if getattr(error, "actor_init_failed", False):
                raise unusable(what, host(node), error) from error
            raise StoreError(f"{what}: node {host(node)} is lost") from error
        check_version(what, host(node), hello.version)
        if hello.kind:
            found[node] = hello.kind
    return found


def _begun_on(ray: Any, node: str) -> Any:
    """Return the actor on a node, which is begun if need be."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name = _name(ray, node)
    if name not in _begun:
        actor = ray.remote(NodeFiles).options(
            name=name,
            num_cpus=0,
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            max_concurrency=_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        _begun[name] = actor.remote()
    return _begun[name]


def ask(node: str, question: Callable[[Any], Any]) -> Any:
    """Return what the actor on a node answers; `question` calls one of its methods.

    Raises:
        LostError: it does not.
        OSError: as the actor returned it.
    """
    return ask_all([(node, question)])[0][1]


def ask_all(questions: Iterable[tuple[str, Callable[[Any], Any]]]) -> list[tuple[str, Any]]:
    """Return several nodes, and what the actor on each answers; they work at the same time.

    Raises:
        LostError, OSError: as for `ask`.
    """
    ray = connect("node://")
    asked = []
    for node, question in questions:
        try:
            asked.append((node, question(_actor(_name(ray, node)))))
        except ValueError as error:  # Ray knows none of this name
            raise LostError(node) from error
    return [(node, _answer(ray, node, answer)) for node, answer in asked]


def _answer(ray: Any, node: str, asked: Any) -> Any:
    try:
        answer = ray.get(asked)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        raise LostError(node) from error
    if isinstance(answer, OSError):
        raise answer
    return answer


def host(node: str) -> str:
    """Return how messages call a node."""
    return host_of(connect("node://"), node)


@lru_cache(maxsize=1)
def pieces() -> BoundedSemaphore:
    """Return what bounds how many pieces this process waits for, as one of all nodes."""
    nodes = len(connect("node://").nodes())
    return BoundedSemaphore(max(1, min(_AT_ONCE, _UNDER_WAY // (PIECE * nodes))))


def _name(ray: Any, node: str) -> str:
    """Return the name of the actor on a node, which no other job has."""
    return f"unshard-files-{ray.get_runtime_context().get_job_id()}-{node}"


@lru_cache(maxsize=1024)
def _actor(name: str) -> Any:
    import ray

    return ray.get_actor(name)
