"""The files of a ZeRO checkpoint, recognised by their names.

| file | contents |
|---|---|
| `mp_rank_00_model_states.pt` | the model, of stages 0 to 2 |
| `zero_pp_rank_R_mp_rank_00_model_states.pt` | rank R's part of the model, of stage 3 |
| `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt` | rank R's part of the float32 weights |
| `zero/NAME/fp32.pt` | a parameter of a universal checkpoint |

R is not padded with zeros. Source: DeepSpeed 0.16.4 and 0.19.8, `runtime/engine.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import NotMergeableError
from unshard.read.format import Location, files_in, shortened

# Five digits at most: a rank number in a hostile name must not make lists of any length.
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,5})_)?mp_rank_(?P<mp>\d{1,5})_model_states\.pt")
_OPTIM = re.compile(
    r"(?P<kind>(?:bf16_|fp16_)?)zero_pp_rank_(?P<dp>\d{1,5})_mp_rank_(?P<mp>\d{1,5})"
    r"_optim_states\.pt"
)
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT = re.compile(
    r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt"
    r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
TO_UNIVERSAL = "make a universal checkpoint of it with ds_to_universal, and pass that"


@dataclass(slots=True)
class ZeroFiles:
    """The files of one save.

    Attributes:
        directory: their directory.
        model: the file of the model, of stages 0 to 2.
        models: the files of stage 3's ranks.
        optim: the files with the float32 weights: rank -> path, by the prefix of their names.
        universal: the folders of a universal checkpoint's parameters.
        is_sliced: whether the model was cut by tensor parallelism.
    """

    directory: Path
    model: Path | None = None
    models: dict[int, Path] = field(default_factory=dict)
    optim: dict[str, dict[int, Path]] = field(default_factory=dict)
    universal: tuple[Path, ...] = ()
    is_sliced: bool = False


def is_zero_file(name: str) -> bool:
    """Return whether DeepSpeed gives a file with weights this name."""
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _OPTIM, _LAYER, _EXPERT))


def find_files(location: Location) -> ZeroFiles:
    """Return the files of a checkpoint.

    Raises:
        NotMergeableError: they are slices of tensors, layers or experts, and no file places them.
    """
    files = ZeroFiles(location.weights_dir)
    folder = location.weights_dir / "zero"
    if folder.is_dir():
        files.universal = tuple(sorted(path for path in folder.iterdir() if path.is_dir()))
    paths = files_in(location.roots, is_zero_file)
    if not files.universal:
        _refuse_slices(location.weights_dir, [path.name for path in paths])
    for path in paths:
        if match := _MODEL.fullmatch(path.name):
            if int(match["mp"]):
                files.is_sliced = True
            elif match["dp"] is None:
                files.model = path
            else:
                files.models[int(match["dp"])] = path
        elif match := _OPTIM.fullmatch(path.name):
            files.optim.setdefault(match["kind"], {})[int(match["dp"])] = path
    return files


def _refuse_slices(directory: Path, names: Sequence[str]) -> None:
    """Refuse tensor parallelism, pipelines and experts, whose files do not place their contents."""
    matches = (_MODEL.fullmatch(name) or _OPTIM.fullmatch(name) for name in names)
    kinds = {
        "slices of tensor parallelism": [m[0] for m in matches if m is not None and int(m["mp"])],
        "the experts of DeepSpeed's own expert parallelism": filter(_EXPERT.fullmatch, names),
        "the layers of a pipeline": filter(_LAYER.fullmatch, names),
    }
    for kind, matching in kinds.items():
        if refused := list(matching):
            raise NotMergeableError(
                f"{directory}: a DeepSpeed checkpoint with {kind}",
                expected="data parallelism alone: the files of mp_rank_00",
                found=shortened(refused),
                hint="convert it with the training code, which knows how tensors are cut; or "
                + TO_UNIVERSAL,
            )
