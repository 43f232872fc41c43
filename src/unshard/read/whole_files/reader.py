"""The format of whole weights, recognised by names; its reader is imported on demand."""

from unshard.read.format import Format, Location, ReadOptions, by_name, has_file
from unshard.read.whole_files.names import is_part_of_set, is_whole_file
from unshard.tensors.catalog import Catalog


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.whole_files.weights import read

    return read(location, options)


WHOLE_FILES = Format(
    "whole files", has_file(is_whole_file), _read, by_name(is_part_of_set), sharded=False
)
