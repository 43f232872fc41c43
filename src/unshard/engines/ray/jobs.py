"""The work of a merge on the nodes of a Ray cluster: one node makes each output file.

A file is written into its own directory next to the output, and moved when the node has flushed it.
So a node that was believed lost can never interfere with a later attempt.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import takes
from unshard.engines.compare import Pairs, measure_pairs, size_of_pair
from unshard.engines.ray.cluster import Cluster, ClusterJobs
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

_VISIBLE_S = 90.0  # network file systems may show another machine's new files late
_LOOK_S = 0.1
_PARTS = 4  # per node, because nodes are not equally fast


@dataclass(frozen=True, slots=True)
class OverRay:
    """The counterpart of `crew.Threads` for the nodes of a cluster.

    Attributes:
        cluster: the cluster.
        resources: the resources of each node.
        listener: receives the progress.
    """

    cluster: Cluster
    resources: Resources
    listener: Listener

    def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
        """Write files with `threads.run_plan`; `directory` is in a stage."""
        files, staging = plan.layout.files, directory.parent
        each, sources = self._share(len(plan.numbers)), _sources(plan)
        overflows = Overflows()

        def done(number: int, attempt: int, file_overflows: Overflows) -> None:
            name = files[number].filename
            folder = _folder_of(attempt, staging)
            _move(folder / name, directory / name)
            shutil.rmtree(folder)
            overflows.update(file_overflows)
            finished(number, file_overflows)

        work = ClusterJobs(
            _Making(plan, staging, each),
            sorted(plan.numbers, key=lambda number: -files[number].size),
            {**_by_directory(sources), str(staging): ()},
            slots=self.resources.workers // each.workers,
            cpus=self.resources.workers,
            done=done,
            lost=lambda _, attempt: shutil.rmtree(_folder_of(attempt, staging), ignore_errors=True),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        return overflows

    def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
        """Make and upload files with `uploads.upload_files`, each from one node."""
        files, written = plan.layout.files, Written()
        for number in plan.numbers:
            stage.wrote(files[number].filename, None)  # it may exist from now on

        def done(number: int, _attempt: int, answer: tuple[Stored, Written]) -> None:
            stored, file_written = answer
            stage.wrote(files[number].filename, stored)
            written.add(file_written)
            finished(number, file_written.overflows)

        with _aborting(stage, self.listener) as abort:
            work = ClusterJobs(
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
        """Compare tensors with `compare.measure_pairs`; a job is some of the pairs."""
        parts = _divided(pairs, _PARTS * max(1, len(self.cluster.nodes())))
        recipes = (tensor.recipe for pair in pairs.values() for tensor in pair)
        # The tensors of a checkpoint share one object of paths.
        tables = (take.entry.chunks.paths for recipe in recipes for take in takes(recipe))
        shared = {id(paths): paths for paths in tables}
        sources = {path for paths in shared.values() for path in paths}
        measured: dict[str, Measures] = {}
        work = ClusterJobs(
            _Measuring(parts, tolerances, self.resources),
            range(len(parts)),
            _by_directory(sources),
            slots=1,
            cpus=self.resources.workers,
            done=lambda _job, _attempt, measures: measured.update(measures),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        return measured

    def verify(self, plan: Plan, catalogs: Sequence[Catalog], directory: Path) -> None:
        """Check with `find_differences`; a job is some of the files and sources."""
        count = _PARTS * max(1, len(self.cluster.nodes()))
        sources = _sources(plan).union(*(catalog.weight_files for catalog in catalogs))
        sources |= {part.path for catalog in catalogs for part in catalog.archives}
        output = {directory / file.filename for file in plan.layout.files}
        problems: list[UnshardError] = []
        work = ClusterJobs(
            _Verifying(plan, catalogs, directory, self.resources, count),
            range(count),
            _by_directory(sources | output),
            slots=1,
            cpus=self.resources.workers,
            done=lambda _job, _attempt, differences: problems.extend(differences),
            alone=_on_one_node(sources),
        )
        self.cluster.run(work, self.listener)
        raise_differences(problems)

    def _share(self, jobs: int) -> Resources:
        """Return the resources of each of a node's concurrent jobs."""
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
        """Make an output file in its own directory; return its overflows."""
        folder = _folder_of(attempt, self.staging)
        folder.mkdir()
        overflows = run_plan(self.plan.only([number]), folder, self.resources, listener)
        sync(folder / self.plan.layout.files[number].filename)
        return overflows


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
    """Checks some of the sources and output files; runs on a node."""

    plan: Plan
    catalogs: Sequence[Catalog]
    directory: Path
    resources: Resources
    count: int

    def do(self, number: int, _attempt: int, listener: Listener) -> list[UnshardError]:
        """Return the problems of a part."""
        arguments = (self.plan, self.catalogs, self.directory, self.resources, listener)
        return find_differences(*arguments, part=(number, self.count))


@dataclass(frozen=True, slots=True)
class _Uploading:
    """Uploads an output file; runs on a node."""

    plan: Plan
    target: RemotePath
    resources: Resources

    def do(self, number: int, _attempt: int, listener: Listener) -> tuple[Stored | None, Written]:
        """Upload a file of the plan; the driver holds the claim, and records the file."""
        stage = BucketStage(self.target)
        plan = self.plan.only([number])
        written = upload_files(plan, stage, self.resources, listener, lambda *_: None)
        return stage.written[self.plan.layout.files[number].filename], written


@contextmanager
def _aborting(stage: Uploads, listener: Listener) -> Iterator[Callable[[str], None]]:
    """Yield a function that aborts a lost node's upload of a file; abort again at the end.

    A node that was only disconnected may have begun another upload.
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
            listener(
                Warned(
                    f"{stage.target}: parts of a lost node's uploads of {', '.join(sorted(names))} "
                    "may be left, which cost money; a lifecycle rule of the bucket can remove them"
                )
            )


def _divided(pairs: Pairs, count: int) -> list[Pairs]:
    """Divide pairs into parts of about equal size, none of them empty."""
    parts: list[dict[str, tuple[ConvertedTensor, ConvertedTensor]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(pairs, key=lambda name: -size_of_pair(pairs[name])):
        least = sizes.index(min(sizes))
        parts[least][name] = pairs[name]
        sizes[least] += size_of_pair(pairs[name]) + 1
    return [part for part in parts if part]


def _folder_of(attempt: int, staging: Path) -> Path:
    return staging / f"attempt-{attempt}"


def _move(file: Path, target: Path) -> None:
    """Move a file that another machine has written."""
    until = time.monotonic() + _VISIBLE_S
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            file.rename(target)
        except FileNotFoundError as error:
            if time.monotonic() > until:
                raise OutputError(
                    f"{file}: a node has written it, but this machine does not see it",
                    hint="the output must be on a file system that the nodes share",
                ) from error
            time.sleep(_LOOK_S)
        else:
            return


def _sources(plan: Plan) -> set[Path]:
    """Return the files that may be read for a plan."""
    tables = [source.chunks.paths for tile in plan.tiled for source in stored_tensors(tile)]
    shared = {id(paths): paths for paths in (plan.paths, *tables)}
    return {path for paths in shared.values() for path in paths}


def _by_directory(paths: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Return the names of files on disk, by directory."""
    names: dict[str, list[str]] = {}
    for path in sorted(paths):
        if not isinstance(path, RemotePath):
            names.setdefault(str(path.parent), []).append(path.name)
    return names


def _on_one_node(paths: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Return the files that only one node has, by Ray's id of the node."""
    return on_one_node((str(path), path.copies) for path in paths if isinstance(path, RemotePath))
