"""The parser: commands from functions, completion, and the examples of `--help`."""
