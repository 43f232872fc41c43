"""`hint`: the lines for one run, filled in as far as its files say; no weights are read.

`MERGE.txt` has them next to the checkpoints, for any step and relative to its directory: a run is
moved, and mounted elsewhere.
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
from unshard.api.making import Prepared
from unshard.api.options import MergeOptions, given_path
from unshard.api.resharding.formats import format_of
from unshard.api.sources import adapter_beside, is_adapter, read_checkpoint
from unshard.containers.open_files import read_whole
from unshard.errors import IncompleteError, UnknownFormatError, UnshardError, printable
from unshard.fronts import Call, Command, Mention, Text, additions, marked
from unshard.read.beside.adapter_config import lora_names
from unshard.read.finding.candidates import at_same_step
from unshard.read.finding.discover import find
from unshard.read.finding.markers import run_of
from unshard.read.format import EVERY_ROLE, Choice, Location, ReshardFormat
from unshard.read.open import Checkpoint
from unshard.stores.remote_path import RemotePath
from unshard.write.dirfd import write_whole

_OURS = "# Written by unshard "
_told = set[Path]()  # runs for which this process has written it
_FILLED_IN = {
    "base MODEL": "MODEL is what training started from: a directory, or an id of the hub",
    "config FILE": "FILE is the config.json of this model",
    "lora-alpha N": "N is the lora_alpha of your LoraConfig",
    "tasks TASKS": "TASKS are names such as gsm8k,ifeval",
    "world-size N": "N is the number of ranks",
}


class HintLine(NamedTuple):
    """What a line is for, the line itself ("" if none works), and what to know about it."""

    label: str
    command: str
    comment: str


def hint(checkpoint: str | Path) -> list[HintLine]:
    """Return the lines for a checkpoint; for a run, those for its highest complete step.

    Raises:
        CheckpointError: as for `inspect`.
    """
    place = given_path(checkpoint, "the checkpoint").resolve()
    source = read_checkpoint(place, MergeOptions())
    at = source.location.path if place in source.location.path.parents else place
    return list(_lines(source, at, str))


def as_text(lines: Iterable[HintLine]) -> str:
    """Return lines for a shell, each after a comment."""
    pairs = ((" ".join(f"# {one.label}: {one.comment}".split()), one.command) for one in lines)
    return printable("\n".join("\n".join([*filter(None, pair), ""]) for pair in pairs))


def write_hint(checkpoint: str | Path, told: set[Path] = _told) -> None:
    """Write `MERGE.txt` next to a checkpoint that was just saved, once per process.

    Nothing is written into a store, for a checkpoint that is not complete, or over another file of
    this name. A file that has these lines already is not touched.

    Raises:
        UnshardError: the checkpoint cannot be read.
        OSError: the file cannot be written.
    """
    place = given_path(checkpoint, "the checkpoint").absolute()
    if isinstance(place, RemotePath) or place.parent in told:
        return
    told.add(place.parent)
    try:
        source = read_checkpoint(place, MergeOptions())
    except (IncompleteError, UnknownFormatError):
        told.discard(place.parent)
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
        head = f"{_OURS}{__version__}, {now}, to be pasted here; STEP is {name}, or another."
        write_whole(file, f"{head}\n\n{text}".encode())


def _lines(source: Checkpoint, at: Path, write: Callable[[Path], str]) -> Iterator[HintLine]:
    """Yield the lines for a step, or a path inside one; `write` returns how a path is given."""
    location, given = source.location, [write(at)]
    output, is_step = location.default_output, at == location.path
    fuse = {"lora": "fuse"} if adapter_beside(source) else {}
    call = Call("unshard merge", given, fuse)
    main, added = _merge("merge", call, at, f"into {write(output)}", None if fuse else source)
    yield main
    sets = next(find(at, Choice(role=EVERY_ROLE))) if is_step else location
    others = {one.role: one for one in sets.others if one.role not in (None, location.role)}
    for role in others:
        call = Call("unshard merge", given, {"role": role})
        yield _merge(f"merge the {role}", call, at, f"into {write(output)}-{role}")[0]
    if is_step and at_same_step(location, "ema"):
        call = Call("unshard merge", given, {"weights": "ema"})
        yield _line("merge the EMA weights", call, added, f"into {write(output)}-ema")
    if lora_names(source.catalog.tensors):
        names = [*given, write(output.with_name(f"{output.name}-adapter"))]
        alpha = [one for one in added if one.option == "lora-alpha"]
        yield _line("LoRA", Call("unshard merge", names, {"lora": "adapter"}), alpha, "for PEFT")
    if main.command:
        base = [one for one in added if one.option == "base"]
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
    """Yield a line for each set that other ranks do not load as it is; torch's DCP they do."""
    kind, form, run = format_of(source), source.location.format, run_of(source.location)
    is_loaded = form.sharded and ReshardFormat.ACCELERATE in form.reshards_to
    to = {} if kind and not kind.is_dcp else {"to": "verl" if kind else "accelerate"}
    if kind is ReshardFormat.DCP or not is_loaded or (to and is_adapter(source)):
        return
    folder = Path() if isinstance(run, RemotePath) else run.parent  # it writes to a disk
    for one in sets:
        inner = one.weights_dir.relative_to(one.step_dir) if kind is ReshardFormat.VERL else ""
        paths = at, folder / f"{run.name}-resharded" / one.step_dir.name / inner
        options = {"world-size": "N", **to} | ({} if one is sets[0] else {"role": one.role})
        call = Call("unshard reshard", [*map(write, paths)], options)
        yield _line("resume elsewhere", call, (), "for another number of ranks, or trainer")


def _merge(
    label: str, call: Call, at: Path, comment: str, source: Checkpoint | None = None
) -> tuple[HintLine, list[Mention]]:
    """Return the line of a merge, with the options that it needs, and these."""
    made: Prepared | UnshardError
    options, notes = MergeOptions(**call.options), tuple[str, ...]()
    try:
        source = source or read_checkpoint(at, options)
        made, notes = plan_merge(source, options)
    except UnshardError as error:
        made = error
    if isinstance(made, Prepared):
        added = [one for note in notes for one in additions(note) if one.option == "dtype"]
        here = source and source.config_of and source.config_of.directory
        if here and not here.is_absolute():  # it is named as seen from the current directory
            added += additions(Text(f"⟦+--base {shlex.quote(str(here.absolute()))}⟧"))
    else:
        needed = ("base", "config", "lora-alpha")
        added = [one for note in notes for one in additions(note) if one.option in needed]
        if any("⟦--base " in marked(note) for note in notes):  # several are named
            added += additions(Text("⟦+--base MODEL⟧"))
        if not added:
            return HintLine(label, "", f"nothing: {made.subject}"), added
        comment = "; ".join(filter(None, [comment, made.found]))
    return _line(label, call, added, comment), added


def _line(label: str, call: Call, added: Iterable[Mention], comment: str) -> HintLine:
    command = Command(merge=call).line([*added])
    meanings = (text for option, text in _FILLED_IN.items() if f"--{option}" in command)
    return HintLine(label, command, "; ".join([comment, *meanings]))
