"""`follow`: merge each checkpoint of a run once, as soon as it is complete.

The trainer is not involved and never waits: its directory is polled. Each output is made with
`reuse`, so a step that was merged before this process was killed is not merged again, and two
followers do not merge the same step.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.following.finder import CheckpointFinder, check_run
from unshard.api.following.followed import FollowState, PendingStep, StepRecord, time_saved
from unshard.api.following.options import Following, check_options, run_command
from unshard.api.making import PlannedMerge
from unshard.api.merging import StepResult, merge_checkpoint
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.console import listener_or_default
from unshard.errors import IncompleteError, OutputError, UnshardError, raise_all
from unshard.fronts import Text
from unshard.keywords import MergeKeywords
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.format import Location
from unshard.read.hub_files import RECORD_NAME
from unshard.stores.nodes.connection import disconnecting
from unshard.stores.remote_path import RemotePath, as_given
from unshard.write.discarding import discard
from unshard.write.hub import push
from unshard.write.record import parse_record
from unshard.write.report import Report
from unshard.write.staging.recovery import recover

_LONGEST_SLEEP_S = 0.2  # bounds the delay of a signal
_LONGEST_PAUSE_S = 300.0  # before a retry
_SETTLED = 2  # looks that find every checkpoint that was complete at the start


@accepting(MergeKeywords)
def follow(
    run: str | Path,
    output: str | Path | None = None,
    *,
    newest: bool = False,
    keep: int | None = None,
    exec: str | Sequence[str] | None = None,  # noqa: A002 (as the option is called)
    retry: int = 0,
    until: int | None = None,
    idle: float | str | None = None,
    interval: float = 5.0,
    listener: Listener | None = None,
    **options: Unpack[MergeKeywords],
) -> Iterator[Report]:
    """Merge each checkpoint of a run once, as soon as it is complete, while training goes on.

    A step is complete when its trainer has written its marker, or when no file is missing and no
    file has changed between two looks. Progress is recorded in `<output>/_unshard`, where the next
    call continues. A step that fails, or that the trainer removes, is reported to the listener and
    does not stop the others.

    Args:
        run: the directory in which the trainer makes its steps; it need not exist yet.
        output: the directory in which each step gets an output; default `merged` next to the steps.
        newest: merge the highest waiting step first, not the lowest.
        keep: keep the outputs of the N steps that were saved last, and remove earlier outputs of
            `follow`, if they contain only files that unshard wrote. Steps that were saved before
            those N are not merged.
        exec: a command to run for each output: its arguments, or a text that is split like a
            shell's. "{output}" and "{step}" are replaced. It may run twice for a step if this
            process is killed.
        retry: number of retries for a step whose merge, upload or command failed.
        until: end when this step, or a higher step, is done.
        idle: end after this time without a new step: seconds, or a text such as "30m".
        interval: seconds between two looks at the run.
        listener: as for `merge`.
        options: as for `merge`, except `step` and `dry_run`; `push_to_hub` uploads each output as
            the revision `step-<step>` of the repository.

    Yields:
        A report for each step that is done. Without `until` and `idle` it never ends.

    Raises:
        UnshardError: an option does not fit, or another process follows a run into `output`; or, at
            the end, the errors of the steps that failed.
    """
    how = Following(
        newest=newest,
        keep=keep,
        exec=exec,
        retry=retry,
        until=until,
        idle=idle,
        interval=interval,
    )
    errors = []
    with listener_or_default(listener) as heard:
        for result in follow_steps(run, output, MergeOptions(**options), how, heard):
            if result.error is None and result.report is not None:
                yield result.report
            elif result.error is not None and result.has_failed:
                errors.append(result.error)
    raise_all(UnshardError, f"{run}: {len(errors)} steps failed", errors)


def follow_steps(
    run: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    how: Following,
    listener: Listener,
    *,
    is_asked_to_end: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Follow a run like `follow`; yield the result of each step.

    `is_asked_to_end` is called between steps.
    """
    follower = _RunFollower(given_path(run, "the run"), output, options, how, listener)
    with disconnecting():
        try:
            yield from follower.steps(is_asked_to_end)
        finally:
            follower.close()


class _RunFollower:
    def __init__(
        self,
        run: Path,
        output: str | Path | None,
        options: MergeOptions,
        how: Following,
        listener: Listener,
    ) -> None:
        self._run = run if isinstance(run, RemotePath) else run.absolute()
        self._how, self._listener, self._repo = how, listener, options.push_to_hub
        self._output = None if output is None else given_output(output)
        check_run(self._run)
        check_options(options, self._output or self._run)  # may ask the hub
        self._private = options.private
        self._options = replace(options, reuse=True, push_to_hub=None, private=False)
        recorded = {**options.recorded, "exec": how.exec is not None, "push_to_hub": self._repo}
        self._recorded = json.dumps(recorded, sort_keys=True)
        self._model = f"{as_given(self._run)} {options.role or ''} {options.weights or 'model'}"
        self._finder = CheckpointFinder(self._run, options.choice, self._warn)
        self._pending: dict[str, PendingStep] = {}
        self._warned: set[str] = set()
        self._highest, self._looks = -1, 0
        self._state = None if self._output is None else FollowState(self._output)

    def close(self) -> None:
        if self._state is not None:
            self._state.close()

    def steps(self, is_asked_to_end: Callable[[], bool]) -> Iterator[StepResult]:
        """Yield the result of each step until the requested end."""
        into = "" if self._output is None else f" into {as_given(self._output)}"
        self._listener(Chosen(f"following {as_given(self._run)}{into}"))
        next_look, news = 0.0, time.monotonic()
        while not is_asked_to_end():
            if time.monotonic() >= next_look:
                if self._look():
                    news = time.monotonic()
                next_look = time.monotonic() + self._how.interval
            if (pending := self._next()) is not None:
                result = self._process(pending)
                self._listener(Stage(""))
                if result is not None:
                    yield result
                news = time.monotonic()
            elif self._is_over(news):
                return
            else:
                time.sleep(max(0.0, min(_LONGEST_SLEEP_S, next_look - time.monotonic())))

    def _look(self) -> bool:
        """Look for complete steps; return whether the run has changed since the last look."""
        found = self._finder.look()
        self._looks += 1
        if found and self._output is None:  # made late, because trainers refuse a non-empty folder
            self._output = found[0].default_output.parent
            self._state = FollowState(self._output)
        for at in found:
            facts = (at.step or 0, time_saved(at), self._finder.found(at))
            name, entry = at.default_output.name, StepRecord(*facts, self._recorded, self._model)
            if not self._is_done(name, entry):
                self._pending[name] = PendingStep(name, entry, at)
        if self._looks == _SETTLED and self._state is not None:
            self._resume(self._state)
            self._retain(self._state)
        return bool(found) or self._finder.is_growing

    def _is_done(self, name: str, entry: StepRecord) -> bool:
        """Return whether this version of a step was done before."""
        state = self._opened()
        before = state.steps.get(name)
        if before is None or before.stamp != entry.stamp or not before.is_done:
            return False
        is_gone = before.state == "done" and not state.is_made(name)
        if is_gone or before.options != self._recorded:
            if self._options.overwrite:
                return False
            what = "outputs that were made with other options are kept"
            if is_gone:
                what = f"step {entry.step}, whose output was removed, is not done again"
            self._warn(Text(f"{what}; to repeat the work: ⟦--overwrite⟧"))
        self._highest = max(self._highest, entry.step)
        return True

    def _resume(self, state: FollowState) -> None:
        """Queue outputs of a killed process whose steps are gone; remove its partial outputs."""
        for name, entry in list(state.steps.items()):
            is_ours = entry.run == self._model and name not in self._pending
            if is_ours and not entry.is_done:
                if state.is_made(name):
                    self._pending[name] = PendingStep(name, entry, None)
                else:
                    self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove the remains of an output that will not be made."""
        state = self._opened()
        if not isinstance(self._output, RemotePath) and self._output is not None:
            recover(self._output, target=name)
        if name in state.steps and state.steps[name].state == "begun":
            state.put(name, None)

    def _next(self) -> PendingStep | None:
        """Return the step to process now, if there is one."""
        keep, state = self._how.keep, self._state
        outputs = [] if keep is None or state is None else self._outputs(state)
        for name, pending in list(self._pending.items()):
            later = [record for _, record in outputs if record.order > pending.entry.order]
            if keep is not None and len(later) >= keep:
                del self._pending[name]
                what = f"step {pending.entry.step} is passed over"
                self._warn(Text(f"{what}: ⟦--keep {keep}⟧ keeps later outputs"))
        now = time.monotonic()
        due = [pending for pending in self._pending.values() if pending.not_before <= now]
        sign = -1 if self._how.newest else 1
        return min(due, key=lambda step: (step.tries, sign * step.entry.step), default=None)

    def _is_over(self, news: float) -> bool:
        """Return whether `until` or `idle` is reached."""
        until, idle = self._how.until, self._how.idle
        if self._pending and until is not None:
            lowest = min(pending.entry.step for pending in self._pending.values())
            until = None if lowest <= until else until
        if self._looks < _SETTLED:
            return False
        is_idle = idle is not None and not self._pending and time.monotonic() - news >= float(idle)
        return is_idle or (until is not None and self._highest >= until)

    def _process(self, pending: PendingStep) -> StepResult | None:
        """Merge a step, upload it, run the command; return None if it will be retried."""
        state, at, name = self._opened(), pending.location, pending.name
        target = (self._output or self._run) / name
        source = self._run if at is None else at.weights_dir
        result = StepResult(pending.entry.step, str(source), str(target), is_meant=True)
        try:
            if at is not None:
                if not state.is_made(name):
                    state.put(name, pending.entry)
                result = replace(result, report=self._merge(at, target))
            pending.entry = replace(pending.entry, state="made")
            state.put(name, pending.entry)  # fails in a store if another process does the same
            self._finish(pending, target)
            state.put(name, replace(pending.entry, state="done"))
            self._retain(state)
        except (UnshardError, OSError) as cause:
            if state.is_lost:
                raise
            error = cause if isinstance(cause, UnshardError) else OutputError(f"{target}: {cause}")
            self._listener(Warned(f"{result.title}: {error.text}"))
            return self._give_up(pending, replace(result, error=error))
        self._end(pending)
        return result

    def _give_up(self, pending: PendingStep, result: StepResult) -> StepResult | None:
        """Return the result of a step that failed; None if it will be retried."""
        is_gone = isinstance(result.error, _StepGoneError)
        if not is_gone and pending.tries < self._how.retry:
            pending.tries += 1
            pause = min(self._how.interval * 2**pending.tries, _LONGEST_PAUSE_S)
            pending.not_before = time.monotonic() + pause
            return None
        with suppress(UnshardError):  # its cause may be that of the step's failure
            if pending.entry.state == "made":
                self._retain(self._opened())
            else:
                self._forget(pending.name)
        at = pending.location
        if is_gone and at is not None and self._finder.stamp(at) != "":
            del self._pending[pending.name]  # saved again: a later look returns it
        else:
            self._end(pending)
        return replace(result, is_meant=not is_gone)

    def _end(self, pending: PendingStep) -> None:
        """Remove a step from the queue for good."""
        self._pending.pop(pending.name, None)
        self._highest = max(self._highest, pending.entry.step)

    def _merge(self, at: Location, target: Path) -> Report:
        """Merge a step, or reuse its output."""
        settings = (self._options, self._listener)

        def unchanged(prepared: PlannedMerge) -> PlannedMerge:
            """Check for changes since the look; the merge notices later changes itself."""
            if not self._finder.is_as_found(at):
                raise _StepGoneError(f"{at.path} is not as it was found")
            return prepared

        try:
            return merge_checkpoint(at.path, target, *settings, before=unchanged, pass_over=False)
        except UnshardError as error:
            if self._finder.is_as_found(at) and not isinstance(error, _StepGoneError):
                raise
            raise _StepGoneError(
                f"{at.path} was removed or saved again before it was merged",
                found=str(error).partition("\n")[0],
                hint="have the trainer keep more checkpoints, or write to a faster disk",
            ) from error

    def _finish(self, pending: PendingStep, target: Path) -> None:
        """Upload an output, and run the command for it; a retry skips finished steps."""
        step = str(pending.entry.step)
        if self._repo is not None and "upload" not in pending.finished:
            record = parse_record((target / RECORD_NAME).read_bytes())
            names = [RECORD_NAME, *(record.sizes if record is not None else ())]
            push(target, f"{self._repo}@step-{step}", names, private=self._private, bars=False)
            pending.finished.add("upload")
        if self._how.exec is not None and "command" not in pending.finished:
            self._listener(Stage(""))
            self._listener(Chosen(f"running the command for step {step}"))
            path = target if isinstance(target, RemotePath) else target.absolute()
            run_command(self._how.exec, output=str(path), step=step)
            pending.finished.add("command")

    def _opened(self) -> FollowState:
        if self._state is None:
            raise RuntimeError("no step was found yet")
        return self._state

    def _outputs(self, state: FollowState) -> list[tuple[str, StepRecord]]:
        """Return the existing outputs of this model with their names, in the order of saves."""
        outputs = [
            (name, record)
            for name, record in state.steps.items()
            if record.run == self._model and record.state in {"made", "done"}
        ]
        return sorted(outputs, key=lambda item: item[1].order)

    def _retain(self, state: FollowState) -> None:
        """Remove all outputs but the last `keep`."""
        if self._how.keep is None or self._output is None:
            return
        for name, entry in self._outputs(state)[: -self._how.keep]:
            try:
                if state.is_made(name):
                    discard(self._output / name)
                state.put(name, replace(entry, state="removed"))
            except OSError as error:
                self._warn(f"{self._output / name} cannot be removed: {error}")
            except OutputError as error:
                self._warn(error.text)

    def _warn(self, text: str) -> None:
        """Report a warning once."""
        if text not in self._warned:
            self._listener(Warned(text))
        self._warned.add(text)


class _StepGoneError(IncompleteError):
    """A step was removed, or saved again, while it was merged."""
