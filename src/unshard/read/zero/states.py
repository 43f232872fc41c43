"""Reads ZeRO's pickles: shapes in the order of the flattening, and the flat tensors.

Nothing of DeepSpeed is imported: its enums and fragments stay inert records. Of the values that a
trainer adds (`client_state`), only the names are used.

Source: DeepSpeed 0.19.8, `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/bf16_optimizer.py`; 0.16.4 where it differs.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

from unshard.containers.open_files import opened
from unshard.containers.pickles.records import Record, Value
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.format import shortened
from unshard.read.optimizer_state import read_numbers
from unshard.read.torch_save.state_dict import ShortStorageError, start_of
from unshard.read.torch_save.values import (
    StorageView,
    TensorFormError,
    ints,
    is_tensor,
    items_of,
    named,
    read_view,
    sizes_of,
)
from unshard.read.zero.files import TO_UNIVERSAL, is_zero_file
from unshard.read.zero.flat import FlatRun
from unshard.tensors.boxes import is_row_major
from unshard.tensors.dtypes import DType

_MOST_RANKS = 99_999
_MOST_STEPS = 1 << 53  # a larger number is damage, or an attack
# The keys that DeepSpeed's engine writes; all others are the trainer's, and are listed.
_BOOKKEEPING = frozenset(
    """
    module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params
    optimizer lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps
    global_steps global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions
    num_experts ds_config ds_version csr_tensor_module_names
    """.split()
)

Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")


class ModelState(NamedTuple):
    """The contents of a file of model states.

    Attributes:
        file: the open file, which has the storages.
        module: the model's state dict; of stage 3 its parameters have no elements.
        buffers: the names in it that are buffers.
        groups: the shapes of trained parameters, by group of the optimizer, in flat order.
        frozen: the shapes of parameters that are not trained; None if they are not recorded.
        fragments: the rank's parts of those.
        shared: names of tied parameters: alias -> name.
        world_size: data parallel; None if missing.
        step: optimizer steps; None if missing.
        stage: of ZeRO, from the config of DeepSpeed; None if missing.
        is_bf16: whether that config trains in bfloat16.
        others: names of the values that the trainer added.
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


class OptimState(NamedTuple):
    """A rank's part of the optimizer.

    Attributes:
        file: the open file.
        is_stage3: whether each parameter is cut over all ranks, else each group is.
        flat: the float32 weights: of stage 3 parts of all parameters, else a part of each group.
        world_size: data parallel: the number of such files.
        paddings: elements after each parameter of each group, which only align the next one.
        base: the state of torch's optimizer, whose moments are cut like the weights.
        steps: the optimizer steps of each flat tensor, by its number, where they are recorded.
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
    """Read a file of model states; with `may_be_sliced`, also one of tensor parallelism.

    Raises:
        CheckpointError: it cannot be read, or is not such a file.
        NotMergeableError: it has parts of tensors without their places.
    """
    file = _opened(path)
    top = items_of(file.value)
    if top is None or not isinstance(top.get("module"), Record | dict):
        found = "a dict without module" if top is not None else named(file.value)
        raise CorruptError(f"{path}: not a file of DeepSpeed's model states", found=found)
    if not may_be_sliced:
        _refuse_parts(path, top)
    config = items_of(top.get("ds_config")) or {}
    step = top.get("global_steps")
    return ModelState(
        file,
        _items(path, "module", top["module"]),
        frozenset(name for name in _listed(path, "buffer_names", top) if isinstance(name, str)),
        _groups(path, top.get("param_shapes")),
        _optional(_shapes, path, "frozen_param_shapes", top),
        _optional(_items, path, "frozen_param_fragments", top) or {},
        _shared(path, top.get("shared_params")),
        _optional(_ranks, path, "dp_world_size", top),
        step if type(step) is int and 0 <= step < _MOST_STEPS else None,
        _stage_of((items_of(config.get("zero_optimization")) or {}).get("stage")),
        bool((items_of(config.get("bf16")) or {}).get("enabled")),
        tuple(name for name in top if name not in _BOOKKEEPING),
    )


def read_optim_state(path: Path) -> OptimState:
    """Read the file of a rank's optimizer.

    Raises:
        CheckpointError: it cannot be read, or is not such a file.
        NotMergeableError: it has no float32 weights, or partitions of an unknown kind.
    """
    file = _opened(path)
    state = items_of((items_of(file.value) or {}).get("optimizer_state_dict"))
    if state is None:
        raise CorruptError(f"{path}: not a file of ZeRO's optimizer states")
    if "ds_zero_partition_groups" in state:
        raise NotMergeableError(
            f"{path}: partitions of groups of ranks: experts of DeepSpeed's AutoEP",
            expected="partitions over all data parallel ranks",
            hint=TO_UNIVERSAL,
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
    world = max((_ranks(path, "partition_count", count) for count in each), default=1)
    paddings = _paddings(path, state.get("param_alignment_paddings"))
    base = state.get("optimizer_state_dict" if is_stage3 else "base_optimizer_state")
    # BF16_Optimizer alone leaves the padding at the ends of the flat tensors.
    end_padding = None if "zero_stage" in state else state.get("group_paddings")
    steps = _recorded_steps(file, base, flat, end_padding)
    return OptimState(file, is_stage3, tuple(flat), world, paddings, base, steps)


def _recorded_steps(
    file: TorchFile, base: Value, flat: Sequence[Value], end_padding: Value
) -> Mapping[int, float]:
    """Return the steps in the state of torch's optimizer, by the number of the flat tensor.

    A flat tensor that is all padding does not count: a rank that resumes from a universal
    checkpoint has no step for it. `end_padding` is a list of elements, if there is any.
    """
    paddings: list[Value] = [0] * len(flat)
    if isinstance(end_padding, list) and len(end_padding) == len(flat):
        paddings = end_padding
    by_number = base_states(base)
    steps: dict[int, float] = {}
    for number, (value, padding) in enumerate(zip(flat, paddings, strict=True)):
        step = number_in(file, (items_of(by_number.get(number)) or {}).get("step"))
        view = _view_or_none(value)
        elements = 0 if view is None else prod(view.sizes)
        if step is not None and isinstance(padding, int) and elements > padding:
            steps[number] = step
    return steps


def base_states(base: Value) -> Mapping[int, Value]:
    """Return the states of flat tensors in the state dict of torch's optimizer, by number."""
    state = (items_of(base) or {}).get("state")
    states = state.items() if isinstance(state, dict) else ()
    # The hashes of a pickle's keys are salted against collisions; plain integers are not.
    return {int(key): value for key, value in states if isinstance(key, int)}


def number_in(file: TorchFile, value: Value) -> float | None:
    """Return a number, or that of a tensor of one element; None for anything else."""
    number = _element(file, value) if is_tensor(value) else value
    return number if isinstance(number, int | float) and abs(number) < _MOST_STEPS else None


def _element(file: TorchFile, value: Value) -> object:
    view = _view_or_none(value)
    if view is None or prod(view.sizes) != 1:
        return None
    try:
        start = start_of(file, view)
    except ShortStorageError:
        return None
    with opened(file.path) as stream:
        return read_numbers(stream, [(view.dtype, start)])[0]


def _view_or_none(value: Value) -> StorageView | None:
    try:
        return read_view(value)
    except TensorFormError:
        return None


def flat_run(file: TorchFile, value: Value, *, rank: int, number: int) -> tuple[DType, FlatRun]:
    """Return the dtype of a flat tensor that a rank pickled into file `number`, and its elements.

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
    return view.dtype, FlatRun(rank, number, start, view.sizes[0])


def _opened(path: Path) -> TorchFile:
    """Open a file; only the name that torch gave it shows which rank it belongs to."""
    file = read_torch_file(path)
    if is_zero_file(f"{file.root}.pt") and file.root != path.stem:
        raise CorruptError(
            f"{path}: was saved as {file.root}.pt",
            hint="the name has the rank of the part: rename it back",
        )
    return file


def _refuse_parts(path: Path, top: Mapping[str, Value]) -> None:
    if "ds_autoep_layers" in top:
        raise NotMergeableError(
            f"{path}: experts of DeepSpeed's AutoEP; the ranks of the experts are not recorded",
            expected="data parallelism alone",
        )
    slices = top.get("mp_world_size")
    degrees = items_of(top.get("checkpoint_parallel_dimensions")) or {}
    if any(isinstance(degree, int) and degree > 1 for degree in (slices, *degrees.values())):
        raise NotMergeableError(
            f"{path}: slices of tensor or pipeline parallelism",
            expected="data parallelism alone: mp_world_size 1",
            found=f"mp_world_size {named(slices)}",
            hint=TO_UNIVERSAL,
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
    groups = tuple(_shapes(path, "param_shapes", group) for group in value)
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name in seen:
            raise CorruptError(f"{path}: param_shapes has {name[:200]} twice")
        seen.add(name)
    return groups


def _shared(path: Path, value: Value) -> Mapping[str, str]:
    shared = {} if value is None else _items(path, "shared_params", value)
    if not all(isinstance(name, str) for name in shared.values()):
        raise _bad(path, "shared_params", value, "names by name")
    return {alias: str(name) for alias, name in shared.items()}


def _ranks(path: Path, name: str, value: Value) -> int:
    if type(value) is not int or not 0 < value <= _MOST_RANKS:
        raise _bad(path, name, value, f"a number of ranks, 1 to {_MOST_RANKS:,}")
    return value


def _stage_of(value: Value) -> int | None:
    if isinstance(value, Record) and value.args:  # ZeroStageEnum(3)
        value = value.args[0]
    return value if type(value) is int else None


def _paddings(path: Path, value: Value) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    try:
        paddings = tuple(ints(group) for group in (value if isinstance(value, list) else [value]))
    except TensorFormError as error:
        raise CorruptError(f"{path}: param_alignment_paddings is not valid: {error}") from error
    if any(size < 0 for group in paddings for size in group):
        raise CorruptError(f"{path}: param_alignment_paddings has a negative number")
    return paddings
