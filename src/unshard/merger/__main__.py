"""`python -m unshard.merger`, which replaces `python -m lmms_engine.merger`."""

from unshard import signals

if __name__ == "__main__":
    signals.end_at_once()  # before the imports, which take time

import argparse

from unshard.compat.commands import console_listener, merge_line, path_argument, run
from unshard.errors import UnknownFormatError
from unshard.fronts import Command

_MODEL_TYPES = ("causal_lm", "masked_lm", "image_text_to_text", "general")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m unshard.merger",
        description="Merge FSDP sharded checkpoints into a single checkpoint",
    )
    parser.add_argument(
        "--checkpoint_path",
        required=True,
        type=path_argument,
        help="checkpoint (checkpoint-1000), or a directory of checkpoints, to merge the highest",
    )
    parser.add_argument(
        "--output_path", type=path_argument, help="output directory; default: checkpoint_path"
    )
    parser.add_argument(
        "--checkpoint_type",
        default="regular",
        choices=("regular", "ema"),
        help="the model's weights, or their exponential moving average",
    )
    parser.add_argument(
        "--model_general_type", choices=_MODEL_TYPES, help="ignored: merging builds no model"
    )
    return parser.parse_args()


def main() -> None:
    """Merge according to the arguments."""
    from unshard.merger.fsdp2 import FSDP2Merger, merge_options

    arguments = _arguments()
    path = arguments.checkpoint_path
    if not path.exists():
        raise UnknownFormatError(f"Checkpoint path does not exist: {path}")
    print(f"Merging {arguments.checkpoint_type} checkpoint from {path}")
    target = arguments.output_path or path
    options = merge_options(arguments.checkpoint_type)
    front = Command({}, merge_line(path, target, options))
    with console_listener(front) as listener:
        merger = FSDP2Merger(arguments.checkpoint_type, listener=listener)
        saved = merger.merge(path, arguments.output_path)
    print(f"Merged checkpoint saved to: {saved}")


if __name__ == "__main__":
    run(main)
