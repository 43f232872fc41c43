"""`archive`: write the steps of a run as a whole model and deltas."""

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
    """Write the steps of a run that an archive does not have yet; each appears only when complete.

    The versions are `weight_v000000` and so on, as SGLang pulls them: a whole model, then deltas
    from step to step. A version is whole again after 32 deltas; if the step before it is gone, or
    its values changed since, as with other options; or if names, dtypes or shapes changed.
    `apply_delta` makes any version.

    Args:
        run: a directory of steps.
        output: the archive, which may exist; only steps above its last one are added.
        listener: as for `merge`; incomplete steps are passed over with a warning.

    Keyword Args:
        options: as for `delta`, except `step` and `overwrite`.

    Raises:
        UnshardError: as `merge` raises it. Complete versions stay.
    """
    reports = list[Report]()
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
                reports.append(_write(at, base, target, chosen, heard, names))
            except IncompleteError as error:
                heard(Warned(f"step {at.step} is passed over: " + error.text))
            else:
                versions.append((number + 1, at.step, target))
    return reports


def _steps_of(run: Path, output: Path, options: MergeOptions) -> Sequence[Location]:
    refuse_inside(output, [run])
    if options.step is not None or options.overwrite:
        why = "⟦--step⟧: all steps are archived" if options.step is not None else ""
        raise UsageError(why or "⟦--overwrite⟧: versions of an archive are not replaced")
    steps = all_steps(run, options.choice)
    if all(at.step is None for at in steps):
        raise UsageError(f"{run}: is not a run: it has no steps", hint="give a directory of steps")
    return steps


def _base_of(
    versions: Sequence[tuple[int, int, Path]], steps: Sequence[Location]
) -> tuple[Path, Path] | None:
    """Return the step of the last version, and that version, if a delta may follow it."""
    paths = [path for _, _, path in reversed(versions)]
    deltas = next((count for count, path in enumerate(paths) if not is_delta(path)), MOST_DELTAS)
    at = next((step for step in steps if versions and step.step == versions[-1][1]), None)
    if at is None or deltas >= MOST_DELTAS:
        return None
    has_gap = versions[-1][0] - versions[-1 - deltas][0] != deltas
    return None if has_gap else (at.path, paths[0])


def _write(  # noqa: PLR0917 (source, base, target, and their settings)
    at: Location,
    base: tuple[Path, Path] | None,
    target: Path,
    options: MergeOptions,
    listener: Listener,
    names: tuple[str, str],
) -> Report:
    """Write a version: a delta if there is a base and a delta can express the change."""
    if base is not None:
        try:
            former, pair = checksums_in(base[1]), (base[0], at.path)
            return write_delta(pair, target, options, listener, names, former)
        except ConversionError as error:  # if the delta is not the cause, the merge raises it again
            listener(Warned(f"step {at.step} is archived as a whole model: " + error.text))
    return merge_checkpoint(at.path, target, options, listener)
