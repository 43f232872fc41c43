"""The report of a merge, for the terminal, JSON and Python callers."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from unshard.console import counted
from unshard.fronts import PYTHON, reword_warning
from unshard.read.format import PassedOver
from unshard.tensors.catalog import Skipped


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The output of a merge, planned with `dry_run`, otherwise written.

    Attributes:
        output: the directory; empty if nothing was written locally, as by `push`.
        source: the directory of the weights; in an average, of the last checkpoint.
        sources: the directories of all checkpoints.
        step, world_size: of the checkpoint; in an average, of the last.
        passed_over: incomplete steps of the run that were skipped.
        files: bytes of every weight file, by name.
        companions: names of the other files.
        tensors, parameters: their numbers.
        dtypes: dtypes written, with tensor counts.
        operations: number of operations of the plan, by kind.
        bytes_read, bytes_written: of weights.
        bytes_copied: bytes that an object store copied itself, so that they did not pass through
            this machine; included in `bytes_written`.
        memory_bytes: bound on the buffers.
        seconds: duration; peak_memory_bytes: of this process so far.
        dry_run: nothing was written.
        loadable: whether a library can load the output: it has the config.json of a library that
            is known to load it or, for an adapter alone, an adapter_config.json. False: the output
            is only weights.
        library: the library of the config ("transformers", "diffusers", "peft", "timm", …); empty
            if unknown.
        names_checked: the reference for the names of the tensors: "config", "base", or "none"; with
            "none", a missing tensor was not noticed.
        changed_from_base: how many tensors differ from the base model's, and how many were
            compared; None if its weights are not available.
        url: of the repository on the hub, if the output was pushed.
        notes: warnings for the user, with the options of `unshard merge`.
        skipped: values of the checkpoint that were left out.
        reused: the output existed already, or another process wrote it meanwhile; this process
            neither read nor wrote anything.
    """

    output: str
    source: str
    sources: tuple[str, ...]
    step: int | None
    passed_over: tuple[PassedOver, ...]
    world_size: int
    files: dict[str, int]
    companions: tuple[str, ...]
    tensors: int
    parameters: int
    dtypes: dict[str, int]
    operations: dict[str, int]
    bytes_read: int
    bytes_written: int
    memory_bytes: int
    seconds: float
    peak_memory_bytes: int
    dry_run: bool
    loadable: bool
    names_checked: str
    changed_from_base: tuple[int, int] | None
    url: str | None
    notes: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    bytes_copied: int = 0
    reused: bool = False
    library: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, with Python's keywords as options."""
        return tuple(reword_warning(note, PYTHON) for note in self.notes)

    def __repr__(self) -> str:
        """Return a line with the output, its size, and the numbers of ranks and checkpoints."""
        verb = "would save" if self.dry_run else "used" if self.reused else "saved"
        tensors = counted(self.tensors, "tensor")
        several = f"{len(self.sources)} checkpoints, " if len(self.sources) > 1 else ""
        return (
            f"<Report: {verb} {tensors} in {counted(len(self.files), 'file')} "
            f"({self.bytes_written:,} bytes) to {self.output or self.url!r}, from {several}"
            f"{counted(self.world_size, 'rank')}, {counted(len(self.notes), 'warning')}>"
        )


def peak_memory() -> int:
    """Return this process's peak resident memory, bytes."""
    try:  # getrusage would include the parent's memory at the time of the fork
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
