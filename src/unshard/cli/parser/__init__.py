"""Commands made from functions, shell completion, and the examples of `--help`."""
