"""`hint`: commands for a run, filled in from its files, without reading weights.

`MERGE.txt` has them next to the checkpoints, for any step. Its paths are relative, because runs are
moved and mounted elsewhere.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from unshard import __version__
from unshard.api.inspecting import plan_merge
from unshard.api.making import PlannedMerge
from unshard.api.options import MergeOptions, given_path
from unshard.api.resharding.target import format_of
from unshard.api.sources import adapter_beside, is_adapter, read_checkpoint
from unshard.containers.open_files import read_whole
from unshard.errors import IncompleteError, UnknownFormatError, UnshardError, printable
from unshard.fronts import Call, Command, Mention, Text, additions, marked
from unshard.read.beside.adapter_config import lora_names
from unshard.read.finding.candidates import sibling_weights
from unshard.read.finding.discover import find
from unshard.read.finding.markers import run_of
from unshard.read.format import EVERY_ROLE, Choice, Location, ReshardFormat
from unshard.read.open import Checkpoint
from unshard.stores.remote_path import RemotePath
from unshard.write.dirfd import write_whole

_OURS = "# Written by unshard "
_written = set[Path]()  # directories in which this process has written MERGE.txt
_PLACEHOLDERS = {
    "base MODEL": "MODEL is the model that training started from: a directory, or an id of the hub",
    "config FILE": "FILE is the config.json of this model",
    "lora-alpha N": "N is the lora_alpha of your LoraConfig",
    "tasks TASKS": "TASKS are names such as gsm8k,ifeval",
    "world-size N": "N is the number of ranks",
}


class HintLine(NamedTuple):
    """The purpose of a command, the command ("" if none works), and a comment."""

    label: str
    command: str
    comment: str


def hint(checkpoint: str | Path) -> list[HintLine]:
    """Return the commands for a checkpoint, or for the highest complete step of a run.

    Raises:
        CheckpointError: as for `inspect`.
    """
    path = given_path(checkpoint, "the checkpoint").resolve()
    source = read_checkpoint(path, MergeOptions())
    at = source.location.path if path in source.location.path.parents else path
    return list(_lines(source, at, str))


def as_text(lines: Iterable[HintLine]) -> str:
    """Return commands for a shell, each after a comment."""
    pairs = ((" ".join(f"# {line.label}: {line.comment}".split()), line.command) for line in lines)
    return printable("\n".join("\n".join([*filter(None, pair), ""]) for pair in pairs))


def write_hint(checkpoint: str | Path, written: set[Path] = _written) -> None:
    """Write `MERGE.txt` next to a checkpoint that was just saved, once per process.

    Nothing is written into a store, for an incomplete checkpoint, or over a foreign file of this
    name. A file that already has these lines is not touched.

    Raises:
        UnshardError: the checkpoint cannot be read.
        OSError: the file cannot be written.
    """
    path = given_path(checkpoint, "the checkpoint").absolute()
    if isinstance(path, RemotePath) or path.parent in written:
        return
    written.add(path.parent)
    try:
        source = read_checkpoint(path, MergeOptions())
    except (IncompleteError, UnknownFormatError):
        written.discard(path.parent)
        return
    location, top = source.location, run_of(source.location)
    name, file = location.path.name.removesuffix(".ckpt"), top / "MERGE.txt"

    def write(path: Path) -> str:
        parts = Path(os.path.relpath(path, top)).parts
        return str(Path(*(re.sub(rf"^{re.escape(name)}\b", "STEP", part) for part in parts)))

    text, before = as_text(_lines(source, location.path, write)), _OURS
    if os.path.lexists(file):
        before = read_whole(file).decode(errors="replace")
    if location.step is not None and before.startswith(_OURS) and not before.endswith(text):
        now = datetime.now(UTC).isoformat(" ", "seconds")
        head = f"{_OURS}{__version__}, {now}. Run the lines here; STEP is {name}, or another step."
        write_whole(file, f"{head}\n\n{text}".encode())


def _lines(source: Checkpoint, at: Path, write: Callable[[Path], str]) -> Iterator[HintLine]:
    """Yield the commands for a step, or a path inside a step; `write` formats a path."""
    location, checkpoint = source.location, write(at)
    output, is_step = location.default_output, at == location.path
    fuse = {"lora": "fuse"} if adapter_beside(source) else {}
    call = Call("unshard merge", [checkpoint], fuse)
    main, added = _merge("merge", call, at, f"into {write(output)}", None if fuse else source)
    yield main
    sets = next(find(at, Choice(role=EVERY_ROLE))) if is_step else location
    others = {other.role: other for other in sets.others if other.role not in (None, location.role)}
    for role in others:
        call = Call("unshard merge", [checkpoint], {"role": role})
        yield _merge(f"merge the {role}", call, at, f"into {write(output)}-{role}")[0]
    if is_step and sibling_weights(location, "ema"):
        call = Call("unshard merge", [checkpoint], {"weights": "ema"})
        yield _line("merge the EMA weights", call, added, f"into {write(output)}-ema")
    if lora_names(source.catalog.tensors):
        paths = [checkpoint, write(output.with_name(f"{output.name}-adapter"))]
        alpha = [mention for mention in added if mention.option == "lora-alpha"]
        yield _line("LoRA", Call("unshard merge", paths, {"lora": "adapter"}), alpha, "for PEFT")
    if main.command:
        base = [mention for mention in added if mention.option == "base"]
        call = Call("unshard verify", [write(output)], {"against": write(at)})
        yield _line("verify", call, base, "compare every tensor of the merged model")
    if main.command and is_step:
        yield from _lines_while_it_trains(location, added, fuse, write)
    yield from _reshards(source, at, (location, *others.values()), write)


def _lines_while_it_trains(
    location: Location, added: Sequence[Mention], fuse: dict[str, str], write: Callable[[Path], str]
) -> Iterator[HintLine]:
    run, tasks = write(run_of(location)), {"tasks": "TASKS"}
    if location.step is None:
        call = Call("unshard eval submit", [write(location.path)], tasks)
    else:
        follow = Call("unshard merge", [run], {"follow": True, **fuse})
        yield _line("follow", follow, added, "merge each step as it is saved")
        call = Call("unshard eval watch", [run], tasks)
    yield _line("evaluate", call, (), "on a server (`unshard eval serve`)")


def _reshards(
    source: Checkpoint, at: Path, sets: Sequence[Location], write: Callable[[Path], str]
) -> Iterator[HintLine]:
    """Yield a command for each set of weights, unless any number of ranks loads it, as with DCP."""
    kind, form, run = format_of(source), source.location.format, run_of(source.location)
    is_loaded = form.sharded and ReshardFormat.ACCELERATE in form.reshards_to
    to = {} if kind and not kind.is_dcp else {"to": "verl" if kind else "accelerate"}
    if kind is ReshardFormat.DCP or not is_loaded or (to and is_adapter(source)):
        return
    folder = Path() if isinstance(run, RemotePath) else run.parent  # a reshard needs a disk
    for own in sets:
        inner = own.weights_dir.relative_to(own.step_dir) if kind is ReshardFormat.VERL else ""
        paths = at, folder / f"{run.name}-resharded" / own.step_dir.name / inner
        options = {"world-size": "N", **to} | ({} if own is sets[0] else {"role": own.role})
        call = Call("unshard reshard", [*map(write, paths)], options)
        yield _line("resume elsewhere", call, (), "for another number of ranks, or trainer")


def _merge(
    label: str, call: Call, at: Path, comment: str, source: Checkpoint | None = None
) -> tuple[HintLine, list[Mention]]:
    """Return the command of a merge with the options that it needs, and these options."""
    planned: PlannedMerge | UnshardError
    options, notes = MergeOptions(**call.options), tuple[str, ...]()
    try:
        source = source or read_checkpoint(at, options)
        planned, notes = plan_merge(source, options)
    except UnshardError as error:
        planned = error
    mentions = [mention for note in notes for mention in additions(note)]
    if isinstance(planned, PlannedMerge):
        added = [mention for mention in mentions if mention.option == "dtype"]
        base = source and source.config_of and source.config_of.directory
        if base and not base.is_absolute():  # relative paths depend on the current directory
            added += additions(Text(f"⟦+--base {shlex.quote(str(base.absolute()))}⟧"))
    else:
        needed = ("base", "config", "lora-alpha")
        added = [mention for mention in mentions if mention.option in needed]
        if any("⟦--base " in marked(note) for note in notes):  # the note names several bases
            added += additions(Text("⟦+--base MODEL⟧"))
        if not added:
            return HintLine(label, "", f"nothing: {planned.subject}"), added
        comment = "; ".join(filter(None, [comment, planned.found]))
    return _line(label, call, added, comment), added


def _line(label: str, call: Call, added: Iterable[Mention], comment: str) -> HintLine:
    command = Command(merge=call).line([*added])
    meanings = (text for option, text in _PLACEHOLDERS.items() if f"--{option}" in command)
    return HintLine(label, command, "; ".join([comment, *meanings]))
