"""`python -m unshard.compat.verl_omni merge|test`, for `python -m verl_omni.model_merger`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the imports, which take time

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.compat.commands import merge_line, path_argument, run, showing
from unshard.errors import ConversionError, CorruptError, UsageError
from unshard.fronts import Call, Command

if TYPE_CHECKING:
    from unshard.api.making import Prepared

_RECORD, _MANIFEST = "unshard.json", "merge_manifest.json"
_INDEX = "model_index.json"
_OWN = {
    "push-to-hub": "--hf_upload_path",
    "private": "--private",
    "base": "--base_model",
    "config": "--hf_model_config_path",
    "dtype": "--dtype",
    "max-shard-size": "--max_shard_size",
}


_DTYPES = ("preserve", "float32", "float16", "bfloat16")
_NOT_NEEDED = "accepted, and not needed: "


def _arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    about = f"{_NOT_NEEDED}the files tell"
    shared.add_argument("--backend", required=True, choices=("fsdp",), help=about)
    about = "the checkpoint: global_step_N/actor"
    shared.add_argument("--local_dir", type=path_argument, help=about)
    about = "the folder of its config.json; default: huggingface in the checkpoint"
    shared.add_argument("--hf_model_config_path", type=path_argument, help=about)
    about = f"{_NOT_NEEDED}no code of a model runs here"
    shared.add_argument("--trust-remote-code", action="store_true", help=about)
    parser = argparse.ArgumentParser(prog="python -m unshard.compat.verl_omni")
    operations = parser.add_subparsers(dest="operation", required=True)
    about = "merge a checkpoint and save it"
    _add_options_of_merge(operations.add_parser("merge", parents=[shared], help=about))
    test = operations.add_parser("test", parents=[shared], help="check an output by its record")
    about = "the output to check"
    test.add_argument("--test_hf_dir", type=path_argument, required=True, help=about)
    return parser.parse_args()


def _add_options_of_merge(merge: argparse.ArgumentParser) -> None:
    about = "where to; default: tmp"
    merge.add_argument("--target_dir", default="tmp", type=path_argument, help=about)
    about = "the pipeline that was trained, or its transformer"
    base = ("--base_model", "--base-model")
    merge.add_argument(*base, type=path_argument, required=True, help=about)
    merge.add_argument("--hf_upload_path", help="then upload it to this repository on the hub")
    merge.add_argument("--private", action="store_true", help="make that repository private")
    about = "write the whole pipeline, or its transformer alone; default: pipeline"
    form = ("--output_format", "--output-format")
    merge.add_argument(*form, choices=("pipeline", "transformer"), default="pipeline", help=about)
    merge.add_argument("--dtype", choices=_DTYPES, default="preserve", help="default: preserve")
    about = "bytes of the largest file of weights; default: 2 GiB"
    size = ("--max_shard_size", "--max-shard-size")
    merge.add_argument(*size, type=int, default=2 << 30, help=about)
    about = f"{_NOT_NEEDED}nothing in a pickle is run"
    merge.add_argument("--trust-checkpoint", action="store_true", help=about)
    about = "default; a checkpoint of several adapters is refused"
    merge.add_argument("--adapter-name", default="default", help=about)


def main() -> None:
    """Merge or check as the arguments say; print one line of JSON."""
    arguments = _arguments()
    (_merge if arguments.operation == "merge" else _test)(arguments)


def _merge(arguments: argparse.Namespace) -> None:
    from unshard.api import MergeOptions
    from unshard.api.merging import merge_checkpoint

    if arguments.local_dir is None:
        raise UsageError("--local_dir is missing", expected="the checkpoint: global_step_N/actor")
    if arguments.adapter_name != "default":
        what = f"--adapter-name {arguments.adapter_name}: only the adapter of a checkpoint is fused"
        raise UsageError(what, expected="default")
    if arguments.target_dir.exists():
        what = f"--target_dir {arguments.target_dir}: exists already"
        raise UsageError(what, hint="give another")
    options = MergeOptions(
        dtype="keep" if arguments.dtype == "preserve" else arguments.dtype,
        base=_base(arguments.base_model, arguments.output_format),
        config=arguments.hf_model_config_path,
        max_shard_size=arguments.max_shard_size,
        verify="full",
        checksums=True,
        extra_state=False,
        push_to_hub=arguments.hf_upload_path,
        private=arguments.private and arguments.hf_upload_path is not None,
    )
    front = Command(_OWN, merge_line(arguments.local_dir, arguments.target_dir, options))
    with showing(front) as listener:
        report = merge_checkpoint(
            *(arguments.local_dir, arguments.target_dir, options, listener),
            before=_with_manifest,
            pass_over=False,
        )
    manifest = str(Path(report.output) / _MANIFEST)
    print(json.dumps({"output_dir": report.output, "manifest_path": manifest}))


def _with_manifest(prepared: "Prepared") -> "Prepared":
    """Add the SHA-256 of every file that is not weights, which `unshard.json` does not have."""
    from unshard.write.companions import companion_files

    copied = companion_files(prepared.checkpoint.companions, prepared.config)
    sums = {
        name: hashlib.sha256(one).hexdigest() if isinstance(one, bytes) else _sha256(one)
        for name, one in (copied | prepared.plan.layout.indices | dict(prepared.files)).items()
    }
    text = json.dumps({"schema_version": 1, "files": sums}, indent=2, sort_keys=True) + "\n"
    return replace(prepared, files={**prepared.files, _MANIFEST: text.encode()})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _base(given: Path, output_format: str) -> Path:
    """Return the base that determines whether a pipeline or its transformer is written."""
    from unshard.read.beside.pipelines import component_of

    is_pipeline = (given / _INDEX).is_file()
    if output_format == "pipeline" and not is_pipeline:
        raise UsageError(
            f"--base_model {given}: is not a pipeline, as --output_format pipeline needs",
            expected=_INDEX,
            hint="give the whole pipeline, or --output_format transformer",
        )
    return component_of(given) if output_format == "transformer" and is_pipeline else given


def _test(arguments: argparse.Namespace) -> None:
    """Compare an output with what was recorded of it: all files, and the values of all tensors.

    Raises:
        CorruptError: a file is missing, is one more, or is not what was written.
    """
    from unshard import api
    from unshard.containers.json_file import JsonFields, json_object
    from unshard.write.record import parse_record

    output: Path = arguments.test_hf_dir
    path, manifest = output / _RECORD, output / _MANIFEST
    front = Command({}, Call("unshard verify", (str(output),), {"checksums": str(path)}))
    with showing(front) as listener:
        if not (path.is_file() and manifest.is_file()):
            what = f"{output}: has no {_MANIFEST}, or no {_RECORD}"
            raise UsageError(what, expected="what this command has merged")
        record = parse_record(path.read_bytes())
        sums = JsonFields(manifest, json_object(manifest)).inside("files").fields
        there = {
            one.relative_to(output).as_posix()
            for one in output.rglob("*")
            if one.is_symlink() or not one.is_dir()
        }
        known = {_RECORD, _MANIFEST, *sums, *(record.sizes if record else ())}
        wrong = sorted(there ^ known)
        wrong += [one for one in sums if one in there and _sha256(output / one) != sums[one]]
        found = api.verify(output, checksums=path, listener=listener)
        wrong += [f"tensor {one.name}" for one in found.different]
        wrong += [f"tensor {name}" for name in (*found.missing, *found.unexpected)]
        if wrong:
            raise CorruptError(f"{output}: is not what was written", found=", ".join(wrong[:8]))
    print(json.dumps({"integrity": "passed", "architecture": _architecture(output)}))


def _architecture(output: Path) -> str:
    """Return the class of the pipeline, or of the model alone."""
    from unshard.containers.json_file import json_object

    files = (output / name for name in (_INDEX, "config.json"))
    name = next((json_object(file).get("_class_name") for file in files if file.is_file()), None)
    if not isinstance(name, str):
        raise ConversionError(f"{output}: no _class_name says what it is")
    return name


if __name__ == "__main__":
    run(main)
