"""What a merge made, as one object for people, JSON and callers."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from unshard.fronts import PYTHON, reword_warning
from unshard.read.format import PassedOver
from unshard.showing import counted
from unshard.tensors.catalog import Skipped


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a merge wrote, or with `dry_run` would write.

    Attributes:
        output: the directory; empty if nothing was written here, as by `push`.
        source: the directory of the weights; of several that were averaged, the last.
        sources: all of them.
        step, world_size: of the checkpoint, or of the last.
        passed_over: steps of the run that are not complete and were passed over.
        files: bytes of every weight file, by name.
        companions: names of the other files.
        tensors, parameters: how many.
        dtypes: dtypes written, with tensor counts.
        operations: number of operations of the plan, by kind.
        bytes_read, bytes_written: of weights.
        bytes_copied: how many of the written ones an object store copied itself: they did not pass
            through this machine.
        memory_bytes: bound on the buffers.
        seconds: how long it took; peak_memory_bytes: of this process so far.
        dry_run: nothing was written.
        loadable: whether a library finds what it needs next to the weights: the config.json of a
            library that is known to load the output, or, for an adapter alone, an
            adapter_config.json. False: these are weights, not a model.
        library: the one that the config is for ("transformers", "diffusers", "peft", "timm", …);
            empty if nothing says.
        names_checked: what the names of the tensors were checked against: "config", "base", or
            "none"; in the last case a missing tensor was not noticed.
        changed_from_base: how many tensors differ from the base model's, and how many were
            compared; None if its weights are not available.
        url: of the repository on the hub, if it was pushed to one.
        notes: what a user should know, with options as `unshard merge` has them.
        skipped: values of the checkpoint that were left out.
        reused: the output was there already, or another process made it meanwhile: nothing was
            read or written here.
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
        """What a user should know, with options as Python has them."""
        return tuple(reword_warning(note, PYTHON) for note in self.notes)

    def __repr__(self) -> str:
        """Return one line: what was made, where, from how many ranks and checkpoints."""
        made = "would save" if self.dry_run else "used" if self.reused else "saved"
        tensors = counted(self.tensors, "tensor")
        several = f"{len(self.sources)} checkpoints, " if len(self.sources) > 1 else ""
        return (
            f"<Report: {made} {tensors} in {counted(len(self.files), 'file')} "
            f"({self.bytes_written:,} bytes) to {self.output or self.url!r}, from {several}"
            f"{counted(self.world_size, 'rank')}, {counted(len(self.notes), 'warning')}>"
        )


def peak_memory() -> int:
    """Return this process's peak resident memory, bytes."""
    try:  # getrusage alone would count what the parent held when it forked this process
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
