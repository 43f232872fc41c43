"""What identifies the process of an attempt. Imports nothing heavy: a supervisor needs it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """The process of an attempt, so that it can be distinguished from a later one with its number.

    Attributes:
        pid: of the leader of its process group.
        started: when the kernel says that it started, clock ticks since boot.
        boot: the kernel's identity of that boot.
        gpus: the names of those that it has.
        directory: of the attempt.
    """

    pid: int
    started: int
    boot: str
    gpus: tuple[str, ...]
    directory: str
