"""Describes a directory without a checkpoint, and advises on it.

Goes by names alone, the nearest miss first: missing parts of a step, then formats of other tools,
then files that are not a model.
"""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unshard.console import counted, listed
from unshard.errors import UnknownFormatError, UnshardError, UsageError
from unshard.read.finding.candidates import DEPTH, WEIGHT_SUFFIXES, formats, search
from unshard.read.step_names import is_state, is_unfinished, named_average
from unshard.read.tree import Tree
from unshard.stores.remote_path import why_unlisted

_LISTED = 12
_MOST_KINDS = 6
_MOST_PATHS = 10_000
_ONE_RANK = r"(?:.*[_.-])?rank[_-]?\d+[_.-].*"


# The meaning of a name, by a pattern or a function of it; the nearest miss first.
_SIGNS: dict[str | Callable[[str], bool], str] = {
    is_unfinished: "an unfinished save, which the trainer renames when it is complete",
    r"latest_checkpointed_iteration\.txt|latest_ckpt_global_step\.txt|latest": "a marker of the "
    "latest step, without the step's directory",
    r"zero_to_fp32\.py|zero_to_torch\.py|latest_universal": "files that DeepSpeed puts next to its "
    "tags (global_stepN), without a tag",
    r"adapter_model\.(?:safetensors|bin)": "a LoRA adapter without its model; pass this file as "
    "the path",
    r".*\.gguf": "a GGUF model, which llama.cpp reads; it is whole already",
    r"consolidated(?:\.\d+)?\.(?:pth|safetensors)": "a model in its maker's format (Llama, "
    "Mistral), which transformers' scripts convert",
    r"_CHECKPOINT_METADATA|_METADATA|ocdbt\.process_\d+|manifest\.ocdbt": "an Orbax checkpoint "
    "(JAX), which Orbax reads",
    r"checkpoint_metadata\.json|model_config\.json": "a nanotron checkpoint, which nanotron's "
    "converter reads",
    r"rank_\d+\.safetensors": "a Fast-LLM checkpoint; its export to Hugging Face can be merged",
    rf"{_ONE_RANK}|(?:pp|tp|sdp|dp)_\d+.*": "files of single ranks, under unknown names",
    r".*\.(?:h5|ckpt\.index|data-\d+-of-\d+)": "a TensorFlow checkpoint",
    r".*\.(?:onnx|engine|plan|mlmodel)": "an exported model, not a checkpoint",
    lambda name: is_state(name.partition(".")[0]) or is_state(name): "training state (optimizer, "
    "scheduler, data, random numbers), not weights",
    r"config\.json|tokenizer.*\.json|generation_config\.json": "a model's config or tokenizer, "
    "without its weights",
    r"events\.out\.tfevents.*|wandb|mlruns|runs|tensorboard": "logs",
}


def no_such(path: Path) -> UnshardError:
    """Return the error about a path that does not exist, or that is the name of an average."""
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
    """Return the error about a path without a checkpoint: the names expected, and those there.

    `wanted` is the step that the user asked for.
    """
    folder = path if tree.is_dir(path) else path.parent
    below = search(tree, folder)
    runs = sorted({folder.joinpath(*run.relative_to(folder).parts[:1]) for run in below.runs})
    if len(runs) > 1:
        sharded = [place for place, form in below.sets if form.sharded]
        apart = [place for place in sharded if not any(map(place.is_relative_to, runs))]
        return _several_runs(path, runs, apart)
    steps = [place for run in below.runs.values() for step, place in run if wanted in (None, step)]
    nearest = steps[0] if steps else folder
    names = [name + ("/" if tree.is_dir(at) else "") for name, at in tree.inside(nearest).items()]
    notes = [*_kinds(tree, nearest), *_links_elsewhere(tree, nearest)]
    notes += [f"{error.filename}: cannot be read: {error.strerror}" for error in below.closed[:1]]
    notes += [below.stopped] if below.stopped else []
    return UnknownFormatError(
        f"{nearest if steps else path}: no checkpoint found",
        expected="model_world_size_W_rank_R.pt (verl, lmms-engine), .metadata and *.distcp (torch "
        "DCP), model_R.pt with metadata.pkl (torch_checkpointing), pytorch_model_fsdp_0/ "
        "(accelerate, HF Trainer), zero_pp_rank_R_mp_rank_00_optim_states.pt (DeepSpeed), "
        f"shard-*-model-*.safetensors or model.safetensors, here or up to {DEPTH} levels below, "
        "in step directories (global_step_N, checkpoint-N, step-N) or without them",
        found="\n            ".join([listed(names, _LISTED) or "an empty directory", *notes]),
        hint=_file_to_pass(tree, folder) or why_unlisted(folder),
    )


def _several_runs(path: Path, runs: list[Path], apart: list[Path]) -> UnknownFormatError:
    paths = [str(place) for place in (*runs, *apart)]
    other = f", and other weights in {counted(len(apart), 'folder')}" if apart else ""
    return UnknownFormatError(
        f"{path}: no checkpoint found, but {len(runs)} runs with checkpoints{other}",
        hint=f"pass one of {'them' if apart else 'the runs below it'}: {listed(paths, _LISTED)}",
    )


def _kinds(tree: Tree, folder: Path) -> list[str]:
    """Return the meanings of names at and below a folder, each with the first path of it."""
    firsts: dict[str, Path] = {}
    for path in _paths(tree, folder)[: _MOST_PATHS + 1]:
        fitting = (
            kind
            for sign, kind in _SIGNS.items()
            if (sign(path.name) if callable(sign) else re.fullmatch(sign, path.name))
        )
        kind = next(fitting, None)
        if kind is not None and not any(form.claims(tree, path) for form in formats()):
            firsts.setdefault(kind, path)
    kinds = [kind for kind in _SIGNS.values() if kind in firsts]
    return [f"{firsts[kind].relative_to(folder)}: {kind}" for kind in kinds[:_MOST_KINDS]]


def _links_elsewhere(tree: Tree, folder: Path) -> list[str]:
    """Return the links to directories elsewhere, which a search does not follow."""
    inside = tree.inside(folder).items()
    links = {name: tree.resolve(at) for name, at in inside if tree.is_link(at) and tree.is_dir(at)}
    away = [(name, to) for name, to in links.items() if not to.is_relative_to(folder)]
    return [
        f"{name}: a link to {to}, which is not searched; pass that path if you mean it"
        for name, to in away[:_MOST_KINDS]
    ]


def _paths(tree: Tree, folder: Path) -> list[Path]:
    """Return the paths in a folder and in the levels below that are searched, nearest first."""
    paths: list[Path] = []
    level = [folder]
    for _ in range(DEPTH):
        inside: list[Path] = []
        for place in level:
            with suppress(PermissionError):
                inside += tree.inside(place).values()
        paths += inside
        level = [path for path in inside if tree.is_dir(path) and not tree.is_link(path)]
        if len(paths) > _MOST_PATHS:
            break
    return paths


def _file_to_pass(tree: Tree, folder: Path) -> str:
    """Return advice about a file that may be the checkpoint, in a directory without one."""
    for name, path in tree.inside(folder).items():
        stem = name.partition(".")[0]
        is_other = is_state(stem) or stem == "adapter_model" or re.fullmatch(_ONE_RANK, name)
        if path.suffix.lower() in WEIGHT_SUFFIXES and not is_other and tree.is_file(path):
            return f"pass the file itself: {path}"
    return ""
