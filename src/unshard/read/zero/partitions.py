"""The partitions, model states and folders of a ZeRO checkpoint, united into tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from unshard.read.zero.steps import check_steps
from unshard.read.zero.universal import FILE, universal_tensors
from unshard.showing import having
from unshard.tensors.catalog import ByteRange, Catalog, Skipped, TensorEntry

_NO_OTHER = "copy the files here from the nodes that wrote them, or take another checkpoint"
_Tensors = Mapping[str, TensorEntry]


def open_zero(location: Location, options: ReadOptions) -> "Reading":
    """Read what the model's file of a checkpoint says.

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
    """Return the names of the parameters that were not trained, without those of wrappers.

    Raises:
        CheckpointError: the model's file cannot be read.
    """
    state = read_model_state(_model_file(find_files(location)))
    tensors = [name for name, value in state.module.items() if is_tensor(value)]
    known = {*_trained(state), *state.buffers, *state.shared}
    left = [] if state.groups is None else [name for name in tensors if name not in known]
    frozen = left if state.frozen is None else list(state.frozen)
    aliases = [alias for alias, name in state.shared.items() if name in frozen]
    # As `unwrapped` takes them off: whether a part is of a wrapper depends on all names.
    every = dict.fromkeys((*tensors, *_trained(state), *state.shared, *frozen))
    names = names_without_wrappers(list(every))
    return [names[name] for name in (*frozen, *aliases)]


def _model_file(files: ZeroFiles) -> Path:
    """Return the file with the model's names: of stage 3 that of rank 0, which knows them all."""
    if files.model is not None and files.models:
        raise CorruptError(
            f"{files.directory}: has files of two saves: of stage 3, and of a lower stage",
            found=f"{files.models[min(files.models)].name} and {files.model.name}",
            hint="move those of the older save elsewhere",
        )
    found = files.model or files.models.get(0)
    if found is None:
        name = "zero_pp_rank_0_mp_rank_00" if files.models else "mp_rank_00"
        raise IncompleteError(
            f"{files.directory}: {name}_model_states.pt is missing, which has the names",
            hint=_NO_OTHER,
        )
    return found


def is_stage0(location: Location) -> bool:
    """Return whether a checkpoint of DeepSpeed has no float32 weights with names: ZeRO was off.

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
    """One checkpoint that is being read.

    Attributes:
        files: its files.
        state: what the model's file says.
        options: how to read.
        notes: for the user.
    """

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
                "ZeRO stage 0: the weights are those of the model; what its optimizer has in "
                "float32 has no names"
            )
        paths = (self.state.path,)
        return self._catalog(self._module_tensors(paths), paths, self.state.world_size or 1)

    def of_universal(self) -> Catalog:
        """Return the tensors of a universal checkpoint, and what its model's files have."""
        state = self.state
        shapes = {} if self.files.is_sliced else _trained(state)
        folders = self.folders()
        ranks = self._states_of_frozen()
        paths = (*(one.path for one in ranks), *(one / FILE for one in folders.values()))
        masters = universal_tensors(folders, shapes, paths, len(ranks), file=FILE)
        return self._catalog(self._united(masters, ranks, paths), paths, state.world_size or 1)

    def folders(self) -> dict[str, Path]:
        """Return the folders of the trained parameters of a universal checkpoint, by name."""
        state = self.state
        shapes = {} if self.files.is_sliced else _trained(state)
        known = {*state.buffers, *state.shared, *(state.frozen or ())}
        others = (one for one in self.files.universal if one.name not in known)
        return {one.name: one for one in others if not shapes or one.name in shapes}

    def of_partitions(self) -> Catalog:
        """Return the float32 weights, and what only the model's files have."""
        states, groups = self.partitions()
        ranks = self._states_of_frozen()
        paths = (*(one.path for one in ranks), *(one.path for one in states))
        masters = unflattened(states, groups, paths, len(ranks))
        return self._catalog(self._united(masters, ranks, paths), paths, len(states))

    def partitions(self) -> tuple[list[OptimState], tuple[Shapes, ...]]:
        """Return what all ranks have of the optimizer, and the shapes of its groups."""
        optim = self._chosen_optim()
        states = [read_optim_state(path) for path in optim]
        for one in states:
            if one.world_size != len(states) or one.is_stage3 != bool(self.files.models):
                raise CorruptError(
                    f"{one.path}: was not saved together with {self.state.path.name}",
                    expected=f"{len(states)} ranks of stage {3 if self.files.models else '1 or 2'}",
                    found=f"{one.world_size} ranks of stage {3 if one.is_stage3 else '1 or 2'}",
                    hint="files of two saves are in one directory: move the older ones elsewhere",
                )
        check_steps((one.path, one.steps) for one in states)
        if self.state.groups is None:
            raise NotMergeableError(
                f"{self.state.path}: has no param_shapes, which DeepSpeed writes since 0.6"
            )
        return states, self.state.groups

    def _chosen_optim(self) -> list[Path]:
        """Return the files of the optimizer, of every rank of this save."""
        kinds = self.files.optim
        kind = "bf16_" if self.state.is_bf16 else ""
        if kind not in kinds and len(kinds) == 1:
            kind = next(iter(kinds))
        found = kinds.get(kind, {})
        world = self.state.world_size
        if world is None:
            world = read_optim_state(found[min(found)]).world_size if found else 1
        missing = [rank for rank in range(world) if rank not in found]
        if missing:
            raise self._missing(missing, f"{kind}zero_pp_rank_*_mp_rank_00_optim_states.pt", world)
        stale = len(found) - world + sum(len(ranks) for one, ranks in kinds.items() if one != kind)
        if stale:
            self.notes.append(
                f"{self.files.directory}: left out {stale} stale files of other saves"
            )
        return [found[rank] for rank in range(world)]

    def _missing(self, ranks: Sequence[int], name: str, world: int) -> IncompleteError:
        names = [name.replace("*", str(rank)) for rank in ranks]
        is_whole = self.files.model is not None
        return IncompleteError(
            f"{self.files.directory}: Missing checkpoint for rank "
            f"{shortened([str(rank) for rank in ranks], 16)} of world size {world}",
            expected=shortened(names, 4),
            hint=_NO_OTHER
            + ("; the weights in the dtype of training are whole: ⟦+--weights module⟧" * is_whole),
        )

    def _states_of_frozen(self) -> list[ModelState]:
        """Return the model's file, and those of other ranks if they have parts of parameters."""
        if not (self.files.models and self.state.frozen):
            return [self.state]
        world = self.state.world_size or len(self.files.models)
        missing = [rank for rank in range(world) if rank not in self.files.models]
        if missing:
            raise self._missing(missing, "zero_pp_rank_*_mp_rank_00_model_states.pt", world)
        others = [read_model_state(self.files.models[rank]) for rank in range(1, world)]
        for one in others:
            _check_same_save(self.state, one)
        return [self.state, *others]

    def _module_tensors(self, paths: tuple[Path, ...]) -> dict[str, TensorEntry]:
        """Return what the model's own file has; of stage 3 parameters have no elements there."""
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
        """Return all tensors in the order of the model: float32 weights, and what has none."""
        state = self.state
        own = {} if self.files.is_sliced else self._module_tensors(paths)
        known = {**masters}
        if self.files.models and state.frozen:
            known |= frozen_of_ranks(ranks, state.frozen, FlatCuts(paths))
        aliases = {**_aliases(own, masters), **state.shared}
        lost = []
        for name, entry in own.items():
            target = aliases.get(name)
            if name in known:
                continue
            if target is not None and target in known:
                known[name] = replace(known[target], fqn=name)
            elif self.files.models and 0 in entry.shape and name not in state.buffers:
                lost.append(name)
            else:
                known[name] = entry
        if lost:
            raise _without_values(state.path, lost)
        for alias, name in state.shared.items():
            if alias not in known and name in known:
                known[alias] = replace(known[name], fqn=alias)
        return {name: known[name] for name in (*own, *(one for one in known if one not in own))}

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


def _check_same_save(first: ModelState, one: ModelState) -> None:
    """Raise if two ranks' files of the model contradict each other, where both state something."""
    facts = (
        ("dp_world_size", first.world_size, one.world_size),
        ("global_steps", first.step, one.step),
        ("the stage of ZeRO", first.stage, one.stage),
        ("frozen_param_shapes", first.frozen, one.frozen),
    )
    for what, expected, found in facts:
        if expected is not None and found is not None and expected != found:
            raise CorruptError(
                f"{one.path}: was not saved together with {first.path.name}: they differ in {what}",
                expected="" if isinstance(expected, Mapping) else str(expected),
                found="" if isinstance(found, Mapping) else str(found),
                hint="files of two saves are in one directory: move the older ones elsewhere",
            )


def _trained(state: ModelState) -> dict[str, tuple[int, ...]]:
    return {name: shape for group in state.groups or () for name, shape in group.items()}


def _aliases(own: _Tensors, masters: _Tensors) -> dict[str, str]:
    """Return which names are trained parameters under another name: the same bytes in the file."""
    filled = {name: entry for name, entry in own.items() if 0 not in entry.shape}
    places = {_place(filled[name]): name for name in masters if name in filled}
    found = ((name, places.get(_place(entry))) for name, entry in filled.items())
    return {name: target for name, target in found if target not in (None, name)}


def _place(entry: TensorEntry) -> tuple[int, tuple[int, ...]]:
    return int(entry.chunks.start[0]), entry.shape


def _without_values(path: Path, names: Sequence[str]) -> NotMergeableError:
    return NotMergeableError(
        f"{path}: {having(len(names), 'parameter')} no values in any file: {shortened(names)}",
        expected="that the optimizer has them, or that they are stored as not trained",
        hint="DeepSpeed before 0.9.1 saved neither parameters that are not trained nor tied ones; "
        "of a parameter that the optimizer was not given, stage 3 saves the name alone",
    )
