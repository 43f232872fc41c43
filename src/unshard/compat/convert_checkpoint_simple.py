"""`scripts/convert_checkpoint_simple.py`, also as a module: `python -m unshard.compat.…`.

It prints the transcript of the script's guide.
"""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the slow imports

import argparse
from typing import TYPE_CHECKING

from unshard.compat.commands import (
    Paths,
    add_options,
    convert,
    find_paths,
    path_argument,
    print_how_to_load,
    run,
)

if TYPE_CHECKING:
    from unshard.api import Report
    from unshard.api.inspecting import ShardCounts
    from unshard.tensors.catalog import Catalog

_RULE = "=" * 70


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint_simple.py",
        description="Convert an FSDP sharded checkpoint to HuggingFace format",
    )
    parser.add_argument(
        "checkpoint_path", type=path_argument, help="the checkpoint: …/global_step_150"
    )
    add_options(parser, output="--output", folder="--actor-dir", dtype="--dtype")
    return parser.parse_args()


def main() -> None:
    """Convert, and print the result."""
    from unshard import api

    arguments = _arguments()
    paths = find_paths(arguments.checkpoint_path, arguments.actor_dir, arguments.output)
    print(_RULE)
    print("FSDP Checkpoint Converter (Simple Version)")
    print(_RULE)
    print(f"Checkpoint:    {paths.checkpoint}")
    print(f"Actor dir:     {paths.actor}")
    print(f"Output:        {paths.output}")
    print(f"Dtype:         {arguments.dtype}")
    print(_RULE)
    options = api.MergeOptions(dtype=arguments.dtype, assume_dim0=True, overwrite=True)

    def before(catalog: "Catalog", counts: "ShardCounts") -> None:
        print(f"✓ Detected world_size={catalog.world_size} from checkpoint")
        print(f"\nLoading {len(counts.keys)} checkpoint shards...")
        for number, (name, keys) in enumerate(counts.keys.items(), start=1):
            print(f"  [{number}/{len(counts.keys)}] Loading {name}... ({keys} keys)")
        print("\nMerging shards into full state dict...", flush=True)
        merged.append(counts)

    merged: list[ShardCounts] = []
    report = convert(paths, options, before)
    print(f"✓ Merged {merged[0].replicated + merged[0].sharded} parameters:")
    print(f"  - {merged[0].replicated} replicated parameters")
    print(f"  - {merged[0].sharded} sharded parameters")
    print(f"\nSaving merged model to {paths.output}")
    print("  Creating model from config... (not needed: bytes are moved, config.json is kept)")
    print(f"  Saving model with dtype={arguments.dtype}...")
    _print_saved(report, paths)


def _print_saved(report: "Report", paths: Paths) -> None:
    from unshard.write.companions import EXTRA_STATE_NAME, SCHEDULER_NAME

    print("  Copying tokenizer files...")
    print("✓ Model saved successfully")
    print("\nMerging extra_state files...")
    if EXTRA_STATE_NAME in report.companions:
        print(f"✓ Saved extra_state to {paths.output / EXTRA_STATE_NAME}")
    else:
        print("  No extra_state files found")
    if SCHEDULER_NAME in report.companions:
        print(f"✓ Saved lr_scheduler state to {paths.output / SCHEDULER_NAME}")
    print(f"\n{_RULE}")
    print("✅ Conversion complete!")
    print(_RULE)
    print(f"\nMerged model saved to: {paths.output}")
    print_how_to_load(paths.output)
    print(_RULE)


if __name__ == "__main__":
    run(main, failed="❌ Error: ")
