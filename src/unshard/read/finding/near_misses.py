"""Say what a directory without a checkpoint holds, and what to do with it.

Told by names alone, the nearest miss first: what a step lacks, then what other tools read, then
what is not a model.
"""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unshard.errors import UnknownFormatError, UnshardError, UsageError
from unshard.read.finding.candidates import DEPTH, WEIGHT_SUFFIXES, formats, search
from unshard.read.step_names import is_state, is_unfinished, named_average
from unshard.read.tree import Tree
from unshard.showing import counted, listed
from unshard.stores.remote_path import why_unlisted

_LISTED = 12
_SHOWN = 6
_MOST_PATHS = 10_000
_ONE_RANK = r"(?:.*[_.-])?rank[_-]?\d+[_.-].*"


# What a name means, by a pattern or a function of it; the nearest miss first.
_SIGNS: dict[str | Callable[[str], bool], str] = {
    is_unfinished: "a save that was not finished: the trainer renames it when it is",
    r"latest_checkpointed_iteration\.txt|latest_ckpt_global_step\.txt|latest": "a marker of the "
    "latest step, without the step's directory",
    r"zero_to_fp32\.py|zero_to_torch\.py|latest_universal": "what DeepSpeed leaves next to its "
    "tags (global_stepN), without a tag",
    r"adapter_model\.(?:safetensors|bin)": "a LoRA adapter without its model; give this file as "
    "the path",
    r".*\.gguf": "a GGUF model, which llama.cpp reads; it is whole already",
    r"consolidated(?:\.\d+)?\.(?:pth|safetensors)": "a model in its maker's format (Llama, "
    "Mistral), which transformers' scripts convert",
    r"_CHECKPOINT_METADATA|_METADATA|ocdbt\.process_\d+|manifest\.ocdbt": "an Orbax checkpoint "
    "(JAX), which Orbax reads",
    r"checkpoint_metadata\.json|model_config\.json": "a nanotron checkpoint, which nanotron's "
    "converter reads",
    r"rank_\d+\.safetensors": "a Fast-LLM checkpoint; what Fast-LLM exports to Hugging Face can "
    "be merged",
    rf"{_ONE_RANK}|(?:pp|tp|sdp|dp)_\d+.*": "files of single ranks, under names that are not known",
    r".*\.(?:h5|ckpt\.index|data-\d+-of-\d+)": "a TensorFlow checkpoint",
    r".*\.(?:onnx|engine|plan|mlmodel)": "an exported model, not a checkpoint",
    lambda name: is_state(name.partition(".")[0]) or is_state(name): "training state (optimizer, "
    "scheduler, data, random numbers), not weights",
    r"config\.json|tokenizer.*\.json|generation_config\.json": "a model's config or tokenizer, "
    "without its weights",
    r"events\.out\.tfevents.*|wandb|mlruns|runs|tensorboard": "logs",
}


def no_such(path: Path) -> UnshardError:
    """Return the error about a path that does not exist; perhaps it means an average of steps."""
    if (average := named_average(path)) is not None:
        run, last, schedule = average
        how = f"⟦--last {last}⟧" + (f" and ⟦--schedule {schedule}⟧" if schedule else "")
        return UsageError(
            f"{path}: is an average of steps, not a checkpoint on disk",
            expected="a checkpoint; merge, push, virtual and from_pretrained take averages",
            hint=f"write it with unshard average {shlex.quote(str(run))} OUTPUT, {how}",
        )
    run, hint = path.parent / path.name.rpartition("@")[0], why_unlisted(path)
    if run != path.parent and run.is_dir():
        hint = f"an average of steps is {run}@last=5 or {run}@last=5,schedule=cosine"
    return UnknownFormatError(f"{path}: no such file or directory", hint=hint)


def nothing_found(tree: Tree, path: Path, wanted: int | None) -> UnknownFormatError:
    """Return the error that says what was looked for, and what is there instead.

    Args:
        tree: what is there.
        path: what was given.
        wanted: the step that was asked for.
    """
    folder = path if tree.is_dir(path) else path.parent
    below = search(tree, folder)
    runs = sorted({folder.joinpath(*run.relative_to(folder).parts[:1]) for run in below.runs})
    if len(runs) > 1:
        sharded = [place for place, form in below.sets if form.sharded]
        apart = [one for one in sharded if not any(map(one.is_relative_to, runs))]
        return _several_runs(path, runs, apart)
    steps = [place for run in below.runs.values() for step, place in run if wanted in (None, step)]
    nearest = steps[0] if steps else folder
    there = [name + ("/" if tree.is_dir(at) else "") for name, at in tree.inside(nearest).items()]
    seen = [*_seen(tree, nearest), *_not_followed(tree, nearest)]
    seen += [f"{error.filename}: cannot be read: {error.strerror}" for error in below.closed[:1]]
    seen += [below.stopped] if below.stopped else []
    return UnknownFormatError(
        f"{nearest if steps else path}: no checkpoint found",
        expected="model_world_size_W_rank_R.pt (verl, lmms-engine), .metadata and *.distcp (torch "
        "DCP), model_R.pt with metadata.pkl (torch_checkpointing), pytorch_model_fsdp_0/ "
        "(accelerate, HF Trainer), zero_pp_rank_R_mp_rank_00_optim_states.pt (DeepSpeed), "
        f"shard-*-model-*.safetensors or model.safetensors, here or up to {DEPTH} levels below, "
        "in step directories (global_step_N, checkpoint-N, step-N) or without them",
        found="\n            ".join([listed(there, _LISTED) or "an empty directory", *seen]),
        hint=_what_to_give(tree, folder) or why_unlisted(folder),
    )


def _several_runs(path: Path, runs: list[Path], apart: list[Path]) -> UnknownFormatError:
    given = [str(place) for place in (*runs, *apart)]
    other = f", and other weights in {counted(len(apart), 'folder')}" if apart else ""
    which = "them" if apart else "the runs below it"
    return UnknownFormatError(
        f"{path}: no checkpoint found, but {len(runs)} runs that have some{other}",
        hint=f"give one of {which}: {listed(given, _LISTED)}",
    )


def _seen(tree: Tree, folder: Path) -> list[str]:
    """Return what the names at and below a folder mean, each with the first that means it."""
    found: dict[str, Path] = {}
    for path in _paths(tree, folder)[: _MOST_PATHS + 1]:
        kind = next((what for sign, what in _SIGNS.items() if _is_meant(sign, path.name)), None)
        if kind is not None and not any(one.claims(tree, path) for one in formats()):
            found.setdefault(kind, path)
    kinds = [kind for kind in _SIGNS.values() if kind in found]
    return [f"{found[kind].relative_to(folder)}: {kind}" for kind in kinds[:_SHOWN]]


def _is_meant(sign: str | Callable[[str], bool], name: str) -> bool:
    return sign(name) if callable(sign) else re.fullmatch(sign, name) is not None


def _not_followed(tree: Tree, folder: Path) -> list[str]:
    """Return the links to directories elsewhere, which a search does not follow."""
    inside = tree.inside(folder).items()
    links = {name: tree.resolve(at) for name, at in inside if tree.is_link(at) and tree.is_dir(at)}
    away = [(name, to) for name, to in links.items() if not to.is_relative_to(folder)]
    return [
        f"{name}: a link to {to}, which is not searched; give that path if you mean it"
        for name, to in away[:_SHOWN]
    ]


def _paths(tree: Tree, folder: Path) -> list[Path]:
    """Return what is in a folder and the levels below that are searched, the nearest first."""
    found: list[Path] = []
    level = [folder]
    for _ in range(DEPTH):
        inside: list[Path] = []
        for place in level:
            with suppress(PermissionError):
                inside += tree.inside(place).values()
        found += inside
        level = [one for one in inside if tree.is_dir(one) and not tree.is_link(one)]
        if len(found) > _MOST_PATHS:
            break
    return found


def _what_to_give(tree: Tree, folder: Path) -> str:
    """Return which file of a directory without a checkpoint may be the one that is meant."""
    for name, path in tree.inside(folder).items():
        stem = name.partition(".")[0]
        is_other = is_state(stem) or stem == "adapter_model" or re.fullmatch(_ONE_RANK, name)
        if path.suffix.lower() in WEIGHT_SUFFIXES and not is_other and tree.is_file(path):
            return f"give the file itself: {path}"
    return ""
