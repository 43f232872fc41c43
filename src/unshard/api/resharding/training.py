"""What the trainer of another format needs besides tensors, made of what the source has."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from unshard.api.resharding.ranks import FSDP_CONFIG
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import Addition, random_note, trainer_rng
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import Plain, write_pickle
from unshard.read.dcp.scheduler import SCHEDULER, SCHEDULERS
from unshard.read.format import ReshardFormat, shortened
from unshard.read.open import Checkpoint
from unshard.read.optimizer.reader import unread_files
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.reader import StateFiles, find_state_files, step_dirs
from unshard.read.training_state.rng_states import RankState, own_device, rank_state
from unshard.showing import listed

_NOTED = re.compile(rf"^optim|(^|\.)({'|'.join(SCHEDULERS)})(\.|$)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_PROCESS = ("cpu", "numpy", "random")
_ACCELERATE = {"cpu": "torch_manual_seed", "numpy": "numpy_random_seed", "random": "random_state"}
_HF = {"cpu": "cpu", "numpy": "numpy", "random": "python"}
_TRAINER = "trainer_state.json"
_TOKENS = "total_tokens"  # without it lmms-engine does not load


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """What a checkpoint has besides model and optimizer.

    Attributes:
        scheduler: the state of its scheduler; None if it has none.
        ranks: what each rank saved; None where that is not known. Empty if no rank saved anything.
        notes: what was left out, for the user.
        of_trainer: the HF Trainer's `trainer_state.json`, which says where it is; or None.
    """

    scheduler: Plain = None
    ranks: Sequence[RankState | None] = ()
    notes: tuple[str, ...] = ()
    of_trainer: Path | None = None


def read_training(source: Checkpoint) -> Training:
    """Return scheduler and random state of a checkpoint of any format."""
    files = find_state_files(source.location, source.catalog.world_size)
    found = Training() if files is None else _of_files(files)
    if found.scheduler is None:
        scheduler = source.location.format.scheduler(source.location)
        notes = (*found.notes, *scheduler.notes)
        found = replace(found, scheduler=scheduler.value, notes=notes)
    paths = (folder / _TRAINER for folder in step_dirs(source.location))
    return replace(found, of_trainer=next((one for one in paths if one.is_file()), None))


def _of_files(files: StateFiles) -> Training:
    notes = [*files.notes]
    if files.missing:
        notes.append(f"{listed(files.missing)}: missing")
    states: list[RankState | None] = [None] * files.world_size
    for rank, path in files.ranks.items():
        found = plain_values(read_torch_file(path))
        states[rank] = rank_state(files.writer, found.value)
        if states[rank] is None:
            notes.append(f"{path.name}: has unexpected contents: left out")
        notes += [f"{path.name}: left out {', '.join(found.notes)}"] if found.notes else []
    schedulers = [plain_values(read_torch_file(path)).value for path in files.schedulers]
    if len(schedulers) > 1:
        notes.append(f"{len(schedulers)} schedulers were saved: only the first is written")
    known = [one.others.get(SCHEDULER) for one in states if one is not None]
    scheduler = next((one for one in (*schedulers, *known) if one is not None), None)
    if not schedulers and len({write_pickle(one) for one in known if one is not None}) > 1:
        notes.append(f"{SCHEDULER} differs between ranks: the first rank's was taken")
    return Training(scheduler, tuple(states), tuple(notes))


def made_anew(source: Checkpoint, found: Training, to: ReshardFormat, target: Target) -> Addition:
    """Return the files that a format has next to its tensors: config, scheduler, random state."""
    files, world = Addition(), len(target.meshes)
    _add_companions(source, "huggingface/" if to is ReshardFormat.VERL else "", files)
    if to is ReshardFormat.VERL:
        config = {"FSDP_version": 2, "world_size": world}
        files.data[FSDP_CONFIG] = dumps(config, indent=4).encode()
    _add_training(found, to, world, target.meshes[0].device_type, files)
    return files


def _add_companions(source: Checkpoint, folder: str, files: Addition) -> None:
    """Add config, tokenizer and the like, and note what else the source has or lacks."""
    files.copied |= {f"{folder}{name}": path for name, path in source.companions.paths.items()}
    if source.optimizer is None:
        files.notes.append(
            "no state of an optimizer was found that can be read: only the model can be loaded"
        )
        unread = unread_files(source)
        if unread:
            files.notes.append(f"left out of the optimizer: {shortened(unread, 5)} (not read)")
    if not source.location.format.sharded and any(map(_EXPERT.search, source.catalog.tensors)):
        files.notes.append(
            "every expert has tensors of its own, as on the hub: transformers 5 trains the experts "
            "of most families in one tensor, and then does not load these"
        )
    # Of the optimizer and the scheduler, other notes say what is left out.
    skipped = [one.fqn for one in source.catalog.skipped if not _NOTED.search(one.fqn)]
    if skipped:
        files.notes.append(f"left out: {', '.join(skipped[:5])} (not the model's weights)")


def _add_training(
    found: Training, to: ReshardFormat, world: int, device: str, files: Addition
) -> None:
    """Add the files of scheduler and random state of a format, and note what has no place in it.

    Args:
        found: the state of the source.
        to: the format; that of `dcp` has no files for them, only the scheduler among its items.
        world: the number of ranks.
        device: the type of the ranks' devices.
        files: to add to.
    """
    states = [found.ranks[rank % len(found.ranks)] for rank in range(world if found.ranks else 0)]
    if to is ReshardFormat.ACCELERATE:
        _add_accelerate(found, states, files)
    folder = "extra_state/" if to is ReshardFormat.LMMS else ""
    for rank in range(0 if to.is_dcp else world):
        state = states[rank] if states else None
        rng = {} if state is None else _own_devices(state.rng, rank, len(found.ranks))
        others = {} if state is None else dict(state.others)
        name = f"{folder}extra_state_world_size_{world}_rank_{rank}.pt"
        is_verl = to is ReshardFormat.VERL
        files.saved[name] = _verl(found, rng, device) if is_verl else _lmms(found, rng, others)
    files.notes += [*found.notes, *_lacking(found, to, world, device)]


def _own_devices(rng: Mapping[str, Plain], rank: int, world: int) -> dict[str, Plain]:
    """Return a rank's random state, of its devices only its own, as extra_state files have it."""
    return {
        name: one if name in _OF_PROCESS else own_device(one, rank % world, world)
        for name, one in rng.items()
        if name in _OF_PROCESS or one not in ([], ())
    }


def _is_loaded_by_verl(rng: Mapping[str, Plain], device: str) -> bool:
    """Return whether verl loads it: it needs the state of the device, unless that is the CPU."""
    return all(name in rng for name in _OF_PROCESS) and (device == "cpu" or device in rng)


def _verl(found: Training, rng: Mapping[str, Plain], device: str) -> Plain:
    own = {"rng": dict(rng)} if _is_loaded_by_verl(rng, device) else {}
    return {SCHEDULER: found.scheduler, **own}


def _lmms(found: Training, rng: Mapping[str, Plain], others: dict[str, Plain]) -> Plain:
    others.pop(SCHEDULER, None)
    scheduler = {} if found.scheduler is None else {"lr_scheduler_state": found.scheduler}
    return {**scheduler, "rng": dict(rng), _TOKENS: 0, **others}


def _lacking(found: Training, to: ReshardFormat, world: int, device: str) -> Iterator[str]:
    """Yield what has no place in the format, and what its trainer would look for in vain."""
    first = next((one for one in found.ranks if one is not None), RankState({}, {}))
    kept = {SCHEDULER, "step"} if to is ReshardFormat.ACCELERATE else {SCHEDULER}
    others = [] if to is ReshardFormat.LMMS else sorted(first.others.keys() - kept)
    if others:
        yield f"{', '.join(others)}: left out, {to.value} has no place for them"
    if first.rng and to is ReshardFormat.DCP:
        yield "the random state of ranks has no place in one DCP directory: left out"
    elif first.rng and to is ReshardFormat.VERL and not _is_loaded_by_verl(first.rng, device):
        what = f"verl loads random state only with that of a {device} device, which was not saved"
        yield f"{what}: left out"
    elif first.rng and len(found.ranks) != world:
        yield random_note(len(found.ranks), world)
    if to.is_dcp:
        return
    lacks = ["scheduler"] if found.scheduler is None else []
    lacks += [] if first.rng else ["random state"]
    if lacks:
        yield f"extra_state has no {' and no '.join(lacks)}: none was found that can be read"
    if to is ReshardFormat.LMMS:
        yield "dataloader_state is not written: lmms-engine needs the files of such a run to resume"


def _add_accelerate(found: Training, states: Sequence[RankState | None], files: Addition) -> None:
    if found.scheduler is not None:
        files.saved["scheduler.bin"] = found.scheduler
    if found.of_trainer is not None:
        _add_trainer(found, found.of_trainer, states, files)
    devices: set[str] = set()
    for rank, state in enumerate(states):
        if state is None or not state.rng:
            continue
        own: dict[Plain, Plain] = {
            key: state.rng[name] for name, key in _ACCELERATE.items() if name in state.rng
        }
        own |= {key: state.others[key] for key in ("step",) if key in state.others}
        files.saved[f"random_states_{rank}.pkl"] = own
        devices |= state.rng.keys() - set(_OF_PROCESS)
    if devices:
        files.notes.append(
            f"the random state of devices ({', '.join(sorted(devices))}) is left out: accelerate "
            "stores that of all devices of a node for every rank, and how they are spread is not "
            "known"
        )


def _add_trainer(
    found: Training, trainer: Path, states: Sequence[RankState | None], files: Addition
) -> None:
    """Add what the HF Trainer looks for in place of accelerate's files: it wrote the source."""
    files.copied[_TRAINER] = trainer
    if found.scheduler is not None:
        files.saved["scheduler.pt"] = found.scheduler
    for rank, state in enumerate(states):
        if state is not None and state.rng:
            own = {one: state.rng[name] for name, one in _HF.items() if name in state.rng}
            files.saved[trainer_rng(rank, len(states))] = own
