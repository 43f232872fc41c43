"""`archive`: the steps of a run, as a whole model and what changed from step to step."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.comparing.applying import MOST_DELTAS
from unshard.api.comparing.deltas import write_delta
from unshard.api.merging import merge_checkpoint
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.errors import ConversionError, IncompleteError, OutputError, UsageError
from unshard.keywords import DeltaKeywords
from unshard.progress import Listener, Warned, ignore
from unshard.read.delta import fingerprint_in, is_delta, versions_in
from unshard.read.finding.discover import all_steps
from unshard.read.finding.versions import fingerprint, stamps_of
from unshard.read.format import Location
from unshard.showing import hearing
from unshard.write.report import Report


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
    is gone or was saved again, or other tensors are there. `apply_delta` makes any of them.

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
        steps = all_steps(given_path(run, "the run"), chosen.choice)
        if not steps or chosen.overwrite or chosen.step is not None:
            what = "all steps of a run are archived, and none is replaced"
            raise UsageError(what, hint="give a run, and neither ⟦--step⟧ nor ⟦--overwrite⟧")
        versions = versions_in(place) if place.is_dir() else []
        for at in steps:
            number, last, _ = versions[-1] if versions else (-1, -1, place)
            if at.step is None or at.step <= last:
                continue
            target = place / f"weight_v{number + 1:06d}"
            base = _base_of(versions, steps, chosen)
            names = f"{number:06d}", f"{number + 1:06d}"
            try:
                made.append(_write(at, base, target, chosen, heard, names))
            except IncompleteError as error:
                heard(Warned(f"step {at.step} is passed over: " + error.text))
            else:
                versions.append((number + 1, at.step, target))
    return made


def _base_of(
    versions: Sequence[tuple[int, int, Path]], steps: Sequence[Location], options: MergeOptions
) -> Path | None:
    """Return the step that the last version is, if it is unchanged and a delta may follow."""
    paths = [path for _, _, path in reversed(versions)]
    deltas = next((at for at, one in enumerate(paths) if not is_delta(one)), MOST_DELTAS)
    at = next((one for one in steps if versions and one.step == versions[-1][1]), None)
    if at is None or deltas >= MOST_DELTAS:
        return None
    if deltas:
        return at.path if fingerprint(stamps_of(at)) == fingerprint_in(paths[0]) else None
    with suppress(OutputError):  # raised if it was made from other files, or with other options
        merge_checkpoint(at.path, paths[0], replace(options, reuse=True, dry_run=True), ignore)
        return at.path
    return None


def _write(  # noqa: PLR0917 (what is written, from what, and where)
    at: Location,
    base: Path | None,
    target: Path,
    options: MergeOptions,
    listener: Listener,
    names: tuple[str, str],
) -> Report:
    """Write a version, a delta if there is a base and one leads to the step."""
    if base is not None:
        try:
            return write_delta((base, at.path), target, options, listener, names)
        except ConversionError as error:  # raised again by the merge, unless it is of the delta
            listener(Warned(f"step {at.step} is archived as a whole model: " + error.text))
    return merge_checkpoint(at.path, target, options, listener)
