"""Unites the partitions, model states and folders of a ZeRO checkpoint into tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.console import having, plain
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, raise_all
from unshard.read.format import Location, ReadOptions, shortened
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.values import is_tensor
from unshard.read.wrapper_names import names_without_wrappers
from unshard.read.zero.files import ZeroFiles, find_files
from unshard.read.zero.flat import FlatCuts
from unshard.read.zero.masters import frozen_of_ranks, unflattened
from unshard.read.zero.states import (
    ModelState,
    OptimState,
    Shapes,
    read_model_state,
    read_optim_state,
)
from unshard.read.zero.universal import FILE, universal_tensors
from unshard.tensors.catalog import ByteRange, Catalog, Skipped, TensorEntry

_COPY_FILES = "copy the files here from the nodes that wrote them, or take another checkpoint"
_TWO_SAVES = "files of two saves are in one directory: move the older ones elsewhere"
_Tensors = Mapping[str, TensorEntry]


def open_zero(location: Location, options: ReadOptions) -> "Reading":
    """Read the model's file of a checkpoint.

    Raises:
        CheckpointError: it is missing, or cannot be read.
    """
    files = find_files(location)
    may_be_sliced = bool(files.universal) and not files.optim
    state = read_model_state(_model_file(files), may_be_sliced=may_be_sliced)
    return Reading(files, state, options)


def read_weights(location: Location, options: ReadOptions) -> Catalog:
    """Return the float32 weights of a checkpoint, or those in the dtype of training.

    Raises:
        CheckpointError: a file is missing, cannot be read, or contradicts another.
    """
    reading = open_zero(location, options)
    if location.weights == "module" or _is_of_stage0(reading.files, reading.state):
        return reading.of_module(is_asked=location.weights == "module")
    if reading.files.universal and not reading.files.optim:
        return reading.of_universal()
    return reading.of_partitions()


def frozen_names(location: Location) -> list[str]:
    """Return the names of the parameters that were not trained, without names of wrappers.

    Raises:
        CheckpointError: the model's file cannot be read.
    """
    state = read_model_state(_model_file(find_files(location)))
    tensors = [name for name, value in state.module.items() if is_tensor(value)]
    if state.frozen is not None:
        frozen = list(state.frozen)
    elif state.groups is None:
        frozen = []
    else:
        others = {*_trained(state), *state.buffers, *state.shared}
        frozen = [name for name in tensors if name not in others]
    aliases = [alias for alias, name in state.shared.items() if name in frozen]
    # All names, as `unwrapped` needs: whether a part is a wrapper's depends on the other names.
    every = dict.fromkeys((*tensors, *_trained(state), *state.shared, *frozen))
    names = names_without_wrappers(list(every))
    return [names[name] for name in (*frozen, *aliases)]


def _model_file(files: ZeroFiles) -> Path:
    """Return the file with the names of all parameters: of stage 3 that of rank 0."""
    if files.model is not None and files.models:
        raise CorruptError(
            f"{files.directory}: has files of two saves: stage 3 and a lower stage",
            found=f"{files.models[min(files.models)].name} and {files.model.name}",
            hint="move those of the older save elsewhere",
        )
    path = files.model or files.models.get(0)
    if path is None:
        name = "zero_pp_rank_0_mp_rank_00" if files.models else "mp_rank_00"
        raise IncompleteError(
            f"{files.directory}: {name}_model_states.pt is missing, which has the names",
            hint=_COPY_FILES,
        )
    return path


def is_stage0(location: Location) -> bool:
    """Return whether ZeRO was off: then no float32 weights have names.

    Raises:
        CheckpointError: the model's file cannot be read.
    """
    files = find_files(location)
    if files.model is None:
        return False
    return _is_of_stage0(files, read_model_state(_model_file(files), may_be_sliced=True))


def _is_of_stage0(files: ZeroFiles, state: ModelState) -> bool:
    return not (files.optim or files.models or files.universal or state.groups or state.stage)


@dataclass(slots=True)
class Reading:
    """A checkpoint that is being read; `state` is that of the model's file."""

    files: ZeroFiles
    state: ModelState
    options: ReadOptions
    notes: list[str] = field(default_factory=list)

    def of_module(self, *, is_asked: bool) -> Catalog:
        """Return the weights in the dtype of training, where they are whole."""
        if self.files.models:
            raise NotMergeableError(
                f"{self.state.path}: stage 3 has no whole weights in the dtype of training",
                expected="stage 0, 1 or 2",
                hint="leave ⟦--weights module⟧ out to merge the float32 weights, and cast them: "
                "⟦--dtype bfloat16⟧",
            )
        if not is_asked:
            self.notes.append(
                "ZeRO stage 0: the weights are those of the model; the float32 weights of its "
                "optimizer have no names"
            )
        paths = (self.state.path,)
        return self._catalog(self._module_tensors(paths), paths, self.state.world_size or 1)

    def of_universal(self) -> Catalog:
        """Return the tensors of a universal checkpoint, and those of the model's files alone."""
        folders = self.folders()
        ranks = self._states_with_frozen()
        paths = (*(state.path for state in ranks), *(path / FILE for path in folders.values()))
        masters = universal_tensors(folders, self._shapes(), paths, len(ranks), file=FILE)
        world = self.state.world_size or 1
        return self._catalog(self._united(masters, ranks, paths), paths, world)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters; none if the model's file has slices."""
        return {} if self.files.is_sliced else _trained(self.state)

    def folders(self) -> dict[str, Path]:
        """Return the folders of the trained parameters of a universal checkpoint, by name."""
        state, shapes = self.state, self._shapes()
        not_trained = {*state.buffers, *state.shared, *(state.frozen or ())}
        folders = (path for path in self.files.universal if path.name not in not_trained)
        return {path.name: path for path in folders if not shapes or path.name in shapes}

    def of_partitions(self) -> Catalog:
        """Return the float32 weights, and the tensors of the model's files alone."""
        states, groups = self.partitions()
        ranks = self._states_with_frozen()
        paths = (*(state.path for state in ranks), *(state.path for state in states))
        masters = unflattened(states, groups, paths, len(ranks))
        return self._catalog(self._united(masters, ranks, paths), paths, len(states))

    def partitions(self) -> tuple[list[OptimState], tuple[Shapes, ...]]:
        """Return the optimizer's parts of all ranks, and the shapes of its groups."""
        states = [read_optim_state(path) for path in self._optim_paths()]
        for state in states:
            if state.world_size != len(states) or state.is_stage3 != bool(self.files.models):
                raise CorruptError(
                    f"{state.path}: was not saved together with {self.state.path.name}",
                    expected=f"{len(states)} ranks of stage {3 if self.files.models else '1 or 2'}",
                    found=f"{state.world_size} ranks of stage {3 if state.is_stage3 else '1 or 2'}",
                    hint=_TWO_SAVES,
                )
        _check_steps(states)
        if self.state.groups is None:
            raise NotMergeableError(
                f"{self.state.path}: has no param_shapes, which DeepSpeed writes since 0.6"
            )
        return states, self.state.groups

    def _optim_paths(self) -> list[Path]:
        """Return the files of the optimizer, of every rank of this save."""
        kinds = self.files.optim
        kind = "bf16_" if self.state.is_bf16 else ""
        if kind not in kinds and len(kinds) == 1:
            kind = next(iter(kinds))
        by_rank = kinds.get(kind, {})
        world = self.state.world_size
        if world is None:
            world = read_optim_state(by_rank[min(by_rank)]).world_size if by_rank else 1
        missing = [rank for rank in range(world) if rank not in by_rank]
        if missing:
            raise self._missing(missing, f"{kind}zero_pp_rank_*_mp_rank_00_optim_states.pt", world)
        stale = sum(map(len, kinds.values())) - world
        if stale:
            self.notes.append(
                f"{self.files.directory}: left out {stale} stale files of other saves"
            )
        return [by_rank[rank] for rank in range(world)]

    def _missing(self, ranks: Sequence[int], name: str, world: int) -> IncompleteError:
        names = [name.replace("*", str(rank)) for rank in ranks]
        is_whole = self.files.model is not None
        return IncompleteError(
            f"{self.files.directory}: Missing checkpoint for rank "
            f"{shortened([str(rank) for rank in ranks], 16)} of world size {world}",
            expected=shortened(names, 4),
            hint=_COPY_FILES
            + ("; the weights in the dtype of training are whole: ⟦+--weights module⟧" * is_whole),
        )

    def _states_with_frozen(self) -> list[ModelState]:
        """Return the model's file, and other ranks' files if they have parts of parameters."""
        if not (self.files.models and self.state.frozen):
            return [self.state]
        world = self.state.world_size or len(self.files.models)
        missing = [rank for rank in range(world) if rank not in self.files.models]
        if missing:
            raise self._missing(missing, "zero_pp_rank_*_mp_rank_00_model_states.pt", world)
        others = [read_model_state(self.files.models[rank]) for rank in range(1, world)]
        for state in others:
            _check_same_save(self.state, state)
        return [self.state, *others]

    def _module_tensors(self, paths: tuple[Path, ...]) -> dict[str, TensorEntry]:
        """Return the tensors of the model's file, where stage 3's parameters have no elements."""
        gathered = Gathering()
        items = {name: value for name, value in self.state.module.items() if is_tensor(value)}
        allowed = self.options.allowed_globals
        gathered.add(tensors_of(self.state.file, items, rank=0, file_number=0, allowed=allowed))
        summary = f"{self.state.path}: the model's tensors cannot be read"
        raise_all(NotMergeableError, summary, gathered.problems)
        return gathered.entries(paths)

    def _united(
        self, masters: _Tensors, ranks: Sequence[ModelState], paths: tuple[Path, ...]
    ) -> _Tensors:
        """Return all tensors in the order of the model: float32 weights, and all others."""
        state = self.state
        own = {} if self.files.is_sliced else self._module_tensors(paths)
        tensors = {**masters}
        if self.files.models and state.frozen:
            tensors |= frozen_of_ranks(ranks, state.frozen, FlatCuts(paths))
        aliases = {**_aliases(own, masters), **state.shared}
        lost = []
        for name, entry in own.items():
            target = aliases.get(name)
            if name in tensors:
                continue
            if target is not None and target in tensors:
                tensors[name] = replace(tensors[target], fqn=name)
            elif self.files.models and 0 in entry.shape and name not in state.buffers:
                lost.append(name)
            else:
                tensors[name] = entry
        if lost:
            raise _without_values(state.path, lost)
        for alias, name in state.shared.items():
            if alias not in tensors and name in tensors:
                tensors[alias] = replace(tensors[name], fqn=alias)
        return {name: tensors[name] for name in dict.fromkeys((*own, *tensors))}

    def _catalog(self, tensors: _Tensors, paths: tuple[Path, ...], world: int) -> Catalog:
        reason = "not a weight: the trainer saved it with the model"
        return Catalog(
            writer="DeepSpeed",
            world_size=world,
            tensors=tensors,
            skipped=tuple(Skipped(name, reason) for name in self.state.others),
            archives=tuple(ByteRange(path, 0, path.stat().st_size) for path in paths),
            notes=tuple(self.notes),
        )


def _check_same_save(first: ModelState, other: ModelState) -> None:
    """Raise if two ranks' files of the model contradict each other."""
    facts = (
        ("dp_world_size", first.world_size, other.world_size),
        ("global_steps", first.step, other.step),
        ("the stage of ZeRO", first.stage, other.stage),
        ("frozen_param_shapes", first.frozen, other.frozen),
    )
    for key, expected, found in facts:
        if expected is not None and found is not None and expected != found:
            raise CorruptError(
                f"{other.path}: was not saved together with {first.path.name}: "
                f"they differ in {key}",
                expected="" if isinstance(expected, Mapping) else str(expected),
                found="" if isinstance(found, Mapping) else str(found),
                hint=_TWO_SAVES,
            )


def _check_steps(ranks: Iterable[OptimState]) -> None:
    """Raise if ranks have different steps of a flat tensor.

    A run that always saves under one tag overwrites its files. If that is interrupted, some ranks
    have files of the new save, and the others of the old one.
    """
    firsts: dict[int, tuple[Path, float]] = {}
    for rank in ranks:
        for number, step in rank.steps.items():
            first, expected = firsts.setdefault(number, (rank.path, step))
            if step != expected:
                raise CorruptError(
                    f"{rank.path}: was not saved together with {first.name}: its optimizer is at "
                    "another step",
                    expected=f"step {plain(expected)}",
                    found=f"step {plain(step)}",
                    hint="a save was interrupted after some files of an older one were "
                    "overwritten: take another checkpoint",
                )


def _trained(state: ModelState) -> dict[str, tuple[int, ...]]:
    return {name: shape for group in state.groups or () for name, shape in group.items()}


def _aliases(own: _Tensors, masters: _Tensors) -> dict[str, str]:
    """Map names to trained parameters that are the same bytes of the file."""
    places = {
        name: (int(entry.chunks.start[0]), entry.shape)
        for name, entry in own.items()
        if 0 not in entry.shape
    }
    trained = {places[name]: name for name in masters if name in places}
    aliases = ((name, trained.get(place)) for name, place in places.items())
    return {name: target for name, target in aliases if target not in (None, name)}


def _without_values(path: Path, names: Sequence[str]) -> NotMergeableError:
    return NotMergeableError(
        f"{path}: {having(len(names), 'parameter')} no values in any file: {shortened(names)}",
        expected="values from the optimizer, or stored as those of parameters that are not trained",
        hint="DeepSpeed before 0.9.1 saved neither parameters that are not trained nor tied "
        "parameters; stage 3 saves only the name of a parameter that the optimizer was not given",
    )
