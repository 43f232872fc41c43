"""`follow`: merge each checkpoint of a run once, as soon as it is complete.

The trainer is not asked, and never waits: its directory is looked at again and again. Each output
is made with `reuse`, so that a step which was merged when this process was killed is not merged
again, and two followers do not merge the same step.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.following.commands import run_command
from unshard.api.following.finder import CheckpointFinder, check_run
from unshard.api.following.followed import Entry, Followed
from unshard.api.following.options import Following, check_options, check_push
from unshard.api.following.waiting import Waiting, time_saved
from unshard.api.making import Prepared
from unshard.api.merging import StepResult, merge_checkpoint
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.errors import IncompleteError, OutputError, UnshardError, raise_all
from unshard.fronts import Text
from unshard.keywords import MergeKeywords
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.format import Location
from unshard.read.hub_files import RECORD_NAME
from unshard.showing import hearing
from unshard.stores.nodes.connection import disconnecting
from unshard.stores.remote_path import RemotePath, as_given
from unshard.write.discarding import discard
from unshard.write.hub import push
from unshard.write.record import parse_record
from unshard.write.report import Report
from unshard.write.staging.recovery import recover

_LONGEST_SLEEP_S = 0.2  # until a signal is noticed
_LONGEST_PAUSE_S = 300.0  # before a step is tried again
_SETTLED = 2  # looks, after which all is found that is complete already


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
            made, if they have nothing but what unshard wrote. No step is merged that was saved
            before all of those.
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
        check_options(options)
        self._run = run if isinstance(run, RemotePath) else run.absolute()
        check_run(self._run)
        self._how, self._listener, self._repo = how, listener, options.push_to_hub
        target = None if output is None else given_output(output)
        if self._repo is not None:
            check_push(self._repo, target or self._run)
        self._private = options.private
        self._options = replace(options, reuse=True, push_to_hub=None, private=False)
        asked = {**options.recorded, "exec": how.exec is not None, "push_to_hub": self._repo}
        self._asked = json.dumps(asked, sort_keys=True)
        self._model = f"{as_given(self._run)} {options.role or ''} {options.weights or 'model'}"
        self._finder = CheckpointFinder(self._run, options.choice, self._warn)
        self._waiting: dict[str, Waiting] = {}
        self._told: set[str] = set()
        self._highest, self._looks = -1, 0
        self._output, self._followed = target, None if target is None else Followed(target)

    def close(self) -> None:
        if self._followed is not None:
            self._followed.close()

    def steps(self, is_asked_to_end: Callable[[], bool]) -> Iterator[StepResult]:
        """Yield what became of each step, until the end that was asked for."""
        into = "" if self._output is None else f" into {as_given(self._output)}"
        self._listener(Chosen(f"following {as_given(self._run)}{into}"))
        next_look, news = 0.0, time.monotonic()
        while not is_asked_to_end():
            if time.monotonic() >= next_look:
                if self._look():
                    news = time.monotonic()
                next_look = time.monotonic() + self._how.interval
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
        if found and self._output is None:  # not before: trainers refuse a folder with something
            self._output = found[0].default_output.parent
            self._followed = Followed(self._output)
        for at in found:
            facts = (at.step or 0, time_saved(at), self._finder.found(at))
            name, entry = at.default_output.name, Entry(*facts, self._asked, self._model)
            if not self._is_done(name, entry):
                self._waiting[name] = Waiting(name, entry, at)
        if self._looks == _SETTLED and self._followed is not None:
            self._go_on(self._followed)
            self._retain(self._followed)
        return bool(found) or self._finder.is_growing

    def _is_done(self, name: str, entry: Entry) -> bool:
        """Return whether a step was done before, as its trainer has it now."""
        followed = self._opened()
        before = followed.steps.get(name)
        if before is None or before.stamp != entry.stamp or not before.is_done:
            return False
        is_gone = before.state == "done" and not followed.is_made(name)
        if is_gone or before.options != self._asked:
            if self._options.overwrite:
                return False
            what = f"step {entry.step}, whose output was removed," if is_gone else "what was done"
            how = "is not done again" if is_gone else "with other options is left as it is"
            self._warn(Text(f"{what} {how}; to do it again: ⟦--overwrite⟧"))
        self._highest = max(self._highest, entry.step)
        return True

    def _go_on(self, followed: Followed) -> None:
        """Hand on what a killed process had made of steps that are gone, or remove what is left."""
        for name, entry in list(followed.steps.items()):
            is_ours = entry.run == self._model and name not in self._waiting
            if is_ours and not entry.is_done:
                if followed.is_made(name):
                    self._waiting[name] = Waiting(name, entry, None)
                else:
                    self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove what is left of an output that is not going to be made."""
        followed = self._opened()
        if not isinstance(self._output, RemotePath) and self._output is not None:
            recover(self._output, target=name)
        if name in followed.steps and followed.steps[name].state == "begun":
            followed.put(name, None)

    def _next(self) -> Waiting | None:
        """Return the step to merge now, if there is one."""
        keep, followed = self._how.keep, self._followed
        ours = [] if keep is None or followed is None else self._kept(followed)
        for name, one in list(self._waiting.items()):
            later = [done for _, done in ours if done.order > one.entry.order]
            if keep is not None and len(later) >= keep:
                del self._waiting[name]
                what = f"step {one.entry.step} is passed over"
                self._warn(Text(f"{what}: ⟦--keep {keep}⟧ leaves later ones"))
        now = time.monotonic()
        due = [one for one in self._waiting.values() if one.not_before <= now]
        sign = -1 if self._how.newest else 1
        return min(due, key=lambda one: (one.tries, sign * one.entry.step), default=None)

    def _is_over(self, news: float) -> bool:
        """Return whether what was asked for has come."""
        until, idle = self._how.until, self._how.idle
        if self._waiting and until is not None:
            lowest = min(one.entry.step for one in self._waiting.values())
            until = None if lowest <= until else until
        if self._looks < _SETTLED:
            return False
        is_idle = idle is not None and not self._waiting and time.monotonic() - news >= float(idle)
        return is_idle or (until is not None and self._highest >= until)

    def _do(self, one: Waiting) -> StepResult | None:
        """Merge a step, upload it, run the command; return None if it is to be tried again."""
        followed, at = self._opened(), one.location
        target = (self._output or self._run) / one.name
        source = self._run if at is None else at.weights_dir
        result = StepResult(one.entry.step, str(source), str(target), is_meant=True)
        try:
            if at is not None:
                if not followed.is_made(one.name):
                    followed.put(one.name, one.entry)
                result = replace(result, report=self._merge(at, target))
            one.entry = replace(one.entry, state="made")
            followed.put(one.name, one.entry)  # also shows whether another process does the same
            self._hand_on(one, target)
            followed.put(one.name, replace(one.entry, state="done"))
            self._retain(followed)
        except (UnshardError, OSError) as found:
            if followed.is_lost:
                raise
            error = found if isinstance(found, UnshardError) else OutputError(f"{target}: {found}")
            self._listener(Warned(f"{result.title}: {error.text}"))
            return self._give_up(one, replace(result, error=error))
        self._end(one)
        return result

    def _give_up(self, one: Waiting, result: StepResult) -> StepResult | None:
        """Return the result of a step that failed; None if it is to be tried again."""
        is_gone = isinstance(result.error, _GoneError)
        if not is_gone and one.tries < self._how.retry:
            one.tries += 1
            pause = min(self._how.interval * 2**one.tries, _LONGEST_PAUSE_S)
            one.not_before = time.monotonic() + pause
            return None
        with suppress(UnshardError):  # it would fail as the step did
            if one.entry.state == "made":
                self._retain(self._opened())
            else:
                self._forget(one.name)
        if is_gone and one.location is not None and self._finder.stamp(one.location) != "":
            del self._waiting[one.name]  # saved again: a later look returns it
        else:
            self._end(one)
        return replace(result, is_meant=not is_gone)

    def _end(self, one: Waiting) -> None:
        """Take note that nothing more is done about a step."""
        self._waiting.pop(one.name, None)
        self._highest = max(self._highest, one.entry.step)

    def _merge(self, at: Location, target: Path) -> Report:
        """Merge a step, or use what was made of it."""
        what = (self._options, self._listener)

        def unchanged(prepared: Prepared) -> Prepared:
            """Check, now that a later change would be noticed, that there was none before."""
            if not self._finder.is_as_found(at):
                raise _GoneError(f"{at.path} is not as it was found")
            return prepared

        try:
            return merge_checkpoint(at.path, target, *what, before=unchanged, pass_over=False)
        except UnshardError as error:
            if self._finder.is_as_found(at) and not isinstance(error, _GoneError):
                raise
            raise _GoneError(
                f"{at.path} was removed or saved again before it was merged",
                found=str(error).partition("\n")[0],
                hint="have the trainer keep more checkpoints, or write to a faster disk",
            ) from error

    def _hand_on(self, one: Waiting, target: Path) -> None:
        """Upload an output, and run the command for it; each once, however often it is tried."""
        step = str(one.entry.step)
        if self._repo is not None and "uploaded" not in one.handed:
            record = parse_record((target / RECORD_NAME).read_bytes())
            names = [RECORD_NAME, *(record.sizes if record is not None else ())]
            push(target, f"{self._repo}@step-{step}", names, private=self._private, bars=False)
            one.handed.add("uploaded")
        if self._how.exec is not None and "run" not in one.handed:
            self._listener(Stage(""))
            self._listener(Chosen(f"running the command for step {step}"))
            path = target if isinstance(target, RemotePath) else target.absolute()
            run_command(self._how.exec, output=str(path), step=step)
            one.handed.add("run")

    def _opened(self) -> Followed:
        if self._followed is None:
            raise RuntimeError("no step was found yet")
        return self._followed

    def _kept(self, followed: Followed) -> list[tuple[str, Entry]]:
        """Return the outputs of this model that are there, by name, in the order of their saves."""
        there = [
            (name, one)
            for name, one in followed.steps.items()
            if one.run == self._model and one.state in {"made", "done"}
        ]
        return sorted(there, key=lambda item: item[1].order)

    def _retain(self, followed: Followed) -> None:
        """Remove the outputs of earlier steps than are kept."""
        if self._how.keep is None or self._output is None:
            return
        for name, entry in self._kept(followed)[: -self._how.keep]:
            try:
                if followed.is_made(name):
                    discard(self._output / name)
                followed.put(name, replace(entry, state="removed"))
            except OSError as error:
                self._warn(f"{self._output / name} cannot be removed: {error}")
            except OutputError as error:
                self._warn(error.text)

    def _warn(self, text: str) -> None:
        """Tell something once."""
        if text not in self._told:
            self._listener(Warned(text))
        self._told.add(text)


class _GoneError(IncompleteError):
    """A step was removed, or saved again, while it was merged."""
