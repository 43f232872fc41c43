"""`python -m unshard.compat.verl_omni merge|test`, for `python -m verl_omni.model_merger`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.compat.commands import (
    NOT_NEEDED,
    console_listener,
    merge_line,
    merger_parsers,
    path_argument,
    run,
)
from unshard.errors import ConversionError, CorruptError, UsageError
from unshard.fronts import Call, Command

if TYPE_CHECKING:
    from unshard.api.making import PlannedMerge

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


def _arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    about = "the folder of its config.json; default: huggingface in the checkpoint"
    shared.add_argument("--hf_model_config_path", type=path_argument, help=about)
    parser, merge = merger_parsers(
        shared,
        "verl_omni",
        backends=("fsdp",),
        test="check an output by its record",
        test_dir="the output to check",
    )
    about = "the pipeline that was trained, or its transformer"
    base = ("--base_model", "--base-model")
    merge.add_argument(*base, type=path_argument, required=True, help=about)
    about = "write the whole pipeline, or only its transformer; default: pipeline"
    form = ("--output_format", "--output-format")
    merge.add_argument(*form, choices=("pipeline", "transformer"), default="pipeline", help=about)
    merge.add_argument("--dtype", choices=_DTYPES, default="preserve", help="default: preserve")
    about = "bytes of the largest file of weights; default: 2 GiB"
    size = ("--max_shard_size", "--max-shard-size")
    merge.add_argument(*size, type=int, default=2 << 30, help=about)
    about = f"{NOT_NEEDED}nothing in a pickle is run"
    merge.add_argument("--trust-checkpoint", action="store_true", help=about)
    about = "default; a checkpoint of several adapters is refused"
    merge.add_argument("--adapter-name", default="default", help=about)
    return parser.parse_args()


def main() -> None:
    """Merge or check; print a line of JSON."""
    arguments = _arguments()
    (_merge if arguments.operation == "merge" else _test)(arguments)


def _merge(arguments: argparse.Namespace) -> None:
    from unshard.api import MergeOptions
    from unshard.api.merging import merge_checkpoint

    if arguments.local_dir is None:
        raise UsageError("--local_dir is missing", expected="the checkpoint: global_step_N/actor")
    if arguments.adapter_name != "default":
        subject = f"--adapter-name {arguments.adapter_name}: only a checkpoint's adapter is fused"
        raise UsageError(subject, expected="default")
    if arguments.target_dir.exists():
        subject = f"--target_dir {arguments.target_dir}: exists already"
        raise UsageError(subject, hint="give another directory")
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
    with console_listener(front) as listener:
        report = merge_checkpoint(
            *(arguments.local_dir, arguments.target_dir, options, listener),
            before=_with_manifest,
            pass_over=False,
        )
    manifest = str(Path(report.output) / _MANIFEST)
    print(json.dumps({"output_dir": report.output, "manifest_path": manifest}))


def _with_manifest(prepared: "PlannedMerge") -> "PlannedMerge":
    """Add the SHA-256 of every file that is not weights, which `unshard.json` does not have."""
    from unshard.write.companions import companion_files

    copied = companion_files(prepared.checkpoint.companions, prepared.config)
    files = copied | prepared.plan.layout.indices | dict(prepared.files)
    sums = {
        name: hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else _sha256(source)
        for name, source in files.items()
    }
    text = json.dumps({"schema_version": 1, "files": sums}, indent=2, sort_keys=True) + "\n"
    return replace(prepared, files={**prepared.files, _MANIFEST: text.encode()})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _base(model: Path, output_format: str) -> Path:
    """Return the base that determines whether a pipeline or its transformer is written."""
    from unshard.read.beside.pipelines import component_of

    is_pipeline = (model / _INDEX).is_file()
    if output_format == "pipeline" and not is_pipeline:
        raise UsageError(
            f"--base_model {model}: is not a pipeline, which --output_format pipeline needs",
            expected=_INDEX,
            hint="give the whole pipeline, or --output_format transformer",
        )
    return component_of(model) if output_format == "transformer" and is_pipeline else model


def _test(arguments: argparse.Namespace) -> None:
    """Compare all files and tensors of an output with its record.

    Raises:
        CorruptError: a file is missing, was added, or differs from its record.
    """
    from unshard import api
    from unshard.containers.json_file import JsonFields, json_object
    from unshard.write.record import parse_record

    output: Path = arguments.test_hf_dir
    path, manifest = output / _RECORD, output / _MANIFEST
    front = Command({}, Call("unshard verify", (str(output),), {"checksums": str(path)}))
    with console_listener(front) as listener:
        if not (path.is_file() and manifest.is_file()):
            raise UsageError(
                f"{output}: has no {_MANIFEST}, or no {_RECORD}",
                expected="an output of this command",
            )
        record = parse_record(path.read_bytes())
        sums = JsonFields(manifest, json_object(manifest)).inside("files").fields
        existing = {
            file.relative_to(output).as_posix()
            for file in output.rglob("*")
            if file.is_symlink() or not file.is_dir()
        }
        recorded = {_RECORD, _MANIFEST, *sums, *(record.sizes if record else ())}
        wrong = sorted(existing ^ recorded)
        wrong += [n for n in sums if n in existing and _sha256(output / n) != sums[n]]
        comparison = api.verify(output, checksums=path, listener=listener)
        wrong += [f"tensor {tensor.name}" for tensor in comparison.different]
        wrong += [f"tensor {name}" for name in (*comparison.missing, *comparison.unexpected)]
        if wrong:
            raise CorruptError(f"{output}: differs from its record", found=", ".join(wrong[:8]))
    print(json.dumps({"integrity": "passed", "architecture": _architecture(output)}))


def _architecture(output: Path) -> str:
    """Return the class of the pipeline, or of the model."""
    from unshard.containers.json_file import json_object

    files = (output / name for name in (_INDEX, "config.json"))
    name = next((json_object(file).get("_class_name") for file in files if file.is_file()), None)
    if not isinstance(name, str):
        raise ConversionError(f"{output}: has no _class_name")
    return name


if __name__ == "__main__":
    run(main)
