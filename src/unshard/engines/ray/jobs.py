"""The work of a merge on the nodes of a Ray cluster: each output file is made by one node.

A file is made in a directory of its own next to the output, and moved there when the node has
flushed it. So what a node writes that was taken for lost can never come between.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unshard.convert.outputs import Converted
from unshard.convert.recipes import Take, takes
from unshard.engines.compare import Pairs, measure_pairs, size_of_pair
from unshard.engines.ray.cluster import Cluster, Work
from unshard.engines.threads import (
    MIN_BUFFER,
    Resources,
    find_differences,
    raise_differences,
    run_plan,
)
from unshard.engines.uploads import upload_files
from unshard.errors import OutputError, UnshardError
from unshard.plan.operations import Plan, stored_tensors
from unshard.progress import Listener, Warned
from unshard.signals import uninterrupted
from unshard.stores.nodes.store import on_one_node
from unshard.stores.objects import Stored
from unshard.stores.remote_path import RemotePath
from unshard.tensors.catalog import Catalog
from unshard.write.bucket.stage import BucketStage
from unshard.write.dirfd import sync
from unshard.write.stage import Finished, Overflows, Uploads, Written
from unshard.write.verification.comparison import Tolerances
from unshard.write.verification.measure import Measures

_VISIBLE_S = 90.0  # a network file system may show what another machine has made later
_LOOK_S = 0.1
_PARTS = 4  # for each node: nodes are not equally fast


@dataclass(frozen=True, slots=True)
class OverRay:
    """Does on the nodes of a cluster what `crew.Threads` does here.

    Attributes:
        cluster: the cluster.
        resources: those of each node.
        listener: is told of the progress.
    """

    cluster: Cluster
    resources: Resources
    listener: Listener

    def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
        """Make the output files as `threads.run_plan` does; `directory` is in a stage."""
        files, staging = plan.layout.files, directory.parent
        each, sources = self._share(len(plan.numbers)), _sources(plan)
        overflows = Overflows()

        def done(number: int, attempt: int, lost: Overflows) -> None:
            name = files[number].filename
            place = _place_of(attempt, staging)
            _move(place / name, directory / name)
            shutil.rmtree(place)
            overflows.update(lost)
            finished(number, lost)

        work = Work(
            _Making(plan, staging, each),
            sorted(plan.numbers, key=lambda number: -files[number].size),
            {**_by_directory(sources), str(staging): ()},
            slots=self.resources.workers // each.workers,
            cpus=self.resources.workers,
            done=done,
            lost=lambda _, attempt: shutil.rmtree(_place_of(attempt, staging), ignore_errors=True),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        return overflows

    def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
        """Make and upload files as `uploads.upload_files` does; each one from one node."""
        files, written = plan.layout.files, Written()
        for number in plan.numbers:
            stage.wrote(files[number].filename, None)  # whatever happens now, it may be there

        def done(number: int, _attempt: int, answer: tuple[Stored, Written]) -> None:
            stored, one = answer
            stage.wrote(files[number].filename, stored)
            written.add(one)
            finished(number, one.overflows)

        with _aborting(stage, self.listener) as abort:
            work = Work(
                _Uploading(plan, stage.target, self.resources),
                sorted(plan.numbers, key=lambda number: -files[number].size),
                _by_directory(sources := _sources(plan)),
                slots=1,
                cpus=self.resources.workers,
                done=done,
                lost=lambda number, _: abort(files[number].filename),
                alone=_on_one_node(sources),
            )
            self.cluster.run(work, self.listener)
        return written

    def measure(self, pairs: Pairs, tolerances: Tolerances) -> Mapping[str, Measures]:
        """Compare tensors as `compare.measure_pairs` does; a node takes some at a time."""
        parts = _divided(pairs, _PARTS * max(1, len(self.cluster.nodes())))
        recipes = (one.recipe for pair in pairs.values() for one in pair)
        tables = {id(one): one for recipe in recipes for one in map(_paths_of, takes(recipe))}
        sources = {path for paths in tables.values() for path in paths}
        measured: dict[str, Measures] = {}
        work = Work(
            _Measuring(parts, tolerances, self.resources),
            range(len(parts)),
            _by_directory(sources),
            slots=1,
            cpus=self.resources.workers,
            done=lambda _job, _attempt, found: measured.update(found),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        return measured

    def verify(self, plan: Plan, catalogs: Sequence[Catalog], directory: Path) -> None:
        """Check as `find_differences` does; a node takes some files and sources at a time."""
        count = _PARTS * max(1, len(self.cluster.nodes()))
        sources = _sources(plan).union(*(one.weight_files for one in catalogs))
        sources |= {part.path for one in catalogs for part in one.archives}
        output = {directory / file.filename for file in plan.layout.files}
        problems: list[UnshardError] = []
        work = Work(
            _Verifying(plan, catalogs, directory, self.resources, count),
            range(count),
            _by_directory(sources | output),
            slots=1,
            cpus=self.resources.workers,
            done=lambda _job, _attempt, found: problems.extend(found),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        raise_differences(problems)

    def _share(self, jobs: int) -> Resources:
        """Return the resources of one of the jobs that a node does at a time."""
        resources, nodes = self.resources, max(1, len(self.cluster.nodes()))
        most = min(resources.workers, resources.memory_bytes // MIN_BUFFER, -(-jobs // nodes))
        slots = max(1, most)
        return Resources(resources.workers // slots, resources.memory_bytes // slots)


@dataclass(frozen=True, slots=True)
class _Making:
    """Makes an output file; runs on a node."""

    plan: Plan
    staging: Path
    resources: Resources

    def do(self, number: int, attempt: int, listener: Listener) -> Overflows:
        """Make an output file in a directory of its own; return what became infinite in it."""
        place, found = _place_of(attempt, self.staging), Overflows()
        place.mkdir()

        def finished(_: int, lost: Overflows) -> None:
            found.update(lost)

        run_plan(self.plan.only([number]), place, self.resources, listener, finished)
        sync(place / self.plan.layout.files[number].filename)
        return found


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Compares some of the tensors; runs on a node."""

    parts: Sequence[Pairs]
    tolerances: Tolerances
    resources: Resources

    def do(self, number: int, _attempt: int, listener: Listener) -> Mapping[str, Measures]:
        """Return the measures of the tensors of a part."""
        return measure_pairs(self.parts[number], self.tolerances, self.resources, listener)


@dataclass(frozen=True, slots=True)
class _Verifying:
    """Reads some of the sources and of the output files again; runs on a node."""

    plan: Plan
    catalogs: Sequence[Catalog]
    directory: Path
    resources: Resources
    count: int

    def do(self, number: int, _attempt: int, listener: Listener) -> list[UnshardError]:
        """Return what differs in a part."""
        given = (self.plan, self.catalogs, self.directory, self.resources, listener)
        return find_differences(*given, part=(number, self.count))


@dataclass(frozen=True, slots=True)
class _Uploading:
    """Uploads an output file; runs on a node."""

    plan: Plan
    target: RemotePath
    resources: Resources

    def do(self, number: int, _attempt: int, listener: Listener) -> tuple[Stored | None, Written]:
        """Upload a file of the plan; the driver has claimed the place, and records the file."""
        stage = BucketStage(self.target)
        plan = self.plan.only([number])
        written = upload_files(plan, stage, self.resources, listener, lambda *_: None)
        return stage.written[self.plan.layout.files[number].filename], written


@contextmanager
def _aborting(stage: Uploads, listener: Listener) -> Iterator[Callable[[str], None]]:
    """Yield what aborts the upload of a file by a lost node; at the end it is done once more.

    A node that was only cut off from the cluster may have begun another upload.
    """
    names: set[str] = set()

    def abort(name: str) -> None:
        names.add(name)
        stage.abort_uploads([name])

    try:
        yield abort
    finally:
        with uninterrupted():
            are_gone = not names or stage.abort_uploads([*names])
        if not are_gone:
            files = ", ".join(sorted(names))
            left = f"{stage.target}: what a lost node was uploading of {files} may be left in parts"
            listener(Warned(f"{left}, which are paid for; a rule of the bucket can remove them"))


def _divided(pairs: Pairs, count: int) -> list[Pairs]:
    """Divide pairs into parts of about as many bytes, none of them empty."""
    parts: list[dict[str, tuple[Converted, Converted]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(pairs, key=lambda name: -size_of_pair(pairs[name])):
        least = sizes.index(min(sizes))
        parts[least][name] = pairs[name]
        sizes[least] += size_of_pair(pairs[name]) + 1
    return [part for part in parts if part]


def _paths_of(taken: Take) -> Sequence[Path]:
    """Return the files that a tensor may be in; those of one checkpoint share the object."""
    return taken.entry.chunks.paths


def _place_of(attempt: int, staging: Path) -> Path:
    return staging / f"attempt-{attempt}"


def _move(made: Path, target: Path) -> None:
    """Move a file that another machine has made."""
    until = time.monotonic() + _VISIBLE_S
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            made.rename(target)
        except FileNotFoundError as error:
            if time.monotonic() > until:
                raise OutputError(
                    f"{made}: a node has made it, but this machine does not see it",
                    hint="the output must be on a file system that the nodes share",
                ) from error
            time.sleep(_LOOK_S)
        else:
            return


def _sources(plan: Plan) -> set[Path]:
    """Return the files that may be read for a plan."""
    tables = [source.chunks.paths for one in plan.tiled for source in stored_tensors(one)]
    shared = {id(paths): paths for paths in (plan.paths, *tables)}
    return {path for paths in shared.values() for path in paths}


def _by_directory(paths: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Return the names of files on disk by their directories."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        if not isinstance(path, RemotePath):
            found.setdefault(str(path.parent), []).append(path.name)
    return found


def _on_one_node(paths: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Return the files that only one node has, by Ray's id of the node."""
    return on_one_node((str(one), one.copies) for one in paths if isinstance(one, RemotePath))
