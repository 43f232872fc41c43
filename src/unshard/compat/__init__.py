"""The command lines of the tools that unshard replaces: same flags, defaults, names and output.

They parse and print; `unshard.api` does the work. `docs/migrating.md` lists the differences.
"""
