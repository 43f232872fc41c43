"""What the pickles of ZeRO say: shapes in the order of the flattening, and the flat tensors.

Nothing of DeepSpeed is imported: its enums and fragments stay inert records. What a trainer adds to
the files (`client_state`) is looked at by its name only.

Source: DeepSpeed 0.19.8, `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/bf16_optimizer.py`; 0.16.4 where it differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unshard.containers.pickles.records import Record, Value
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.format import shortened
from unshard.read.torch_save.state_dict import ShortStorageError, start_of
from unshard.read.torch_save.values import (
    TensorFormError,
    ints,
    items_of,
    named,
    read_view,
    sizes_of,
)
from unshard.read.zero.files import is_zero_file
from unshard.read.zero.flat import Run
from unshard.read.zero.steps import stated_steps
from unshard.tensors.boxes import is_row_major
from unshard.tensors.dtypes import DType

_MOST_RANKS, _MOST_STEPS = 99_999, 1 << 53
# What an engine writes about itself; all other values are the trainer's, and are listed.
_BOOKKEEPING = frozenset(
    """
    module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params
    optimizer lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps
    global_steps global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions
    num_experts ds_config ds_version csr_tensor_module_names
    """.split()
)
_AUTOEP = "ds_autoep_layers"
_PARTITION_GROUPS = "ds_zero_partition_groups"

Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """A file of model states.

    Attributes:
        file: the open file, which has the storages.
        module: the model's state dict; of stage 3 its parameters have no elements.
        buffers: the names in it that are buffers.
        groups: the shapes of trained parameters, by group of the optimizer, in flat order.
        frozen: the shapes of parameters that are not trained; None where they are not stated.
        fragments: what the rank has of those.
        shared: names of parameters that are others under another name.
        world_size: data parallel; None where it is not stated.
        step: how many steps were made; None where it is not stated.
        stage: of ZeRO, as the config of DeepSpeed says; None if it does not.
        is_bf16: whether that config trains in bfloat16.
        others: values that the trainer added.
    """

    file: TorchFile
    module: Mapping[str, Value]
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    frozen: Shapes | None
    fragments: Mapping[str, Value]
    shared: Mapping[str, str]
    world_size: int | None
    step: int | None
    stage: int | None
    is_bf16: bool
    others: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.file.path


@dataclass(frozen=True, slots=True, eq=False)
class OptimState:
    """What a rank has of the optimizer.

    Attributes:
        file: the open file.
        is_stage3: whether each parameter is cut over all ranks, else each group is.
        flat: the float32 weights: of stage 3 parts of all parameters, else a part of each group.
        world_size: data parallel: the number of such files.
        paddings: elements after each parameter of each group, which only align the next one.
        base: the state of torch's optimizer, whose moments are cut like the weights.
        steps: how many steps were made, by the number of the flat tensor; as far as it is stated.
    """

    file: TorchFile
    is_stage3: bool
    flat: tuple[Value, ...]
    world_size: int
    paddings: tuple[tuple[int, ...], ...] | None
    base: Value
    steps: Mapping[int, float]

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.file.path


def read_model_state(path: Path, *, may_be_sliced: bool = False) -> ModelState:
    """Read what a file of model states says; of slices only if they are not needed.

    Raises:
        CheckpointError: it cannot be read, or is not one.
        NotMergeableError: it has parts of tensors that it does not place.
    """
    file = _opened(path)
    top = items_of(file.value)
    if top is None or not isinstance(top.get("module"), Record | dict):
        found = "a dict without module" if top is not None else named(file.value)
        raise CorruptError(f"{path}: not a file of DeepSpeed's model states", found=found)
    if not may_be_sliced:
        _refuse_parts(path, top)
    config = items_of(top.get("ds_config")) or {}
    world = top.get("dp_world_size")
    return ModelState(
        file,
        _items(path, "module", top["module"]),
        frozenset(one for one in _listed(path, "buffer_names", top) if isinstance(one, str)),
        _groups(path, top.get("param_shapes")),
        _optional(_shapes, path, "frozen_param_shapes", top),
        _optional(_items, path, "frozen_param_fragments", top) or {},
        _shared(path, top.get("shared_params")),
        None if world is None else _ranks(path, "dp_world_size", world),
        _step_of(top.get("global_steps")),
        _stage_of((items_of(config.get("zero_optimization")) or {}).get("stage")),
        bool((items_of(config.get("bf16")) or {}).get("enabled")),
        tuple(name for name in top if name not in _BOOKKEEPING),
    )


def read_optim_state(path: Path) -> OptimState:
    """Read what a file of a rank's optimizer says.

    Raises:
        CheckpointError: it cannot be read, or is not one.
        NotMergeableError: it has no float32 weights, or partitions of an unknown kind.
    """
    file = _opened(path)
    state = items_of((items_of(file.value) or {}).get("optimizer_state_dict"))
    if state is None:
        raise CorruptError(f"{path}: not a file of ZeRO's optimizer states")
    if _PARTITION_GROUPS in state:
        raise NotMergeableError(
            f"{path}: partitions of groups of ranks: experts of DeepSpeed's AutoEP",
            expected="partitions over all data parallel ranks",
            hint="make a universal checkpoint of it with ds_to_universal, and give that",
        )
    is_stage3 = "fp32_flat_groups" in state
    flat = state.get("fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups")
    if not isinstance(flat, list):
        raise NotMergeableError(
            f"{path}: has no float32 weights",
            expected="fp32_flat_groups (stage 3) or single_partition_of_fp32_groups (1 and 2)",
            found=shortened(list(state), 8),
        )
    counts = state.get("partition_count")
    each = counts if isinstance(counts, list) else [counts]
    world = max((_ranks(path, "partition_count", one) for one in each), default=1)
    paddings = _paddings(path, state.get("param_alignment_paddings"))
    base = state.get("optimizer_state_dict" if is_stage3 else "base_optimizer_state")
    kept = None if "zero_stage" in state else state.get("group_paddings")  # of BF16_Optimizer
    steps = stated_steps(file, base, flat, kept)
    return OptimState(file, is_stage3, tuple(flat), world, paddings, base, steps)


def flat_run(file: TorchFile, value: Value, *, rank: int, number: int) -> tuple[DType, Run]:
    """Return the dtype of a flat tensor, and where its elements are.

    Args:
        file: the file that has it.
        value: its pickle.
        rank: the rank that wrote it.
        number: of the file, among those being read.

    Raises:
        CorruptError: it is not flat, or not all there.
    """
    try:
        view = read_view(value)
        start = start_of(file, view)
    except (TensorFormError, ShortStorageError) as error:
        raise CorruptError(f"{file.path}: a partition cannot be read: {error}") from error
    if len(view.sizes) != 1 or not is_row_major(view.sizes, view.strides):
        raise CorruptError(
            f"{file.path}: a partition that is not flat", found=f"sizes {list(view.sizes)[:8]}"
        )
    return view.dtype, Run(rank, number, start, view.sizes[0])


def _opened(path: Path) -> TorchFile:
    """Open a file; nothing in it says which rank it is of, but the name that torch gave it."""
    file = read_torch_file(path)
    if is_zero_file(f"{file.root}.pt") and file.root != path.stem:
        raise CorruptError(
            f"{path}: was saved as {file.root}.pt",
            hint="the name says which rank's part it is: give it that name again",
        )
    return file


def _refuse_parts(path: Path, top: Mapping[str, Value]) -> None:
    if _AUTOEP in top:
        raise NotMergeableError(
            f"{path}: experts of DeepSpeed's AutoEP, which rank has which is not recorded",
            expected="data parallelism alone",
        )
    slices = top.get("mp_world_size")
    degrees = items_of(top.get("checkpoint_parallel_dimensions")) or {}
    if any(isinstance(one, int) and one > 1 for one in (slices, *degrees.values())):
        raise NotMergeableError(
            f"{path}: slices of tensor or pipeline parallelism",
            expected="data parallelism alone: mp_world_size 1",
            found=f"mp_world_size {named(slices)}",
            hint="make a universal checkpoint of it with ds_to_universal, and give that",
        )


def _bad(path: Path, name: str, value: Value, expected: str) -> CorruptError:
    return CorruptError(f"{path}: {name} is not valid", expected=expected, found=named(value))


def _items(path: Path, name: str, value: Value) -> Mapping[str, Value]:
    items = items_of(value)
    if items is None:
        raise _bad(path, name, value, "a dict by name")
    return items


def _optional(
    read: Callable[[Path, str, Value], T], path: Path, name: str, top: Mapping[str, Value]
) -> T | None:
    return None if top.get(name) is None else read(path, name, top[name])


def _listed(path: Path, name: str, top: Mapping[str, Value]) -> list[Value]:
    value = top.get(name)
    if value is not None and not isinstance(value, list):
        raise _bad(path, name, value, "a list")
    return value or []


def _shapes(path: Path, name: str, value: Value) -> Shapes:
    try:
        return {key: sizes_of(size) for key, size in _items(path, name, value).items()}
    except TensorFormError as error:
        raise CorruptError(f"{path}: {name} is not valid: {error}") from error


def _groups(path: Path, value: Value) -> tuple[Shapes, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _bad(path, "param_shapes", value, "a list of dicts, one per group of the optimizer")
    groups = tuple(_shapes(path, "param_shapes", one) for one in value)
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name in seen:
            raise CorruptError(f"{path}: param_shapes names {name[:200]} twice")
        seen.add(name)
    return groups


def _shared(path: Path, value: Value) -> Mapping[str, str]:
    shared = {} if value is None else _items(path, "shared_params", value)
    found = {alias: name for alias, name in shared.items() if isinstance(name, str)}
    if len(found) != len(shared):
        raise _bad(path, "shared_params", value, "names by name")
    return found


def _ranks(path: Path, name: str, value: Value) -> int:
    if type(value) is not int or not 0 < value <= _MOST_RANKS:
        raise _bad(path, name, value, f"a number of ranks, 1 to {_MOST_RANKS:,}")
    return value


def _step_of(value: Value) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_STEPS else None


def _stage_of(value: Value) -> int | None:
    if isinstance(value, Record) and value.args:  # ZeroStageEnum(3)
        value = value.args[0]
    return value if type(value) is int else None


def _paddings(path: Path, value: Value) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    try:
        found = tuple(ints(one) for one in (value if isinstance(value, list) else [value]))
    except TensorFormError as error:
        raise CorruptError(f"{path}: param_alignment_paddings is not valid: {error}") from error
    if any(one < 0 for group in found for one in group):
        raise CorruptError(f"{path}: param_alignment_paddings has a negative number")
    return found
