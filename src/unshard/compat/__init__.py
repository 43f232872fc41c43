"""The command lines of the tools that unshard replaces: same flags, defaults, names and words.

They parse and print; what they do is `unshard.api`'s. `docs/migrating.md` says what differs.
"""
