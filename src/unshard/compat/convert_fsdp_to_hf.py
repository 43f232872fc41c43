"""`convert_fsdp_to_hf.py` of verl's forks, alone or under torchrun, where rank 0 converts.

Also `torchrun --nproc_per_node=N -m unshard.compat.convert_fsdp_to_hf`.
"""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
from typing import TYPE_CHECKING

from unshard.compat.commands import (
    NOT_NEEDED,
    Paths,
    add_options,
    convert,
    find_paths,
    path_argument,
    print_how_to_load,
    run,
)
from unshard.errors import front_of_errors
from unshard.fronts import Command

if TYPE_CHECKING:
    from unshard.api import Report
    from unshard.api.inspecting import ShardCounts
    from unshard.tensors.catalog import Catalog

_RULE = "=" * 60


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convert_fsdp_to_hf.py",
        description="Convert an FSDP sharded checkpoint to HuggingFace format",
    )
    parser.add_argument(
        "--checkpoint_path",
        type=path_argument,
        required=True,
        help="the checkpoint: global_step_150",
    )
    add_options(parser, output="--output_path", folder="--actor_subdir", dtype="--torch_dtype")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help=f"{NOT_NEEDED}no code of a model is run",
    )
    return parser.parse_args()


def main() -> None:
    """Convert, and print the result."""
    from unshard import api

    arguments = _arguments()
    with front_of_errors(Command({"output": "--output_path"})):
        paths = find_paths(arguments.checkpoint_path, arguments.actor_subdir, arguments.output_path)
    print(f"\n{_RULE}")
    print("FSDP to HuggingFace Checkpoint Converter")
    print(_RULE)
    print(f"Checkpoint path: {paths.checkpoint}")
    print(f"Actor directory: {paths.actor}")
    print(f"Output path:     {paths.output}")
    print(f"Torch dtype:     {arguments.torch_dtype}")
    print(f"{_RULE}\n")
    options = api.MergeOptions(dtype=arguments.torch_dtype, overwrite=True)

    def before(catalog: "Catalog", counts: "ShardCounts") -> None:
        print(f"Detected world_size={catalog.world_size} from checkpoint")
        print(f"\nLoading and merging {len(counts.keys)} checkpoint shards...")
        print(f"\nSaving merged model with dtype={arguments.torch_dtype}...", flush=True)

    _print_saved(convert(paths, options, before), paths)


def _print_saved(report: "Report", paths: Paths) -> None:
    from unshard.write.companions import EXTRA_STATE_NAME, SCHEDULER_NAME

    for name in report.companions:
        if name not in {EXTRA_STATE_NAME, SCHEDULER_NAME}:
            print(f"  Copied {name}")
    print("\nMerging extra_state files...")
    if EXTRA_STATE_NAME in report.companions:
        print(f"  Saved merged extra_state to {paths.output / EXTRA_STATE_NAME}")
    if SCHEDULER_NAME in report.companions:
        print(f"  Saved lr_scheduler state to {paths.output / SCHEDULER_NAME}")
    print(f"\n✅ Successfully saved merged checkpoint to {paths.output}")
    print_how_to_load(paths.output)
    print("\n✅ Conversion complete!")


if __name__ == "__main__":
    run(main)
