"""`python -m unshard.compat.verl merge|test`, for `python -m verl.model_merger`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
from dataclasses import replace

from unshard.compat.commands import NOT_NEEDED, console_listener, merge_line, merger_parsers, run
from unshard.errors import UsageError
from unshard.fronts import Call, Command
from unshard.merger.saving import as_transformers_saves

_TOLERANCE = 1e-6


def _arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    for flag in ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization"):
        shared.add_argument(flag, action="store_true", help=NOT_NEEDED.removesuffix(": "))
    parser, _ = merger_parsers(
        shared,
        "verl",
        backends=("fsdp", "megatron"),
        test="compare with a model",
        test_dir="the Hugging Face model to compare with",
    )
    return parser.parse_args()


def main() -> None:
    """Merge or compare, and print the result."""
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
    with console_listener(front) as listener:
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
    with console_listener(front) as listener:
        comparison = api.verify(
            arguments.test_hf_dir,
            arguments.local_dir,
            atol=_TOLERANCE,
            rtol=_TOLERANCE,
            dtype="bfloat16",
            listener=listener,
        )
    print_comparison(comparison)
    if not comparison.equal:
        raise SystemExit(1)
    print(
        "FSDP checks passed: The merged state_dict matches the hf model saved by "
        "FSDPCheckpointManager."
    )


if __name__ == "__main__":
    run(main)
