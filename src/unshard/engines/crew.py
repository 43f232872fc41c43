"""The choice of the engine: threads of this process, or the nodes of a Ray cluster."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from unshard.engines.threads import Resources, find_differences, raise_differences, run_plan
from unshard.plan.operations import Plan
from unshard.progress import Listener
from unshard.tensors.catalog import Catalog
from unshard.write.stage import Finished, Overflows, Uploads, Written

if TYPE_CHECKING:
    from unshard.engines.compare import Pairs
    from unshard.engines.ray.jobs import OverRay
    from unshard.write.verification.comparison import Tolerances
    from unshard.write.verification.measure import Measures


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of this process, as a `MergeEngine` that also verifies and compares."""

    resources: Resources
    listener: Listener

    def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
        """Write files with `threads.run_plan`."""
        return run_plan(plan, directory, self.resources, self.listener, finished)

    def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
        """Make and upload files with `uploads.upload_files`."""
        from unshard.engines.uploads import upload_files

        return upload_files(plan, stage, self.resources, self.listener, finished)

    def verify(self, plan: Plan, catalogs: Sequence[Catalog], directory: Path) -> None:
        """Check sources, replicas and every byte of an output, with `threads.find_differences`."""
        limits = self.resources, self.listener
        raise_differences(find_differences(plan, catalogs, directory, *limits))

    def measure(self, pairs: "Pairs", tolerances: "Tolerances") -> "Mapping[str, Measures]":
        """Compare tensors with `compare.measure_pairs`."""
        from unshard.engines.compare import measure_pairs

        return measure_pairs(pairs, tolerances, self.resources, self.listener)


Crew: TypeAlias = "Threads | OverRay"


@contextmanager
def engine_for(name: str | None, resources: Resources, listener: Listener) -> Iterator[Crew]:
    """Yield the nodes of a Ray cluster for "ray", else the threads of this process.

    Raises:
        UsageError: there is no cluster.
    """
    if name != "ray":
        yield Threads(resources, listener)
        return
    from unshard.engines.ray.cluster import connected
    from unshard.engines.ray.jobs import OverRay

    with connected() as cluster:
        yield OverRay(cluster, resources, listener)
