"""`follow`: merge each checkpoint of a run once, as soon as it is complete.

The trainer is not asked, and never waits: its directory is looked at again and again. Each output
is made with `reuse`, so that a step which was merged when this process was killed is not merged
again, and two followers do not merge the same step.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.following.commands import run_command
from unshard.api.following.finder import CheckpointFinder, check_run
from unshard.api.following.followed import Done, Followed
from unshard.api.following.options import Following
from unshard.api.following.waiting import Waiting, time_saved
from unshard.api.making import Prepared
from unshard.api.merging import StepResult, merge_checkpoint
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.errors import IncompleteError, OutputError, UnshardError, UsageError, raise_all
from unshard.fronts import Text
from unshard.keywords import MergeKeywords
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.format import EVERY_ROLE
from unshard.read.hub_files import RECORD_NAME
from unshard.showing import hearing
from unshard.stores.nodes.connection import disconnecting
from unshard.stores.remote_path import RemotePath, as_given, look_again
from unshard.write.discarding import discard
from unshard.write.hub import check_repo, push
from unshard.write.record import parse_record
from unshard.write.report import Report
from unshard.write.staging.recovery import recover

_LONGEST_SLEEP_S = 0.2  # until a signal is noticed
_LONGEST_PAUSE_S = 300.0  # before a step is tried again


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

    A step is complete when its trainer has left its mark, or when no file is missing and none has
    changed between two looks. What was done is remembered in `<output>/_unshard`, so that the next
    call goes on. A step that fails, or that the trainer removes meanwhile, is told to the listener
    and does not stop the others.

    Args:
        run: the directory in which the trainer makes its steps; it need not exist yet.
        output: the directory to make one output per step in; default `merged` next to the steps.
        newest: of several steps take the highest first, not the lowest.
        keep: leave the outputs of the N steps that were saved last, and remove others that this
            made, if they have nothing but what unshard wrote. Steps saved before are not merged.
        exec: a command to run for each output: its arguments, or a text that is split like a
            shell's. "{output}" and "{step}" are replaced. It may run twice for a step if this
            process was killed meanwhile.
        retry: how many times to try a step again whose merge, upload or command failed.
        until: end when this step, or a higher one, is done.
        idle: end when no new step came for so long: seconds, or a text such as "30m".
        interval: seconds between two looks at the run.
        listener: as for `merge`.
        options: as for `merge`, except `step` and `dry_run`; `push_to_hub` uploads each output, as
            the revision `step-<step>` of the repository.

    Yields:
        A report for each step that is done. Without `until` and `idle` it never ends.

    Raises:
        UnshardError: an option does not fit, or another process follows a run into `output`; or, in
            the end, what the steps that failed ended with.
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
    failed = []
    with hearing(listener) as heard:
        for one in follow_steps(run, output, MergeOptions(**options), how, heard):
            if one.error is None and one.report is not None:
                yield one.report
            elif one.error is not None and one.has_failed:
                failed.append(one.error)
    raise_all(UnshardError, f"{run}: {len(failed)} steps failed", failed)


def follow_steps(
    run: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    how: Following,
    listener: Listener,
    *,
    is_asked_to_end: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Follow a run as `follow` does; yield what became of each step.

    `is_asked_to_end` is called between steps.
    """
    follower = _Follower(given_path(run, "the run"), output, options, how, listener)
    with disconnecting():
        try:
            yield from follower.steps(is_asked_to_end)
        finally:
            follower.close()


class _Follower:
    def __init__(
        self,
        run: Path,
        output: str | Path | None,
        options: MergeOptions,
        how: Following,
        listener: Listener,
    ) -> None:
        _check(options)
        self._run = run if isinstance(run, RemotePath) else run.absolute()
        check_run(self._run)
        self._output = self._run / "merged" if output is None else given_output(output)
        self._how, self._listener, self._repo = how, listener, options.push_to_hub
        if self._repo is not None:
            _check_push(self._repo, self._output)
        self._private = options.private
        self._options = replace(options, reuse=True, push_to_hub=None, private=False)
        self._recorded = json.dumps(options.recorded, sort_keys=True)
        self._finder = CheckpointFinder(self._run, options.choice, self._warn)
        self._waiting: dict[Path, Waiting] = {}
        self._told: set[str] = set()
        self._followed = Followed(self._output)
        done = [done.step for done in self._followed.steps.values()]
        self._highest, self._looks = max(done, default=-1), 0

    def close(self) -> None:
        self._followed.close()

    def steps(self, is_asked_to_end: Callable[[], bool]) -> Iterator[StepResult]:
        """Yield what became of each step, until the end that was asked for."""
        self._listener(Chosen(f"following {as_given(self._run)} into {as_given(self._output)}"))
        next_look, news = 0.0, time.monotonic()
        while not is_asked_to_end():
            now = time.monotonic()
            if now >= next_look:
                if self._look():
                    news = time.monotonic()
                next_look = time.monotonic() + self._how.interval
                if self._looks == 2 and (left := self._go_on()) is not None:
                    yield left
            if (due := self._next()) is not None:
                result = self._do(due)
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
        for at in found:
            done = Done(at.step or 0, time_saved(at), self._finder.found(at), self._recorded)
            one = Waiting(at, done)
            if not self._is_done(one):
                self._waiting[at.path] = one
        return bool(found) or self._finder.is_growing

    def _is_done(self, one: Waiting) -> bool:
        """Return whether a step was done before, as its trainer has it now."""
        done = self._followed.steps.get(one.name)
        if done is None or done.stamp != one.done.stamp:
            return False
        if done.options != self._recorded:
            if self._options.overwrite:
                return False
            what = "outputs that were made with other options are left as they are; to make them"
            self._warn(Text(f"{what} again: ⟦--overwrite⟧"))
        self._highest = max(self._highest, one.step)
        return True

    def _next(self) -> Waiting | None:
        """Return the step to merge now, if there is one."""
        for path, one in list(self._waiting.items()):
            newer = [done for done in self._followed.steps.values() if done.order > one.done.order]
            if self._how.keep is not None and len(newer) >= self._how.keep:
                del self._waiting[path]
                self._warn(Text(f"step {one.step} is not merged: ⟦--keep⟧ leaves later ones"))
        now = time.monotonic()
        due = [one for one in self._waiting.values() if one.not_before <= now]
        sign = -1 if self._how.newest else 1
        return min(due, key=lambda one: (one.tries, sign * one.step), default=None)

    def _is_over(self, news: float) -> bool:
        """Return whether what was asked for has come."""
        until, idle = self._how.until, self._how.idle
        if self._waiting and until is not None:
            until = None if min(one.step for one in self._waiting.values()) <= until else until
        if self._looks < 2:  # only the second one finds what is there already
            return False
        is_idle = idle is not None and not self._waiting and time.monotonic() - news >= float(idle)
        return is_idle or (until is not None and self._highest >= until)

    def _do(self, one: Waiting) -> StepResult | None:
        """Merge a step, upload it, run the command; return None if it is to be tried again."""
        at = one.location
        target = self._output / one.name
        result = StepResult(at.step, str(at.weights_dir), str(target), is_meant=True)
        try:
            self._followed.begin(one.name, one.done)
            report = self._merge(one, target)
            result = replace(result, report=report)
            self._hand_on(target, at.step)
            self._followed.add(one.name, one.done)
            self._retain()
        except (UnshardError, OSError) as found:
            error = found if isinstance(found, UnshardError) else OutputError(f"{target}: {found}")
            self._listener(Warned(f"{result.title}: {error.text}"))
            is_gone = isinstance(error, _GoneError)
            if not is_gone and one.tries < self._how.retry:
                one.tries += 1
                pause = min(self._how.interval * 2**one.tries, _LONGEST_PAUSE_S)
                one.not_before = time.monotonic() + pause
                return None
            if is_gone and self._finder.stamp(at) != "":  # saved again: a later look returns it
                del self._waiting[at.path]
            else:
                self._end(one)
            return replace(result, error=error, is_meant=not is_gone)
        self._end(one)
        return result

    def _end(self, one: Waiting) -> None:
        """Take note that nothing more is done about a step."""
        self._waiting.pop(one.location.path, None)
        self._highest = max(self._highest, one.step)

    def _merge(self, one: Waiting, target: Path) -> Report:
        """Merge a step, or use what was made of it."""
        at, what = one.location, (self._options, self._listener)

        def unchanged(prepared: Prepared) -> Prepared:
            """Check, now that a later change would be noticed, that there was none before."""
            if self._finder.stamp(at) != one.done.stamp:
                raise _GoneError(f"{at.path} is not as it was found")
            return prepared

        try:
            return merge_checkpoint(at.path, target, *what, before=unchanged, pass_over=False)
        except UnshardError as error:
            if self._finder.stamp(at) == one.done.stamp:
                raise
            raise _GoneError(
                f"{at.path} was removed or saved again before it was merged",
                found=str(error).partition("\n")[0],
                hint="have the trainer keep more checkpoints, or write to a faster disk",
            ) from error

    def _go_on(self) -> StepResult | None:
        """Finish what a killed process had begun of a step that is gone since, or remove it."""
        begun = self._followed.begun
        if begun is None or begun[0] in {one.name for one in self._waiting.values()}:
            return None
        name, done = begun
        target = self._output / name
        if not self._followed.is_made(name):
            if not isinstance(target, RemotePath):
                recover(self._output, target=name)
            return None
        result = StepResult(done.step, str(self._run), str(target), is_meant=True)
        try:
            self._hand_on(target, done.step)
            self._followed.add(name, done)
        except UnshardError as error:
            self._listener(Warned(f"{result.title}: {error.text}"))
            return replace(result, error=error)
        return result

    def _hand_on(self, target: Path, number: int | None) -> None:
        """Upload an output, and run the command for it."""
        step = str(number if number is not None else target.name)
        if self._repo is not None:
            record = parse_record((target / RECORD_NAME).read_bytes())
            names = [RECORD_NAME, *(record.sizes if record is not None else ())]
            repo = f"{self._repo}@step-{step}"
            push(target, repo, names, private=self._private, bars=False)
        if self._how.exec is not None:
            self._listener(Stage(""))
            self._listener(Chosen(f"running the command for step {step}"))
            path = target if isinstance(target, RemotePath) else target.absolute()
            run_command(self._how.exec, output=str(path), step=step)

    def _retain(self) -> None:
        """Remove the outputs of earlier steps than are kept."""
        if self._how.keep is None:
            return
        steps = sorted(self._followed.steps.items(), key=lambda item: item[1].order)
        look_again(self._output)
        there = {path.name for path in self._output.iterdir()}
        for name in [name for name, _ in steps[: -self._how.keep] if name in there]:
            try:
                discard(self._output / name)
            except OSError as error:
                self._warn(f"{self._output / name} cannot be removed: {error}")
            except UnshardError as error:
                self._warn(error.text)

    def _warn(self, text: str) -> None:
        """Tell something once."""
        if text not in self._told:
            self._listener(Warned(text))
        self._told.add(text)


class _GoneError(IncompleteError):
    """A step was removed, or saved again, while it was merged."""


def _check(options: MergeOptions) -> None:
    """Refuse what does not fit all steps."""
    if options.role == EVERY_ROLE:
        raise UsageError(
            "⟦--follow⟧ follows one model of a step, and ⟦--role all⟧ means several",
            hint="follow each into a directory of its own: ⟦--role actor⟧, ⟦--role critic⟧",
        )
    if options.step is not None:
        raise UsageError(f"⟦--follow⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.dry_run:
        raise UsageError("⟦--follow⟧ and ⟦--dry-run⟧ exclude each other")


def _check_push(repo: str, output: Path) -> None:
    if isinstance(output, RemotePath):
        raise UsageError(
            f"⟦--push-to-hub⟧ needs outputs on a disk, and {as_given(output)} is in an object store"
        )
    check_repo(repo, may_ask=True)
