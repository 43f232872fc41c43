"""`unshard hint`."""

from unshard import signals
from unshard.cli.options import CheckpointArgument


def hint(checkpoint: CheckpointArgument) -> None:
    """Print the lines to paste that merge and evaluate this run.

    They are filled in as far as the files say. A word in capitals is for you to replace.
    """
    from unshard.api.hinting import as_text
    from unshard.api.hinting import hint as find_lines

    signals.raise_them()
    print(as_text(find_lines(checkpoint)), end="")
