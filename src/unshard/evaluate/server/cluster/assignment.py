"""An attempt whose evaluator runs on a node of a Ray cluster: what is run, and what is recorded.

On the server's machine the attempt has a supervisor as any other. What it runs is not the evaluator
but `cluster.place`, which gets an `Assignment`, has Ray place an actor (`cluster.seat`) on a node,
and prints what the evaluator prints there. So an attempt is recorded, adopted, followed and ended
by the same files and processes as without Ray, and the server itself never imports Ray.

`NODE`, a directory in the attempt's own, contains the working directory of the evaluator, and two
records that `place` writes: on which node the evaluator is, before it starts, and how it ended,
when nothing of it is left.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from unshard.evaluate.server.processes.launching import environment_of_module, scrub
from unshard.evaluate.server.processes.supervise import Exit, Order, read_exit
from unshard.write.dirfd import write_whole

NODE = "node"

KILLED, LOST, NOT_PLACED = "killed", "lost", "not placed"
"""Reasons of an `Exit` besides a supervisor's: the supervisor was killed, too; the node is lost;
there was no node, because the cluster does not answer or ended the attempt."""

ENDED_NAME = "ended.json"
_NODE_NAME = "placed.json"
_VARIABLE = "UNSHARD_ASSIGNMENT"
_PLACE = "unshard.evaluate.server.cluster.place"
_MARGIN_S = 30.0  # for Ray to carry the order to end to the node, and the answer back


@dataclass(frozen=True, slots=True)
class Assignment:
    """An evaluator to run on any node.

    Attributes:
        address: of the cluster, as `ray.init` takes it.
        name: of the actor; no other attempt has it.
        gpus: how many it gets; Ray chooses which.
        model: the directory that it reads; must exist on the node.
        order: what its supervisor there gets; the environment is what the profile sets.
    """

    address: str
    name: str
    gpus: int
    model: str
    order: Order

    @property
    def attempt(self) -> Path:
        """The directory of the attempt."""
        return Path(self.order.directory).parent


def assign(order: Order, own: Mapping[str, str], *, address: str, gpus: int, model: Path) -> Order:
    """Return what the attempt's supervisor on the server's machine runs instead of an order.

    Args:
        order: as it would be run on that machine.
        own: what the profile sets of the environment; the rest is the node's.
        address: of the cluster.
        gpus: how many the evaluator gets.
        model: the directory that it reads.
    """
    directory = Path(order.directory)
    place = directory / NODE
    place.mkdir(mode=0o700)
    there = Order(
        order.command,
        dict(own),
        str(place),
        order.timeout_s,
        order.grace_s,
        order.log_bytes,
        is_tied=True,
    )
    name = "/".join(directory.parts[-2:])  # the job's id, and the number of the attempt
    assignment = Assignment(address, name, gpus, str(model), there)
    found = environment_of_module(order.directory)
    rays = {name: found[name] for name in found if name.startswith("RAY_")}  # its token, too
    environment = scrub(found) | rays | {_VARIABLE: json.dumps(asdict(assignment))}
    return Order(
        [sys.executable, "-P", "-m", _PLACE],
        environment,
        order.directory,
        math.inf,  # the supervisor on the node keeps to the timeout, which begins there
        grace_on(directory, order.grace_s),
        order.log_bytes,
    )


def read_assignment() -> Assignment:
    """Return what this process was started for."""
    found = json.loads(os.environ.pop(_VARIABLE))
    return Assignment(**found | {"order": Order(**found["order"])})


def is_placed(directory: Path) -> bool:
    """Return whether the evaluator of an attempt runs, or ran, on a node of a cluster."""
    return (directory / NODE).is_dir()


def grace_on(directory: Path, grace_s: float) -> float:
    """Return how long the processes on the server's machine may take to end an attempt."""
    return 2 * grace_s + _MARGIN_S if is_placed(directory) else grace_s


def record_node(directory: Path, node_id: str) -> None:
    """Record on which node an attempt is about to start its evaluator."""
    write_whole(directory / NODE / _NODE_NAME, json.dumps({"node": node_id}).encode())


def read_node(directory: Path) -> str | None:
    """Return the node on which something of an attempt may run; None if nothing does."""
    if (directory / NODE / ENDED_NAME).exists():
        return None
    try:
        return str(json.loads((directory / NODE / _NODE_NAME).read_bytes())["node"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def read_end(directory: Path) -> Exit | None:
    """Return how the evaluator of an attempt ended, wherever it ran; None if it was killed."""
    done = read_exit(directory)
    if done is None or not is_placed(directory):
        return done
    try:
        return Exit(**json.loads((directory / NODE / ENDED_NAME).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return Exit(NOT_PLACED, 1, "the process that watches it on the Ray cluster ended", 0.0)
