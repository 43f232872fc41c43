"""Refuse links inside a checkpoint that point outside the directories the server may read."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.pins.files import list_checkpoint
from unshard.read.beside.companions import companions_in

__all__ = ["check_links"]


def check_links(checkpoint: Path, run: Path, roots: Sequence[Path]) -> None:
    """Raise unless every file that would be pinned or merged is below a root, links followed.

    Files that no longer exist are ignored. A link that is made after this check is not found: see
    `requests.resolve_checkpoint`.

    Args:
        checkpoint: a directory, or a file that is one.
        run: the directory above it that may contain its config and tokenizer.
        roots: the directories that may be read.

    Raises:
        UsageError: names the first file that is not.
    """
    places = [root.resolve() for root in roots]
    try:
        for file in _files(checkpoint, run):
            found = file.resolve()
            if not any(found.is_relative_to(place) for place in places):
                raise UsageError(
                    f"{file}: leads out of the directories that this server may read",
                    found=str(found),
                    hint="put the file itself there, or add its directory to the server's `roots`",
                )
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{checkpoint}: cannot be followed", found=str(error)) from error


def _files(checkpoint: Path, run: Path) -> Iterator[Path]:
    above = [one for one in checkpoint.parents if one.is_relative_to(run)]
    for folder in (*above, *(one / "huggingface" for one in above)):
        own = companions_in(folder)
        yield from own.files.values()
        if own.config is not None:
            yield own.config
    is_folder = checkpoint.is_dir()
    for name in list_checkpoint(checkpoint).files:
        yield checkpoint / name if is_folder else checkpoint
