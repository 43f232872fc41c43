"""`zero_to_fp32.py` of DeepSpeed: `python -m unshard.compat.zero_to_fp32 CHECKPOINT OUTPUT`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
import re
from pathlib import Path

from unshard.compat.commands import console_listener, merge_line, path_argument, run
from unshard.errors import NotMergeableError, UnknownFormatError, front_of_errors
from unshard.fronts import Command


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Extract the float32 weights of a ZeRO checkpoint of stage 1, 2 or 3.",
    )
    parser.add_argument(
        "checkpoint_dir",
        type=path_argument,
        help="the directory that contains the tag: path/checkpoint-12",
    )
    parser.add_argument("output_dir", type=path_argument, help="directory to write")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="the largest weight file; default: 5GB"
    )
    parser.add_argument(
        "--safe_serialization",
        action="store_true",
        help="ignored: the output is safetensors in any case",
    )
    parser.add_argument("-t", "--tag", help="default: the tag in the file latest")
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="ignored")
    return parser.parse_args()


def main() -> None:
    """Merge, and print the result."""
    from unshard.api import MergeOptions
    from unshard.api.merging import merge_checkpoint
    from unshard.console import counted
    from unshard.read.finding.discover import discover
    from unshard.read.format import Choice
    from unshard.read.zero.partitions import frozen_names, is_stage0

    arguments = _arguments()
    folder = _tag_folder(arguments.checkpoint_dir, arguments.tag)
    location = discover(folder, Choice())[0]
    if is_stage0(location):
        with front_of_errors(Command({}, merge_line(folder, arguments.output_dir, MergeOptions()))):
            raise NotMergeableError(
                f"{folder}: of ZeRO stage 0, which saves no float32 weights by name",
                expected="stage 1, 2 or 3",
                hint="for the weights in the dtype of training: ⟦+--names training⟧",
            )
    frozen = frozen_names(location) if arguments.exclude_frozen_parameters else []
    options = MergeOptions(
        names="training",
        lora="keep",
        max_shard_size=arguments.max_shard_size,
        exclude=f"^(?:{'|'.join(map(re.escape, frozen))})$" if frozen else None,
        overwrite=True,
        extra_state=False,
    )
    line = merge_line(folder, arguments.output_dir, options)
    with console_listener(Command({"max-shard-size": "--max_shard_size"}, line)) as listener:
        print(f"Processing zero checkpoint '{folder}'", flush=True)
        request = (folder, arguments.output_dir, options, listener)
        report = merge_checkpoint(*request, pass_over=False)
    print(f"Saved {counted(report.tensors, 'tensor')} to {report.output}")


def _tag_folder(checkpoint: Path, tag: str | None) -> Path:
    """Return the directory of a tag, by default of the tag in the file `latest`.

    Raises:
        UnknownFormatError: the file or the directory does not exist.
    """
    from unshard.read.finding.markers import stated_tag

    tag = stated_tag(checkpoint) if tag is None else tag
    if tag is None:
        raise UnknownFormatError(
            f"Unable to find 'latest' file at {checkpoint / 'latest'}",
            hint="give the directory that has it, or the tag: -t TAG",
        )
    if not (checkpoint / tag).is_dir():
        raise UnknownFormatError(f"Directory '{checkpoint / tag}' doesn't exist")
    return checkpoint / tag


if __name__ == "__main__":
    run(main)
