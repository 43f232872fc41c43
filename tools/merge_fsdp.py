#!/usr/bin/env python3
"""The same as `python -m unshard.compat.merge_fsdp`, where it used to be."""

from unshard.compat.commands import run
from unshard.compat.merge_fsdp import main

if __name__ == "__main__":
    run(main)
