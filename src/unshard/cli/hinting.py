"""`unshard hint`."""

from unshard import signals
from unshard.cli.options import CheckpointArgument


def hint(checkpoint: CheckpointArgument) -> None:
    """Print the lines to paste that merge and evaluate this run.

    Values that the files contain are filled in. Replace the words in capitals.
    """
    from unshard.api.hinting import as_text
    from unshard.api.hinting import hint as find_lines

    signals.raise_them()
    print(as_text(find_lines(checkpoint)), end="")
