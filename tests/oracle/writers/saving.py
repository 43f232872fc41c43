"""Save one rank's file as the trainers do, read it back, and hold it against the truth.

Knows the name of a rank file and how to compare tensors bit for bit; knows no scenario.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "accelerate_rank_file",
    "copy_state",
    "equal_bits",
    "gather",
    "leave_truth",
    "logits_file",
    "rank_file",
    "save_rank",
    "truth_file",
]

_NOT_IN_GLOO = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

State = Mapping[str, torch.Tensor]


def rank_file(directory: Path, world: int, rank: int) -> Path:
    """Return where verl and lmms-engine put the model's shards of one rank."""
    return directory / f"model_world_size_{world}_rank_{rank}.pt"


def accelerate_rank_file(directory: Path, rank: int) -> Path:
    """Return where accelerate puts the first model's shards of one rank, without DCP."""
    return directory / f"pytorch_model_fsdp_0_rank{rank}.bin"


def truth_file(directory: Path) -> Path:
    """Return where rank 0 leaves the whole tensors: next to the checkpoint, never in it."""
    return directory.parent / f"{directory.name}.truth"


def logits_file(directory: Path) -> Path:
    """Return where rank 0 leaves what the live model makes of a few tokens, likewise."""
    return directory.parent / f"{directory.name}.logits"


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit agree, so that NaN equals NaN and 0.0 not -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def save_rank(
    place: tuple[int, int, Path],
    state: State,
    truth: State,
    *,
    parts: Collection[str] = (),
    path: Path | None = None,
) -> None:
    """Write a rank file, make sure that torch reads it back, and leave the truth on rank 0.

    Every rank must call it: DTensors are gathered to compare them with the truth.

    Args:
        place: rank, world size and the checkpoint's directory.
        state: what to save; DTensors and plain tensors by name.
        truth: the same names with whole, plain tensors.
        parts: plain tensors of `state` that hold only this rank's part of the truth.
        path: the rank's file; `rank_file` names it unless given.

    Raises:
        AssertionError: torch reads back something else, or gathers something else than the truth.
    """
    rank, world, directory = place
    path = path or rank_file(directory, world, rank)
    torch.save(state, path)
    _check_readable(path, state)
    _check_truth(state, truth, parts)
    leave_truth(place, truth)


def leave_truth(place: tuple[int, int, Path], truth: State) -> None:
    """Write the whole tensors next to the checkpoint, on rank 0."""
    rank, _, directory = place
    if rank == 0:
        whole = {name: tensor.detach().contiguous() for name, tensor in truth.items()}
        torch.save(whole, truth_file(directory))


def copy_state(model: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Return the model's state dict as it is now, apart from the model."""
    state = model.state_dict()
    return OrderedDict((name, tensor.detach().clone()) for name, tensor in state.items())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_readable(path: Path, state: State) -> None:
    loaded = torch.load(path, weights_only=False)
    assert list(loaded) == list(state)
    for name, tensor in state.items():
        again = loaded[name]
        assert isinstance(again, DTensor) == isinstance(tensor, DTensor), name
        assert again.shape == tensor.shape, name
        assert _local(again).stride() == _local(tensor).stride(), name
        assert equal_bits(_local(again), _local(tensor)), name
        if isinstance(again, DTensor) and isinstance(tensor, DTensor):
            assert again.placements == tensor.placements, name


def gather(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor; its bytes are gathered where gloo does not know the dtype."""
    if tensor.dtype not in _NOT_IN_GLOO:
        return tensor.full_tensor()
    shape = torch.Size((*tensor.shape, tensor.dtype.itemsize))
    octets = DTensor.from_local(
        tensor.to_local().contiguous().unsqueeze(-1).view(torch.uint8),
        tensor.device_mesh,
        tensor.placements,
        shape=shape,
        stride=torch.empty(shape).stride(),
    )
    return octets.full_tensor().view(tensor.dtype).squeeze(-1)


def _check_truth(state: State, truth: State, parts: Collection[str]) -> None:
    assert list(truth) == list(state)
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            assert equal_bits(gather(tensor), truth[name]), name
        elif name not in parts:
            assert equal_bits(tensor, truth[name]), name
