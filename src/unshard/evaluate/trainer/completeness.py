"""Watch a run's directory for checkpoints that are complete, for trainers without hooks.

A checkpoint is complete when its writer has left its mark, and its files have kept their sizes and
times since the last look: the latest step of verl, SkyRL and lerobot, `CHECKPOINT_COMPLETE` of
LLaMA-Factory, transformers' `trainer_state.json`, DeepSpeed's `latest`, OLMo-core's
`.metadata.json`, DCP's `.metadata`, Megatron's `metadata.json`. A directory that is renamed when it
is complete (NeMo-RL, xtuner) has no step until then. Rank files without a mark (lmms-engine) are
complete when every rank's are there, in the folder of the dataloader too, every zip has its end,
and the config is there; safetensors files when the set is complete and each file is as long as its
header says. In an object store, where uploads may come in any order, a checkpoint must also be
whole as a merge reads it: no file, rank or tensor is missing.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.api.sources import read_checkpoint
from unshard.containers.json_file import JsonFields, json_object
from unshard.containers.safetensors_file import read_safetensors
from unshard.errors import (
    CorruptError,
    IncompleteError,
    StoreError,
    UnknownFormatError,
    UnshardError,
    UsageError,
)
from unshard.evaluate.jobs import WeightsName
from unshard.read.finding.discover import all_steps, step_numbers
from unshard.read.finding.markers import find_markers, stated_tag
from unshard.read.format import Choice, Location
from unshard.read.hub_files import INDEX_NAME, weight_map
from unshard.read.step_names import step_of
from unshard.read.zero.reader import ZERO
from unshard.stores.objects import listed
from unshard.stores.remote_path import RemotePath, look_again

_RANK_FILE = re.compile(r".*world_size_(\d+)_rank_(\d+)\.\w+")
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_LMMS_ENGINE = ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0")
_LATEST = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "last")
_COMPLETE = ("CHECKPOINT_COMPLETE", "COMPLETED", "ok")  # LLaMA-Factory, open-instruct, Fast-LLM
_MOST_OTHERS = 4  # steps of the run that show whether its trainer leaves such a file
_OLMO = ".metadata.json"
_MEGATRON_FIRST, _MEGATRON_LAST = "common.pt", "metadata.json"
_TRAINER_STATE = "trainer_state.json"
_END_OF_ZIP = b"PK\x05\x06"
_END_SIZE = 22  # without the comment, whose length is its last two bytes (APPNOTE.TXT 4.3.16)
_MOST_COMMENT = 65535
_ZIPS = frozenset({".pt", ".bin", ".pth", ".ckpt"})

log = logging.getLogger(__name__)


class CheckpointFinder:
    """Looks at a run again and again, and returns every complete checkpoint once.

    Args:
        run: the directory of the steps.
        weights: "model" or "ema".
    """

    def __init__(self, run: Path, *, weights: WeightsName = "model") -> None:
        self._run = run
        self._choice = Choice(None, None, weights)
        self._before: dict[Path, Mapping[str, object]] = {}  # see `_status_of`
        self._unread: dict[Path, Mapping[str, object]] = {}  # of those that were read in vain
        self._seen: set[Path] = set()
        self._done: set[int] = set()  # the steps of those
        self._warned: set[str] = set()

    def look(self) -> list[Location]:
        """Return the checkpoints that are complete since the last look, the lowest step first."""
        look_again(self._run)
        try:
            steps = self._steps()
        except StoreError as error:
            self._warn(f"the run cannot be listed now: {error}")
            return []
        found = []
        for location in steps:
            if location.path not in self._seen and self._is_ready(location):
                self._seen.add(location.path)
                self._done |= set() if location.step is None else {location.step}
                found.append(location)
        return found

    def _warn(self, why: str) -> None:
        """Log why a checkpoint is not found, once."""
        if why not in self._warned:
            log.warning("%s", why)
        self._warned.add(why)

    def _steps(self) -> list[Location]:
        """Return the checkpoints of all steps; a broken step does not hold up the others.

        In an object store, where every folder is a request, only of those that are not seen yet.
        """
        if isinstance(self._run, RemotePath) and (numbers := step_numbers(self._run)):
            return self._of_steps([one for one in numbers if one not in self._done])
        try:
            return self._found(self._choice)
        except (UnshardError, OSError) as error:
            numbers = step_numbers(self._run)
            if not numbers:
                self._warn(f"no checkpoint yet: {error}")
        return self._of_steps(numbers)

    def _of_steps(self, numbers: Iterable[int]) -> list[Location]:
        found: list[Location] = []
        for number in numbers:
            try:
                found += self._found(replace(self._choice, step=number))
            except (UnshardError, OSError) as error:
                self._warn(f"step {number} is not submitted yet: {error}")
        return found

    def _found(self, choice: Choice) -> list[Location]:
        """Return the checkpoints of steps; of an actor and a critic, the actor."""
        try:
            found = all_steps(self._run, choice)
        except UsageError:
            found = all_steps(self._run, replace(choice, role="actor"))
        return [one for one in found if one.role != "critic"]

    def _is_ready(self, location: Location) -> bool:
        """Return whether nothing has changed since the last look, and nothing is missing."""
        place = location.path
        before = self._before.get(place)
        try:
            now = self._before[place] = _status_of(place)
            if before != now or now == self._unread.get(place):
                return False
            why = why_incomplete(location)
            if why is None and isinstance(place, RemotePath):
                why = _why_unread(location)
                self._unread |= {} if why is None else {place: now}
        except OSError:  # the trainer has just removed it
            return False
        except StoreError as error:
            why = str(error)
        if why is not None:
            self._warn(f"step {location.step} is not complete yet: {why}")
        return why is None


def _status_of(place: Path) -> Mapping[str, object]:
    """Return what changes with any file of a checkpoint: size and time, or size and ETag."""
    if isinstance(place, RemotePath) and not place.is_file():
        return listed(place.bucket, place.key)
    inside = [place] if place.is_file() else place.rglob("*")
    files = {path: path.stat() for path in inside if path.is_file()}
    return {str(path): (one.st_size, one.st_mtime_ns) for path, one in files.items()}


def _why_unread(location: Location) -> str | None:
    """Return what a checkpoint in a store lacks; None also if it fails for another reason.

    That is for the server to report: waiting would not help.
    """
    options = MergeOptions(role=location.role, weights=location.weights)
    try:
        read_checkpoint(location.path, options, pass_over=False)
    except (IncompleteError, UnknownFormatError, CorruptError) as error:
        return str(error)
    except StoreError:
        raise
    except UnshardError as error:
        log.info("%s: submitted, although it cannot be read: %s", location.path, error)
    return None


def why_incomplete(location: Location) -> str | None:
    """Return why a checkpoint is incomplete; None if its writer has finished it.

    Raises:
        OSError: it has vanished.
    """
    marks = [*_look_at_tag(location), *_look_at_run(location), *_look_at_step(location)]
    if marks:
        return marks[0] or None
    if location.path.is_file():
        return why_unfinished([location.path])
    names = {path.name for path in location.weights_dir.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        if ".metadata" not in names or ".metadata.tmp" in names:
            return ".metadata is missing"
        is_begun = _MEGATRON_FIRST in names and _MEGATRON_LAST not in names
        return f"{_MEGATRON_LAST} is missing" if is_begun else None
    return _why_ranks(location) or _why_shards(location.weights_dir, names)


def _look_at_run(location: Location) -> Iterator[str]:
    """Yield what the run's marks of the latest step say of this one: what is wrong, or ""."""
    step, run = location.step, location.step_dir.parent
    for latest in find_markers(run):
        if latest.name not in _LATEST or step is None:
            continue
        if latest.step is None or latest.step < step:
            yield f"{latest.name} has {'nothing' if latest.step is None else latest.step}"
        elif latest.step in _steps_of(run):  # else an earlier run's
            yield ""


def _look_at_tag(location: Location) -> Iterator[str]:
    """Yield what DeepSpeed's `latest` says of a tag that is not complete.

    It is written when all ranks have written their files. Of a trainer's own step other files
    follow it.
    """
    if location.format is not ZERO:
        return
    tag = stated_tag(location.weights_dir.parent)
    stated, step = step_of(tag or ""), location.step
    if tag is None:
        yield "latest is missing"
    elif tag != location.weights_dir.name and (stated is None or step is None or stated < step):
        yield f"latest has {tag}"
    elif not (location.step_dir / _TRAINER_STATE).is_file():
        yield ""


@lru_cache(maxsize=8)
def _list_steps(run: Path, changed: int) -> dict[int, str]:
    """Return what `_steps_of` does; the run's directory was last `changed` then, in ns."""
    del changed
    return _steps_in(run)


def _steps_of(run: Path) -> dict[int, str]:
    """Return the names of a run's steps by number; of a folder in a store no time is known."""
    if isinstance(run, RemotePath):
        return _steps_in(run)
    return _list_steps(run, run.stat().st_mtime_ns)


def _steps_in(run: Path) -> dict[int, str]:
    found = {step_of(path.name): path.name for path in run.iterdir()}
    return {step: name for step, name in found.items() if step is not None}


def _look_at_step(location: Location) -> Iterator[str]:
    """Yield what the marks in the step's own directory say: what is wrong, or ""."""
    step_dir, run = location.step_dir, location.step_dir.parent
    others = _steps_of(run).values()
    for name in _COMPLETE:
        if (step_dir / name).is_file():
            yield ""
        elif any((run / other / name).is_file() for other in islice(others, _MOST_OTHERS)):
            yield f"{name} is missing"
    state = step_dir / _TRAINER_STATE
    if state.is_file():
        with suppress(CorruptError):
            if JsonFields(state, json_object(state)).count("global_step") == location.step:
                yield ""
        yield f"{state.name} is of another step"
    if location.weights_dir.name == "model_and_optim" and not (step_dir / _OLMO).is_file():
        yield f"{_OLMO} is missing"


def _why_ranks(location: Location) -> str | None:
    """Return which rank file is missing, or which file that lmms-engine writes after them."""
    folder, loader = location.weights_dir, location.step_dir / "dataloader_state"
    worlds = _find_ranks(folder)
    why = _why_not_every_rank(folder, worlds)
    if why is None and worlds and loader.is_dir():
        why = _why_not_every_rank(loader, _find_ranks(loader) or {world: set() for world in worlds})
    is_lmms = bool(worlds) and folder.name in _LMMS_ENGINE
    if why is None and is_lmms and not (location.step_dir / "config.json").is_file():
        return "config.json is missing"  # the last that it writes
    return why


def _find_ranks(folder: Path) -> dict[int, set[int]]:
    """Return the ranks whose files are in a folder, by world size."""
    found: dict[int, set[int]] = {}
    for match in (_RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
        if match is not None:
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def _why_not_every_rank(folder: Path, worlds: Mapping[int, set[int]]) -> str | None:
    """Return which rank's file a folder lacks, or which is not finished."""
    for world, there in worlds.items():
        missing = sorted(set(range(world)) - there)
        if missing:
            return f"{folder.name}: rank {missing[0]} of {world} is missing"
    return why_unfinished(path for path in folder.iterdir() if path.suffix in _ZIPS)


def _why_shards(folder: Path, names: set[str]) -> str | None:
    """Return which safetensors file a folder lacks, or which is shorter than its header says."""
    wanted = {
        f"{match[1]}-{number:0{len(match[2])}}-of-{match[2]}.safetensors"
        for match in map(_SHARD.fullmatch, names)
        if match is not None
        for number in range(1, int(match[2]) + 1)
    }
    if INDEX_NAME in names:
        try:
            wanted |= set(weight_map(folder / INDEX_NAME).values())
        except CorruptError:
            return f"{INDEX_NAME} is not finished"
    if missing := sorted(wanted - names):
        return f"{missing[0]} is missing"
    for path in folder.glob("*.safetensors"):
        try:
            read_safetensors(path)
        except UnshardError:
            return f"{path.name} is not finished"
    return None


def why_unfinished(files: Iterable[Path]) -> str | None:
    """Return which file is empty or a zip without its end; torch's legacy files are not zips."""
    for path in files:
        if isinstance(path, RemotePath):
            continue  # an object is there only when it is whole
        with path.open("rb") as stream:
            head = stream.read(4)
            stream.seek(max(0, path.stat().st_size - _END_SIZE - _MOST_COMMENT))
            tail = stream.read()
        at = tail.rfind(_END_OF_ZIP)
        comment = int.from_bytes(tail[at + _END_SIZE - 2 : at + _END_SIZE], "little")
        has_end = at >= 0 and len(tail) >= at + _END_SIZE + comment
        if not head.strip(b"\0") or (head[:2] == b"PK" and not has_end):
            return f"{path.name} is not finished"
    return None
