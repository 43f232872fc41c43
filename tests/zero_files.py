"""Write ZeRO checkpoints as DeepSpeed does, by the plainest arithmetic: lay flat, pad, divide.

Real files of DeepSpeed are in `data/deepspeed.tar.xz`; these are of any sizes, groups and worlds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch

__all__ = ["ZeroModel", "save_universal", "save_zero", "zero_model"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ZeroModel:
    """What is saved.

    Attributes:
        groups: the trained parameters in float32, by group of the optimizer.
        frozen: parameters that are not trained.
        buffers: persistent buffers.
        shared: other names of parameters.
        order: all names, in the order of the state dict; None for that of the above.
        extra: what the trainer adds.
        states: what torch's optimizer has of each trained parameter.
        settings: the hyper-parameters of each group of the optimizer.
    """

    groups: Sequence[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    states: Mapping[str, Tensors] = field(default_factory=dict)
    settings: Sequence[Mapping[str, object]] = ()

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """The trained parameters."""
        return {name: value for group in self.groups for name, value in group.items()}

    @property
    def truth(self) -> dict[str, torch.Tensor]:
        """Every tensor, with the trained ones in float32, in the order of the state dict."""
        known = {**self.masters, **self.frozen, **self.buffers}
        known |= {alias: known[name] for alias, name in self.shared.items()}
        return {name: known[name] for name in self.order or known}


def zero_model(
    tensors: Tensors,
    *,
    order: Sequence[str],
    shared: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
) -> ZeroModel:
    """Return a model of tensors, of which those in float32 are trained, those in 16 bits are not.

    The rest are buffers. Trained ones are in two groups, as optimizers divide them.
    """
    trained = {name: one for name, one in tensors.items() if one.dtype == torch.float32}
    half = {torch.float16, torch.bfloat16}
    frozen = {name: one for name, one in tensors.items() if one.dtype in half}
    rest = {name: one for name, one in tensors.items() if name not in {**trained, **frozen}}
    groups = [
        {name: one for name, one in trained.items() if one.ndim > 1},
        {name: one for name, one in trained.items() if one.ndim < 2},
    ]
    return ZeroModel(groups, frozen, rest, shared or {}, order, extra or {})


def save_zero(
    directory: Path,
    model: ZeroModel,
    *,
    world: int,
    stage: int,
    ranks: Iterable[int] | None = None,
    align: int = 1,
    sub_group: int = 10**9,
    keeps_padding: bool = False,
    prefix: str = "bf16_",
) -> Path:
    """Save a model of a stage (1, 2 or 3) as `world` ranks do; the files of all ranks, or of some.

    Args:
        directory: of the tag.
        model: what is saved.
        world: ranks.
        stage: of ZeRO.
        ranks: whose files are written.
        align: each parameter of stages 1 and 2 begins at a multiple of as many elements.
        sub_group: elements of a part of the optimizer, of stage 3.
        keeps_padding: whether the last partition has its padding, as BF16_Optimizer leaves it.
        prefix: of the names of the optimizer's files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    groups = _divided(model.groups, sub_group) if stage == 3 else list(model.groups)
    for rank in range(world) if ranks is None else ranks:
        state = _model_state(model, groups, rank, world=world, stage=stage)
        if stage == 3:
            torch.save(state, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            optimizer = _stage3(groups, rank, world)
        else:
            if rank == 0:
                torch.save(state, directory / "mp_rank_00_model_states.pt")
            optimizer = _stage2(groups, rank, world, align=align, keeps_padding=keeps_padding)
            if not keeps_padding:
                optimizer["zero_stage"] = stage
        if model.settings:
            key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
            lay = partial(_laid, rank=rank, world=world, stage=stage, align=align)
            flat = [_flat_state(model, group, lay) for group in groups if group]
            optimizer[key] = {
                "state": {number: one for number, one in enumerate(flat) if one},
                "param_groups": _numbered(model, sub_group if stage == 3 else None),
            }
        saved = {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}
        torch.save(saved, directory / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return directory


def _laid(group: Tensors, *, rank: int, world: int, stage: int, align: int) -> torch.Tensor:
    """Return a rank's part of the moments of a group: with the padding that masters have lost."""
    if stage == 3:
        return torch.cat([_part(value, rank, world) for value in group.values()])
    made = _stage2([group], rank, world, align=align, keeps_padding=True)
    (flat,) = cast("list[torch.Tensor]", made["single_partition_of_fp32_groups"])
    return flat


def _flat_state(
    model: ZeroModel, group: Tensors, lay: Callable[[Tensors], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return torch's state of the flat tensor that stands for a group."""
    first = model.states.get(next(iter(group)), {})
    return {
        key: lay({name: model.states[name][key] for name in group}) if value.ndim else value
        for key, value in first.items()
    }


def _numbered(model: ZeroModel, sub_group: int | None) -> list[dict[str, object]]:
    """Return the groups of torch's optimizer, with the numbers of flat tensors."""
    found: list[dict[str, object]] = []
    at = 0
    for group, settings in zip(model.groups, model.settings, strict=True):
        count = 1 if sub_group is None else len(_divided([group], sub_group))
        found.append({**settings, "params": list(range(at, at + count))})
        at += count
    return found


def save_universal(directory: Path, model: ZeroModel) -> Path:
    """Save what `ds_to_universal` makes of a checkpoint of stage 2 on one rank."""
    (directory / "zero").mkdir(parents=True)
    state = _model_state(model, model.groups, 0, world=1, stage=2)
    torch.save(state, directory / "mp_rank_00_model_states.pt")
    for name, value in model.masters.items():
        folder = directory / "zero" / name
        folder.mkdir()
        for key, one in {"fp32": value, **model.states.get(name, {})}.items():
            saved = {"param": one.clone(), "cat_dim": 0} if one.ndim else one
            torch.save(saved, folder / f"{key}.pt")
    groups = {"param_groups": _numbered(model, None)}
    torch.save(groups, directory / "zero/optimizer_state.pt")
    return directory


def _divided(groups: Sequence[Tensors], most: int) -> list[dict[str, torch.Tensor]]:
    """Divide groups into parts of at least `most` elements, but for the last of each."""
    parts: list[dict[str, torch.Tensor]] = []
    for group in groups:
        parts.append({})
        for name, value in group.items():
            if sum(one.numel() for one in parts[-1].values()) >= most:
                parts.append({})
            parts[-1][name] = value
    return parts


def _model_state(
    model: ZeroModel, groups: Sequence[Tensors], rank: int, *, world: int, stage: int
) -> dict[str, object]:
    live = {name: value.bfloat16() for name, value in model.masters.items()}
    whole = {**live, **model.frozen, **model.buffers}
    whole |= {alias: whole[name] for alias, name in model.shared.items()}
    if stage == 3:
        whole |= {
            name: torch.empty(0, dtype=value.dtype)
            for name, value in whole.items()
            if name not in model.buffers
        }
    fragments: Tensors = model.frozen
    if stage == 3:
        fragments = {name: _part(value, rank, world) for name, value in model.frozen.items()}
    has_frozen = stage > 1
    return {
        "module": {name: whole[name] for name in model.truth},
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in group.items()} for group in groups],
        "frozen_param_shapes": (
            {name: value.shape for name, value in model.frozen.items()} if has_frozen else None
        ),
        "frozen_param_fragments": dict(fragments) if has_frozen else None,
        "shared_params": dict(model.shared) if rank == 0 else {},
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        **model.extra,
    }


def _part(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a rank's part of a tensor that is cut into equal parts, with padding of 7."""
    count = -(-value.numel() // world)
    padded = torch.full((count * world,), 7, dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * count : (rank + 1) * count].clone()


def _stage3(groups: Sequence[Tensors], rank: int, world: int) -> dict[str, object]:
    flat = [
        torch.cat([_part(value, rank, world) for value in group.values()])
        for group in groups
        if group
    ]
    return {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": flat}


def _stage2(
    groups: Sequence[Tensors], rank: int, world: int, *, align: int, keeps_padding: bool
) -> dict[str, object]:
    partitions: list[torch.Tensor] = []
    paddings: list[int] = []
    between: list[list[int]] = []
    for group in groups:
        parts: list[torch.Tensor] = []
        between.append([])
        for number, value in enumerate(group.values()):
            padding = -value.numel() % align if number < len(group) - 1 else 0
            parts += [value.reshape(-1), torch.full((padding,), 7.0)]
            between[-1].append(padding)
        flat = torch.cat([*parts, torch.empty(0)])
        size = -(-flat.numel() // (2 * world)) * 2
        padded = torch.cat([flat, torch.full((size * world - flat.numel(),), 7.0)])
        begin, end = rank * size, (rank + 1) * size
        kept = end if keeps_padding else min(max(begin, flat.numel()), end)
        partitions.append(padded[begin:kept])  # a view, as DeepSpeed's
        paddings.append(end - min(max(begin, flat.numel()), end))
    state: dict[str, object] = {
        "single_partition_of_fp32_groups": partitions,
        "group_paddings": paddings,
        "partition_count": [world] * len(groups),
    }
    if not keeps_padding:
        state["param_alignment_paddings"] = between
    return state
