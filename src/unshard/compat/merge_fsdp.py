"""`tools/merge_fsdp.py` of lmms-engine; also `python -m unshard.compat.merge_fsdp`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.compat.commands import console_listener, merge_line, path_argument, run
from unshard.errors import UnknownFormatError, UnshardError, UsageError
from unshard.fronts import Call, Command, marked
from unshard.keywords import Weights
from unshard.merger.saving import as_transformers_saves
from unshard.progress import Listener, Warned

if TYPE_CHECKING:
    from unshard.api import MergeOptions
    from unshard.api.making import PlannedMerge

_EMA_DIR, _MODEL_DIR = "pytorch_ema_model_fsdp_0", "pytorch_model_fsdp_0"
_MODEL = "--model_name_or_class"
_WEIGHTS: Mapping[str, Weights] = {_MODEL_DIR: "model", _EMA_DIR: "ema"}
_STEP = re.compile(r"checkpoint-(\d+)")
_AUTO = re.compile(r"AutoModel(For\w+)?")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")  # Qwen2ForCausalLM; hub ids have a slash


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="merge_fsdp.py", description="Merge FSDP shards into a single checkpoint."
    )
    parser.add_argument(
        "--input_dir",
        required=True,
        type=path_argument,
        help="the directory that contains checkpoint-N",
    )
    parser.add_argument(
        _MODEL,
        default="",
        help="a directory or hub id: tensor names, config and tokenizer; or a class name, which "
        "goes to the config's architectures",
    )
    parser.add_argument(
        "--type",
        default="hf",
        choices=("hf", "fsdp2"),
        help="ignored: the format is detected",
    )
    parser.add_argument("--output_dir", type=path_argument, help="default: input_dir itself")
    parser.add_argument("--step", type=int, help="default: the latest checkpoint")
    parser.add_argument(
        "--state_dict_dirname",
        default=_MODEL_DIR,
        help=f"the folder of the shards; {_EMA_DIR} for EMA weights",
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge all checkpoints by averaging their weights"
    )
    return parser.parse_args()


def main() -> None:
    """Merge or average, and print the result."""
    from unshard.api import MergeOptions
    from unshard.api.merging import check_output, merge_checkpoint, merge_with
    from unshard.api.opening import open_sources

    arguments = _arguments()
    paths = _checkpoints(arguments.input_dir, arguments.state_dict_dirname, arguments.step)
    target = arguments.output_dir or arguments.input_dir
    options = MergeOptions(
        dtype="bfloat16",
        weights=_WEIGHTS.get(arguments.state_dict_dirname),
        step=arguments.step if paths == [arguments.input_dir] else None,
        overwrite=True,
        extra_state=False,
    )
    averages = arguments.merge and arguments.step is None
    line = merge_line(paths[-1], target, options)
    if averages:
        chosen = {"output": target, **options.chosen}
        del chosen["extra_state"]  # an average has none
        line = Call("unshard average", [*map(str, paths)], chosen)
    alone = replace(options, config="none")
    own = {"base": _MODEL, "config": _MODEL, "step": "--step"}
    with (
        console_listener(Command(own, line)) as listener,
        _with_model(arguments.model_name_or_class, paths[-1], alone, listener) as final,
    ):
        if averages:
            output = check_output(target, final)
            sources = open_sources(paths, final, listener, pass_over=False)
            report = merge_with(sources, output, final, listener, before=_prepare)
        else:
            request = (paths[-1], target, final, listener)
            report = merge_checkpoint(*request, before=_prepare, pass_over=False)
    print(f"Merged checkpoint saved to: {report.output}")


def _prepare(prepared: "PlannedMerge") -> "PlannedMerge":
    """Print the sources of a merge, and change its config as transformers saves it."""
    count = len(prepared.sources.checkpoints)
    if count > 1:
        print(f"Merging {count} checkpoints", flush=True)
    else:
        directory = prepared.checkpoint.location.weights_dir
        print(f"Using latest checkpoint: {directory}", flush=True)
    return as_transformers_saves(prepared)


def _checkpoints(run_dir: Path, dirname: str, step: int | None) -> list[Path]:
    """Return the paths to merge: the run itself, or folders of another name in its steps."""
    if not run_dir.is_dir():
        raise UnknownFormatError(f"No checkpoint found in {run_dir}: the directory does not exist")
    if dirname in _WEIGHTS:
        return [run_dir]
    folders = {
        int(match[1]): folder
        for folder in run_dir.glob(f"checkpoint-*/{dirname}")
        if (match := _STEP.fullmatch(folder.parent.name))
    }
    chosen = [folders[number] for number in sorted(folders) if step in (None, number)]
    if not chosen:
        raise UnknownFormatError(f"No checkpoint found in {run_dir}: no checkpoint-N/{dirname}")
    return chosen


@contextmanager
def _with_model(
    model: str, checkpoint: Path, options: "MergeOptions", listener: Listener
) -> Iterator["MergeOptions"]:
    """Yield the options with the base or config for a directory, hub id or class name."""
    if not model or _AUTO.fullmatch(model):  # an Auto class does not determine the model
        yield options
    elif Path(model).is_dir():
        weights = [*Path(model).glob("*.safetensors*"), *Path(model).glob("*.bin*")]
        yield replace(options, base=model) if weights else replace(options, config=Path(model))
    elif Path(model).suffix == ".json":  # the error about a missing config suggests a file
        yield replace(options, config=model)
    elif not _CLASS.fullmatch(model):
        try:
            yield replace(options, base=model)
        except UnshardError as error:
            if marked(error.subject).startswith("⟦--base "):
                error.hint += f"; or leave {_MODEL} out if the checkpoint has a config.json"
            raise
    else:
        from unshard.api.sources import read_checkpoint

        config = read_checkpoint(checkpoint, options).config
        if config is None:
            raise UsageError(
                f"{_MODEL} {model}: is the name of a class, but {checkpoint} has no config.json",
                hint="give a model's directory or hub id instead",
            )
        if (before := config.fields.get("architectures")) and before != [model]:
            listener(
                Warned(
                    f"config.json: architectures changed from {before} to [{model!r}]; the class "
                    "was not checked"
                )
            )
        fields = {**config.fields, "architectures": [model]}
        with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
            file = Path(scratch) / "config.json"
            file.write_text(json.dumps(fields), encoding="utf-8")
            yield replace(options, config=file)


if __name__ == "__main__":
    run(main)
