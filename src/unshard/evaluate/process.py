"""The identity of an attempt's process. Imports nothing heavy: a supervisor needs it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """The process of an attempt, distinguished from a later process that has its pid.

    Attributes:
        pid: of the leader of its process group.
        started: the start time of the process in the kernel, clock ticks since boot.
        boot: the kernel's id of that boot.
        gpus: the names of its GPUs.
        directory: of the attempt.
    """

    pid: int
    started: int
    boot: str
    gpus: tuple[str, ...]
    directory: str
