"""All formats, in the order in which a directory is asked for them."""

from pathlib import Path

from unshard.read.dcp.reader import DCP
from unshard.read.format import Format
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.refused import DEEPSPEED, MEGATRON
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
from unshard.read.whole_files.reader import WHOLE_FILES

__all__ = ["FORMATS", "format_in"]

FORMATS = (RANK_FILES, SAFETENSORS_SHARDS, MEGATRON, DCP, WHOLE_FILES, DEEPSPEED)


def format_in(directory: Path, *, sharded: bool) -> Format | None:
    """Return the format of the files that lie in a directory itself, or None."""
    if not directory.is_dir():
        return None
    return next((one for one in FORMATS if one.sharded is sharded and one.holds(directory)), None)
