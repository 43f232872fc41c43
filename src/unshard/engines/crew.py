"""What does the work: the threads of this process, or the nodes of a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unshard.engines.compare import Measure, measure_pairs
from unshard.engines.threads import RunPlan, VerifyFull, run_plan, verify_full

if TYPE_CHECKING:
    from unshard.engines.ray.jobs import Upload


@dataclass(frozen=True, slots=True)
class Crew:
    """What does the work.

    Attributes:
        run_plan: makes the files of a plan.
        measure: compares tensors.
        verify_full: reads sources and output again.
        upload: uploads the files of a plan into a store; None: this process does.
    """

    run_plan: RunPlan
    measure: Measure
    verify_full: VerifyFull
    upload: "Upload | None" = None


@contextmanager
def crew(engine: str | None = None) -> Iterator[Crew]:
    """Yield what does the work: the nodes of a Ray cluster for "ray", else threads.

    Raises:
        UsageError: there is no cluster.
    """
    if engine != "ray":
        yield Crew(run_plan, measure_pairs, verify_full)
        return
    from unshard.engines.ray.cluster import connected
    from unshard.engines.ray.jobs import OverRay

    with connected() as cluster:
        ray = OverRay(cluster)
        yield Crew(ray.run_plan, ray.measure, ray.verify_full, ray.upload)
