"""Scheduler and random state of all ranks, united under one set of names for all writers.

    lr_scheduler   for `load_state_dict`
    rng.cpu        of the first rank, as rng.numpy and rng.random are: for `torch.set_rng_state`,
                   `numpy.random.set_state`, `random.setstate`
    rng.cuda       each rank's own device, in rank order; the same for npu, xpu, …
    rng_by_rank    the state of each rank: cpu, cuda, numpy, random; None if it is missing
    <any other>    of the first rank; if ranks differ, <any other>_by_rank too

Pure: knows values, not files. A rank's state takes about 60 KB of memory.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from unshard.containers.torch_files.writer import Plain, SavedTensor, write_pickle
from unshard.read.format import shortened
from unshard.tensors.dtypes import numpy_dtype

_StateFields = dict[str, Plain]

_OF_PROCESS = ("cpu", "numpy", "random")
_SCHEDULER = "lr_scheduler"
_MOST_SHOWN = 8
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
    """The tool that wrote the files, which decides their contents."""

    EXTRA_STATE = "extra_state files"
    ACCELERATE = "accelerate's files"
    TRAINER = "HF Trainer's files"


class RankState(NamedTuple):
    """The state of one rank: `rng` by the names above, with its devices as saved; and the rest."""

    rng: _StateFields
    others: _StateFields


def rank_state(writer: StateWriter, value: Plain) -> RankState | None:
    """Return the state in a rank's file; None if it is not of that writer's form."""
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
    """Return numpy's state with lists for its arrays, which `weights_only` does not allow."""
    match value:
        case _ if key != "numpy":
            return value
        case tuple():
            return tuple(_numbers(key, part) for part in value)
        case dict():
            return {name: _numbers(key, part) for name, part in value.items()}
        case SavedTensor(source=bytes() as data):
            numbers = np.frombuffer(data, numpy_dtype(value.dtype))
            nested: list[Plain] = numbers.reshape(value.shape).tolist()
            return nested
    return value


def unite(states: Sequence[RankState | None]) -> tuple[_StateFields, tuple[str, ...]]:
    """Return the state of a checkpoint, and notes for the user.

    A state is None for a rank whose file is missing or cannot be read.
    """
    present = {rank: state for rank, state in enumerate(states) if state is not None}
    rng, notes = _rng(present, len(states))
    fields: _StateFields = {}
    for key in dict.fromkeys(key for state in present.values() for key in state.others):
        values = [None if state is None else state.others.get(key) for state in states]
        first = next(iter(present.values())).others
        if key in first:
            fields[key] = first[key]
        if len({write_pickle(values[rank]) for rank in present}) > 1:
            fields[f"{key}_by_rank"] = values
            if key == _SCHEDULER:
                notes.append("lr_scheduler differs between ranks: the first rank's was taken")
    if rng:
        by_rank = [None if state is None else state.rng for state in states]
        fields = {"rng": rng, "rng_by_rank": by_rank, **fields}
    return fields, tuple(notes)


def _rng(present: Mapping[int, RankState], world_size: int) -> tuple[_StateFields, list[str]]:
    """Return the random state by name, devices in rank order."""
    with_rng = {rank: state.rng for rank, state in present.items() if state.rng}
    if not with_rng:
        return {}, []
    first, own = next(iter(with_rng.items()))
    rng: _StateFields = {}
    notes = [f"rng is that of rank {first}: rank 0 saved none"] if first else []
    for name in dict.fromkeys(name for states in with_rng.values() for name in states):
        if name in _OF_PROCESS:
            rng |= {name: own[name]} if name in own else {}
            continue
        per_rank = {rank: states[name] for rank, states in with_rng.items() if name in states}
        if world_size == 1:
            rng[name] = _as_list(per_rank[0])
            continue
        if why := _why_no_order(per_rank, world_size):
            notes.append(f"rng.{name} was left out: {why}; the saved states are in rng_by_rank")
        else:
            rng[name] = [own_device(per_rank[rank], rank, world_size) for rank in range(world_size)]
    return rng, notes


def _as_list(value: Plain) -> list[Plain]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _why_no_order(per_rank: Mapping[int, Plain], world_size: int) -> str:
    """Return why the states of a device cannot be put into rank order; empty if they can."""
    lacking = [str(rank) for rank in range(world_size) if rank not in per_rank]
    if lacking:
        return f"none was saved by rank {shortened(lacking, _MOST_SHOWN)}"
    for rank, value in per_rank.items():
        count = len(_as_list(value))
        if count == 0 or (1 < count < world_size and world_size % count):
            return f"rank {rank} saved {count} devices, of {world_size} ranks: its own is unknown"
    return ""


def own_device(value: Plain, rank: int, world_size: int) -> Plain:
    """Return the state of a rank's own device among those that it saved.

    Trainer and accelerate save all devices that a process sees, with the ranks of a node in order.
    """
    states = _as_list(value)
    if len(states) == 1:
        return states[0]
    return states[rank if world_size <= len(states) else rank % len(states)]
