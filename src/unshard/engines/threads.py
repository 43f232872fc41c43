"""Run a plan with threads of this process."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from unshard.engines.pool import Pool, Resources, divide
from unshard.errors import CorruptError, OutputError, UnshardError, raise_all
from unshard.plan.operations import Plan
from unshard.plan.work import split_into_units
from unshard.progress import Listener
from unshard.tensors.catalog import Catalog
from unshard.write.execute import Executor
from unshard.write.verification.full import Check, Checker, source_jobs

__all__ = [
    "Overflows",
    "RunPlan",
    "create_files",
    "named_overflows",
    "run_plan",
    "verify_full",
]

Overflows = Counter[tuple[int, int]]
"""How many finite values became infinite, by output file and the byte where a tensor begins."""

RunPlan = Callable[[Plan, Path, Resources, Listener], dict[str, int]]
"""A function that does what `run_plan` does."""


def run_plan(
    plan: Plan, directory: Path, resources: Resources, listener: Listener
) -> dict[str, int]:
    """Make the output files in `directory`: headers, and every operation of the plan.

    The bytes do not depend on the resources. The first error stops all workers and is raised.

    Returns:
        How many finite values became infinite as float16, by the name of the tensor.
    """
    outputs = create_files(plan, directory)
    share = divide(resources)
    work = split_into_units(plan, buffer_bytes=share.buffer_bytes)
    executors: list[Executor] = []

    def executor() -> Executor:
        executors.append(
            Executor(outputs, open_files=share.open_files, buffer_bytes=share.buffer_bytes)
        )
        return executors[-1]

    Pool(work, listener).run(share.workers, executor)
    return named_overflows((one.overflows for one in executors), plan)


def create_files(plan: Plan, directory: Path) -> tuple[Path, ...]:
    """Make the output files at full size, their headers written; return their paths."""
    outputs = tuple(directory / file.filename for file in plan.layout.files)
    for path, file in zip(outputs, plan.layout.files, strict=True):
        with path.open("xb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
    return outputs


def named_overflows(overflows: Iterable[Overflows], plan: Plan) -> dict[str, int]:
    """Return the counts of all workers by the names of the tensors, in the order of the files."""
    counted = sum(overflows, Overflows())
    return {
        tensor.name: count
        for number, file in enumerate(plan.layout.files)
        for tensor in file.tensors
        if (count := counted[number, len(file.header) + tensor.data_offsets[0]])
    }


def verify_full(
    plan: Plan,
    catalogs: Sequence[Catalog],
    directory: Path,
    resources: Resources,
    listener: Listener,
) -> None:
    """Check sources, replicas and every byte of the output in `directory`.

    Raises:
        CorruptError: a source file is damaged, or replicas differ.
        OutputError: the output differs from its sources.
    """
    share = divide(resources)
    block = share.buffer_bytes // 2
    problems: list[UnshardError] = []
    jobs: Iterator[Check] = chain(source_jobs(catalogs), split_into_units(plan, buffer_bytes=block))

    def checker() -> Checker:
        return Checker(
            catalogs,
            plan.layout,
            directory,
            problems,
            open_files=share.open_files,
            block_bytes=block // 2,
        )

    Pool(jobs, listener).run(share.workers, checker)
    for kind in (CorruptError, OutputError):
        found = sorted((p for p in problems if isinstance(p, kind)), key=str)
        raise_all(kind, "verification found differences", found)
