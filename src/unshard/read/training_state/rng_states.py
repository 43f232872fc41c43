"""Scheduler and random state of all ranks, united under one set of names for all writers.

    lr_scheduler   what `load_state_dict` takes
    rng.cpu        of the first rank, as rng.numpy and rng.random are: for `torch.set_rng_state`,
                   `numpy.random.set_state`, `random.setstate`
    rng.cuda       each rank's own device, in rank order; the same for npu, xpu, …
    rng_by_rank    per rank what it saved: cpu, cuda, numpy, random; None where it is missing
    <any other>    of the first rank; where ranks differ, <any other>_by_rank too

Pure: knows values, not files. A rank's state takes about 60 KB of memory.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from unshard.containers.torch_files.writer import Plain, SavedTensor, write_pickle
from unshard.tensors.dtypes import numpy_dtype

_StateFields = dict[str, Plain]

_OF_PROCESS = ("cpu", "numpy", "random")
_SCHEDULER = "lr_scheduler"
_SHOWN = 8
_RENAMED = {
    "lr_scheduler_state": _SCHEDULER,  # lmms-engine
    "python": "random",  # HF Trainer
    "random_state": "random",  # accelerate, with the next three
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "cpu",
    "xm_seed": "xla",
}
_DEVICE_SEED = re.compile(r"torch_(\w+)_manual_seed")


class StateWriter(Enum):
    """The tool that wrote the files, which decides what is in them."""

    EXTRA_STATE = "extra_state files"
    ACCELERATE = "accelerate's files"
    TRAINER = "HF Trainer's files"


class RankState(NamedTuple):
    """What one rank saved: `rng` by the names above, its devices as it saved them; the rest."""

    rng: _StateFields
    others: _StateFields


def rank_state(writer: StateWriter, value: Plain) -> RankState | None:
    """Return what a rank's file contains; None if that writer's files contain something else."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    fields = {_renamed(key): part for key, part in value.items()}
    match writer:
        case StateWriter.EXTRA_STATE:
            rng = fields.pop("rng", {})
        case StateWriter.ACCELERATE:
            others = {key: fields.pop(key) for key in ("step",) if key in fields}
            rng, fields = fields, others
        case StateWriter.TRAINER:
            rng, fields = fields, {}
    if not isinstance(rng, dict):
        return None
    return RankState({str(key): _numbers(key, part) for key, part in rng.items()}, fields)


def _renamed(key: str) -> str:
    seed = _DEVICE_SEED.fullmatch(key)
    return seed[1] if seed else _RENAMED.get(key, key)


def _numbers(key: Plain, value: Plain) -> Plain:
    """Return numpy's state with lists for its arrays: `weights_only` admits no arrays."""
    match value:
        case _ if key != "numpy":
            return value
        case tuple():
            return tuple(_numbers(key, part) for part in value)
        case dict():
            return {name: _numbers(key, part) for name, part in value.items()}
        case SavedTensor(source=bytes() as data):
            numbers = np.frombuffer(data, numpy_dtype(value.dtype))
            found: list[Plain] = numbers.reshape(value.shape).tolist()
            return found
    return value


def unite(states: Sequence[RankState | None]) -> tuple[_StateFields, tuple[str, ...]]:
    """Return the state of a checkpoint, and notes for the user.

    A state is None for a rank whose file is missing or cannot be read.
    """
    present = {rank: state for rank, state in enumerate(states) if state is not None}
    rng, notes = _rng(present, len(states))
    found: _StateFields = {}
    for key in dict.fromkeys(key for state in present.values() for key in state.others):
        values = [None if state is None else state.others.get(key) for state in states]
        first = next(iter(present.values())).others
        if key in first:
            found[key] = first[key]
        if len({write_pickle(values[rank]) for rank in present}) > 1:
            found[f"{key}_by_rank"] = values
            if key == _SCHEDULER:
                notes.append("lr_scheduler differs between ranks: the first rank's was taken")
    if rng:
        by_rank = [None if state is None else state.rng for state in states]
        found = {"rng": rng, "rng_by_rank": by_rank, **found}
    return found, tuple(notes)


def _rng(present: Mapping[int, RankState], world_size: int) -> tuple[_StateFields, list[str]]:
    """Return the random state by name, devices in rank order."""
    with_rng = {rank: state.rng for rank, state in present.items() if state.rng}
    if not with_rng:
        return {}, []
    first, own = next(iter(with_rng.items()))
    rng: _StateFields = {}
    notes = [f"rng is that of rank {first}: rank 0 saved none"] if first else []
    for name in dict.fromkeys(name for one in with_rng.values() for name in one):
        if name in _OF_PROCESS:
            rng |= {name: own[name]} if name in own else {}
            continue
        per_rank = {rank: one[name] for rank, one in with_rng.items() if name in one}
        if world_size == 1:
            rng[name] = _as_list(per_rank[0])
            continue
        why = _why_no_order(per_rank, world_size)
        if why:
            notes.append(f"rng.{name} was left out: {why}; what was saved is in rng_by_rank")
        else:
            rng[name] = [own_device(per_rank[rank], rank, world_size) for rank in range(world_size)]
    return rng, notes


def _as_list(value: Plain) -> list[Plain]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _why_no_order(per_rank: Mapping[int, Plain], world_size: int) -> str:
    """Return why the states of a device cannot be put into rank order; empty if they can."""
    lacking = [rank for rank in range(world_size) if rank not in per_rank]
    if lacking:
        more = " …" if len(lacking) > _SHOWN else ""
        return f"none was saved by rank {', '.join(map(str, lacking[:_SHOWN]))}{more}"
    for rank, value in per_rank.items():
        count = len(_as_list(value))
        if count == 0 or (1 < count < world_size and world_size % count):
            return f"rank {rank} saved {count} devices, of {world_size} ranks: which was its own?"
    return ""


def own_device(value: Plain, rank: int, world_size: int) -> Plain:
    """Return the state of a rank's own device, of all those that it saw.

    Trainer and accelerate save all that a process sees, ranks of a node in their order.
    """
    states = _as_list(value)
    if len(states) == 1:
        return states[0]
    return states[rank if world_size <= len(states) else rank % len(states)]
