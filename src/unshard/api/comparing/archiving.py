"""`archive`: the steps of a run, as a whole model and what changed from step to step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from unshard.api.comparing.applying import MOST_DELTAS
from unshard.api.comparing.deltas import write_delta
from unshard.api.merging import merge_checkpoint
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.errors import ConversionError, IncompleteError, UsageError
from unshard.keywords import DeltaKeywords
from unshard.progress import Listener, Warned
from unshard.read.delta import checksums_in, is_delta, versions_in
from unshard.read.finding.discover import all_steps
from unshard.read.format import Location
from unshard.showing import hearing
from unshard.write.report import Report
from unshard.write.staging.targets import refuse_inside


@accepting(DeltaKeywords)
def archive(
    run: str | Path,
    output: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[DeltaKeywords],
) -> list[Report]:
    """Write the steps of a run that an archive does not have yet; each is complete, or not there.

    The versions are `weight_v000000` and so on, as SGLang pulls them: a whole model, then what
    changed from step to step. The next is whole again after 32 deltas, and where the step before it
    is gone or has other values than were archived, as with other options, or other tensors are
    there. `apply_delta` makes any of them.

    Args:
        run: a directory that has several steps.
        output: the archive, which may be there; only steps above its last one are added.
        listener: as for `merge`; is told of steps that are incomplete, and passed over.

    Keyword Args:
        options: as for `delta`, except `step` and `overwrite`.

    Raises:
        UnshardError: as `merge` raises it. The versions that are complete stay.
    """
    made = list[Report]()
    with hearing(listener) as heard:
        chosen, place = MergeOptions(**options, extra_state=False), given_output(output)
        steps = _steps_of(given_path(run, "the run"), place, chosen)
        versions = versions_in(place) if place.is_dir() else []
        for at in steps:
            number, last, _ = versions[-1] if versions else (-1, -1, place)
            if at.step is None or at.step <= last:
                continue
            target = place / f"weight_v{number + 1:06d}"
            base = _base_of(versions, steps)
            names = f"{number:06d}", f"{number + 1:06d}"
            try:
                made.append(_write(at, base, target, chosen, heard, names))
            except IncompleteError as error:
                heard(Warned(f"step {at.step} is passed over: " + error.text))
            else:
                versions.append((number + 1, at.step, target))
    return made


def _steps_of(run: Path, output: Path, options: MergeOptions) -> Sequence[Location]:
    refuse_inside(output, [run])
    if options.step is not None or options.overwrite:
        why = "⟦--step⟧: all steps are archived" if options.step is not None else ""
        raise UsageError(why or "⟦--overwrite⟧: versions of an archive are not replaced")
    steps = all_steps(run, options.choice)
    if all(one.step is None for one in steps):
        raise UsageError(f"{run}: is not a run: it has no steps", hint="give a directory of steps")
    return steps


def _base_of(
    versions: Sequence[tuple[int, int, Path]], steps: Sequence[Location]
) -> tuple[Path, Path] | None:
    """Return the step that the last version is, and this one, if a delta may follow."""
    paths = [path for _, _, path in reversed(versions)]
    deltas = next((at for at, one in enumerate(paths) if not is_delta(one)), MOST_DELTAS)
    at = next((one for one in steps if versions and one.step == versions[-1][1]), None)
    if at is None or deltas >= MOST_DELTAS:
        return None
    is_whole = versions[-1][0] - versions[-1 - deltas][0] == deltas  # none between them is missing
    return (at.path, paths[0]) if is_whole else None


def _write(  # noqa: PLR0917 (what is written, from what, and where)
    at: Location,
    base: tuple[Path, Path] | None,
    target: Path,
    options: MergeOptions,
    listener: Listener,
    names: tuple[str, str],
) -> Report:
    """Write a version, a delta if there is a base and one leads to the step."""
    if base is not None:
        try:
            former, pair = checksums_in(base[1]), (base[0], at.path)
            return write_delta(pair, target, options, listener, names, former)
        except ConversionError as error:  # raised again by the merge, unless it is of the delta
            listener(Warned(f"step {at.step} is archived as a whole model: " + error.text))
    return merge_checkpoint(at.path, target, options, listener)
