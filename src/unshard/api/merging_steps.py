"""`merge_all`: every step of a run, each merged by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unshard.api.merging import merge_with
from unshard.api.options import MergeOptions, given_output, given_path
from unshard.engines.threads import RunPlan, run_plan
from unshard.errors import (
    IncompleteError,
    UnknownFormatError,
    UnshardError,
    UsageError,
    raise_all,
)
from unshard.progress import Chosen, Listener, Warned
from unshard.read.discover import all_steps
from unshard.read.format import Location
from unshard.showing import hearing
from unshard.write.record import is_made_from
from unshard.write.report import Report

__all__ = ["StepResult", "merge_all", "merge_steps"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one step of a run.

    Attributes:
        step: its number.
        source: the directory of its weights; output: where its model is, or would be.
        report: of the merge, if it was made.
        error: why it was not made; an IncompleteError for a step that was passed over.
            Neither report nor error: its output was there already.
    """

    step: int | None
    source: str
    output: str
    report: Report | None = None
    error: UnshardError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the step could not be merged although it is complete."""
        return self.error is not None and not isinstance(self.error, IncompleteError)


def merge_all(
    run: str | Path,
    output: str | Path | None = None,
    options: MergeOptions | None = None,
    listener: Listener | None = None,
    engine: RunPlan = run_plan,
    *,
    skip_existing: bool = False,
) -> list[Report]:
    """Merge every complete step of a run, each as `merge` does, the lowest first.

    A step that cannot be merged does not prevent the merge of the others.

    Args:
        run: a directory that has several steps.
        output: the directory to make one output per step in; default `merged` next to the steps.
        options: as for `merge`.
        listener: as for `merge`; steps that are incomplete are named.
        engine: what writes the files; see `unshard.engines.crew`.
        skip_existing: leave out the steps whose output an earlier merge with the same options made.

    Returns:
        A report for each step that was merged now.

    Raises:
        UnshardError: there is no such run; or, after all steps were tried, what those that failed
            ended with. The outputs of the others stay.
    """
    with hearing(listener) as heard:
        results = list(
            merge_steps(run, output, options, heard, engine, skip_existing=skip_existing)
        )
    failed = [one.error for one in results if one.error is not None and one.has_failed]
    kinds = {type(error) for error in failed}
    kind = kinds.pop() if len(kinds) == 1 else UnshardError
    raise_all(kind, f"{run}: {len(failed)} of {len(results)} steps failed", failed)
    return [one.report for one in results if one.report is not None]


def merge_steps(
    run: str | Path,
    output: str | Path | None,
    options: MergeOptions | None,
    listener: Listener,
    engine: RunPlan,
    *,
    skip_existing: bool,
) -> Iterator[StepResult]:
    """Merge as `merge_all` does; yield what becomes of each step.

    Raises:
        UnshardError: there is no such run, or an option does not fit; nothing was made.
    """
    chosen = options or MergeOptions()
    if chosen.push_to_hub is not None:
        raise UsageError("--all-steps with --push-to-hub: one repository cannot hold all of them")
    if chosen.step is not None:
        raise UsageError(f"--all-steps and --step {chosen.step} exclude each other")
    steps = all_steps(given_path(run, "the run"), chosen.request)
    if not steps:
        raise UnknownFormatError(
            f"{run} is one checkpoint, not a directory of several",
            hint="give the directory that has the steps, or merge this checkpoint alone",
        )
    for location in steps:
        target = location.default_output
        if output is not None:
            target = given_output(output) / target.name
        if skip_existing and is_made_from(target, location, chosen.recorded):
            listener(Chosen(f"skipping step {location.step}: {target} was made from it already"))
            yield StepResult(location.step, str(location.weights_dir), str(target))
        else:
            yield _merged(location, target, chosen, listener, engine)


def _merged(
    location: Location, target: Path, options: MergeOptions, listener: Listener, engine: RunPlan
) -> StepResult:
    places = location.step, str(location.weights_dir), str(target)
    try:
        report = merge_with(location.step_dir, target, options, listener, engine=engine)
    except IncompleteError as error:
        listener(Warned(f"passed over an incomplete step: {error.text}"))
        return StepResult(*places, error=error)
    except UnshardError as error:
        listener(Warned(f"step {location.step} could not be merged: {error.text}"))
        return StepResult(*places, error=error)
    return StepResult(*places, report=report)
