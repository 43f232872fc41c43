"""Convert configs, scheduler and random state for the trainer of another format."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from unshard.api.resharding.ranks import FSDP_CONFIG
from unshard.api.resharding.target import ReshardTarget
from unshard.api.resharding.writing import Addition, random_note, trainer_rng
from unshard.console import listed
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import Plain, write_pickle
from unshard.read.dcp.scheduler import SCHEDULER, SCHEDULERS
from unshard.read.format import ReshardFormat, shortened
from unshard.read.open import Checkpoint
from unshard.read.optimizer.reader import unread_files
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.reader import StateFiles, find_state_files, step_dirs
from unshard.read.training_state.rng_states import RankState, own_device, rank_state

_NOTED = re.compile(rf"^optim|(^|\.)({'|'.join(SCHEDULERS)})(\.|$)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_PROCESS = ("cpu", "numpy", "random")
_ACCELERATE = {"cpu": "torch_manual_seed", "numpy": "numpy_random_seed", "random": "random_state"}
_HF = {"cpu": "cpu", "numpy": "numpy", "random": "python"}
_TRAINER = "trainer_state.json"
_TOKENS = "total_tokens"  # without it lmms-engine does not load


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The training state of a checkpoint besides model and optimizer.

    Attributes:
        scheduler: the state of its scheduler; None if it has none.
        ranks: the state of each rank; None for a rank whose state cannot be read.
        notes: values that were left out, for the user.
        trainer_state: the HF Trainer's `trainer_state.json` with its position in training, if any.
    """

    scheduler: Plain = None
    ranks: Sequence[RankState | None] = ()
    notes: tuple[str, ...] = ()
    trainer_state: Path | None = None


def read_training(source: Checkpoint) -> Training:
    """Return scheduler and random state of a checkpoint of any format."""
    files = find_state_files(source.location, source.catalog.world_size)
    training = Training() if files is None else _from_files(files)
    if training.scheduler is None:
        scheduler = source.location.format.scheduler(source.location)
        notes = (*training.notes, *scheduler.notes)
        training = replace(training, scheduler=scheduler.value, notes=notes)
    paths = (folder / _TRAINER for folder in step_dirs(source.location))
    return replace(training, trainer_state=next((path for path in paths if path.is_file()), None))


def _from_files(files: StateFiles) -> Training:
    notes = [*files.notes]
    if files.missing:
        notes.append(f"{listed(files.missing)}: missing")
    states: list[RankState | None] = [None] * files.world_size
    for rank, path in files.ranks.items():
        values = plain_values(read_torch_file(path))
        states[rank] = rank_state(files.writer, values.value)
        if states[rank] is None:
            notes.append(f"{path.name}: has unexpected contents: left out")
        notes += [f"{path.name}: left out {', '.join(values.notes)}"] if values.notes else []
    schedulers = [plain_values(read_torch_file(path)).value for path in files.schedulers]
    if len(schedulers) > 1:
        notes.append(f"{len(schedulers)} schedulers were saved: only the first is written")
    of_ranks = [state.others.get(SCHEDULER) for state in states if state is not None]
    of_ranks = [scheduler for scheduler in of_ranks if scheduler is not None]
    if not schedulers and len(set(map(write_pickle, of_ranks))) > 1:
        notes.append(f"{SCHEDULER} differs between ranks: the first rank's was taken")
    saved = (scheduler for scheduler in (*schedulers, *of_ranks) if scheduler is not None)
    return Training(next(saved, None), tuple(states), tuple(notes))


def made_anew(source: Checkpoint, training: Training, target: ReshardTarget) -> Addition:
    """Return the files that a format has next to its tensors: config, scheduler, random state."""
    files, is_verl = Addition(), target.format is ReshardFormat.VERL
    _add_companions(source, "huggingface/" if is_verl else "", files)
    if is_verl:
        config = {"FSDP_version": 2, "world_size": target.world_size}
        files.data[FSDP_CONFIG] = dumps(config, indent=4).encode()
    _add_training(training, target, files)
    return files


def _add_companions(source: Checkpoint, folder: str, files: Addition) -> None:
    """Add config, tokenizer and the like; note values that are left out or missing."""
    files.copied |= {f"{folder}{name}": path for name, path in source.companions.paths.items()}
    if source.optimizer is None:
        files.notes.append(
            "no state of an optimizer was found that can be read: the output has the model alone"
        )
        unread = unread_files(source)
        if unread:
            files.notes.append(f"left out of the optimizer: {shortened(unread, 5)} (not read)")
    if not source.location.format.sharded and any(map(_EXPERT.search, source.catalog.tensors)):
        files.notes.append(
            "every expert has tensors of its own, as on the hub: transformers 5 trains the experts "
            "of most families in one tensor, and then does not load these"
        )
    # Other notes list skipped values of the optimizer and the scheduler.
    skipped = [value.fqn for value in source.catalog.skipped if not _NOTED.search(value.fqn)]
    if skipped:
        files.notes.append(f"left out: {', '.join(skipped[:5])} (not the model's weights)")


def _add_training(training: Training, target: ReshardTarget, files: Addition) -> None:
    """Add the files of scheduler and random state of a format, and notes about the rest.

    DCP has no such files; its scheduler is an item.
    """
    world, own = target.world_size, training.ranks
    states = [own[rank % len(own)] for rank in range(world if own else 0)]
    if target.format is ReshardFormat.ACCELERATE:
        _add_accelerate(training, states, files)
    is_verl, device = target.format is ReshardFormat.VERL, target.meshes[0].device_type
    scheduler = training.scheduler
    for rank in range(0 if target.format.is_dcp else world):
        state = (states[rank] if states else None) or RankState({}, {})
        rng = _own_devices(state.rng, rank, len(own))
        name = f"extra_state_world_size_{world}_rank_{rank}.pt"
        if is_verl:
            loaded = {"rng": rng} if _is_loaded_by_verl(rng, device) else {}
            files.saved[name] = {SCHEDULER: scheduler, **loaded}
        else:
            saved = {} if scheduler is None else {"lr_scheduler_state": scheduler}
            others = {key: value for key, value in state.others.items() if key != SCHEDULER}
            files.saved[f"extra_state/{name}"] = {**saved, "rng": rng, _TOKENS: 0, **others}
    files.notes += [*training.notes, *_notes(training, target)]


def _own_devices(rng: Mapping[str, Plain], rank: int, world: int) -> dict[str, Plain]:
    """Return a rank's random state with only its own device, as in extra_state files."""
    return {
        name: state if name in _OF_PROCESS else own_device(state, rank % world, world)
        for name, state in rng.items()
        if name in _OF_PROCESS or state not in ([], ())
    }


def _is_loaded_by_verl(rng: Mapping[str, Plain], device: str) -> bool:
    """Return whether verl loads it: it needs the state of the device, unless that is the CPU."""
    return all(name in rng for name in _OF_PROCESS) and (device == "cpu" or device in rng)


def _notes(training: Training, target: ReshardTarget) -> Iterator[str]:
    """Yield notes about values that the format cannot store, or that its trainer will miss."""
    to, world, device = target.format, target.world_size, target.meshes[0].device_type
    first = next(filter(None, training.ranks), RankState({}, {}))
    stored = {SCHEDULER, "step"} if to is ReshardFormat.ACCELERATE else {SCHEDULER}
    others = [] if to is ReshardFormat.LMMS else sorted(first.others.keys() - stored)
    if others:
        yield f"{', '.join(others)}: left out, {to.value} has no place for them"
    if first.rng and to is ReshardFormat.DCP:
        yield "the random state of ranks has no place in one DCP directory: left out"
    elif first.rng and to is ReshardFormat.VERL and not _is_loaded_by_verl(first.rng, device):
        what = f"verl loads random state only with that of a {device} device, which was not saved"
        yield f"{what}: left out"
    elif first.rng and len(training.ranks) != world:
        yield random_note(len(training.ranks), world)
    if to.is_dcp:
        return
    lacks = ["scheduler"] if training.scheduler is None else []
    lacks += [] if first.rng else ["random state"]
    if lacks:
        yield f"extra_state has no {' and no '.join(lacks)}: none was found that can be read"
    if to is ReshardFormat.LMMS:
        yield "dataloader_state is not written: lmms-engine needs the files of such a run to resume"


def _add_accelerate(
    training: Training, states: Sequence[RankState | None], files: Addition
) -> None:
    """Add the files of accelerate, and those of the HF Trainer if it wrote the source."""
    if training.scheduler is not None:
        files.saved["scheduler.bin"] = training.scheduler
    if training.trainer_state is not None:
        files.copied[_TRAINER] = training.trainer_state
        if training.scheduler is not None:
            files.saved["scheduler.pt"] = training.scheduler
    devices: set[str] = set()
    for rank, state in enumerate(states):
        if state is None or not state.rng:
            continue
        own: dict[Plain, Plain] = {
            key: state.rng[name] for name, key in _ACCELERATE.items() if name in state.rng
        }
        own |= {key: state.others[key] for key in ("step",) if key in state.others}
        files.saved[f"random_states_{rank}.pkl"] = own
        if training.trainer_state is not None:
            values = {key: state.rng[name] for name, key in _HF.items() if name in state.rng}
            files.saved[trainer_rng(rank, len(states))] = values
        devices |= state.rng.keys() - set(_OF_PROCESS)
    if devices:
        files.notes.append(
            f"the random state of devices ({', '.join(sorted(devices))}) is left out: accelerate "
            "stores that of all devices of a node for every rank, and the ranks of each node are "
            "unknown"
        )
