"""`python -m unshard.compat.verl merge|test`, for `python -m verl.model_merger`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the imports, which take time

import argparse
from dataclasses import replace

from unshard.compat.commands import merge_line, path_argument, run, showing
from unshard.errors import UsageError
from unshard.fronts import Call, Command
from unshard.merger.saving import as_transformers_saves

_TOLERANCE = 1e-6


def _arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--backend",
        required=True,
        choices=("fsdp", "megatron"),
        help="accepted, and not needed: the files tell",
    )
    shared.add_argument(
        "--local_dir", type=path_argument, help="the checkpoint: global_step_N/actor"
    )
    for flag in ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization"):
        shared.add_argument(flag, action="store_true", help="accepted, and not needed")
    shared.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="accepted, and not needed: no code of a model runs here",
    )
    parser = argparse.ArgumentParser(prog="python -m unshard.compat.verl")
    operations = parser.add_subparsers(dest="operation", required=True)
    merge = operations.add_parser("merge", parents=[shared], help="merge a checkpoint and save it")
    merge.add_argument(
        "--target_dir", default="tmp", type=path_argument, help="where to; default: tmp"
    )
    merge.add_argument("--hf_upload_path", help="then upload it to this repository on the hub")
    merge.add_argument("--private", action="store_true", help="make that repository private")
    test = operations.add_parser("test", parents=[shared], help="compare with a model")
    test.add_argument(
        "--test_hf_dir",
        type=path_argument,
        required=True,
        help="the Hugging Face model to compare with",
    )
    return parser.parse_args()


def main() -> None:
    """Merge or compare as the arguments say."""
    arguments = _arguments()
    if arguments.local_dir is None:
        raise UsageError("--local_dir is missing", expected="the checkpoint: global_step_N/actor")
    (_merge if arguments.operation == "merge" else _test)(arguments)


def _merge(arguments: argparse.Namespace) -> None:
    from unshard.api import MergeOptions
    from unshard.api.merging import merge_checkpoint

    options = MergeOptions(
        dtype="bfloat16",
        overwrite=True,
        extra_state=False,
        push_to_hub=arguments.hf_upload_path,
        private=arguments.private and arguments.hf_upload_path is not None,
    )
    own = {"push-to-hub": "--hf_upload_path", "private": "--private"}
    front = Command(own, merge_line(arguments.local_dir, arguments.target_dir, options))
    with showing(front) as listener:
        report = merge_checkpoint(
            *(arguments.local_dir, arguments.target_dir, replace(options, config="none"), listener),
            before=as_transformers_saves,
            pass_over=False,
        )
    print(f"Saving model to {report.output}")
    if any(name.startswith("tokenizer") for name in report.companions):
        print(f"Saving tokenizer to {report.output}")
    if report.url is not None:
        print(f"Uploaded to {report.url}")


def _test(arguments: argparse.Namespace) -> None:
    from unshard import api
    from unshard.cli.reports import print_comparison

    options = {"against": str(arguments.local_dir), "atol": _TOLERANCE, "rtol": _TOLERANCE}
    front = Command({}, Call("unshard verify", (str(arguments.test_hf_dir),), options))
    with showing(front) as listener:
        found = api.verify(
            arguments.test_hf_dir,
            arguments.local_dir,
            atol=_TOLERANCE,
            rtol=_TOLERANCE,
            dtype="bfloat16",
            listener=listener,
        )
    print_comparison(found)
    if not found.equal:
        raise SystemExit(1)
    print(
        "FSDP checks passed: The merged state_dict matches the hf model saved by "
        "FSDPCheckpointManager."
    )


if __name__ == "__main__":
    run(main)
