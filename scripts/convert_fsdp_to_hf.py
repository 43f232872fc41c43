#!/usr/bin/env python3
"""The same as `python -m unshard.compat.convert_fsdp_to_hf`, where it used to be."""

from unshard.compat.commands import run
from unshard.compat.convert_fsdp_to_hf import main

if __name__ == "__main__":
    run(main)
