"""Which files a ZeRO checkpoint has, by their names alone, and which of them nothing can place.

| file | of |
|---|---|
| `mp_rank_00_model_states.pt` | the model, of stages 0 to 2 |
| `zero_pp_rank_R_mp_rank_00_model_states.pt` | what rank R has of the model, of stage 3 |
| `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt` | rank R's part of the float32 weights |
| `zero/NAME/fp32.pt` | a parameter of a universal checkpoint |

R is not padded with zeros. Source: DeepSpeed 0.16.4 and 0.19.8, `runtime/engine.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import NotMergeableError
from unshard.read.format import Location, files_in, shortened

# Five digits at most: a name must not make lists as long as it likes.
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
_PATTERNS = (_MODEL, _OPTIM, _LAYER, _EXPERT)
_UNIVERSAL = "zero"
_MEGATRON = "convert it with the training code: only that knows how a tensor is cut"


@dataclass(slots=True)
class ZeroFiles:
    """The files of one save.

    Attributes:
        directory: where they are.
        model: the file of the model, of stages 0 to 2.
        models: the files of stage 3's ranks.
        optim: the files with the float32 weights: rank -> path, by the prefix of their names.
        universal: the folders of a universal checkpoint's parameters.
        is_sliced: whether it was made of slices of tensor parallelism.
    """

    directory: Path
    model: Path | None = None
    models: dict[int, Path] = field(default_factory=dict)
    optim: dict[str, dict[int, Path]] = field(default_factory=dict)
    universal: tuple[Path, ...] = ()
    is_sliced: bool = False


def is_zero_file(name: str) -> bool:
    """Return whether DeepSpeed gives a file with weights this name."""
    return any(pattern.fullmatch(name) for pattern in _PATTERNS)


def find_files(location: Location) -> ZeroFiles:
    """Return the files of a checkpoint.

    Raises:
        NotMergeableError: they are slices of tensors, layers or experts, which nothing here places.
    """
    found = ZeroFiles(location.weights_dir)
    folder = location.weights_dir / _UNIVERSAL
    if folder.is_dir():
        found.universal = tuple(sorted(one for one in folder.iterdir() if one.is_dir()))
    paths = files_in(location.roots, is_zero_file)
    if not found.universal:
        _refuse_layers(location.weights_dir, [path.name for path in paths])
    for path in paths:
        if match := _MODEL.fullmatch(path.name):
            found.is_sliced |= int(match["mp"]) > 0
            if int(match["mp"]):
                continue
            if match["dp"] is None:
                found.model = path
            else:
                found.models[int(match["dp"])] = path
        elif match := _OPTIM.fullmatch(path.name):
            found.optim.setdefault(match["kind"], {})[int(match["dp"])] = path
    return found


def _refuse_layers(directory: Path, names: Sequence[str]) -> None:
    """Refuse tensor parallelism, pipelines and experts, whose files do not say what they hold."""
    matches = (_MODEL.fullmatch(name) or _OPTIM.fullmatch(name) for name in names)
    sliced = [match[0] for match in matches if match is not None and int(match["mp"])]
    experts = [name for name in names if _EXPERT.fullmatch(name)]
    layers = [name for name in names if _LAYER.fullmatch(name)]
    kinds: Mapping[str, Sequence[str]] = {
        "slices of tensor parallelism": sliced,
        "the experts of DeepSpeed's own expert parallelism": experts,
        "the layers of a pipeline": layers,
    }
    for what, there in kinds.items():
        if there:
            raise NotMergeableError(
                f"{directory}: a DeepSpeed checkpoint with {what}",
                expected="data parallelism alone: the files of mp_rank_00",
                found=shortened(there),
                hint=f"{_MEGATRON}; or make a universal checkpoint of it with ds_to_universal, "
                "and give that",
            )
